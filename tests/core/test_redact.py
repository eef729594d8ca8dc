"""No secret in a text, and nothing else lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.redact import redact
from headwater.errors import BadSampleError, ConfigError, HeadwaterError

SECRET = "hunter2hunter2XYZ"
TEXTS = [
    f"hw_{SECRET}aaaaaaaaaaaaaaaaaaaaaaaaaa",
    f"s3://key:{SECRET}@bucket/x can't be listed",
    f"https://x/y?X-Amz-Signature={SECRET}&a=1",
    f"az://c/p?sv=1&sig={SECRET}",
    f"Authorization: Bearer {SECRET}",
    f"AWS_SECRET_ACCESS_KEY={SECRET}",
    f'{{"aws_secret_access_key": "{SECRET}"}}',
    f"S3Config {{ session_token: {SECRET}, region: x }}",
    f"AccountKey={SECRET};EndpointSuffix=core",
    f"-----BEGIN EC PRIVATE KEY-----\n{SECRET}\n-----END EC PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_is_gone_and_its_place_is_shown(text):
    assert SECRET not in redact(text)
    assert "***" in redact(text)


@pytest.mark.parametrize(
    "text",
    ["check the credentials (for s3://: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION)",
     "file:///data/a@b.jpg", "grpc+tls://store-1:8815 does not answer", "give --tokens FILE", "the token of tenant a",
     "hw_short", "a/b:c.jpg is not a picture", "token: a token begins with hw_ and comes from `headwater token`"],
)  # fmt: skip
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


@given(st.text(), st.sampled_from(TEXTS), st.text())
def test_twice_is_the_same_as_once(before, secret, after):
    once = redact(before + secret + after)
    assert redact(once) == once


@pytest.mark.parametrize("kind", [HeadwaterError, ConfigError, lambda text: BadSampleError("key", text)])
def test_an_error_of_ours_never_shows_a_secret(kind):
    error = kind(f"can't open s3://key:{SECRET}@bucket")
    assert SECRET not in f"{error} {error!r} {vars(error)}"

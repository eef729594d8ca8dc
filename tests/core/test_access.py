"""Tokens as data: what a file may say, and whom it lets in."""

import tomllib
from dataclasses import replace
from datetime import UTC, date, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.access import (
    Grant,
    Quota,
    confirm,
    entry_text,
    identify,
    is_loopback,
    read_grants,
    token_digest,
    token_fault,
)
from headwater.errors import ConfigError, RefusedError

TOKEN, OTHER = "hw_" + "a" * 43, "hw_" + "b" * 43
GRANTS = (Grant("one", token_digest(TOKEN), expires_s=1000.0), Grant("two", token_digest(OTHER)))


def read(text):
    return read_grants(tomllib.loads(text), "tokens.toml")


def test_every_field_of_an_entry_is_read():
    (grant,) = read(f"""
        [[token]]
        tenant = "vision-team"
        sha256 = "{"0" * 64}"
        roots = ["s3://photos/train", "/data"]
        expires = 2030-12-31
        max_chunks = 4
        max_upload = "500MB"
        max_prefixes = "2GB"
        rows_per_second = 1000
        weight = 2
        operator = true
    """)
    end = datetime(2031, 1, 1, tzinfo=UTC).timestamp()  # a day is good to its end
    quota = Quota(4, 500_000_000, 2_000_000_000, 1000, 2.0)
    assert grant == Grant("vision-team", "0" * 64, ("s3://photos/train", "/data"), quota, end, is_operator=True)


def test_all_faults_of_a_file_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        read(f"""
            colour = 1
            [[token]]
            tenant = "a/b"
            sha256 = "{TOKEN}"
            root = ["x"]
            [[token]]
            tenant = "ok"
            sha256 = "{"0" * 64}"
            roots = []
            expires = "tomorrow"
            max_chunks = 0
            max_upload = "much"
            rows_per_second = 1.5
            weight = 0
            operator = "yes"
        """)
    for fault in (
        "tokens.toml has 11 faults",
        "colour is not a part of it",
        "[[token]] 1 (a/b): tenant must be a name",
        "sha256 must be the 64 hexadecimal digits",
        "root is not a field; did you mean roots?",
        "[[token]] 2 (ok): roots is empty; leave it out",
        "expires is 'tomorrow'",
        "max_chunks is 0",
        "max_upload is 'much'",
        "rows_per_second is 1.5",
        "weight is 0; it must be a number from 0.01 to 100",
        "operator is 'yes'; it must be true or false",
    ):
        assert fault in str(caught.value)
    assert TOKEN not in str(caught.value)  # one who puts the token there by mistake does not find it in the log


@pytest.mark.parametrize("text", ["", "token = 5", "[token]\ntenant='a'", "token = [1]"])
def test_a_file_without_entries_is_refused(text):
    with pytest.raises(ConfigError, match=r"\[\[token\]\]"):
        read(text)


def test_the_same_token_twice_is_refused():
    with pytest.raises(ConfigError, match="b has a sha256 that is there twice"):
        read("".join(f'[[token]]\ntenant = "{name}"\nsha256 = "{"0" * 64}"\n' for name in "ab"))


@pytest.mark.parametrize(
    ("headers", "now", "said"),
    [
        ([], 0, "none was sent"),
        ([f"Bearer {'hw_' + 'c' * 43}"], 0, "not one of this node's"),
        ([f"Basic {TOKEN}"], 0, "not one of this node's"),
        ([TOKEN], 0, "not one of this node's"),
        (["Bearer "], 0, "not one of this node's"),
        (["Bearer \ud800"], 0, "not one of this node's"),
        ([f"Bearer {TOKEN}"] * 2, 0, "not one of this node's"),
        ([f"Bearer {TOKEN}"], 1000, "the token of tenant one expired at 1970-01-01 00:16 UTC"),
    ],
)
def test_who_is_not_let_in_is_told_why_and_what_to_do(headers, now, said):
    with pytest.raises(RefusedError, match=said) as caught:
        identify(GRANTS, headers, now)
    assert "HEADWATER_TOKEN" in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_token_is_good_until_it_expires():
    assert identify(GRANTS, [f"Bearer {TOKEN}"], 999.9) is GRANTS[0]
    assert identify(GRANTS, [f"bearer {OTHER}"], 1e12) is GRANTS[1]


tenants = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
fields = st.fixed_dictionaries(
    {"roots": st.lists(st.text(min_size=1, max_size=20).filter(str.strip), max_size=3)},
    optional={
        "expires": st.dates(max_value=date(9999, 12, 30)),
        "max_chunks": st.integers(1, 9),
        "max_upload": st.just("5MB"),
    },
)


@given(tenants, fields)
def test_an_entry_that_is_written_is_read_back(tenant, fields):
    (grant,) = read(entry_text(tenant, "0" * 64, fields))
    assert (grant.tenant, list(grant.roots)) == (tenant, fields["roots"])
    assert grant.quota.max_chunks == fields.get("max_chunks")
    assert (grant.expires_s is None) == ("expires" not in fields)


@pytest.mark.parametrize("token", ["", "secret", "hw_short", 5, None, TOKEN + "\n", "hw_" + "ä" * 43])
def test_what_is_no_token_is_said_without_telling_it(token):
    assert "headwater token" in token_fault(token)
    assert token_fault(TOKEN) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "[::1]", "::1"])
def test_loopback_is_known(host):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "10.0.0.5", "[::]", "", "127.0.0.1.evil.org", "localhost.evil.org", "store"]
)
def test_anything_else_may_be_reached_by_others(host):
    assert not is_loopback(host)


def test_the_smallest_limit_of_an_upload_counts():
    assert Quota().upload_bytes(10) == 10
    assert Quota(max_upload_bytes=5, max_prefix_bytes=7).upload_bytes(10) == 5
    assert Quota(max_upload_bytes=0).upload_bytes(10) == 0
    assert Quota(max_upload_bytes=50).upload_bytes(10) == 10


def test_a_call_that_lasts_ends_with_its_token():
    confirm(GRANTS, GRANTS[0], 999.0)
    with pytest.raises(RefusedError, match="expired"):
        confirm(GRANTS, GRANTS[0], 1000.0)
    with pytest.raises(RefusedError, match="any more"):
        confirm(GRANTS[1:], GRANTS[0], 999.0)


def test_a_call_that_lasts_is_held_to_what_its_token_allows_now():
    less = replace(GRANTS[0], roots=("file:///a",), quota=Quota(rows_per_s=1), expires_s=500.0)
    assert confirm((less,), GRANTS[0], 499.0) == less
    with pytest.raises(RefusedError, match="expired"):
        confirm((less,), GRANTS[0], 999.0)
    with pytest.raises(RefusedError, match="any more"):  # another's now: what was begun is not
        confirm((replace(GRANTS[0], tenant="new"),), GRANTS[0], 499.0)

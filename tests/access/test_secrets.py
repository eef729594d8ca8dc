"""Secrets of a real node and of those who call it: in no line that it writes, and in no error that it sends."""

import signal

import pytest

from headwater.data.wire import Listing
from headwater.errors import HeadwaterError, RefusedError
from headwater.train.access import Access
from headwater.train.client import NodeClient

SECRETS = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLE", "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEXAMPLE",
           "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE"}  # fmt: skip
ROOT = "s3://AKIAEXAMPLE:pa55word-of-mine@photos"


def test_neither_logs_nor_errors_nor_answers_have_a_secret(start_node, tmp_path, tokens, entry_of, monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:pa55word-of-mine@127.0.0.1:1")
    (tmp_path / "tokens.toml").write_text(entry_of("all"))
    said = tmp_path / "said"
    node = start_node(ROOT, options=("--tokens", str(tmp_path / "tokens.toml"), "--state", str(tmp_path / "state")),
                      wrap=("sh", "-c", f'exec "$@" 2>{said}', "sh"))  # fmt: skip
    texts = [node.said]
    client = NodeClient(node.address, Access(tokens["all"]))
    texts.append(str(client.hello()))
    for url in (f"{ROOT}/train", "s3://key:pa55word-of-mine@other", "s3://photos?X-Amz-Signature=pa55word-of-mine"):
        with pytest.raises(HeadwaterError) as caught:
            client.list_samples(Listing(url))
        texts += [str(caught.value), repr(vars(caught.value))]
    with pytest.raises(RefusedError) as caught:
        NodeClient(node.address, Access(tokens["foreign"])).hello()
    texts.append(str(caught.value))
    node.process.send_signal(signal.SIGTERM)
    node.process.wait()
    texts.append(said.read_text())
    assert "calls refused at the door" in texts[-1]
    assert "s3://***@photos" in texts[0]
    hidden = ["pa55word-of-mine", *list(SECRETS.values())[:2], tokens["all"], tokens["foreign"]]
    assert [(secret, text) for secret in hidden for text in texts if secret in text] == []

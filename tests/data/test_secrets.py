"""Secrets that only their value tells: those of the environment, in logs, too."""

import io
import logging

import pytest

from headwater.data.secrets import Redacting, redact
from headwater.data.wire import Bad, error_from_wire, error_to_wire, pack_bad
from headwater.errors import BadSampleError, StoreError

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("HEADWATER_TLS_KEY", "/etc/headwater/client.key")


@pytest.mark.parametrize(
    "name", ["AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "HEADWATER_TOKEN", "AZURE_CLIENT_SECRET"]
)
def test_the_value_of_a_secret_variable_is_left_out(name, monkeypatch):
    monkeypatch.setenv(name, "something-private")
    assert redact(f"{SECRET} and something-private") == "*** and ***"


def test_names_of_files_and_key_ids_stay():
    text = "AKIAIOSFODNN7EXAMPLE was refused; see /etc/headwater/client.key"
    assert redact(text) == text


def test_a_log_line_and_its_traceback_have_no_secret():
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    handler.setFormatter(Redacting(logging.Formatter("%(levelname)s %(message)s")))
    log = logging.Logger("test")
    log.addHandler(handler)
    try:
        raise ValueError(f"signature of {SECRET} is wrong")
    except ValueError:
        log.exception("unexpected error with %s", SECRET)
    assert said.getvalue().startswith("ERROR unexpected error with ***\nTraceback")
    assert "ValueError: signature of *** is wrong" in said.getvalue()


@pytest.mark.parametrize("error", [StoreError(f"403: {SECRET}"), BadSampleError("a.jpg", f"403: {SECRET}")])
def test_an_error_is_sent_without_secrets(error):
    assert SECRET.encode() not in error_to_wire(error)
    assert "403: ***" in str(error_from_wire(error_to_wire(error)))
    assert SECRET.encode() not in pack_bad([Bad(1, "a.jpg", f"403: {SECRET}")])

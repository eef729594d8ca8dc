"""`headwater reduce`: what it refuses before it listens, and the key file that it makes."""

import stat
import sys

import pytest

from headwater.cli.reduce import reduce
from headwater.errors import ConfigError
from headwater.reduce.control import read_keys

PLAIN = {"listen": "127.0.0.1:0", "workers": 0, "key_file": None, "root": "", "place": "0/1", "window": "512KiB",
         "memory": "1GiB", "mtu": 0, "insecure": False, "log_format": "text", "log_level": "info"}  # fmt: skip


@pytest.fixture(autouse=True)
def no_logs(monkeypatch):
    """The command sets up the logs of its process, and this one is pytest's."""
    verb = sys.modules["headwater.cli.reduce"]  # the package has the command under that name
    monkeypatch.setattr(verb, "set_up_logs", lambda style, level: None)
    monkeypatch.setattr(verb, "keep_out_of_logs", lambda: None)


@pytest.mark.parametrize(("given", "says"), [
    ({"listen": "0.0.0.0:8816"}, "no key to keep them out; give --key-file"),
    ({"listen": "here"}, "--listen is 'here'; it must look like"),
    ({"place": "2/2"}, "--place is '2/2'"),
    ({"mtu": 100}, "--mtu is 100"),
    ({"window": "much"}, "--window is 'much'"),
    ({"root": "nowhere"}, "--root is 'nowhere'"),
    ({"listen": "203.0.113.7:1", "insecure": True}, "can't listen on 203.0.113.7:1"),
])  # fmt: skip
def test_what_makes_no_sense_is_said_before_anything_listens(given, says):
    with pytest.raises(ConfigError) as caught:
        reduce(**{**PLAIN, **given})
    assert says in str(caught.value)


def test_a_key_file_that_is_not_there_is_made_for_its_owner_alone(tmp_path):
    path = tmp_path / "key"
    (key,) = read_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key.startswith(b"hw_")
    assert read_keys(path) == [key], "and stays"


def test_a_key_file_that_others_can_read_or_that_has_no_good_key_is_refused(tmp_path):
    path = tmp_path / "key"
    path.write_text("# nothing\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="has no key"):
        read_keys(path)
    path.write_text("short\n")
    with pytest.raises(ConfigError, match="5 characters"):
        read_keys(path)

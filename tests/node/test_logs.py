"""Lines that a machine can read, and lines that a person can; neither has a secret or a second line in it."""

import json
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.node.logs import Json, Text, set_up_logs


def record(text, fields=None, error=None):
    made = logging.LogRecord("headwater.node", logging.WARNING, "file.py", 1, "%s", (text,), None)
    made.exc_info = (type(error), error, error.__traceback__) if error else None
    if fields:
        made.fields = fields
    return made


@given(st.text(max_size=5000), st.dictionaries(st.sampled_from(["tenant", "job"]), st.text(max_size=50)))
def test_a_json_line_is_one_object_with_everything_in_it(text, fields):
    line = Json().format(record(text, fields))
    assert len(line.splitlines()) == 1
    said = json.loads(line)
    assert said.pop("event").removesuffix(" …") == text[:4000].removesuffix(" …")
    assert said.pop("time").endswith("Z")
    assert said == {"level": "warning", "logger": "headwater.node", **fields}


@given(st.text(max_size=200))
def test_a_text_line_is_one_line_that_steers_no_terminal(text):
    line = Text().format(record(text, {"job": text}))
    assert line.isprintable()
    assert " WARNING " in line


def test_a_traceback_is_part_of_the_object():
    try:
        raise ValueError("of s3://user:password@store/x")
    except ValueError as error:
        line = Json().format(record("went wrong", error=error))
    assert "ValueError: of s3://***@store/x" in json.loads(line)["traceback"]


@pytest.mark.parametrize("formatter", [Json(), Text()])
def test_a_password_in_a_url_is_not_written(formatter):
    assert "password" not in formatter.format(record("s3://user:password@store/x failed"))


@pytest.mark.parametrize(("style", "level"), [("xml", "info"), ("json", "loud")])
def test_a_form_or_level_that_is_none_is_explained(style, level):
    with pytest.raises(ConfigError, match="it must be one of"):
        set_up_logs(style, level)


def test_an_error_in_a_thread_is_a_line_like_others():
    import subprocess

    code = """
import threading
from headwater.node.logs import set_up_logs
set_up_logs("json", "info")
thread = threading.Thread(target=lambda: 1 / 0, name="one")
thread.start()
thread.join()
raise RuntimeError("at last")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, last = map(json.loads, done.stderr.splitlines())
    assert first["event"] == "unexpected error in the thread one"
    assert "ZeroDivisionError" in first["traceback"]
    assert "RuntimeError: at last" in last["traceback"]

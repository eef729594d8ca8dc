"""The long run finds what it looks for: errors, crashes, hangs, memory and files, each with its input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.fuzz.guard import Guard
from bench.fuzz.target import Room, Target

ROOT = Path(__file__).parents[2]
PLANTED = """
import ctypes
from bench.fuzz.target import Target

def at(word, act):
    def make(room):
        def harness(data):
            if word in data:
                act(room)
            if b"plain" in data:
                raise ValueError
        return harness
    return make

def target(name, act, **more):
    return Target(name, "", at(b"bad", act), lambda: [b"good", b"plain"], (ValueError,), 1, **more)

def spin(room):
    while True:
        pass

TARGETS = {each.name: each for each in (
    target("fine", lambda room: None),
    target("error", lambda room: 1 // 0),
    target("crash", lambda room: ctypes.string_at(1)),
    target("hang", spin),
    target("memory", lambda room: len(b"x" * (600 << 20))),
    target("escape", lambda room: open(room.outside / "secret.jpg").close()),
    target("contained", lambda room: ctypes.string_at(1), contained=True),
)}
"""


@pytest.fixture
def fuzz(tmp_path):
    """fuzz(targets): a short run over planted targets, whose corpus has the one bad input."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "planted.py").write_text(PLANTED)

    def run(*names):
        for name in names:
            (tmp_path / "corpus" / name).mkdir(parents=True)
            (tmp_path / "corpus" / name / "one").write_bytes(b"bad")
        paths = [str(tmp_path / "code"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, "-m", "bench.fuzz", "--table", "planted", "--inputs", str(3 * len(names)),
                   "--plain", "--hang", "2", "--corpus", str(tmp_path / "corpus"), "--save", str(tmp_path / "found"),
                   "--targets", ",".join(names)]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})  # fmt: skip
        return done, tmp_path / "found"

    return run


def kinds(found, name):
    told = found / name / "found.jsonl"
    lines = [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []
    saved = [path for path in (found / name).iterdir() if path.name.partition("-")[0] in
             ("error", "crash", "hang", "memory", "escape")]  # fmt: skip
    assert all(path.read_bytes() == b"bad" for path in saved)
    return {path.name.partition("-")[0] for path in saved} | {line["kind"] for line in lines}


def test_each_kind_of_fault_is_found_and_its_input_saved(fuzz):
    names = ("error", "crash", "hang", "memory", "escape")
    done, found = fuzz(*names)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {name: kinds(found, name) for name in names} == {name: {name} for name in names}


def test_a_run_without_faults_ends_well_and_what_a_child_contains_is_none(fuzz):
    done, found = fuzz("fine", "contained")
    assert done.returncode == 0, done.stdout + done.stderr
    assert kinds(found, "contained") == {"crash"}


def test_a_file_that_one_input_opened_is_not_held_against_the_next(tmp_path):
    def make(room):
        return lambda data: data == b"bad" and (room.outside / "secret.jpg").read_bytes()

    guard = Guard(Target("one", "", make, lambda: [b"good"], (), 1), Room.make(tmp_path / "room"))
    assert guard.run(b"bad").kind == "escape"
    assert guard.run(b"good") is None

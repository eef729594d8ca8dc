"""Nothing of a rig is left, however the process that made it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.rig import Host, Link, Rig, RigUp, leftovers
from bench.rig.cgroups import CONTROLLERS, MOUNT
from bench.rig.python import python, python_env
from bench.rig.tool import tool

DEADLINE_S = 30.0
RIG = Rig(storage=(Host("storage"),), trainers=(Host("trainer"),), links={"trainer": Link(10)})
# A rig with a process that has a child and ignores being asked to end.
MAKER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored in the background
from bench.rig import Host, Link, Rig, RigUp
rig = Rig(storage=(Host("storage"),), trainers=(Host("trainer"),), links={"trainer": Link(10)})
with RigUp(rig) as up:
    stubborn = "trap '' INT TERM HUP; sleep 1000 & echo $!; wait"
    process = up.popen("storage", ["sh", "-c", stubborn], stdout=subprocess.PIPE, text=True)
    print(up.name, process.pid, process.stdout.readline().strip(), up._watchdog.pid, flush=True)
    sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("can_rig")


def traces(name: str) -> list[str]:
    """All that the machine still has of a rig."""
    found = [line for line in tool("ip", "netns", "list").splitlines() if line.startswith(name)]
    found += [str(path) for controller in CONTROLLERS for path in (MOUNT / controller).glob(f"{name}*")]
    return found + [str(path) for path in Path(tempfile.gettempdir()).glob(f"{name}*")]


def links() -> set[str]:
    return {line.split(":")[1] for line in tool("ip", "-oneline", "link").splitlines()}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(name: str, *pids: int) -> None:
    """Wait until all of it is."""
    deadline = time.monotonic() + DEADLINE_S
    while (left := traces(name)) or any(map(runs, pids)):
        assert time.monotonic() < deadline, (left, [pid for pid in pids if runs(pid)])
        time.sleep(0.05)


def start_sleeper(up: RigUp) -> subprocess.Popen[str]:
    """A process that runs in the rig when this returns."""
    process = up.popen("trainer", ["sh", "-c", "echo here; exec sleep 1000"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@contextmanager
def maker() -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """Another process with a rig: it, the rig's name, and the processes in the rig, last the watchdog."""
    process = subprocess.Popen([sys.executable, "-c", MAKER], env=python_env(), text=True, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            name, *pids = process.stdout.readline().split()
            yield process, name, [int(pid) for pid in pids]
        finally:
            process.kill()


def test_nothing_is_left_after_the_block() -> None:
    before = links()
    with RigUp(RIG) as up:
        assert len(traces(up.name)) == 3 + len(CONTROLLERS) + 1
        assert links() == before  # the machine's own network never sees the rig
        sleeper = start_sleeper(up)
    assert traces(up.name) == []
    assert sleeper.returncode == -signal.SIGKILL
    assert links() == before


def test_nothing_is_left_after_an_exception() -> None:
    up = RigUp(RIG)

    def fail() -> None:
        with up:
            start_sleeper(up)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert traces(up.name) == []


def test_nothing_is_left_if_it_fails_while_coming_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.rig.up.Network.shape", fail)
    up = RigUp(RIG)
    with pytest.raises(KeyboardInterrupt), up:
        pass
    assert traces(up.name) == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(ending: signal.Signals) -> None:
    with maker() as (process, name, pids):
        assert all(map(runs, pids))
        os.killpg(process.pid, ending)
        process.wait(DEADLINE_S)
        gone(name, *pids)


@pytest.mark.parametrize("cleaner", ["--clean", "the next rig"])
def test_what_a_killed_maker_and_watchdog_left_is_cleaned(cleaner: str) -> None:
    with maker() as (process, name, pids):
        os.kill(pids.pop(), signal.SIGKILL)  # the watchdog
        process.kill()
        process.wait(DEADLINE_S)
        assert traces(name)
        assert name in leftovers.rigs()
        if cleaner == "--clean":
            assert name in subprocess.check_output(python("bench.rig", "--clean"), env=python_env(), text=True)
        else:
            with RigUp(RIG):
                pass
        gone(name, *pids)


def test_a_rig_of_a_living_process_is_not_cleaned() -> None:
    with RigUp(RIG) as up:
        subprocess.run(python("bench.rig", "--clean"), env=python_env(), check=True, stdout=subprocess.DEVNULL)
        assert up.run("trainer", ["echo", "here"]) == "here\n"

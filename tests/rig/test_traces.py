"""What is left after a benchmark is found, and what others have is not taken for it."""

import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import traces

LISTEN = (
    "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
)


def listening():
    process = subprocess.Popen([sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def end(process):
    process.communicate("\n")


def test_a_process_and_its_port_are_found_and_those_of_others_are_not():
    other, other_port = listening()
    with traces.marked() as mark:
        before = traces.look(mark)
        ours, port = listening()
        left = traces.look(mark).since(before)
    assert f"port {port} of {ours.pid}" in left
    assert any(each.startswith(f"process {ours.pid} ") for each in left)
    assert not any(str(other_port) in each or str(other.pid) in each for each in left)
    end(ours)
    end(other)
    assert not [each for each in traces.look(mark).since(before) if each.startswith(("process", "port"))]


def test_a_temporary_folder_of_ours_is_found():
    with traces.marked() as mark:
        before = traces.look(mark)
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder:
            assert f"file {Path(folder).name}" in traces.look(mark).since(before)
        assert f"file {Path(folder).name}" not in traces.look(mark).since(before)


def test_a_lock_that_is_held_is_found(tmp_path):
    with (tmp_path / "lock").open("wb") as file:
        assert traces.locks_held(tmp_path) == []
        fcntl.flock(file, fcntl.LOCK_EX)
        assert len(traces.locks_held(tmp_path)) == 1
    assert traces.locks_held(tmp_path) == []

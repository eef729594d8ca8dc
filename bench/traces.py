"""What a benchmark may leave on the machine. Owns `Traces`: looked at before and after, the difference is left over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.rig import cgroups, network

_MARK = "HEADWATER_BENCH_MARK"  # in the environment of all that is started meanwhile
# What the benchmark itself and its store make; temporary files of all others go to a folder of the benchmark's own.
_NAMES = ("headwater-rig-", "headwater-bench-", "seaweedfs-")
_OWNED = re.compile(r"headwater-rig-(\d+)-")
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


@dataclass(frozen=True)
class Traces:
    """Names of things, by kind."""

    found: frozenset[tuple[str, str]]

    def since(self, earlier: Traces) -> list[str]:
        """What is here now and was not then."""
        return [f"{kind} {name}" for kind, name in sorted(self.found - earlier.found)]


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """Processes that are started in the block, and theirs, can be told by the mark."""
    mark = secrets.token_hex(8)
    os.environ[_MARK] = mark
    try:
        yield mark
    finally:
        del os.environ[_MARK]


def look(mark: str) -> Traces:
    """Marked processes and the ports they listen on; rigs; mounts; our names in the folder for temporary files.

    What belongs to a living process without the mark is not ours: another benchmark or test may run beside this one.
    """
    found = set[tuple[str, str]]()
    for pid, command in _processes(mark).items():
        found |= {("process", f"{pid} {command}"), *(("port", f"{port} of {pid}") for port in _ports(pid))}
    made = [("namespace", each) for each in network.found()]
    made += [("control group", str(path)) for path in cgroups.found()]
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    made += [("mount", each) for each in mounts if any(name in each for name in _NAMES)]
    made += [("file", name) for name in os.listdir(tempfile.gettempdir()) if name.startswith(_NAMES)]
    return Traces(frozenset(found | {(kind, name) for kind, name in made if not _is_anothers(name)}))


def locks_held(folder: Path) -> list[str]:
    """Lock files below the folder that somebody still holds."""
    held = []
    for path in folder.rglob("lock"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(f"lock {path.name} in {path.parent.name}")
    return held


def _processes(mark: str) -> dict[int, str]:
    """By their ids, their commands."""
    wanted, found = f"{_MARK}={mark}".encode(), dict[int, str]()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(path.name)] = command.decode(errors="replace").strip()
    return found


def _ports(pid: int) -> list[int]:
    """On which the process listens, in its own network."""
    found = []
    with contextlib.suppress(OSError):  # ended meanwhile
        sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in sockets:
                    found.append(int(fields[1].rpartition(":")[2], 16))
    return found


def _is_anothers(name: str) -> bool:
    """Whether the name tells of a living process that is not this one."""
    match = _OWNED.search(name)
    return match is not None and int(match[1]) != os.getpid() and Path(f"/proc/{match[1]}").exists()

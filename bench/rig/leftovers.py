"""Whose a rig is, and how it is taken away. Owns the names of rigs: they say which process made them.

The name of everything that a rig makes on the machine (namespaces, control groups, a folder for logs and data) starts
with its own, so one function removes a rig, for the process that made it as for another that comes later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

from bench.rig import cgroups, network
from bench.rig import store as stores
from bench.rig.tool import tool

_NAME = re.compile(r"headwater-rig-(\d+)-(\d+)-\d+")
_counter = itertools.count()


def new_name() -> str:
    """A name for a rig of this process: its id, when it started, and a count."""
    return f"headwater-rig-{os.getpid()}-{_started(os.getpid())}-{next(_counter)}"


def owner(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match, name
    return int(match[1])


def is_alive(name: str) -> bool:
    """Whether the process that made the rig still runs. Ids come round again; with the start they don't."""
    match = _NAME.fullmatch(name)
    assert match, name
    return _started(int(match[1])) == int(match[2])


def folder(name: str) -> Path:
    """Logs and data of the rig; on a disk, since a store's data may be more than fits memory."""
    return Path(tempfile.gettempdir()) / name


def rigs() -> list[str]:
    """The names of all rigs of which something is on this machine."""
    names = [*network.found(), *(path.name for path in cgroups.found()), *(path.name for path in _folders())]
    return sorted({match[0] for name in names if (match := _NAME.match(name))})


def tear_down(name: str) -> bool:
    """Remove the rig, whatever state it is in; whether there was anything to remove."""
    groups = [path for path in cgroups.found() if path.name == name]
    for path in groups:
        cgroups.remove(path)
    namespaces = [each for each in network.found() if each.startswith(f"{name}-")]
    for namespace in namespaces:
        network.remove(namespace)
    folders = [path for path in _folders() if path.name == name]
    for path in folders:
        for store in path.glob("store-*"):
            stores.forget_sockets(store)
        _unmount_below(path)
        while path.exists():
            with contextlib.suppress(FileNotFoundError):  # another process may be cleaning, too
                shutil.rmtree(path)
    return bool(groups or namespaces or folders)


def _unmount_below(folder: Path) -> None:
    """Small disks that a benchmark had there."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for each in mounts:
        if each.startswith(f"{folder}/"):
            tool("umount", "--lazy", each)


def clean() -> list[str]:
    """Remove the rigs whose makers are gone; their names."""
    dead = [name for name in rigs() if not is_alive(name)]
    for name in dead:
        tear_down(name)
    return dead


def _folders() -> list[Path]:
    """Only our own: in a shared folder, anyone can make something with such a name."""
    found = []
    for path in Path(tempfile.gettempdir()).glob("headwater-rig-*"):
        with contextlib.suppress(FileNotFoundError):
            about = path.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
                found.append(path)
    return found


def _started(pid: int) -> int | None:
    """When the process started, in ticks since the machine did; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])

"""This machine: cores, memory, disk, shared memory, files, buffers; and what a control group takes of them."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from headwater.cli.checks import NOTE, OK, WRONG, Finding
from headwater.data.cores import usable_cores
from headwater.data.memory import available_bytes, memory_bytes
from headwater.node.serve import default_state

# Below these somebody will be surprised; what fails, says so itself. Assumed, not measured.
LEAST_MEMORY_BYTES, LEAST_DISK_BYTES, LEAST_SHM_BYTES = 1_000_000_000, 2_000_000_000, 64 << 20
LEAST_FILES = 4096
LEAST_RMEM_BYTES = 1 << 20  # an aggregator's datagrams come in bursts
_PART = "machine"


def check() -> Iterator[Finding]:
    cores, machine_cores = usable_cores(), os.cpu_count() or 1
    less = cores < machine_cores
    yield Finding(
        _PART,
        "cores",
        OK if cores >= 1 else NOTE,
        f"{cores:g}"
        + (f" of {machine_cores}: an affinity or a control group holds this process to them" if less else ""),
    )
    yield from _memory()
    yield from _room()
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = most == resource.RLIM_INFINITY or most >= LEAST_FILES
    yield Finding(
        _PART,
        "open files",
        OK if enough else NOTE,
        f"at most {most:,} (now {soft:,}; a node asks for more)",
        "" if enough else f"ulimit -Hn {LEAST_FILES * 16} before a node is started",
    )
    rmem = Path("/proc/sys/net/core/rmem_max")
    if rmem.exists():
        limit = int(rmem.read_text())
        enough = limit >= LEAST_RMEM_BYTES
        yield Finding(
            _PART,
            "socket buffers",
            OK if enough else NOTE,
            f"net.core.rmem_max is {limit:,} bytes",
            ""
            if enough
            else "for headwater reduce, on aggregator and workers: sysctl -w "
            f"net.core.rmem_max={4 * LEAST_RMEM_BYTES}; links of much bandwidth and delay gain as well",
        )


def _memory() -> Iterator[Finding]:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ours, free = memory_bytes(), available_bytes()
    said = f"{_gb(free)} free of {_gb(ours)}"
    if ours < whole:
        said += f"; a control group holds it to that (the machine has {_gb(whole)})"
    enough = free >= LEAST_MEMORY_BYTES
    yield Finding(
        _PART,
        "memory",
        OK if enough else WRONG,
        said,
        "" if enough else "end something, raise the control group's limit, or give nodes less with --memory",
    )


def _room() -> Iterator[Finding]:
    state = default_state()
    there = next(each for each in (state, *state.parents) if each.exists())
    free = shutil.disk_usage(there).free
    writable = os.access(there, os.W_OK)
    if not writable:
        yield Finding(
            _PART,
            "disk",
            WRONG,
            f"{there} can't be written to",
            "set XDG_CACHE_HOME to a folder of yours, or give --state and --cache-dir",
        )
    else:
        enough = free >= LEAST_DISK_BYTES
        yield Finding(
            _PART,
            "disk",
            OK if enough else NOTE,
            f"{_gb(free)} free for prefixes and kept rows in {state}",
            ""
            if enough
            else "rows are kept within half of what is free: make room, or name another disk with --cache-dir",
        )
    shm = Path("/dev/shm")
    if shm.is_dir():
        found = shutil.disk_usage(shm)
        enough = found.free >= LEAST_SHM_BYTES
        yield Finding(
            _PART,
            "shared memory",
            OK if enough else NOTE,
            f"{_gb(found.free)} free of {_gb(found.total)}",
            ""
            if enough
            else "Headwater needs none, but torch's DataLoader and Gloo may: docker run "
            "--shm-size=1g, or an emptyDir of medium Memory at /dev/shm",
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.0f} MB"

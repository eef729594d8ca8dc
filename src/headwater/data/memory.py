"""Memory: how much this machine has (all of it, or less where a cgroup says so), and how much this process takes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import pyarrow as pa

_C = ctypes.CDLL(None)
# Version 2 and version 1 of the kernel's control groups; inside a container they name the container's own limit.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_bytes() -> int:
    """Bytes that this process may hope for."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [machine]
    for name in (*_LIMITS, *_own_limits()):
        try:
            found.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(found)


def available_bytes() -> int:
    """Of those, what nobody holds now; file pages that can be dropped count as free."""
    found = [memory_bytes() - held_bytes()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return max(0, min(found))


def resident_bytes() -> int:
    """What this process holds now.

    Without what was used once and is free again: loading an engine leaves much of that, and runs would seem to need
    nothing because they find it there.
    """
    give_back()
    return held_bytes()


def held_bytes() -> int:
    """The same with what is free and was not given back; takes no time."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def page_cache_bytes() -> int | None:
    """File pages that the kernel holds for this process's control group, or for the machine where that is not told."""
    for name in (*_own_stats(), "/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat"):
        try:
            found = dict(line.split() for line in Path(name).read_text().splitlines())
        except (OSError, ValueError):
            continue
        if held := found.get("file", found.get("total_cache")):
            return int(held)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Cached:")), None)


def give_back() -> None:
    """Return to the system what this process has freed: malloc keeps it for later, in an arena for each thread; so does
    Arrow, from what came over the wire."""
    pa.default_memory_pool().release_unused()
    if hasattr(_C, "malloc_trim"):  # of glibc
        _C.malloc_trim(0)


def reset_peak() -> int | None:
    """Forget the highest resident size so far; returns the present one. None where the system does not allow it."""
    resident = resident_bytes()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return resident


def peak_bytes() -> int:
    """The highest resident size since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _own_limits() -> list[str]:
    """The limits of the groups that this process is in."""
    first, second = _own_groups()
    return [f"{group}/memory.limit_in_bytes" for group in first] + [f"{group}/memory.max" for group in second]


def _own_stats() -> list[str]:
    return [f"{group}/memory.stat" for groups in _own_groups() for group in groups]


def _own_groups() -> tuple[list[str], list[str]]:
    """The groups for memory that this process is in, of version 1 and of version 2, as /proc tells them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [], []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return ([f"/sys/fs/cgroup/memory{path}" for _, names, path in groups if "memory" in names],
            [f"/sys/fs/cgroup{path}" for _, names, path in groups if not names])  # fmt: skip

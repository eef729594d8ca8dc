"""How much memory a node has: the machine's, or less where a cgroup says so. Owns that one question."""

from __future__ import annotations

import os
from pathlib import Path

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


def _own_limits() -> list[str]:
    """The limits of the groups that this process is in, as /proc tells them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [f"/sys/fs/cgroup/memory{path}/memory.limit_in_bytes" for _, names, path in groups if "memory" in names] + [
        f"/sys/fs/cgroup{path}/memory.max" for _, names, path in groups if not names
    ]

"""The cores of this machine: their kind, what they can do, and how many this process may use. Owns those questions."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path


def usable_cores() -> float:
    """Cores of its affinity, or less where a cgroup holds it to a share: maybe a fraction of one."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas()])


def _quotas() -> list[float]:
    found = []
    for folder in _groups():
        quota = _number(folder / "cpu.cfs_quota_us")  # version 1
        period = _number(folder / "cpu.cfs_period_us")
        if quota is None:  # version 2: "quota period" or "max period"
            words = _text(folder / "cpu.max").split()
            if len(words) == 2 and words[0].isdigit():
                quota, period = int(words[0]), int(words[1])
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return found


def _groups() -> list[Path]:
    """The folders of the groups that this process is in, and those above them."""
    folders = []
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, names, path = line.split(":", 2)
        if not names or "cpu" in names.split(","):
            root = Path("/sys/fs/cgroup") / ("cpu" if names else "")
            place = root / path.lstrip("/")
            while place != root.parent and place != Path("/"):
                folders.append(place)
                place = place.parent
    return folders


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def machine() -> str:
    """This kind of machine, in words that tell it from another; a name alone does not ("AMD EPYC")."""
    titles = ("cpu family", "model", "stepping", "flags", "CPU implementer", "CPU variant", "CPU part", "Features")
    about = "\n".join(map(_cpu_line, titles))
    return f"{platform.machine()} {_cpu_name()} ({hashlib.sha256(about.encode()).hexdigest()[:8]})"


def cpu_flags() -> frozenset[str]:
    """What this CPU can do, in the kernel's words; empty where it does not say."""
    return frozenset(_cpu_line("flags").split())


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor()


def _cpu_line(title: str) -> str:
    lines = (line.partition(":") for line in _text(Path("/proc/cpuinfo")).splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == title), "")

"""A host's share of CPU and its memory, held and measured by control groups (version 1).

Owns the folders below `MOUNT` that are named for a rig: in each controller one for the rig, with one for each host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from bench.rig.description import RigError

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuacct", "memory")
_KILLED_WITHIN_S = 20.0
# Short periods make a slow core rather than a fast one that stalls. The kernel checks at its ticks (1 to 10 ms), so
# shorter ones would not be kept; and it takes no quota below 1 ms.
_PERIOD_US = 20_000
_LEAST_QUOTA_US = 1_000


def absent() -> list[str]:
    """Controllers that this machine doesn't have."""
    return [name for name in CONTROLLERS if not (MOUNT / name / "cgroup.procs").exists()]


@dataclass(frozen=True)
class Group:
    """The control group of one host."""

    rig: str
    host: str

    def make(self, cpu: float, memory_bytes: int | None) -> None:
        for controller in CONTROLLERS:
            # Two controllers may share a mount.
            self._folder(controller).mkdir(parents=True, exist_ok=True)
        self.set_cpu(cpu)
        if memory_bytes is not None:
            self._write("memory", "memory.limit_in_bytes", memory_bytes)
            with contextlib.suppress(FileNotFoundError):  # a kernel that doesn't count swap
                self._write("memory", "memory.memsw.limit_in_bytes", memory_bytes)

    def set_cpu(self, cpu: float) -> None:
        period = max(_PERIOD_US, round(_LEAST_QUOTA_US / cpu))
        # Without a quota in between, since the old quota and the new period together might be out of range.
        self._write("cpu", "cpu.cfs_quota_us", -1)
        self._write("cpu", "cpu.cfs_period_us", period)
        self._write("cpu", "cpu.cfs_quota_us", max(_LEAST_QUOTA_US, round(cpu * period)))

    def doors(self) -> list[Path]:
        """The files into which a process writes its id to join."""
        return [self._folder(controller) / "cgroup.procs" for controller in CONTROLLERS]

    def cpu_s(self) -> float:
        return int(self._read("cpuacct", "cpuacct.usage")) / 1e9

    def processes(self) -> dict[int, tuple[float, str]]:
        """By their ids: the CPU-seconds that each has used, and its command."""
        found = {}
        for pid in _pids(self._folder("cpuacct")):
            with contextlib.suppress(OSError):  # ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), command.strip()
        return found

    def memory_bytes(self) -> tuple[int, int, int]:
        """Now, at most, and of processes alone."""
        stat = dict(line.split() for line in self._read("memory", "memory.stat").splitlines())
        now = int(self._read("memory", "memory.usage_in_bytes"))
        return now, int(self._read("memory", "memory.max_usage_in_bytes")), int(stat["total_rss"])

    def num_memory_kills(self) -> int:
        said = dict(line.split() for line in self._read("memory", "memory.oom_control").splitlines())
        return int(said["oom_kill"])

    def forget_max_memory(self) -> None:
        self._write("memory", "memory.max_usage_in_bytes", 0)

    def _folder(self, controller: str) -> Path:
        return MOUNT / controller / self.rig / self.host

    def _read(self, controller: str, name: str) -> str:
        return (self._folder(controller) / name).read_text()

    def _write(self, controller: str, name: str, value: int) -> None:
        (self._folder(controller) / name).write_text(str(value))


def found() -> list[Path]:
    """Every group at the top of a controller, whoever made it."""
    return sorted(
        path for name in CONTROLLERS if (MOUNT / name).is_dir() for path in (MOUNT / name).iterdir() if path.is_dir()
    )


def remove(top: Path) -> None:
    """Kill all that runs in the group and in those inside it, and take them away."""
    deadline = time.monotonic() + _KILLED_WITHIN_S
    while True:
        left = _pids(top)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left and _remove_folders(top):
            return
        if time.monotonic() > deadline:
            raise RigError(f"{top} can't be removed: processes {sorted(left)} don't end")
        time.sleep(0.01)


def _pids(top: Path) -> set[int]:
    found: set[int] = set()
    for folder, _, _ in os.walk(top):
        with contextlib.suppress(OSError):  # gone meanwhile
            found |= {int(line) for line in Path(folder, "cgroup.procs").read_text().split()}
    return found


def _remove_folders(top: Path) -> bool:
    """Whether they are gone; the kernel may hold one for a moment after its last process."""
    try:
        for folder, _, _ in os.walk(top, topdown=False):
            os.rmdir(folder)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno != errno.ENOENT:  # another process may be cleaning, too
            raise
    return not top.exists()

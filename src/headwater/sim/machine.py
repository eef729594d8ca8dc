"""A machine under the virtual clock: cores, an accelerator, memory, what it drew; and the threads that work there.

Owns `Machine`, `Threads` and `Gauge`. Whose task runs next is `core.fair`'s decision, as on a live node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import simpy

from headwater.core.fair import Fair, Turn
from headwater.sim.sharing import Done, Shared

Note = Callable[[str, str, float], None]  # lane, what, since when; it ends now


@dataclass
class Gauge:
    """Bytes that are held, and the most so far."""

    now: float = 0.0
    peak: float = 0.0

    def add(self, num_bytes: float) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True)
class Build:
    """What a machine is made of. `chip_speed` is 0 without an accelerator; energy is told where watts are given."""

    name: str
    group: str
    cores: float
    speed: float = 1.0
    chip_speed: float = 0.0
    idle_w: float | None = None
    busy_w: float | None = None
    chip_idle_w: float | None = None
    chip_busy_w: float | None = None
    price_per_hour: float = 0.0


class Machine:
    """Cores that all its work shares, and an accelerator that does one thing after the other."""

    def __init__(self, env: simpy.Environment, build: Build) -> None:
        self.env, self.build = env, build
        self.memory = Gauge()
        self._gone = (0.0, 0.0)  # what earlier lives did: core-seconds, accelerator-seconds
        self._factor = 1.0
        self._fresh()

    def _fresh(self) -> None:
        build = self.build
        self.cores = Shared(self.env, build.cores * build.speed, min(1.0, build.cores) * build.speed)
        self.num_threads = max(1, math.ceil(build.cores))
        self.threads = Threads(self.env, self.cores, self.num_threads)
        self.chip: Threads | None = None
        self.chip_shared: Shared | None = None
        if build.chip_speed:
            self.chip_shared = Shared(self.env, build.chip_speed, build.chip_speed)
            self.chip = Threads(self.env, self.chip_shared, 1)

    def restart(self) -> None:
        """Whatever it did is lost."""
        self._gone = self.worked()
        self.memory.now = 0.0
        self._fresh()
        self.slow(self._factor)

    def slow(self, factor: float) -> None:
        self._factor = factor
        self.cores.slow(factor)
        if self.chip_shared is not None:
            self.chip_shared.slow(factor)

    def worked(self) -> tuple[float, float]:
        """Core-seconds and accelerator-seconds so far, of its own."""
        build = self.build
        cores = self.cores.full() * build.cores
        chip = self.chip_shared.usage()[1] if self.chip_shared is not None else 0.0
        return self._gone[0] + cores, self._gone[1] + chip

    def energy_j(self, seconds: float) -> float | None:
        """Modelled: idle watts all the time, and what is above them for as long as it was busy."""
        build, total, known = self.build, 0.0, False
        cores_s, chip_s = self.worked()
        if build.idle_w is not None and build.busy_w is not None:
            total += build.idle_w * seconds + (build.busy_w - build.idle_w) * cores_s / build.cores
            known = True
        if build.chip_idle_w is not None and build.chip_busy_w is not None:
            total += build.chip_idle_w * seconds + (build.chip_busy_w - build.chip_idle_w) * chip_s
            known = True
        return total if known else None


@dataclass(frozen=True)
class _Task:
    work: float
    then: Done
    told: Callable[[str, float], None] | None


class Threads:
    """So many at once, each with one task; the most urgent task of whoever has had the least time comes next."""

    def __init__(self, env: simpy.Environment, cores: Shared, count: int) -> None:
        self._env, self._cores = env, cores
        self._free = list(range(count))
        self._queue: Fair[_Task] = Fair()

    def submit(
        self, urgency: int, work: float, then: Done, tenant: str = "", told: Callable[[str, float], None] | None = None
    ) -> None:
        """`told` hears which thread did it, and since when."""
        self._queue.put(tenant, urgency, _Task(work, then, told))
        self._next()

    def _next(self) -> None:
        while self._free and len(self._queue):
            turn, task = self._queue.take()
            self._begin(self._free.pop(0), turn, task)

    def _begin(self, number: int, turn: Turn, task: _Task) -> None:
        since = self._env.now

        def end() -> None:
            self._queue.took(turn, self._env.now - since)
            self._free.append(number)
            self._free.sort()
            if task.told is not None:
                task.told(f"compute-{number}", since)
            task.then()
            self._next()

        self._cores.use(task.work, end)

"""What a run takes of every tier: CPU, memory, and modelled energy.

Owns `Meter`. CPU-seconds and memory are measured, on nodes by the nodes themselves and for all of their tenants
together; energy is modelled from busy time and stated power, as everywhere.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headwater.data.cores import usable_cores
from headwater.data.memory import held_bytes, page_cache_bytes
from headwater.errors import HeadwaterError
from headwater.train.client import NodeClient
from headwater.train.own import OwnNode


@dataclass(frozen=True)
class Usage:
    """Of one tier, over some time. What can't be told is None."""

    cpu_s: float
    resident_bytes: int
    page_cache_bytes: int | None  # of its control group, or of the whole machine
    modelled_j: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Reading:
    cpu_s: float
    resident_bytes: int
    page_cache_bytes: int | None
    cores: float


@dataclass
class _Account:
    """Of one process, at its latest answer."""

    cpu_s: float
    at: float


class Meter:
    """Reads all tiers of a job; `lap` tells what they took since it was last asked."""

    def __init__(
        self,
        clients: Callable[[], Sequence[NodeClient]],
        own: Callable[[], Sequence[OwnNode]],
        power: Mapping[str, tuple[float, float]] | None = None,
        trainers: int = 1,
    ) -> None:
        """`clients` tells the nodes of the moment; `own` the trainer's own node, whose work is the trainer's, once
        there is one. `trainers` of the job share this machine, and what it draws when idle."""
        self._clients, self._own, self._power, self._trainers = clients, own, power or {}, trainers
        self._tells_accelerator = "accelerator" in self._power
        self._accounts: dict[str, _Account] = {}
        self._lap()

    def lap(self) -> dict[str, Usage]:
        """By tier: "trainer", and each node's name. A node that does not answer is left out, and told of as a whole
        when it does again; of one that was started anew, what it took since then."""
        if self._tells_accelerator:
            self._tells_accelerator = False
            warnings.warn("power is given for an accelerator, and how long it is busy is not measured: what a run took "
                          "is told without its energy; the estimates of `headwater plan` have it",
                          stacklevel=3)  # fmt: skip
        return self._lap()

    def _lap(self) -> dict[str, Usage]:
        here = _Reading(time.process_time(), held_bytes(), page_cache_bytes(),
                        min(usable_cores(), float(len(os.sched_getaffinity(0)))))  # fmt: skip
        cpu_s, taken_s = self._since("trainer", here.cpu_s)
        beside = [said for each in self._own() if (said := _ask(each)) is not None]
        cpu_s += sum(self._since("own", each.cpu_s)[0] for each in beside)  # there is at most one
        here = replace(here, resident_bytes=here.resident_bytes + sum(each.resident_bytes for each in beside))
        found = {"trainer": self._usage("trainer", here, cpu_s, taken_s)}
        for client in self._clients():
            if (there := _ask(client)) is not None:
                is_first = client.name not in self._accounts
                cpu_s, taken_s = self._since(client.name, there.cpu_s)
                if not is_first:  # what it did before it was first asked is not this job's
                    found[client.name] = self._usage("node", there, cpu_s, taken_s)
        return found

    def _since(self, name: str, cpu_s: float) -> tuple[float, float]:
        """CPU-seconds of a process since it last answered, and how long ago that was."""
        now = time.perf_counter()
        before = self._accounts.get(name, _Account(0.0, now))
        self._accounts[name] = _Account(cpu_s, now)
        return cpu_s - before.cpu_s if cpu_s >= before.cpu_s else cpu_s, now - before.at

    def _usage(self, device: str, each: _Reading, cpu_s: float, taken_s: float) -> Usage:
        modelled_j = None
        if (watts := self._power.get(device)) is not None:
            idle_w, busy_w = watts
            shared = self._trainers if device == "trainer" else 1
            modelled_j = idle_w * taken_s / shared + (busy_w - idle_w) * min(taken_s, cpu_s / each.cores)
        return Usage(cpu_s, each.resident_bytes, each.page_cache_bytes, modelled_j)


def _ask(node: NodeClient | OwnNode) -> _Reading | None:
    try:
        said = node.hello()
    except HeadwaterError:
        return None
    cache = said.get("page_cache_bytes")
    return _Reading(float(said["cpu_s"]), int(said.get("resident_bytes", 0)),
                    None if cache is None else int(cache), float(said["cores"]))  # fmt: skip

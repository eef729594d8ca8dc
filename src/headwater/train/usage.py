"""What a run takes of every tier: CPU, memory, and modelled energy.

Owns `Meter`. CPU-seconds and memory are measured, on nodes by the nodes themselves and for all of their tenants
together; energy is modelled from busy time and stated power, as everywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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


class Meter:
    """Reads all tiers of a job; `lap` tells what they took since it was last asked."""

    def __init__(
        self,
        clients: Callable[[], Sequence[NodeClient]],
        own: Callable[[], Sequence[OwnNode]],
        power: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """`clients` tells the nodes of the moment; `own` the trainer's own node, whose work is the trainer's, once
        there is one."""
        self._clients, self._own, self._power = clients, own, power or {}
        self._at, self._before = time.perf_counter(), self._read()

    def lap(self) -> dict[str, Usage]:
        """By tier: "trainer", and each node's name; a node that does not answer, or was started anew, is left out."""
        now, found = time.perf_counter(), self._read()
        taken_s, self._at = now - self._at, now
        before, self._before = self._before, found
        return {
            name: Usage(
                each.cpu_s - before[name].cpu_s,
                each.resident_bytes,
                each.page_cache_bytes,
                self._energy_j(name, taken_s, each.cpu_s - before[name].cpu_s, each.cores),
            )
            for name, each in found.items()
            if name in before and each.cpu_s >= before[name].cpu_s
        }

    def _energy_j(self, name: str, taken_s: float, cpu_s: float, cores: float) -> float | None:
        watts = self._power.get("trainer" if name == "trainer" else "node")
        if watts is None:
            return None
        idle_w, busy_w = watts
        return idle_w * taken_s + (busy_w - idle_w) * min(taken_s, cpu_s / cores)

    def _read(self) -> dict[str, _Reading]:
        own = [found for each in self._own() if (found := _ask(each)) is not None]
        here = _Reading(
            time.process_time() + sum(each.cpu_s for each in own),
            held_bytes() + sum(each.resident_bytes for each in own),
            page_cache_bytes(),
            min(usable_cores(), float(len(os.sched_getaffinity(0)))),
        )
        nodes = {client.name: _ask(client) for client in self._clients()}
        return {"trainer": here} | {name: each for name, each in nodes.items() if each is not None}


def _ask(node: NodeClient | OwnNode) -> _Reading | None:
    try:
        said = node.hello()
    except HeadwaterError:
        return None
    cache = said.get("page_cache_bytes")
    return _Reading(float(said["cpu_s"]), int(said.get("resident_bytes", 0)),
                    None if cache is None else int(cache), float(said["cores"]))  # fmt: skip

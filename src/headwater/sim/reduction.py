"""Sums of gradients under the virtual clock: round a ring, or in the switch.

Owns `Rounds`, the sums at the end of a fleet's steps, and `ring_s`, the time of one alone. In a ring each worker
sends and takes 2(n−1)/n of the bytes; a switch that adds them up takes and gives them once. Both cross the trainers'
ports, which rows need as well. Sums that overlap with a backward pass, bucket by bucket, are in `sim.overlap`; a sum
packet by packet, with the state machines of `core.slots`, in `sim.packets`.
"""

from __future__ import annotations

from typing import Any

import simpy

from headwater.sim.rigfile import RING
from headwater.sim.sharing import Line, after, together


def ring_parts(num_workers: int) -> float:
    """What each worker sends, and takes, of the bytes that are summed."""
    return 2 * (num_workers - 1) / num_workers


def ring_s(num_workers: int, num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """A ring all-reduce alone: 2(n−1) turns of an n-th each."""
    return ring_parts(num_workers) * num_bytes / bytes_per_s + 2 * (num_workers - 1) * latency_s


def switch_s(num_bytes: float, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """The same by a switch: results come while the rest still goes."""
    return num_bytes / bytes_per_s + 2 * latency_s


class Rounds:
    """One sum after each step, of all trainers; a trainer that has no more steps is not waited for."""

    def __init__(self, env: simpy.Environment, num_workers: int, num_bytes: float, kind: str) -> None:
        self._env, self._num_workers, self._kind = env, num_workers, kind
        self._bytes = num_bytes * (ring_parts(num_workers) if kind == RING else 1.0)
        self._lines: dict[Any, tuple[Line, Line]] = {}
        self._rounds: dict[int, tuple[list[Any], list[simpy.Event]]] = {}
        self.num_bytes = 0.0  # that trainers have sent for sums
        self._done: dict[Any, int] = {}

    def join(self, who: Any, down: Line, up: Line) -> None:
        self._lines[who] = down, up

    def __call__(self, who: Any, number: int) -> simpy.Event:
        """This trainer's gradients are ready; the event is the end of the sum."""
        turn = self._done.get(who, 0)
        self._done[who] = turn + 1
        here, events = self._rounds.setdefault(turn, ([], []))
        here.append(who)
        event = self._env.event()
        events.append(event)
        if len(here) == self._num_workers:
            del self._rounds[turn]
            self._sum(here, events)
        return event

    def _sum(self, here: list[Any], events: list[simpy.Event]) -> None:
        lines = [line for who in here for line in self._lines[who]]
        latency_s = max(line.latency_s for line in lines)
        turns = 2 * (self._num_workers - 1) if self._kind == RING else 2

        def told() -> None:
            for event in events:
                event.succeed()

        def through() -> None:
            after(self._env, turns * latency_s, told)

        for line in lines:
            line.num_bytes += self._bytes
        self.num_bytes += self._bytes * len(here)
        together([lambda one, line=line: line.use(self._bytes, one) for line in lines], through)  # type: ignore[misc]

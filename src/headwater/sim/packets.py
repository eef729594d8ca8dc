"""A sum in the network packet by packet: the state machines of `core.slots` under the virtual clock.

Owns `summed_s`. A block of every worker goes up its line, the switch adds, the sum comes down each line. Blocks are the
unit here, not packets: a packet's own order matters where some are lost, and here none are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import simpy

from headwater.core.slots import Done, Multicast, Send, Switch, Total, Worker
from headwater.sim.sharing import Line, carry

BLOCK_BYTES = 44_800.0  # docs/reduce.md


def summed_s(
    num_workers: int,
    num_bytes: float,
    bytes_per_s: float,
    *,
    latency_s: float = 0.0,
    num_slots: int = 64,
    block_bytes: float = BLOCK_BYTES,
) -> float:
    """Seconds until every worker has the whole sum."""
    env = simpy.Environment()
    blocks = max(1, round(num_bytes / block_bytes))
    each_bytes = num_bytes / blocks
    up = [_Wire(Line(env, bytes_per_s, latency_s), each_bytes) for _ in range(num_workers)]
    down = [_Wire(Line(env, bytes_per_s, latency_s), each_bytes) for _ in range(num_workers)]
    switch = Switch(1, num_workers, num_slots)
    workers = [Worker(1, num_slots) for _ in range(num_workers)]
    done = [0] * num_workers
    ended = env.event()

    def sent(who: int, block: int) -> None:
        decisions = switch.arrived(1, who, block, 1, 1)
        if any(isinstance(each, Total) for each in decisions):
            for each in switch.finished(block):
                if isinstance(each, Multicast):
                    for number in range(num_workers):
                        down[number].send(env, partial(came, number, block))

    def came(who: int, block: int) -> None:
        follow(who, workers[who].result(1, block, 1, 1))

    def follow(who: int, decisions: Sequence[object]) -> None:
        for each in decisions:
            if isinstance(each, Send):
                up[who].send(env, partial(sent, who, each.block))
            elif isinstance(each, Done):
                done[who] += 1
                if min(done) == blocks:
                    ended.succeed()

    for number, worker in enumerate(workers):
        follow(number, worker.submit([1] * blocks))
    env.run(ended)
    return float(env.now)


class _Wire:
    """Blocks one after the other, in the order in which they were sent."""

    def __init__(self, line: Line, num_bytes: float) -> None:
        self._line, self._bytes = line, num_bytes
        self._queue: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def send(self, env: simpy.Environment, there: Callable[[], None]) -> None:
        self._queue.append(there)
        self._next(env)

    def _next(self, env: simpy.Environment) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True

        def left() -> None:
            self._is_busy = False
            self._next(env)

        carry(env, [self._line], self._bytes, left, self._queue.popleft())

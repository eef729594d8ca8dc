"""Which node gets which chunk, in what order replies are passed on, and what happens when a node dies.

Owns `Dispatch`, a state machine: events in (method calls), decisions out (lists). It knows no socket, thread or clock;
the trainer feeds it what really happens, the simulator what would.

A chunk's life:   waiting ──Assign──▶ out ──finished──▶ kept ──Deliver (in order)──▶ passed on ──taken──▶ gone
                     ▲                 │
                     └── node_down / failed (bounded) ──┘

What holds, whatever happens and in whatever order (tests/core/test_dispatch.py explores it exhaustively):
1. Every chunk is kept once and delivered once, in ascending order.
2. No chunk at or beyond `taken + window` is ever handed out, so buffers are bounded.
3. A node never has more than `per_node` chunks out.
4. While a node is up and no Stop was said, something is out, or everything within the window is kept.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(frozen=True)
class Assign:
    """Hand this chunk to this node."""

    node: str
    chunk: int


@dataclass(frozen=True)
class Keep:
    """This reply is the first for its chunk: hold on to its rows. A reply without Keep is dropped."""

    chunk: int


@dataclass(frozen=True)
class Deliver:
    """Pass this chunk's rows on; it is the next in order."""

    chunk: int


@dataclass(frozen=True)
class Stop:
    """The epoch can't be completed."""

    reason: str


Decision = Assign | Keep | Deliver | Stop


class Dispatch:
    """Hands `num_chunks` chunks to nodes that come and go."""

    def __init__(self, num_chunks: int, *, window: int, per_node: int, max_failures: int = 3) -> None:
        assert window >= 1
        assert per_node >= 1
        assert max_failures >= 1
        self._num_chunks = num_chunks
        self._window = window
        self._per_node = per_node
        self._max_failures = max_failures
        self._next_new = 0  # chunks from here on were never handed out
        self._again: list[int] = []  # a heap of chunks handed back
        self._out: dict[str, set[int]] = {}  # per node that is up: its chunks
        self._kept: set[int] = set()  # complete, waiting for their turn
        self._delivered = 0
        self._taken = 0
        self._failures: dict[int, int] = {}
        self._stopped = False

    @property
    def done(self) -> bool:
        """Everything was delivered."""
        return self._delivered == self._num_chunks

    @property
    def num_out(self) -> int:
        """Chunks that nodes are working on."""
        return sum(len(chunks) for chunks in self._out.values())

    def out_on(self, node: str) -> frozenset[int]:
        """The chunks this node is working on."""
        return frozenset(self._out.get(node, ()))

    def node_up(self, node: str) -> list[Decision]:
        """A node answers; it may have been here before."""
        self._out.setdefault(node, set())
        return self._assign()

    def node_down(self, node: str) -> list[Decision]:
        """A node is gone; its chunks go to others, or wait for one to come up."""
        for chunk in self._out.pop(node, ()):
            self._hand_back(chunk)
        return self._assign()

    def finished(self, node: str, chunk: int) -> list[Decision]:
        """A complete and checked reply. It counts even if its node was taken for dead meanwhile."""
        if node in self._out:
            self._out[node].discard(chunk)
        if self._stopped or chunk in self._kept or chunk < self._delivered:
            return self._assign()
        self._kept.add(chunk)
        decisions: list[Decision] = [Keep(chunk)]
        while self._delivered in self._kept:
            self._kept.remove(self._delivered)
            decisions.append(Deliver(self._delivered))
            self._delivered += 1
        return decisions + self._assign()

    def failed(self, node: str, chunk: int, reason: str) -> list[Decision]:
        """The node lives, and could not do this chunk. After `max_failures` of these for one chunk, stop."""
        if chunk not in self._out.get(node, ()):
            return []
        self._out[node].remove(chunk)
        self._failures[chunk] = self._failures.get(chunk, 0) + 1
        if self._failures[chunk] >= self._max_failures:
            return self.give_up(
                f"chunk {chunk} failed {self._failures[chunk]} times; the last time on {node}: {reason}"
            )
        self._hand_back(chunk)
        return self._assign(last=node)

    def taken(self) -> list[Decision]:
        """The trainer has used up the oldest delivered chunk; the window moves on by one."""
        assert self._taken < self._delivered
        self._taken += 1
        return self._assign()

    def give_up(self, reason: str) -> list[Decision]:
        """Whoever watches the clock has lost patience."""
        if self._stopped:
            return []
        self._stopped = True
        return [Stop(reason)]

    def _hand_back(self, chunk: int) -> None:
        elsewhere = any(chunk in chunks for chunks in self._out.values())
        if chunk not in self._kept and chunk >= self._delivered and not elsewhere:
            heapq.heappush(self._again, chunk)

    def _assign(self, last: str | None = None) -> list[Decision]:
        """Give the lowest waiting chunks to the least busy nodes; `last` just failed and is asked last."""
        decisions: list[Decision] = []
        while not self._stopped and (chunk := self._peek()) is not None:
            free = [node for node, chunks in self._out.items() if len(chunks) < self._per_node]
            if not free:
                break
            node = min(free, key=lambda name: (name == last, len(self._out[name])))
            self._pop(chunk)
            self._out[node].add(chunk)
            decisions.append(Assign(node, chunk))
        return decisions

    def _peek(self) -> int | None:
        while self._again and (self._again[0] in self._kept or self._again[0] < self._delivered):
            heapq.heappop(self._again)  # a node that was taken for dead delivered it after all
        if self._again:
            return self._again[0]
        if self._next_new < min(self._num_chunks, self._taken + self._window):
            return self._next_new
        return None

    def _pop(self, chunk: int) -> None:
        if self._again and self._again[0] == chunk:
            heapq.heappop(self._again)
        else:
            self._next_new += 1

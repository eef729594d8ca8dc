"""Which node gets which chunk, in what order replies are passed on, and what happens when a node dies.

Owns `Dispatch`, a state machine: events in (method calls), decisions out (lists). It knows no socket, thread or clock;
the trainer feeds it what really happens, the simulator what would.

A node's pace is how many chunks all nodes finish together while it finishes one: the machine's clock, since it has no
other. A slow node gets a chunk only if that will be back before the trainer wants it; where the trainer waits for a
chunk that a slow node has, and another node has nothing to do, that one gets it, too, and the first reply counts.

A chunk's life:   waiting ──Assign──▶ out ──finished──▶ kept ──Deliver (in order)──▶ passed on ──taken──▶ gone
                     ▲                 │
                     └── node_down / failed (bounded) ──┘

Not every node can do every chunk where nodes have disks of their own: `able` says which. A node that has failed twice
since it last finished something, such as one that can't read the store any more, is left out for a while if others can
do its chunks.

Where the trainer has a node of its own (`own`), some chunks are for that one (`is_own`), and all others for the
others: what it reads comes over the trainer's own link, so how much it does is the plan's business. Only where the
trainer waits, and one of the others has nothing to do, is one of its chunks taken over, and one of theirs by it only
where all of them have long been silent; where none of them is up, it does theirs; and a chunk that failed once is for
everybody. Without `is_own` every chunk is for everybody, and the trainer's own node helps out: it takes none while
nodes alone keep the trainer supplied, since its core may be the one that the trainer's steps need. It has at most
`own_out` chunks out, however many others have: what it reads early, rows that are wanted now have to wait for.

Work may begin in two places at once (`tail`): the trainer uses up the head of an epoch, and the tail is made meanwhile,
up to a window of its own. That is how two-ended preprocessing with one switch is carried out (`core.prongs`).

What holds, whatever happens and in whatever order (tests/core/test_dispatch.py explores it exhaustively):
1. Every chunk is kept once and delivered once, in ascending order.
2. No chunk of the head at or beyond `taken + window` is ever handed out, and none of the tail at or beyond its own
   window, which begins where the tail does, or where the trainer is; so buffers are bounded. The head's window may be
   widened while it runs (`widen`), when nodes join.
3. A node never has more than `per_node` chunks out, and the trainer's own no more than `own_out`.
4. While a node is up that can do a chunk that waits, and no Stop was said, something is out.
5. A chunk is out on at most two nodes, and only on nodes that can do it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse

SLOW = 2.0  # times the pace of the fastest: from here on a node is chosen with care
ASK_AGAIN = 3.0  # a node that was left out gets another chunk after so many times its pace: it may be faster now
FAILING = 2  # failures in a row, whatever of: from here on others are asked first
_LATEST = 0.5  # weight of the newest in a pace


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


@dataclass(frozen=True)
class Pace:
    """What one epoch tells the next about a node: its pace, and how many chunks were finished since it had one."""

    chunks: float
    idle: int = 0


@dataclass(frozen=True)
class Front:
    """Chunks from `start` to `stop`, of which so many are handed out ahead of the trainer, or of the first of them."""

    start: int
    stop: int
    window: int

    def end(self, taken: int) -> int:
        """The first chunk that may not be handed out yet."""
        return min(self.stop, max(taken, self.start) + self.window)


def window_of(num_workers: int, per_worker: int, more_ahead: int = 0) -> int:
    """Chunks that are out or wait for their turn: for each worker one more than it has out, and one in use."""
    return (per_worker + 1) * num_workers + 1 + more_ahead


class Dispatch:
    """Hands `num_chunks` chunks to nodes that come and go."""

    def __init__(
        self,
        num_chunks: int,
        *,
        window: int,
        per_node: int,
        max_failures: int = 3,
        able: Callable[[int], Collection[str]] | None = None,
        own: str | None = None,
        is_own: Callable[[int], bool] | None = None,
        own_out: int = 2,
        paces: Mapping[str, Pace] | None = None,
        tail: tuple[int, int] | None = None,
    ) -> None:
        """`able` names the nodes that can do a chunk; without it, all can. `own` is the trainer's own node. `paces`
        are those of an epoch before: a slow node need not be found out again. `tail` is the first chunk of the tail and
        its window; without it all is head."""
        assert window >= 1
        start, tail_window = tail or (num_chunks, 1)
        assert 0 <= start <= num_chunks
        assert tail_window >= 1
        assert own_out >= 1
        assert per_node >= 1
        assert max_failures >= 1
        self._num_chunks = num_chunks
        self._fronts = (Front(0, start, window), Front(start, num_chunks, tail_window))
        self._per_node = per_node
        self._max_failures = max_failures
        self._able = able
        self._own, self._is_own, self._own_out = own, is_own, own_out
        self._supplied = min(window, per_node + 1)  # chunks made ahead: with so many, nodes need no help
        self._for_all: set[int] = set()  # failed once, on whomever they were for
        self._next_new = [front.start for front in self._fronts]  # chunks from here on are beyond its window
        self._waiting: list[int] = []  # within the window, in order, and out nowhere
        self._out: dict[str, set[int]] = {}  # per node that is up: its chunks
        self._clock = 0  # replies so far
        known = paces or {}
        self._pace = {node: pace.chunks for node, pace in known.items()}  # per node that has finished something
        # Per node: when it began with what it is doing now, or last finished.
        self._since = {node: -pace.idle for node, pace in known.items()}
        self._kept: set[int] = set()  # complete, waiting for their turn
        self._delivered = 0
        self._taken = 0
        self._failures: dict[int, int] = {}
        self._in_a_row: dict[str, int] = {}  # per node: failures since it last finished something
        self._overdue = False  # nodes have been silent for long
        self._stopped = False

    @property
    def done(self) -> bool:
        """Everything was delivered."""
        return self._delivered == self._num_chunks

    @property
    def num_out(self) -> int:
        """Chunks that nodes are working on."""
        return sum(len(chunks) for chunks in self._out.values())

    @property
    def is_stuck(self) -> bool:
        """Chunks wait, and no node that is up can do any of them."""
        return bool(self._waiting) and not any(self._nodes_for(chunk) for chunk in self._waiting) and not self.num_out

    @property
    def paces(self) -> dict[str, Pace]:
        """Of each node whose pace is known by now; one that is late with what it has is as slow as that.

        One that has finished nothing may have had to load something first, so it is asked again soon.
        """
        found = {}
        for node, chunks in self._out.items():
            if node in self._pace:
                found[node] = Pace(self._pace_of(node), 0 if chunks else self._clock - self._since[node])
            elif chunks:
                found[node] = Pace(self._pace_of(node), round((ASK_AGAIN - 1) * self._pace_of(node)))
        return found

    def out_on(self, node: str) -> frozenset[int]:
        """The chunks this node is working on."""
        return frozenset(self._out.get(node, ()))

    def widen(self, window: int) -> None:
        """So many chunks of the head may be handed out ahead of the trainer from here on, if that is more: there are
        more nodes to keep at work. It never becomes less; what was handed out would be beyond it."""
        head, tail = self._fronts
        self._fronts = (replace(head, window=max(head.window, window)), tail)

    def node_up(self, *nodes: str) -> list[Decision]:
        """Nodes answer; they may have been here before. Those that come together are given work together."""
        for node in nodes:
            self._out.setdefault(node, set())
            self._since.setdefault(node, self._clock)
        return self._assign()

    def node_down(self, node: str) -> list[Decision]:
        """A node is gone; its chunks go to others, or wait for one to come up."""
        self._pace.pop(node, None)
        self._since.pop(node, None)
        self._in_a_row.pop(node, None)
        for chunk in self._out.pop(node, ()):
            self._hand_back(chunk)
        return self._assign()

    def finished(self, node: str, chunk: int, overdue: bool = False) -> list[Decision]:
        """A complete and checked reply. It counts even if its node was taken for dead meanwhile. `overdue`: as `late`
        has it."""
        self._overdue = overdue
        if node in self._out:
            self._out[node].discard(chunk)
            self._in_a_row.pop(node, None)
            self._learn(node)
        if self._stopped or chunk in self._kept or chunk < self._delivered:
            return self._assign()
        if chunk in self._waiting:  # its node was taken for dead, and delivers after all
            self._waiting.remove(chunk)
        self._kept.add(chunk)
        decisions: list[Decision] = [Keep(chunk)]
        while self._delivered in self._kept:
            self._kept.remove(self._delivered)
            decisions.append(Deliver(self._delivered))
            self._delivered += 1
        return decisions + self._assign()

    def failed(self, node: str, chunk: int, reason: str, *, counts: bool = True) -> list[Decision]:
        """The node lives, and could not do this chunk. After `max_failures` of these that count for one chunk, stop."""
        if chunk not in self._out.get(node, ()):
            return []
        self._out[node].remove(chunk)
        self._in_a_row[node] = self._in_a_row.get(node, 0) + 1
        self._since[node] = self._clock
        if chunk in self._kept or chunk < self._delivered:
            return self._assign()  # another node has done it meanwhile
        self._for_all.add(chunk)
        if counts:
            self._failures[chunk] = self._failures.get(chunk, 0) + 1
        if self._failures.get(chunk, 0) >= self._max_failures:
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

    def late(self, overdue: bool = False) -> list[Decision]:
        """The trainer has waited for a while, and nothing came: time passes though nobody replies. Nodes are `overdue`
        where they have been silent for much longer than they usually are (`core.rhythm`)."""
        self._clock += 1
        self._overdue = overdue
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
            insort(self._waiting, chunk)

    def _assign(self, last: str | None = None) -> list[Decision]:
        """Give the lowest waiting chunks to the least busy nodes; `last` just failed and is asked last."""
        if self._stopped:
            return []
        for number, front in enumerate(self._fronts):
            end = front.end(self._taken)
            for chunk in range(self._next_new[number], end):
                insort(self._waiting, chunk)
            self._next_new[number] = max(self._next_new[number], end)
        decisions: list[Decision] = []
        for chunk in list(self._waiting):
            if not any(self._has_room(node) for node in self._out):
                break
            if self._is_for_others(chunk):  # most of a long tail, while its nodes are busy
                continue
            meant = self._nodes_meant_for(chunk)
            free = [node for node in meant if self._has_room(node)]
            fastest = min((self._pace_of(each) for each in meant), default=0.0) if free else 0.0
            in_time = [node for node in free if self._in_time(node, chunk, fastest)]
            if not in_time and self.num_out == 0:
                in_time = free  # better late than never
            if in_time:
                node = min(in_time, key=lambda name: (name == last, len(self._out[name]), self._pace_of(name)))
                self._waiting.remove(chunk)
                decisions.append(self._hand_out(node, chunk))
        return decisions or self._take_over() or self._hand_out_again()

    def _is_for_others(self, chunk: int) -> bool:
        """Surely not for the trainer's own node, and no other has room: told without looking at each of them."""
        if self._is_own is None or self._able is not None or self._in_a_row or self._is_own(chunk):
            return False
        others = [node for node in self._out if node != self._own]
        return bool(others) and chunk not in self._for_all and not any(self._has_room(node) for node in others)

    def _has_room(self, node: str) -> bool:
        if node != self._own:
            return len(self._out[node]) < self._per_node
        helps = self._is_own is not None or len(self._out) == 1 or self._made_ahead < self._supplied
        return helps and len(self._out[node]) < min(self._per_node, self._own_out)

    @property
    def _made_ahead(self) -> int:
        """Chunks that are made, and that the trainer has not used up."""
        return len(self._kept) + self._delivered - self._taken

    def _is_failing(self, node: str) -> bool:
        """Has it failed so often that others come first? After a while it is tried again."""
        failing = self._in_a_row.get(node, 0) >= FAILING
        return failing and self._clock - self._since[node] < ASK_AGAIN * self._pace_of(node)

    def _nodes_for(self, chunk: int) -> list[str]:
        """Those that are up and can do it."""
        return [node for node in self._out if self._able is None or node in self._able(chunk)]

    def _nodes_meant_for(self, chunk: int) -> list[str]:
        """Of those, the ones that it is for; all, if none of these is up or it has failed before."""
        able = self._nodes_for(chunk)
        able = [node for node in able if not self._is_failing(node)] or able
        if self._own is None or self._is_own is None or chunk in self._for_all:
            return able
        return [node for node in able if (node == self._own) == self._is_own(chunk)] or able

    def _take_over(self) -> list[Decision]:
        """The trainer waits, and whoever the next chunk is for has not begun with it: who is idle does that."""
        if self._is_own is None or self._taken < self._delivered:
            return []
        soon = [chunk for chunk in self._waiting if chunk < self._taken + self._fronts[0].window]
        for chunks in (filter(self._is_own, soon), filterfalse(self._is_own, soon)):
            if (chunk := next(chunks, None)) is None:
                continue
            others = [node for node in self._nodes_for(chunk) if node != self._own]
            if self._is_own(chunk):
                idle = [node for node in others if not self._out[node]]
            else:
                idle = [self._own] if self._own and self._is_left_to_own(chunk, others) else []
            if idle:
                self._waiting.remove(chunk)
                return [self._hand_out(min(idle, key=self._pace_of), chunk)]
        return []

    def _is_left_to_own(self, chunk: int, others: Sequence[str]) -> bool:
        """Are all nodes that it is for busy and overdue, while the trainer's own has nothing to do?

        What they are busy with may have been done by it meanwhile. That it is faster than they are is no reason: how
        much it reads over the trainer's link is the plan's business.
        """
        if not self._overdue or self._own not in self._nodes_for(chunk) or self._out[self._own]:
            return False
        return not any(self._has_room(node) for node in others)

    def _hand_out(self, node: str, chunk: int) -> Assign:
        if not self._out[node]:
            self._since[node] = self._clock
        self._out[node].add(chunk)
        return Assign(node, chunk)

    def _hand_out_again(self) -> list[Decision]:
        """The trainer waits for a chunk that a slow node has: those who are idle may be sooner with what it has."""
        decisions: list[Decision] = []
        if self._taken < self._delivered or all(self._out.values()):
            return decisions
        holders: dict[int, list[str]] = {}
        for node, chunks in self._out.items():
            for chunk in chunks - self._kept:
                if chunk >= self._delivered:  # otherwise somebody was sooner
                    holders.setdefault(chunk, []).append(node)
        for chunk in sorted(holders):
            idle = [node for node in self._nodes_for(chunk) if not self._out[node]]
            if idle and len(holders[chunk]) == 1:
                node = min(idle, key=self._pace_of)
                if self._pace_of(holders[chunk][0]) > SLOW * self._pace_of(node):
                    decisions.append(self._hand_out(node, chunk))
        return decisions

    def _in_time(self, node: str, chunk: int, fastest: float) -> bool:
        """Would this node be done with the chunk before the trainer wants it, or at least about as soon as the fastest
        of those it is for?"""
        pace = self._pace_of(node)
        waits = len(self._out[node]) + 1
        if pace <= SLOW * fastest or waits * pace <= chunk - self._taken:
            return True
        return waits == 1 and self._clock - self._since[node] >= ASK_AGAIN * pace

    def _pace_of(self, node: str) -> float:
        """Its pace so far, or what it must be by now if it is later than that; until it is known, that of equals."""
        known = self._pace.get(node, float(len(self._out)))
        return max(known, self._clock - self._since[node]) if self._out[node] else known

    def _learn(self, node: str) -> None:
        self._clock += 1
        taken = max(1, self._clock - self._since.get(node, 0))
        before = self._pace.get(node, taken)
        self._pace[node] = before + _LATEST * (taken - before)
        self._since[node] = self._clock

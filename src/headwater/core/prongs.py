"""Two-ended preprocessing: the trainer's CPU and the storage side work through an epoch from its two ends.

Owns the three strategies. Draws belong to samples, not to places, so all of them give every sample the same pixels, and
each sample once; they differ in the order of the batches, and in what that order costs.

- **ordered**: both sides work ahead on the same order, chunk by chunk (a plan's `split` says whose a chunk is). Batches
  come as in a plain run. Costs a window of finished rows that wait for their turn.
- **mte** (moving towards each other): the trainer takes the head of the order up to a meeting point, the storage side
  the tail, from its end backwards; the loop uses up the head, then switches once. The meeting point follows from the
  plan's share, so the order repeats exactly from it (`visits`); `core.dispatch` carries it out. Costs room for the tail
  at the trainer: what does not fit is made when the head is used up.
- **wrr** (weighted round robin): before each step the loop takes a batch of the storage side if one is ready, else the
  trainer's next; both go on until they meet, wherever that is (`TwoEnded`). Costs the order, which depends on timing.

What `TwoEnded` promises, whatever happens and in whatever order (tests/core/test_prongs.py explores it exhaustively):
1. Every chunk is kept once and delivered once.
2. Finished chunks of the storage side go first; of the trainer's own, the lowest.
3. A worker has at most `per_worker` chunks out, and gets no more while its side has `per_worker + 1` for each of its
   workers that are out or kept; so buffers are bounded.
4. While a worker is up, chunks are left, and no Stop was said, something is out or waits to be taken.
5. A chunk is out on at most two workers.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headwater.core.dispatch import Assign, Decision, Deliver, Keep, Pace, Stop
from headwater.core.order import Ids
from headwater.core.share import SHARES

ORDERED, MTE, WRR = "ordered", "mte", "wrr"
STRATEGIES = (ORDERED, MTE, WRR)
# Assumed, not measured: of a trainer's memory, and of what is free of it, for rows of a tail that wait under mte.
TAIL_MEMORY, TAIL_OF_FREE = 0.25, 0.5


def meeting_point(num_entries: int, share: float, grain: int) -> int:
    """How many entries of an epoch's order are the trainer's under mte: its share, in whole steps of `grain`.

    Both sides get something where there is more than one step: how fast one is that does nothing is not found out.
    """
    assert 0 <= share <= 1
    steps, most = round(share * num_entries / grain), -(-num_entries // grain)
    if 0 < share < 1 and most >= 2:
        steps = min(max(steps, 1), most - 1)
    return min(num_entries, grain * steps)


def tail_bytes(memory_bytes: float, free_bytes: Any) -> Any:
    """What a machine may hold of an epoch's tail until its head is used up: live, simulated and estimated."""
    return np.minimum(TAIL_MEMORY * memory_bytes, TAIL_OF_FREE * free_bytes)


def tail_room(held_bytes: float, chunk_bytes: float, prefetch: int) -> int:
    """The same in chunks; as many as a node works ahead in any case."""
    return max(prefetch + 1, int(held_bytes / chunk_bytes))


def next_share(share: float, trainer_s: float, storage_s: float) -> float:
    """The trainer's share of the next epoch under mte, after one with this share.

    `trainer_s` is when the loop was through with everything, less its waits for the tail; `storage_s` when the tail was
    made. An epoch is shortest where the two are equal: the storage side goes on with the tail while its beginning is
    used up. The rule takes the trainer's time for a multiple of its share, though steps take their time whoever made
    their rows. So it comes nearer from epoch to epoch and does not overshoot: what one share less takes off is less
    than that.
    """
    assert 0 < share < 1
    here, there = share / max(trainer_s, 1e-9), (1 - share) / max(storage_s, 1e-9)
    return min(max(here / (here + there), SHARES[0]), SHARES[-1])


@dataclass(frozen=True)
class Visit:
    """How an epoch is gone through: fixed when it begins, whatever plans take over meanwhile."""

    strategy: str = ORDERED
    meeting: int | None = None  # under mte: how many entries of the order are the head


def visits(ids: Ids, meeting: int) -> Ids:
    """The order under mte: the head as it is, then the tail from its end backwards."""
    assert 0 <= meeting <= len(ids)
    return np.concatenate([ids[:meeting], ids[meeting:][::-1]])


@dataclass
class _Side:
    """One prong: who works on it, and what it has finished that nobody has taken."""

    workers: list[str] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


class TwoEnded:
    """Hands `num_chunks` chunks to both sides from opposite ends, and passes on what is ready (wrr).

    The events and decisions are those of `core.dispatch`, so the same threads carry them out. `own` is the trainer's
    worker; all others are the storage side.
    """

    def __init__(self, num_chunks: int, *, own: str, per_worker: int, max_failures: int = 3) -> None:
        assert per_worker >= 1
        assert max_failures >= 1
        self._num_chunks, self._own = num_chunks, own
        self._per_worker, self._max_failures = per_worker, max_failures
        self._low, self._high = 0, num_chunks  # nobody has had those in between
        self._returned: list[int] = []  # ascending: handed back, and out nowhere
        self._out: dict[str, set[int]] = {}  # per worker that is up
        self._here, self._there = _Side(), _Side()
        self._kept: set[int] = set()  # ever
        self._delivered = self._taken = 0
        self._failures: dict[int, int] = {}
        self._failed_on: dict[int, set[str]] = {}
        self._stopped = False

    @property
    def done(self) -> bool:
        """Everything was delivered."""
        return self._delivered == self._num_chunks

    @property
    def num_out(self) -> int:
        return sum(len(chunks) for chunks in self._out.values())

    @property
    def is_stuck(self) -> bool:
        """Chunks wait, and nobody is up."""
        return (self._low < self._high or bool(self._returned)) and not self._out

    @property
    def paces(self) -> dict[str, Pace]:
        """Nobody is chosen by its pace here: each takes the next chunk when it is done."""
        return {}

    def out_on(self, worker: str) -> frozenset[int]:
        """The chunks this worker has."""
        return frozenset(self._out.get(worker, ()))

    def node_up(self, *workers: str) -> list[Decision]:
        for worker in workers:
            if worker not in self._out:
                self._out[worker] = set()
                self._side(worker).workers.append(worker)
        return self._assign()

    def node_down(self, worker: str) -> list[Decision]:
        """A worker is gone; what it had is for whoever comes to it."""
        if worker in self._out:
            self._side(worker).workers.remove(worker)
            for chunk in self._out.pop(worker):
                self._hand_back(chunk)
        return self._assign()

    def finished(self, worker: str, chunk: int, overdue: bool = False) -> list[Decision]:
        """A complete and checked reply; it counts even if its worker was taken for dead meanwhile."""
        if worker in self._out:
            self._out[worker].discard(chunk)
        if self._stopped or chunk in self._kept:
            return self._assign()
        if chunk in self._returned:
            self._returned.remove(chunk)
        self._kept.add(chunk)
        self._side(worker).kept.append(chunk)
        return [Keep(chunk), *self._deliver(), *self._assign()]

    def failed(self, worker: str, chunk: int, reason: str, *, counts: bool = True) -> list[Decision]:
        """The worker lives, and could not do this chunk. After `max_failures` that count for one chunk, stop."""
        if chunk not in self._out.get(worker, ()):
            return []
        self._out[worker].remove(chunk)
        if chunk in self._kept:
            return self._assign()  # another one has done it meanwhile
        self._failed_on.setdefault(chunk, set()).add(worker)
        if counts:
            self._failures[chunk] = self._failures.get(chunk, 0) + 1
        if self._failures.get(chunk, 0) >= self._max_failures:
            return self.give_up(
                f"chunk {chunk} failed {self._failures[chunk]} times; the last time on {worker}: {reason}"
            )
        self._hand_back(chunk)
        return self._assign()

    def taken(self) -> list[Decision]:
        """The loop has used up the delivered chunk."""
        assert self._taken < self._delivered
        self._taken += 1
        return [*self._deliver(), *self._assign()]

    def late(self, overdue: bool = False) -> list[Decision]:
        """The loop has waited for a while, and nothing came: who has nothing to do gets what failed there before, or
        else what another one has."""
        decisions = self._assign()
        if decisions or self._stopped:
            return decisions
        for worker, chunks in self._out.items():
            if chunks or not self._has_room(worker):
                continue
            if self._returned:
                decisions.append(self._hand_out(worker, self._returned[0]))
                continue
            alone = [chunk for chunk in self._chunks_out() if sum(chunk in out for out in self._out.values()) == 1]
            if alone:
                decisions.append(self._hand_out(worker, min(alone)))
        return decisions

    def give_up(self, reason: str) -> list[Decision]:
        """Whoever watches the clock has lost patience."""
        if self._stopped:
            return []
        self._stopped = True
        return [Stop(reason)]

    def _side(self, worker: str) -> _Side:
        return self._here if worker == self._own else self._there

    def _chunks_out(self) -> set[int]:
        """That nobody has finished yet."""
        return set().union(*self._out.values()) - self._kept

    def _hand_back(self, chunk: int) -> None:
        if chunk not in self._kept and chunk not in self._chunks_out():
            insort(self._returned, chunk)

    def _has_room(self, worker: str) -> bool:
        side = self._side(worker)
        holds = len(side.kept) + sum(len(self._out[each]) for each in side.workers)
        return len(self._out[worker]) < self._per_worker and holds < (self._per_worker + 1) * len(side.workers)

    def _assign(self) -> list[Decision]:
        """Round after round: each worker with room takes the next chunk from its end."""
        decisions: list[Decision] = []
        given = not self._stopped
        while given:
            given = False
            # The least busy first, so that a side's chunks spread over its workers.
            for worker in sorted(self._out, key=lambda each: len(self._out[each])):
                if self._has_room(worker) and (chunk := self._next_for(worker)) is not None:
                    decisions.append(self._hand_out(worker, chunk))
                    given = True
        return decisions

    def _next_for(self, worker: str) -> int | None:
        """From its end; what failed there before, only if nobody else is up."""
        alone, is_own = len(self._out) == 1, worker == self._own
        new = [] if self._low == self._high else [self._low if is_own else self._high - 1]
        for chunk in sorted([*self._returned, *new], reverse=not is_own):
            if alone or worker not in self._failed_on.get(chunk, ()) or self._all_failed(chunk):
                return chunk
        return None

    def _all_failed(self, chunk: int) -> bool:
        return set(self._out) <= self._failed_on.get(chunk, set())

    def _hand_out(self, worker: str, chunk: int) -> Assign:
        if chunk in self._returned:
            self._returned.remove(chunk)
        elif self._low <= chunk < self._high:
            assert chunk in (self._low, self._high - 1)
            self._low, self._high = (chunk + 1, self._high) if chunk == self._low else (self._low, chunk)
        self._out[worker].add(chunk)
        return Assign(worker, chunk)

    def _deliver(self) -> list[Decision]:
        """One at a time, when the loop wants one: what is ready then counts."""
        if self._taken < self._delivered:
            return []
        if self._there.kept:
            chunk = self._there.kept.pop(0)
        elif self._here.kept:
            chunk = min(self._here.kept)
            self._here.kept.remove(chunk)
        else:
            return []
        self._delivered += 1
        return [Deliver(chunk)]

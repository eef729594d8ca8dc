"""Sums in the network: the switch's slots and the worker's window, as two state machines.

Owns `Switch` and `Worker`: events in (method calls), decisions out (tuples). They know no socket, payload or clock; the
aggregator and the reducer feed them what really happens, and move bytes as they say.

A job's gradients are a stream of **blocks**, numbered from 0 and the same on every worker. A block is sent as up to
`MAX_PIECES` **pieces**, one packet each. The switch has a pool of W **slots**; block b belongs to slot b mod W, in one
of the slot's two **sets** (the shadow copies), chosen by b // W mod 2. A worker sends block b + W only once it has the
result of b. So results clock the stream, at most W blocks of a worker are under way, and whoever sends b + 2W proves
that everybody has b: a set is never overwritten while somebody may still ask for it.

    worker                                          switch
      submit ──Send(b)──────── pieces of b ─────────▶ arrived: Take, and after the last worker's: Total
                                                       │ (added up, in rank order)
      result ◀────────────────── sum of b ──────────── finished: Multicast
        └─ Keep, Done, Send(b + W)
      late, or overtaken ──Ask(b, have)─────────────▶ asked: Result (what is missing of the sum), or Need (what is
      needed ◀───────────────────────────────────────  missing of this worker's pieces), or Wait (others are missing)

SwitchML repeats a packet and has it dropped or answered; here a worker asks, with 16 bytes, and only pieces that were
really lost travel again. A block is asked for when later ones have overtaken it, so that one loss costs no time-out;
where nothing comes at all, whoever watches the clock says `late`, and is told to wait twice as long each time.

What holds, whatever is lost, doubled, late or out of order (tests/core/test_slots.py explores it exhaustively):
1. Every worker gets each block's sum once, made of each worker's pieces of that block exactly once.
2. No set is used again before every worker has its result; no contribution is overwritten before it was added.
3. Whoever has the result of b still holds it while any worker lacks it, in one buffer a slot (`core.agree` needs that).
4. While messages eventually arrive, everything submitted by all is delivered.
5. Packets of another job, or of an earlier start of this one, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_PIECES = 32
ALL = (1 << MAX_PIECES) - 1  # "every piece", where the switch can't know how many there are
OVERTAKEN = 3  # later blocks that are back before one is asked for, as TCP counts duplicate acknowledgements
BROKEN = 1  # the same, where a part of its sum is here: the rest was sent in the same breath
MOST_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class Take:
    """Hold on to these pieces of a worker's block: they are new."""

    worker: int
    block: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Total:
    """Every worker's pieces of this block are here: add them up, and say `finished` once the sum is there."""

    block: int


@dataclass(frozen=True, slots=True)
class Multicast:
    """Send the sum of this block to every worker."""

    block: int


@dataclass(frozen=True, slots=True)
class Result:
    """Send these pieces of the sum to this worker alone."""

    worker: int
    block: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Need:
    """Tell this worker that these pieces of its block are not here."""

    worker: int
    block: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Tell this worker that its pieces are here, and those of these workers are not."""

    worker: int
    block: int
    workers: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send these pieces of this block to the switch."""

    block: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Hold on to these pieces of the sum: they are new."""

    block: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Done:
    """The whole sum of this block is here."""

    block: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the switch what has become of this block; these pieces of its sum are here."""

    block: int
    have: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The packet changes nothing; count it."""

    reason: str


SwitchDecision = Take | Total | Multicast | Result | Need | Wait | Drop
WorkerDecision = Send | Keep | Done | Ask | Drop

FOREIGN, STALE, REPEAT, EARLY, MISFIT = "foreign", "stale", "repeat", "early", "misfit"


def runs(pieces: int) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of consecutive pieces."""
    first = 0
    while pieces:
        skip = (pieces & -pieces).bit_length() - 1
        pieces >>= skip
        first += skip
        count = (~pieces & (pieces + 1)).bit_length() - 1
        yield first, count
        pieces >>= count
        first += count


class Switch:
    """The slots of one job of `num_workers`. `job` is what its packets have to carry."""

    def __init__(self, job: int, num_workers: int, num_slots: int) -> None:
        assert num_workers >= 1
        assert num_slots >= 1
        self.job = job
        self.num_workers, self.num_slots = num_workers, num_slots
        self.everyone = (1 << num_workers) - 1
        # Per slot: its block (below 0: none yet), and of each of its two sets …
        self._block = [slot - num_slots for slot in range(num_slots)]
        self._full = [[0, 0] for _ in range(num_slots)]  # all pieces of its block
        self._got = [
            [[0] * num_workers, [0] * num_workers] for _ in range(num_slots)
        ]  # by worker: pieces that are here
        self._arrived = [[0, 0] for _ in range(num_slots)]  # workers whose pieces are all here
        self._finished = [[True, True] for _ in range(num_slots)]  # the sum is there

    def arrived(self, job: int, worker: int, block: int, pieces: int, num_pieces: int) -> tuple[SwitchDecision, ...]:
        """Pieces of a worker's block."""
        if job != self.job or not 0 <= worker < self.num_workers:
            return (Drop(FOREIGN),)
        if not 1 <= num_pieces <= MAX_PIECES:
            return (Drop(MISFIT),)
        slot, version = block % self.num_slots, block // self.num_slots % 2
        full = (1 << num_pieces) - 1
        ahead = block - self._block[slot]
        if ahead == self.num_slots:
            if not self._finished[slot][1 - version]:
                return (Drop(EARLY),)  # nobody has the result without which no worker may send this
            self._block[slot] = block
            self._full[slot][version] = full
            self._got[slot][version] = [0] * self.num_workers
            self._arrived[slot][version] = 0
            self._finished[slot][version] = False
        elif ahead == -self.num_slots:
            return (Drop(REPEAT),)
        elif ahead != 0:
            return (Drop(STALE if ahead < 0 else EARLY),)
        if full != self._full[slot][version] or not pieces or pieces & ~full:
            return (Drop(MISFIT),)
        got = self._got[slot][version]
        new = pieces & ~got[worker]
        if not new:
            return (Drop(REPEAT),)
        got[worker] |= new
        if got[worker] != full:
            return (Take(worker, block, new),)
        self._arrived[slot][version] |= 1 << worker
        if self._arrived[slot][version] != self.everyone:
            return (Take(worker, block, new),)
        return (Take(worker, block, new), Total(block))

    def finished(self, block: int) -> tuple[SwitchDecision, ...]:
        """The sum that `Total` asked for is there."""
        slot, version = block % self.num_slots, block // self.num_slots % 2
        assert self._block[slot] == block
        assert self._arrived[slot][version] == self.everyone
        assert not self._finished[slot][version]
        self._finished[slot][version] = True
        return (Multicast(block),)

    def asked(self, job: int, worker: int, block: int, have: int) -> tuple[SwitchDecision, ...]:
        """A worker has waited for the sum of this block; it has these pieces of it."""
        if job != self.job or not 0 <= worker < self.num_workers:
            return (Drop(FOREIGN),)
        slot, version = block % self.num_slots, block // self.num_slots % 2
        ahead = block - self._block[slot]
        if ahead == self.num_slots:
            return (Need(worker, block, ALL),) if self._finished[slot][1 - version] else (Drop(EARLY),)
        if ahead not in (0, -self.num_slots) or block < 0:
            return (Drop(STALE if ahead < 0 else EARLY),)
        full = self._full[slot][version]
        if self._finished[slot][version]:
            missing = full & ~have
            return (Result(worker, block, missing),) if missing else (Drop(REPEAT),)
        if missing := full & ~self._got[slot][version][worker]:
            return (Need(worker, block, missing),)
        return (Wait(worker, block, self.everyone & ~self._arrived[slot][version]),)

    def holds(self, block: int) -> bool:
        """Is the sum of this block still here?"""
        slot, version = block % self.num_slots, block // self.num_slots % 2
        return block >= 0 and self._block[slot] - block in (0, self.num_slots) and self._finished[slot][version]

    @property
    def num_open(self) -> int:
        """Blocks of which something is here and the sum is not."""
        return sum(not finished for pair in self._finished for finished in pair)


@dataclass(slots=True)
class Flight:
    """A block that was sent, and whose sum is not here."""

    full: int
    stamp: int  # its place in the order in which blocks were sent or last asked for
    have: int = 0  # pieces of the sum
    passed: int = 0  # later ones whose sums are here


class Worker:
    """One worker's window on `num_slots` slots."""

    def __init__(self, job: int, num_slots: int) -> None:
        assert num_slots >= 1
        self.job = job
        self.num_slots = num_slots
        self.submitted = 0  # blocks
        self.awaited = 0  # workers that the switch said it waits for
        self._sizes: dict[int, int] = {}  # of blocks that wait for their slot: their pieces
        self._last = [slot - num_slots for slot in range(num_slots)]  # per slot: the last block that was sent
        self._flights: dict[int, Flight] = {}  # in the order of their stamps
        self._stamp = 0
        self._doublings = 0

    @property
    def is_idle(self) -> bool:
        """Everything that was submitted is done."""
        return not self._flights and not self._sizes

    @property
    def num_out(self) -> int:
        return len(self._flights)

    @property
    def patience(self) -> int:
        """How many times the usual to wait before saying `late`."""
        return 1 << self._doublings

    @property
    def done(self) -> tuple[int, ...]:
        """Per slot: its last block whose sum is here; all earlier ones of that slot are. Below 0: none yet."""
        return tuple(last - self.num_slots if last in self._flights else last for last in self._last)

    def is_done(self, block: int) -> bool:
        return block <= self._last[block % self.num_slots] and block not in self._flights

    def submit(self, num_pieces: Iterable[int]) -> tuple[WorkerDecision, ...]:
        """Further blocks, of so many pieces each."""
        first = self.submitted
        for size in num_pieces:
            assert 1 <= size <= MAX_PIECES
            self._sizes[self.submitted] = size
            self.submitted += 1
        decisions: list[WorkerDecision] = []
        for block in range(first, min(self.submitted, first + self.num_slots)):
            if self.is_done(block - self.num_slots):
                decisions.append(self._send(block))
        return tuple(decisions)

    def result(self, job: int, block: int, pieces: int, num_pieces: int) -> tuple[WorkerDecision, ...]:
        """Pieces of a block's sum."""
        if job != self.job:
            return (Drop(FOREIGN),)
        flight = self._flights.get(block)
        if flight is None:
            return (Drop(REPEAT if 0 <= block < self.submitted else STALE),)
        if (1 << num_pieces) - 1 != flight.full or not pieces or pieces & ~flight.full:
            return (Drop(MISFIT),)
        new = pieces & ~flight.have
        if not new:
            return (Drop(REPEAT),)
        flight.have |= new
        self._doublings = self.awaited = 0
        if flight.have != flight.full:
            return (Keep(block, new),)
        del self._flights[block]
        following = block + self.num_slots
        released = (self._send(following),) if following in self._sizes else ()
        return (Keep(block, new), Done(block), *released, *self._overtaken_by(flight.stamp))

    def needed(self, job: int, block: int, pieces: int) -> tuple[WorkerDecision, ...]:
        """The switch has not got these pieces of ours."""
        if job != self.job:
            return (Drop(FOREIGN),)
        flight = self._flights.get(block)
        if flight is None or flight.have:
            return (Drop(REPEAT),)  # the sum is on its way, so they were there in the end
        return (Send(block, pieces & flight.full),)

    def waiting(self, job: int, block: int, workers: int) -> tuple[WorkerDecision, ...]:
        """The switch has ours, and waits for these workers."""
        if job != self.job:
            return (Drop(FOREIGN),)
        if block in self._flights:
            self.awaited = workers
        return ()

    def late(self) -> tuple[WorkerDecision, ...]:
        """Nothing has come for `patience` times the usual."""
        if not self._flights:
            return ()
        self._doublings = min(self._doublings + 1, MOST_DOUBLINGS)
        return tuple(Ask(block, flight.have) for block, flight in self._flights.items())

    def _send(self, block: int) -> Send:
        full = (1 << self._sizes.pop(block)) - 1
        self._last[block % self.num_slots] = block
        self._stamp += 1
        self._flights[block] = Flight(full, self._stamp)
        return Send(block, full)

    def _overtaken_by(self, stamp: int) -> list[WorkerDecision]:
        """Asks for those that were sent earlier than one that is done, and are not back."""
        asks: list[WorkerDecision] = []
        if not self._flights or next(iter(self._flights.values())).stamp > stamp:
            return asks
        for block, flight in list(self._flights.items()):
            if flight.stamp > stamp:
                break
            flight.passed += 1
            if flight.passed >= (BROKEN if flight.have else OVERTAKEN):
                self._stamp += 1
                flight.stamp, flight.passed = self._stamp, 0
                self._flights[block] = self._flights.pop(block)
                asks.append(Ask(block, flight.have))
        return asks

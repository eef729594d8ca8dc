"""One chunk's way through a node: read → decode → infer → send, a few groups at a time.

Owns `Ring`, a state machine: events in, decisions out. A group is some samples that go through the model together; how
many, is said when it begins, so that a node can do with less memory in the middle of a chunk. At most `slots` groups
hold buffers at once, so a chunk of any size takes bounded memory, and while one group is sent the next ones are read,
decoded and inferred.

What holds (tests/core/test_ring.py explores it exhaustively):
1. Every sample is read once and decoded at most once.
2. A group is inferred once all its samples were decoded or found bad, and sent once; a group with no good sample is
   neither inferred nor sent.
3. At most `slots` groups are between their first read and the end of their sending.
4. Until `done`, something is under way, or a group may begin.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Read:
    """Fetch this sample's bytes."""

    sample: int


@dataclass(frozen=True)
class Decode:
    """Turn this sample's bytes into its row of the group's buffer."""

    sample: int


@dataclass(frozen=True)
class Infer:
    """Run the model on this group's good rows."""

    group: int


@dataclass(frozen=True)
class Send:
    """Pass this group's rows to the wire."""

    group: int


Decision = Read | Decode | Infer | Send


class Ring:
    """Walks `num_samples` samples (numbered from 0) through the stages."""

    def __init__(self, num_samples: int, *, slots: int) -> None:
        assert num_samples >= 1
        assert slots >= 1
        self._num_samples = num_samples
        self._slots = slots
        self._starts: list[int] = []  # the first sample of each group so far
        self._next = 0  # the first sample of the group after them
        self._waiting: dict[int, int] = {}  # per group under way: samples not yet decoded or found bad
        self._good: dict[int, int] = {}
        self._finished = 0

    @property
    def done(self) -> bool:
        return self._next == self._num_samples and self._finished == len(self._starts)

    @property
    def may_begin(self) -> bool:
        """Whether there are samples and a slot for another group."""
        return self._next < self._num_samples and len(self._starts) - self._finished < self._slots

    @property
    def num_left(self) -> int:
        """Samples that are in no group yet."""
        return self._num_samples - self._next

    def group_of(self, sample: int) -> int:
        return bisect_right(self._starts, sample) - 1

    def samples_of(self, group: int) -> range:
        return range(self._starts[group], [*self._starts[group + 1 : group + 2], self._next][0])

    def begin(self, rows: int) -> list[Decision]:
        """The next group, of at most so many samples."""
        assert self.may_begin
        assert rows >= 1
        group = len(self._starts)
        self._starts.append(self._next)
        self._next = min(self._next + rows, self._num_samples)
        samples = self.samples_of(group)
        self._waiting[group] = len(samples)
        self._good[group] = 0
        return [Read(sample) for sample in samples]

    def read(self, sample: int) -> list[Decision]:
        """The bytes are here."""
        return [Decode(sample)]

    def decoded(self, sample: int) -> list[Decision]:
        """The row is in its buffer."""
        self._good[self.group_of(sample)] += 1
        return self._settled(sample)

    def bad(self, sample: int) -> list[Decision]:
        """This sample can't be read or decoded; the group goes on without it."""
        return self._settled(sample)

    def inferred(self, group: int) -> list[Decision]:
        return [Send(group)]

    def sent(self, group: int) -> list[Decision]:
        """The group's buffers are free."""
        del self._good[group]
        self._finished += 1
        return []

    def _settled(self, sample: int) -> list[Decision]:
        group = self.group_of(sample)
        self._waiting[group] -= 1
        if self._waiting[group]:
            return []
        del self._waiting[group]
        return [Infer(group)] if self._good[group] else self.sent(group)

"""One chunk's way through a node: read → decode → infer → send, a few groups at a time.

Owns `Ring`, a state machine: events in, decisions out. A group is `group_rows` samples that go through the model
together. At most `slots` groups hold buffers at once, so a chunk of any size takes bounded memory, and while one group
is sent the next ones are read, decoded and inferred.

What holds (tests/core/test_ring.py explores it exhaustively):
1. Every sample is read once and decoded at most once.
2. A group is inferred once all its samples were decoded or found bad, and sent once; a group with no good sample is
   neither inferred nor sent.
3. At most `slots` groups are between their first read and the end of their sending.
4. Until `done`, something is always under way.
"""

from __future__ import annotations

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

    def __init__(self, num_samples: int, *, group_rows: int, slots: int) -> None:
        assert num_samples >= 1
        assert group_rows >= 1
        assert slots >= 1
        self._num_samples = num_samples
        self._group_rows = group_rows
        self._slots = slots
        self._num_groups = -(-num_samples // group_rows)
        self._next_group = 0
        self._waiting: dict[int, int] = {}  # per group under way: samples not yet decoded or found bad
        self._good: dict[int, int] = {}
        self._finished = 0

    @property
    def done(self) -> bool:
        return self._finished == self._num_groups

    def group_of(self, sample: int) -> int:
        return sample // self._group_rows

    def samples_of(self, group: int) -> range:
        return range(group * self._group_rows, min((group + 1) * self._group_rows, self._num_samples))

    def begin(self) -> list[Decision]:
        return self._admit()

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
        return self._admit()

    def _settled(self, sample: int) -> list[Decision]:
        group = self.group_of(sample)
        self._waiting[group] -= 1
        if self._waiting[group]:
            return []
        del self._waiting[group]
        return [Infer(group)] if self._good[group] else self.sent(group)

    def _admit(self) -> list[Decision]:
        decisions: list[Decision] = []
        while self._next_group < self._num_groups and self._next_group - self._finished < self._slots:
            samples = self.samples_of(self._next_group)
            self._waiting[self._next_group] = len(samples)
            self._good[self._next_group] = 0
            decisions += [Read(sample) for sample in samples]
            self._next_group += 1
        return decisions

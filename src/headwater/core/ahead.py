"""Batches whose bags a node was told of before they are needed: what to ask for, and when.

Owns `Ahead`, the trainer's state machine of prefetching. Bags that were **staged** are at the node, their vectors in
its memory; what they add up to is known for one version of the table, or not yet. Each step makes a new version and
changes vectors that staged bags have in common with it. So nothing is used as it was prefetched unless no step came
between: pooled vectors are asked for again in those bags that have a changed vector, and come from the node as if
nothing had been prefetched. In training the answer to a step brings the next staged bags along, pooled after that step.

What holds (tests/core/test_ahead.py): what a batch gets is what it would have got without prefetching, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 4  # staged batches of one table; more hold the node's memory for longer and bring nothing


@dataclass(frozen=True)
class Take:
    """What is known is right."""


@dataclass(frozen=True)
class Fetch:
    """Ask for the bags that have changed since; -1: for all of them."""

    since: int


@dataclass(frozen=True)
class Bring:
    """Let the answer to a step bring these staged bags, as far as they have changed since."""

    number: int
    since: int


class Ahead:
    def __init__(self, version: int) -> None:
        self.version = version  # that steps which were begun lead to
        self._known: dict[int, int] = {}  # staged → the version that its pooled vectors are of, or -1

    @property
    def staged(self) -> list[int]:
        return list(self._known)

    def stage(self, number: int, *, pooled: bool) -> bool:
        """Whether it is staged; `pooled`: its vectors are asked for with it, since no step is to be expected."""
        assert number not in self._known
        if len(self._known) >= MOST:
            return False
        self._known[number] = self.version if pooled else -1
        return True

    def step(self) -> Bring | None:
        """A step begins; what its answer is to bring."""
        self.version += 1
        for number, since in self._known.items():  # the first is needed first
            self._known[number] = self.version
            return Bring(number, since)
        return None

    def take(self, number: int) -> Take | Fetch:
        """The batch's turn has come."""
        since = self._known.pop(number)
        return Take() if since == self.version else Fetch(since)

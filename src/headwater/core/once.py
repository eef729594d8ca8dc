"""Each step of a table is applied once, in order, whatever is sent twice, late, or by a trainer that was replaced.

Owns `Once`, the state machine of one part of a table, and the rules for going back. A table's **version** is the number
of steps that were applied to it; step v makes version v of version v - 1. A **lease** says which trainer may take
steps: a new one ends the old one's.

With several parts, a trainer sends step v + 1 to anybody only when all have confirmed v (it says so: `settled`). So
parts are at most one step apart, however the trainer or the nodes end, and a part can go back to any version that is
not yet on its disk for good: its **checkpoint**, which is never later than what was settled.

What holds (tests/core/test_once.py): every version is made once; no step is left out; a checkpoint is of a settled
version, and so all parts can meet at the version of the one that is behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Apply:
    """Do it; it makes this version."""

    version: int


@dataclass(frozen=True)
class Repeat:
    """It was done already; say so again."""


@dataclass(frozen=True)
class Refuse:
    """It can't be done; why, and what to do."""

    reason: str


LOST_LEASE = "another trainer has taken over this table"
BEHIND = "this part of the table is behind"


@dataclass
class Once:
    """One part: whose it is, where it stands, what is on its disk for good, and what all parts have."""

    lease: str = ""
    version: int = 0
    checkpoint: int = 0
    settled: int = 0

    def step(self, lease: str, version: int, settled: int) -> Apply | Repeat | Refuse:
        """A trainer sends the step that makes this version."""
        if lease != self.lease:
            return Refuse(f"{LOST_LEASE}; only one may train it at a time: stop one of them")
        if not 0 <= settled < version:
            return Refuse(f"step {version} says that {settled} is settled; it must be one before it at most")
        self.settled = max(self.settled, min(settled, self.version))
        if version <= self.version:
            return Repeat()
        if version > self.version + 1:
            return Refuse(f"{BEHIND}: it is at version {self.version}, and step {version} came; send those between")
        return Apply(version)

    def applied(self, version: int) -> None:
        assert version == self.version + 1
        self.version = version

    def look(self, lease: str, version: int) -> str | None:
        """Why this trainer may not read that version here now; None if it may."""
        if lease != self.lease:
            return f"{LOST_LEASE}; open it again to read it"
        if version != self.version:
            return f"{BEHIND}, or ahead: it is at version {self.version}, and {version} was asked for"
        return None

    @property
    def may_checkpoint(self) -> bool:
        """Nobody will want to go back behind what is now."""
        return self.version == self.settled and self.version > self.checkpoint

    def checkpointed(self) -> None:
        assert self.may_checkpoint
        self.checkpoint = self.version

    def may_go_back(self, version: int) -> bool:
        return self.checkpoint <= version <= self.version

    def went_back(self, version: int) -> None:
        assert self.may_go_back(version)
        self.version = version
        self.settled = min(self.settled, version)

    def opened(self, lease: str) -> None:
        """A trainer takes over. Until it has made parts meet, nothing new is settled."""
        self.lease = lease


def meeting(parts: Sequence[tuple[int, int]]) -> int | None:
    """The version at which these parts, (version, checkpoint) each, can meet; None if they can't."""
    target = min(version for version, _ in parts)
    return target if all(checkpoint <= target for _, checkpoint in parts) else None

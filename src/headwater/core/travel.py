"""What of an embedding crosses the link: pooled vectors, or every distinct vector of a batch.

Owns `Shape` (what a batch is, in numbers) and `Trial`, the state machine that finds out in the
first steps of a run. Either way the numbers are the same: only who adds up differs. Pooled vectors are fewer where bags
have many ids; where they have one or two, and the same few again and again, the distinct vectors are.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

WAYS = ("pooled", "vectors")
ROUNDS = 6  # steps of each way that are timed: their median then stands against noise
_CLEARLY = 0.5  # of the bytes: below that the other way is not even tried


@dataclass(frozen=True)
class Shape:
    """A batch: bags, ids in them, distinct ones; bytes of a vector, and of an id on its way."""

    num_bags: int
    num_ids: int
    num_distinct: int
    vector_bytes: int
    id_bytes: int = 4

    def crossing_bytes(self, way: str) -> tuple[int, int]:
        """To the node and from it, in a step: ids, lengths and gradients; vectors."""
        if way == "pooled":
            vectors, ids = self.num_bags * self.vector_bytes, (self.num_ids + self.num_bags) * self.id_bytes
        else:
            vectors, ids = self.num_distinct * self.vector_bytes, 2 * self.num_distinct * self.id_bytes
        return ids + vectors, vectors


class Trial:
    """Which way the next step goes. The first of each is not counted; then both in turns; then the faster one."""

    def __init__(self, shape: Shape) -> None:
        self._taken: dict[str, list[float]] = {way: [] for way in WAYS}
        self.chosen: str | None = None
        bytes_of = {way: sum(shape.crossing_bytes(way)) for way in WAYS}
        self.because = ""
        for way, other in (WAYS, WAYS[::-1]):
            if bytes_of[way] < _CLEARLY * bytes_of[other] and way == "pooled":
                # Fewer bytes, and the node adds up what the trainer would have: nothing speaks for the other way.
                self._choose(
                    way, f"{bytes_of[way]:,} bytes a step cross the link instead of {bytes_of[other]:,} (counted)"
                )

    @property
    def way(self) -> str:
        if self.chosen is not None:
            return self.chosen
        return min(WAYS, key=lambda way: len(self._taken[way]))

    def took(self, way: str, seconds: float) -> None:
        """A step of this way held the trainer up for so long."""
        if self.chosen is not None:
            return
        self._taken[way].append(seconds)
        if all(len(each) > ROUNDS for each in self._taken.values()):
            found = {each: statistics.median(taken[1:]) for each, taken in self._taken.items()}
            best = min(WAYS, key=lambda each: found[each])
            other = WAYS[1 - WAYS.index(best)]
            self._choose(best, f"{1e3 * found[best]:.3g} ms a step against {1e3 * found[other]:.3g} (measured)")

    def _choose(self, way: str, because: str) -> None:
        self.chosen, self.because = way, because

"""A place where a model can be split, as plain data.

Owns `Cut` and the choice among cuts. `headwater.model` finds them in a graph; the plan, the planner and the simulator
only need what is here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.spec import Boundary, row_bytes
from headwater.errors import ImpureError, ModelError


@dataclass(frozen=True)
class Cut:
    """A position in the model's topological order. Index 0 is in front of the first operation."""

    index: int
    name: str
    boundary: Boundary
    legal: bool
    why_not: str
    prefix_params: int
    prefix_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row at this boundary, uncompressed."""
        return row_bytes(self.boundary)


def legal_cuts(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """The cuts whose prefix may run away from the trainer."""
    return tuple(cut for cut in cuts if cut.legal)


def smallest_cut(cuts: Sequence[Cut]) -> Cut:
    """The legal cut with the fewest bytes per row; among equals the latest, which leaves the trainer least to do."""
    return min(legal_cuts(cuts), key=lambda cut: (cut.row_bytes, -cut.index))


def find_cut(cuts: Sequence[Cut], wanted: str | int) -> Cut:
    """The cut with this name or index, if it is legal."""
    matches = [cut for cut in cuts if wanted in (cut.index, cut.name)]
    if not matches:
        names = [cut.name for cut in cuts if cut.legal]
        close = difflib.get_close_matches(str(wanted), names, n=5, cutoff=0.3) or names[-5:]
        raise ModelError(
            f"no cut {wanted!r}; it must be an index from 0 to {len(cuts) - 1} or a name, such as {', '.join(close)} "
            f"(`headwater cuts MODEL` lists all)"
        )
    if not matches[0].legal:
        raise ImpureError(f"cut {matches[0].name!r} can't be used: {matches[0].why_not}")
    return matches[0]

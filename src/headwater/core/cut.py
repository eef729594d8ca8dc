"""A place where a model can be split, as plain data.

Owns `Cut` and the choice among cuts. `headwater.model` finds them in a graph; the plan, the planner and the simulator
only need what is here.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.codecs import wire_row_bytes
from headwater.core.spec import Boundary, row_bytes
from headwater.errors import ImpureError, ModelError

MAX_OFFERED = 32  # a planner's choice among more would be finer than its estimates, and each costs a little to keep


@dataclass(frozen=True)
class Cut:
    """A cut after place `index`; 0 is in front of the first operator. `why_not` is empty for a legal cut.

    `also` has the inner modules that end at the same place; `impure` tells an impure prefix from a boundary that can't
    be sent as rows. `boundary` is empty where what crosses is no set of rows.
    """

    index: int
    name: str
    boundary: Boundary
    legal: bool
    why_not: str
    prefix_params: int
    prefix_bytes: int
    also: tuple[str, ...] = ()
    impure: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the boundary, uncompressed."""
        return row_bytes(self.boundary)


def legal_cuts(all_cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    return tuple(cut for cut in all_cuts if cut.legal)


def offered_cuts(all_cuts: Sequence[Cut], most: int = MAX_OFFERED) -> tuple[Cut, ...]:
    """The cuts that a planner chooses from: the input, the last legal one, and ends of modules, outer ones first.

    Levels of nesting are added while there are at most `most` cuts: blocks always, their layers in small models. Inside
    a block more crosses than at its end, and what could be gained by balancing is less than a block's work.
    """
    legal = legal_cuts(all_cuts)
    named = [cut for cut in legal if cut.index and "/" not in cut.name]
    chosen = {cut.index: cut for cut in (*legal[:1], *legal[-1:])}
    for depth in sorted({cut.name.count(".") for cut in named}):
        level = {cut.index: cut for cut in named if cut.name.count(".") == depth}
        if len(chosen | level) > most:
            break
        chosen |= level
    return tuple(sorted(chosen.values(), key=_index))


def smallest_cut(all_cuts: Sequence[Cut], codec: str = "raw", pixel_bytes: int | None = None) -> Cut:
    """The legal cut with the fewest bytes a row on the wire; of several the latest: the trainer has least to do.

    At the input, rows travel as pixels: `pixel_bytes` of uint8 rather than the floats the model takes.
    """
    legal = legal_cuts(all_cuts)
    if not legal:
        raise ModelError(f"the model has no legal cut, not even at its input: {all_cuts[0].why_not}")

    def on_the_wire(cut: Cut) -> int:
        return pixel_bytes if cut.index == 0 and pixel_bytes is not None else wire_row_bytes(codec, cut.boundary)

    return min(legal, key=lambda cut: (on_the_wire(cut), -cut.index))


def find_cut(all_cuts: Sequence[Cut], name_or_index: str | int) -> Cut:
    """The legal cut of that name (of a module that ends there) or index."""
    cut = _look_up(all_cuts, name_or_index)
    if cut.legal:
        return cut
    last = max((other for other in legal_cuts(all_cuts) if other.index < cut.index), default=None, key=_index)
    before = f"; the last legal cut before it is {last.name!r}" if last else ""
    raise refusal(cut, f"{cut.why_not}{before}")


def refusal(cut: Cut, why: str) -> ModelError:
    """The error that tells why a cut can't be used."""
    kind = ImpureError if cut.impure else ModelError
    return kind(f"cut {cut.name!r} (index {cut.index}): {why}")


def _index(cut: Cut) -> int:
    return cut.index


def _look_up(all_cuts: Sequence[Cut], name_or_index: str | int) -> Cut:
    if isinstance(name_or_index, int):
        if not 0 <= name_or_index < len(all_cuts):
            raise ModelError(f"cut {name_or_index}: this model has the cuts 0 to {len(all_cuts) - 1}")
        return all_cuts[name_or_index]
    by_name = {cut.name: cut for cut in all_cuts}
    for cut in all_cuts:
        for name in cut.also:
            by_name.setdefault(name, cut)
    if name_or_index in by_name:
        return by_name[name_or_index]
    close = difflib.get_close_matches(name_or_index, by_name, n=5, cutoff=0.4)
    hint = f"close names: {', '.join(close)}" if close else "`headwater cuts MODEL` lists the names"
    raise ModelError(f"no cut is named {name_or_index!r}; {hint}")

"""How workers that lost their switch end a step with the same bits. Owns `settle`; pure.

When the switch goes, some workers may have the sum of a block that others lack, and may even have used it. Each
reports, for every slot, the last block whose sum it has (`Worker.done`); everybody gets all reports, by an ordinary
collective, and decides the same:

- all have a block: nothing to do;
- some have it: the lowest of them sends its bits to all. It still holds them: in a slot nobody can be more than one
  block ahead of another, and each worker keeps the last sum of each slot (`core.slots`, promise 3);
- nobody has it: it is added up by the ordinary all-reduce. What was submitted is untouched until its sum is there.

Afterwards all workers have the same blocks, and whatever they have not, now and later, goes by the ordinary all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """The worker `source` sends the sum of this block to all."""

    block: int
    source: int


def settle(reports: Sequence[Sequence[int]]) -> tuple[list[Step], tuple[int, ...]]:
    """Of one report a worker: what to do, in order; and the report that then holds for all."""
    num_slots = len(reports[0])
    assert all(len(report) == num_slots for report in reports)
    steps, after = [], []
    for slot in range(num_slots):
        last = max(report[slot] for report in reports)
        assert all(last - report[slot] in (0, num_slots) for report in reports)
        after.append(last)
        if any(report[slot] < last for report in reports):
            steps.append(Step(last, next(rank for rank, report in enumerate(reports) if report[slot] == last)))
    return sorted(steps, key=lambda step: step.block), tuple(after)


def is_settled(block: int, done: Sequence[int]) -> bool:
    """Is the sum of this block with all workers, if each reports this?"""
    return block <= done[block % len(done)]

"""How many rows each tenant of a node may run at once, so that all of them together stay within its memory.

Owns the rule; who asks and who waits is the business of `core.admission`. A tenant's memory is a line, measured: so
many bytes however few rows, and so many more for each row of a group. What a larger group is good for is a curve,
measured as well: rows a second at some group sizes. Nothing here knows a model.

The rule.
- Tenants come in the order of their arrival. Each gets in once one row of its group fits beside those before it; from
  the first that does not, all wait, so nobody is overtaken for ever. One that could not run even alone does not hold up
  the others: it is named apart.
- A group never grows beyond what the tenant asked for, nor beyond where more rows bring less than `ENOUGH` allows.
- What is left of the memory goes, row by row, to whoever is furthest from its best speed, by weight; who needs more for
  its next row than is left keeps what it has, and the others go on. So nobody can get a row more without another, no
  better off, having fewer (max-min fairness).
- The curve is of the engine alone, and a group also costs a task and a record batch. So what is left when everyone is
  at its best speed makes groups larger all the same, up to `STEADY` rows.
- Tenants of one engine share what that takes however few rows.

What holds (tests/core/test_batching.py): the sum is within the budget; everyone who got in has a row; groups are within
what was asked; no tenant is overtaken; nobody can be raised at the cost of those who are better off; more memory lowers
the worst-off tenant never; the answer depends on nothing but the question.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENOUGH = 0.97  # of the best rate: as fast as clocks on a shared machine can tell apart
STEADY = 32  # rows of a group beyond which what it costs by itself is lost among its rows: the default of a plan


@dataclass(frozen=True)
class Demand:
    """What one tenant needs and wants.

    `rates` are rows a second at some group sizes, in any order; empty while nothing is measured. `engine` names what
    the fixed bytes are of, if others may use the same. A group goes through it in pieces of at most `piece` rows, if
    that is given: rows beyond take only `beyond_bytes`.
    """

    name: str
    fixed_bytes: int
    row_bytes: int
    wanted: int
    weight: float = 1.0
    rates: tuple[tuple[int, float], ...] = ()
    engine: str = ""
    piece: int | None = None
    beyond_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.fixed_bytes >= 0
        assert self.row_bytes >= 0
        assert self.wanted >= 1
        assert self.weight > 0
        assert all(rows >= 1 and rate > 0 for rows, rate in self.rates)

    def num_bytes(self, rows: int) -> int:
        near = rows if self.piece is None else min(rows, self.piece)
        return self.fixed_bytes + near * self.row_bytes + (rows - near) * self.beyond_bytes

    def next_bytes(self, rows: int) -> int:
        """What a row more takes than so many."""
        return self.num_bytes(rows + 1) - self.num_bytes(rows)


@dataclass(frozen=True)
class Shares:
    """Who may run groups of how many rows; who waits, the first of them first; and who can't run here at all."""

    rows: Mapping[str, int]
    waiting: tuple[str, ...]
    too_large: tuple[str, ...]
    used_bytes: int


def share(demands: Sequence[Demand], budget_bytes: int) -> Shares:
    """Divide the memory among tenants, given in the order of their arrival."""
    assert len({each.name for each in demands}) == len(demands)
    too_large = [each for each in demands if each.num_bytes(1) > budget_bytes]
    able = [each for each in demands if each.num_bytes(1) <= budget_bytes]
    left = budget_bytes
    inside: list[Demand] = []
    engines: dict[str, int] = {}
    for each in able:
        need = each.num_bytes(1) - min(each.fixed_bytes, engines.get(each.engine, 0))
        if need > left:
            break
        left -= need
        inside.append(each)
        if each.engine:
            engines[each.engine] = max(each.fixed_bytes, engines.get(each.engine, 0))
    rows = [1] * len(inside)
    left = _fill(inside, rows, [enough(each) for each in inside], left)
    left = _fill(inside, rows, [most(each) for each in inside], left)
    return Shares(
        {each.name: count for each, count in zip(inside, rows, strict=True)},
        tuple(each.name for each in able[len(inside) :]),
        tuple(each.name for each in too_large),
        budget_bytes - left,
    )


def _fill(inside: Sequence[Demand], rows: list[int], tops: Sequence[int], left: int) -> int:
    """Raise groups a row at a time; what is left of the memory."""
    lowest = [(level(each, rows[place]), rows[place], place) for place, each in enumerate(inside)]
    heapq.heapify(lowest)
    while lowest:
        *_, place = heapq.heappop(lowest)
        each = inside[place]
        if rows[place] < tops[place] and each.next_bytes(rows[place]) <= left:
            left -= each.next_bytes(rows[place])
            rows[place] += 1
            heapq.heappush(lowest, (level(each, rows[place]), rows[place], place))
    return left


def most(demand: Demand) -> int:
    """The rows beyond which a group never grows."""
    return max(enough(demand), min(demand.wanted, STEADY))


def enough(demand: Demand) -> int:
    """The fewest rows that bring nearly all the speed there is to have, within what is wanted."""
    curve = _curve(demand)
    best = _rate(curve, demand.wanted)
    good = [rows for rows, rate in curve if rows <= demand.wanted and rate >= ENOUGH * best]
    return min([*good, demand.wanted])


def level(demand: Demand, rows: int) -> float:
    """How near to its best speed a tenant is with groups of so many rows, from 0 to 1, by its weight."""
    curve = _curve(demand)
    return _rate(curve, rows) / _rate(curve, enough(demand)) / demand.weight


def _curve(demand: Demand) -> list[tuple[int, float]]:
    """What is known of rows a second by rows a group: rising, since a larger group may always go in pieces."""
    if not demand.rates:
        return [(demand.wanted, float(demand.wanted))]
    best = 0.0
    rising = []
    for rows, rate in sorted(demand.rates):
        best = max(best, rate)
        rising.append((rows, best))
    return rising


def _rate(curve: Sequence[tuple[int, float]], rows: int) -> float:
    """Between two points a straight line; before the first, one from nothing; behind the last, level."""
    before = (0, 0.0)
    for point in curve:
        if rows <= point[0]:
            part = (rows - before[0]) / (point[0] - before[0])
            return before[1] + part * (point[1] - before[1])
        before = point
    return before[1]

"""The way a batch goes: pooled by the nodes, or each of its distinct vectors fetched and pooled here; or nowhere, where
this process has a copy of the table.

Owns `Way`: it carries out what `core.embedding_cost` and `core.travel` decide, and measures for them.
"""

from __future__ import annotations

import logging
import time
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from headwater.core.bags import Bags, Sorting, gradients, pool
from headwater.core.embedding_cost import HERE, NODES, PLACES, Priced, fastest
from headwater.core.travel import WAYS, Trial
from headwater.errors import ConfigError
from headwater.train.table_measure import MEMORY_SHARE, fits_here, measure_table, shape_of
from headwater.train.tablecopy import Copy, copy_bytes
from headwater.train.tables import CLOSE_WITHIN_S, Table

AUTO = "auto"
TRAVELS = (*WAYS, AUTO)
PLACED = (*PLACES, AUTO)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Went:
    """A batch that went one way or the other; its gradients go the same."""

    way: str
    batch: Any  # the table's, or the copy's
    bags: Bags
    sorting: Sorting | None
    held_up_s: float


class Way:
    def __init__(self, table: Table, travels: str, place: str = NODES) -> None:
        self._table = table
        self._travels = travels
        self._place = place
        self._copy: Copy | None = None
        self._trial: Trial | None = None
        self._sorted: list[tuple[Bags, Sorting]] = []  # of batches that were staged
        self.ranking: list[Priced] = []  # what was considered for `place="auto"`, the first one taken
        if place == HERE and not fits_here(table):
            raise ConfigError(f"a copy of table {table.name} takes {copy_bytes(table.spec) / 1e9:,.3g} GB, more than "
                              f"{MEMORY_SHARE:.0%} of the memory that is free here; leave it on its nodes "
                              "(place='nodes')")  # fmt: skip

    # A copy here

    @property
    def place(self) -> str:
        """Where the table is trained; "auto" until the first batch has come."""
        return self._place

    def write_back(self) -> None:
        """What was trained in a copy goes to the nodes."""
        if self._copy is not None:
            self._copy.write_back()

    def forget(self) -> None:
        """The nodes' table has changed: a copy is made anew when it is needed. What was not written back is gone."""
        if self._copy is not None:
            self._last.detach()
            self._copy = None

    def _own(self) -> Copy:
        if self._copy is None:
            self._table.settle()
            self._copy = Copy(self._table)
            # When the process ends without closing the module, too: before the table hangs up.
            self._last = weakref.finalize(self, _write_last, self._table, self._copy)
        return self._copy

    def _decide(self, bags: Bags) -> None:
        spec, ways = self._table.spec, WAYS if self._travels == AUTO else (self._travels,)
        if not fits_here(self._table):
            self._place = NODES
            log.info("table %s stays on its nodes: %.3g GB are more than %.0f %% of the memory that is free here",
                     self._table.name, copy_bytes(spec) / 1e9, 100 * MEMORY_SHARE)  # fmt: skip
            return
        self.ranking = fastest(measure_table(self._table, bags), ways)
        self._place = self.ranking[0].place
        log.info("table %s: %s", self._table.name, "; not: ".join(each.describe() for each in self.ranking))

    # The way

    @property
    def now(self) -> str:
        """The way that the next batch goes."""
        if self._place == HERE:
            return HERE
        if self._travels != AUTO:
            return self._travels
        return "pooled" if self._trial is None else self._trial.way

    @property
    def because(self) -> str:
        """Why it goes so; empty while that is not known."""
        if self._travels != AUTO:
            return "it was asked for"
        return "" if self._trial is None else self._trial.because

    def stage(self, bags: Bags, *, pooled: bool) -> bool:
        if self._place == HERE:
            return True  # it is here
        if self._place == AUTO:
            return False
        if self._travels == AUTO and (self._trial is None or self._trial.chosen is None):
            return False  # what was prefetched would not tell what a step takes
        if self.now == "pooled":
            return self._table.stage(bags, pooled=pooled)
        sorting = Sorting.of(bags.ids)
        if self._table.stage(_each(sorting), pooled=pooled):
            self._sorted.append((bags, sorting))
            return True
        return False

    def unstage(self, bags: Bags) -> None:
        """What was staged won't be asked for."""
        for place, (staged, sorting) in enumerate(self._sorted):
            if staged.equals(bags):
                del self._sorted[place]
                bags = _each(sorting)
                break
        self._table.unstage(bags)

    def pooled(self, bags: Bags) -> tuple[Went, np.ndarray]:
        if self._place == AUTO:
            self._decide(bags)
        if self._place == HERE:
            start = time.perf_counter()
            parts, sums = self._own().pooled(bags)
            return Went(HERE, parts, bags, None, time.perf_counter() - start), sums
        if self._travels == AUTO and self._trial is None:
            self._trial = Trial(shape_of(bags, self._table.spec.vector_bytes))
            self._tell()
        way, start = self.now, time.perf_counter()
        if way == "pooled":
            batch, sums = self._table.pooled(bags)
            return Went(way, batch, bags, None, time.perf_counter() - start), sums
        sorting = self._known(bags)
        batch, vectors = self._table.pooled(_each(sorting))
        sums = pool(vectors, bags, sorting.inverse)
        return Went(way, batch, bags, sorting, time.perf_counter() - start), sums

    def train(self, went: Went, grads: np.ndarray, lr: float) -> None:
        if went.way == HERE:
            self._own().train(went.batch, grads, lr)
            return
        start = time.perf_counter()
        if went.sorting is not None:
            grads = gradients(went.bags, went.sorting, grads)
        self._table.train(went.batch, grads, lr)
        if self._trial is not None and self._trial.chosen is None:
            self._table.settle()  # so that the step's whole time is known
            self._trial.took(went.way, went.held_up_s + time.perf_counter() - start)
            self._tell()

    def _known(self, bags: Bags) -> Sorting:
        for place, (staged, sorting) in enumerate(self._sorted):
            if staged.equals(bags):
                del self._sorted[: place + 1]
                return sorting
        return Sorting.of(bags.ids)

    def _tell(self) -> None:
        if self._trial is not None and self._trial.chosen is not None:
            what = "pooled vectors cross" if self._trial.chosen == "pooled" else "the distinct vectors of a batch cross"
            log.info("table %s: %s the link: %s", self._table.name, what, self._trial.because)


def _each(sorting: Sorting) -> Bags:
    return Bags(sorting.unique, np.ones(len(sorting.unique), np.int64))


def _write_last(table: Table, copy: Copy) -> None:
    for line in table.lines:
        line.patience_s = min(line.patience_s, CLOSE_WITHIN_S)
    copy.write_back()

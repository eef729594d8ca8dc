"""The way a batch goes: pooled by the nodes, or each of its distinct vectors fetched and pooled here.

Owns `Way`: it carries out what `core.travel` decides, and times the first steps for it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np

from headwater.core.bags import Bags, Sorting, gradients, pool
from headwater.core.travel import WAYS, Shape, Trial
from headwater.train.tables import Batch, Table

TRAVELS = (*WAYS, "auto")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Went:
    """A batch that went one way or the other; its gradients go the same."""

    way: str
    batch: Batch
    bags: Bags
    sorting: Sorting | None
    held_up_s: float


class Way:
    def __init__(self, table: Table, travels: str) -> None:
        self._table = table
        self._travels = travels
        self._trial: Trial | None = None
        self._sorted: list[tuple[Bags, Sorting]] = []  # of batches that were staged

    @property
    def now(self) -> str:
        """The way that the next batch goes."""
        if self._travels != "auto":
            return self._travels
        return "pooled" if self._trial is None else self._trial.way

    @property
    def because(self) -> str:
        """Why it goes so; empty while that is not known."""
        if self._travels != "auto":
            return "it was asked for"
        return "" if self._trial is None else self._trial.because

    def stage(self, bags: Bags, *, pooled: bool) -> bool:
        if self._travels == "auto" and (self._trial is None or self._trial.chosen is None):
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
        if self._travels == "auto" and self._trial is None:
            spec = self._table.spec
            self._trial = Trial(Shape(len(bags), len(bags.ids), len(np.unique(bags.ids)), spec.vector_bytes))
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

"""How fast this machine's cores handle a table's vectors, measured with bags of the run, on a node as on a trainer.

Owns `measure`. Nothing is changed by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from headwater.core.bags import Bags, Sorting, gradients, pool, step
from headwater.core.embedding_cost import Rates
from headwater.core.table import TableSpec

_TIMES = 3  # of which the best counts: others had to do with something else


def measure(spec: TableSpec, bags: Bags, records: np.ndarray, slots: np.ndarray) -> Rates:
    """`records` has the vectors as they lie in memory, in its first columns; `slots` says where those of the distinct
    ids of `bags` are."""
    sorting = Sorting.of(bags.ids)
    where = slots[sorting.inverse]
    grads = np.ones((len(bags), spec.dim), spec.dtype)

    def step_all() -> None:
        before = records.take(slots, axis=0)
        step(spec, 0.0, before[:, : spec.dim].copy(), np.zeros(len(slots), spec.dtype), each.copy())
        records[slots] = before

    sort_s = _best(lambda: Sorting.of(bags.ids))
    pool_s = _best(lambda: pool(records[:, : spec.dim], bags, where))
    each = gradients(bags, sorting, grads)
    grads_s = _best(lambda: gradients(bags, sorting, grads))
    step_s = _best(step_all)
    return Rates((sort_s + pool_s + grads_s) / max(1, len(bags.ids)), step_s / max(1, len(slots)))


def _best(work: Callable[[], object]) -> float:
    found = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)

"""A copy of a table in the trainer's memory, trained there, and written back to its nodes.

Owns `Copy`. It does what nodes would do with the same steps, in the same order, part by part, so that pooled vectors,
losses and the table in the end have the same bits. Vectors that nobody has trained are computed when they are first
used, as on a node. Between two times of writing back, nodes have the table as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.core.bags import Bags, Sorting, gradients, pool, step
from headwater.core.table import TableSpec, initial
from headwater.train.tablefile import trained
from headwater.train.tables import READ_BYTES, Table, added_up

_Parts = Sequence[tuple[Bags, np.ndarray]]
_WRITE_BYTES = 4 * READ_BYTES  # put together at once


def copy_bytes(spec: TableSpec) -> int:
    """The memory that a copy takes."""
    return spec.num_embeddings * (spec.vector_bytes + spec.state_bytes + 2)


@dataclass
class _Part:
    vectors: np.ndarray
    state: np.ndarray | None
    known: np.ndarray  # which of them have values here
    changed: np.ndarray  # since they were written back


class Copy:
    """Of a table that is settled. Nobody else trains it meanwhile: its lease is this trainer's."""

    def __init__(self, table: Table) -> None:
        self._table, self._spec = table, table.spec
        self._parts = [self._empty(part) for part in range(self._spec.num_parts)]
        for ids in trained(table, max(1, READ_BYTES // self._spec.vector_bytes)):
            vectors, state = table.read(ids)
            for number, part in enumerate(self._parts):
                own = np.flatnonzero(ids % self._spec.num_parts == number)
                places = ids[own] // self._spec.num_parts
                part.vectors[places], part.known[places] = vectors[own], True
                if part.state is not None:
                    part.state[places] = state[own]

    def _empty(self, part: int) -> _Part:
        num = self._spec.num_in(part)
        state = np.zeros(num, self._spec.dtype) if self._spec.state_bytes else None
        return _Part(np.empty((num, self._spec.dim), self._spec.dtype), state, np.zeros(num, np.bool_),
                     np.zeros(num, np.bool_))  # fmt: skip

    def pooled(self, bags: Bags) -> tuple[_Parts, np.ndarray]:
        """What these bags add up to now; with it, what each part has of them."""
        parts = [bags.of_part(part, self._spec.num_parts) for part in range(self._spec.num_parts)]
        found = ((which, self._sums(part, own)) for part, (own, which) in enumerate(parts))
        return parts, added_up(found, len(bags))

    def _sums(self, number: int, bags: Bags) -> np.ndarray:
        part = self._parts[number]
        new = np.unique(bags.ids[~part.known[bags.ids]])
        part.vectors[new] = initial(self._spec, self._spec.ids_of(number, new))
        part.known[new] = True
        return pool(part.vectors, bags, bags.ids)

    def train(self, parts: _Parts, grads: np.ndarray, lr: float) -> None:
        """A step, from the gradients of what the bags came to."""
        for part, (own, which) in zip(self._parts, parts, strict=True):
            if not len(own):
                continue
            sorting = Sorting.of(own.ids)
            places = sorting.unique
            some = gradients(own, sorting, grads if len(which) == len(grads) else grads[which])
            vectors = part.vectors.take(places, axis=0)
            state = None if part.state is None else part.state[places]
            step(self._spec, lr, vectors, state, some)
            part.vectors[places], part.changed[places] = vectors, True
            if part.state is not None:
                part.state[places] = state

    def write_back(self) -> None:
        """Until nodes have what was trained here on their disks."""
        most = max(1, _WRITE_BYTES // self._spec.vector_bytes)
        for number, part in enumerate(self._parts):
            places = np.flatnonzero(part.changed)
            for start in range(0, len(places), most):
                some = places[start : start + most]
                state = None if part.state is None else part.state[some]
                self._table.write(self._spec.ids_of(number, some), part.vectors[some], state)
                part.changed[some] = False

"""Bags: ids whose vectors are added up; and what a step does to the vectors behind them.

Owns pooling, its gradient, and the sparse optimizers. Everything is added in a fixed order (a bag's ids as they were
given; a vector's gradients by their place in the batch), so the same steps give the same bits wherever they run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headwater.core.table import Ids, TableSpec, Vectors

_LONG = 256  # runs beyond that are added up by themselves


@dataclass(frozen=True)
class Bags:
    """The ids of a batch, bag after bag; no bag is empty. `weights` has one number for each id, or there are none."""

    ids: Ids
    lengths: Ids
    weights: Vectors | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> Ids:
        starts = np.zeros(len(self.lengths), np.int64)
        np.cumsum(self.lengths[:-1], out=starts[1:])
        return starts

    def equals(self, other: Bags) -> bool:
        if not (np.array_equal(self.ids, other.ids) and np.array_equal(self.lengths, other.lengths)):
            return False
        if self.weights is None or other.weights is None:
            return self.weights is other.weights
        return np.array_equal(self.weights, other.weights)

    def some(self, which: Ids) -> Bags:
        """Only these bags."""
        if not len(which):
            return Bags(self.ids[:0], self.lengths[:0], None if self.weights is None else self.weights[:0])
        lengths = self.lengths[which]
        places = np.repeat(self.starts[which] - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        return Bags(self.ids[places], lengths, None if self.weights is None else self.weights[places])

    def of_part(self, part: int, num_parts: int) -> tuple[Bags, Ids]:
        """What one of the parts has of them, by its places; and which bags these are: those it has none of are not."""
        if num_parts == 1:
            return self, np.arange(len(self.lengths), dtype=np.int64)
        here = self.ids % num_parts == part
        counts = np.add.reduceat(here.astype(np.int64), self.starts) if len(self.lengths) else self.lengths
        which = np.flatnonzero(counts)
        weights = None if self.weights is None else self.weights[here]
        return Bags(self.ids[here] // num_parts, counts[which], weights), which


@dataclass(frozen=True)
class Sorting:
    """The distinct ids of some bags, ascending; for each id which of these it is; and the ids in order of them."""

    unique: Ids
    inverse: Ids
    order: Ids
    counts: Ids

    @classmethod
    def of(cls, ids: Ids) -> Sorting:
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        first = np.ones(len(ids), np.bool_)
        first[1:] = ordered[1:] != ordered[:-1]
        inverse = np.empty(len(ids), np.int64)
        inverse[order] = np.cumsum(first) - 1
        starts = np.flatnonzero(first)
        return cls(ordered[starts], inverse, order, np.diff(starts, append=len(ids)))


def pool(vectors: Vectors, bags: Bags, of: Ids | None = None) -> Vectors:
    """A sum for each bag. `of` says of each of its ids which of `vectors` it is; without it, there is one for each."""
    return _sums(vectors, of, bags.starts, bags.lengths, bags.weights)


def gradients(bags: Bags, sorting: Sorting, pooled: Vectors) -> Vectors:
    """Those of the distinct ids, from those of the pooled vectors."""
    owners = np.repeat(np.arange(len(bags)), bags.lengths)[sorting.order]
    weights = None if bags.weights is None else bags.weights[sorting.order]
    return _sums(pooled, owners, np.cumsum(sorting.counts) - sorting.counts, sorting.counts, weights)


def _sums(values: Vectors, of: Ids | None, starts: Ids, lengths: Ids, weights: Vectors | None) -> Vectors:
    """Of each run of places, the values that these are `of`, one after the other, in an order that depends on the run's
    length alone.

    All runs at once, the first of each, the second of each, and so on: several times as fast as `np.add.reduceat`. No
    value is copied before it is added, and a run of one is copied once.
    """

    def at(places: Ids) -> Vectors:
        which = places if of is None else of[places]
        # Rows that lie side by side are taken several times as fast.
        found: Vectors = values.take(which, axis=0) if values.flags.c_contiguous else values[which]
        if weights is not None:
            found *= weights[places][:, None]
        return found

    if not len(lengths):
        return np.empty((0, values.shape[1]), values.dtype)
    sums = at(starts)
    for run in np.flatnonzero(lengths > _LONG):
        np.add.reduce(at(np.arange(starts[run], starts[run] + lengths[run])), axis=0, out=sums[run])
    many = np.flatnonzero((lengths > 1) & (lengths <= _LONG))
    if len(many):
        many = many[np.argsort(-lengths[many], kind="stable")]
        falling, first = -lengths[many], starts[many]
        total = sums[many]
        for place in range(1, -int(falling[0])):
            num = int(np.searchsorted(falling, -place))  # as many have more than `place`
            total[:num] += at(first[:num] + place)
        sums[many] = total
    return sums


def step(spec: TableSpec, lr: float, vectors: Vectors, state: Vectors | None, grads: Vectors) -> None:
    """These vectors, and what the optimizer keeps of them, take a step, where they lie. `grads` are used up."""
    rate = vectors.dtype.type(lr)
    if spec.optimizer == "sgd":
        grads *= rate
    else:
        assert state is not None
        state += np.square(grads).mean(axis=1, dtype=vectors.dtype)
        grads *= (rate / (np.sqrt(state) + vectors.dtype.type(spec.eps)))[:, None]
    vectors -= grads


def as_bags(
    ids: Ids, starts: Ids, weights: Vectors | None, skip: int | None
) -> tuple[Bags, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bags from ids and where each begins, without empty ones and without the id to `skip`.

    With them, which of all bags these are; and the length of every bag.
    """
    lengths = np.diff(starts, append=len(ids))
    if skip is not None:
        keep = ids != skip
        before = np.concatenate([[0], np.cumsum(keep)])
        lengths = before[starts + lengths] - before[starts]
        ids, weights = ids[keep], None if weights is None else weights[keep]
    which = np.flatnonzero(lengths)
    return Bags(ids, lengths[which], weights), which, lengths

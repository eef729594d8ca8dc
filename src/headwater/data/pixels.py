"""The inputs of batches to come, made while the prefix computes.

Owns `Pixels`. The order of a batch is the trainer's; what a sample becomes is `data.extract`'s, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial

import numpy as np

from headwater.core.partition import MAX_MICRO
from headwater.data.extract import Extractor
from headwater.data.samples import SampleRef
from headwater.data.store import Store
from headwater.data.wire import Chunk
from headwater.errors import BadSampleError, ConfigError, UnreachableError

MAX_AHEAD = 2 * MAX_MICRO  # parts of batches: all of a batch, and of the next one
_LOOK_S = 0.5  # how often who waits for rows looks whether anybody still wants them


def pixels_of(
    extractor: Extractor,
    store: Callable[[], Store],
    chunk: Chunk,
    abandoned: Callable[[], bool],
    weight: float = 1.0,
    place: str = "",
) -> np.ndarray:
    """The rows of these samples, in their order. BadSampleError names the first that can't be read.

    The store is opened, and read, by readers of this place: a disk that hangs must not hold up more than these."""
    spec = chunk.extraction.boundary[0]
    opening = extractor.start(store, chunk.job, weight, place)
    while not wait([opening], timeout=_LOOK_S).done:
        if abandoned():
            opening.cancel()
            raise _given_up()
    found = np.empty((len(chunk.samples), *spec.shape), spec.dtype)
    places = {ref.id: place for place, ref in enumerate(chunk.samples)}
    num_found = 0
    for part in extractor.rows(opening.result(), chunk, None, abandoned, weight=weight, place=place):
        if part.bad:
            raise BadSampleError(part.bad[0].key, part.bad[0].reason)
        found[[places[sample] for sample in part.ids.tolist()]] = part.tensors[0]
        num_found += len(part.ids)
    if num_found != len(chunk.samples):
        if abandoned():  # what is there of them must not pass for rows
            raise _given_up()
        raise ConfigError(f"{len(chunk.samples) - num_found} of {len(chunk.samples)} samples gave no row")
    return found


def _given_up() -> UnreachableError:
    return UnreachableError("these rows were given up: the node is being stopped, or nobody waits for them")


class Pixels:
    """Rows that are being made, by the number that the trainer gave them."""

    def __init__(
        self,
        extractor: Extractor,
        store: Callable[[], Store],
        chunk: Chunk,
        abandoned: Callable[[], bool],
        weight: float = 1.0,
        max_rows: int | None = None,
        place: str = "",
    ) -> None:
        """`chunk` is a pattern for those to come; their samples are at this place. With `max_rows`, a part begins when
        there is room for its rows beside those that are there or coming; one alone always does."""
        self._make = partial(pixels_of, extractor, store)
        self._chunk = chunk
        self._abandoned = abandoned
        self._place = place
        self.weight = weight  # of what is fetched from now on
        self._pool = ThreadPoolExecutor(2, "pixels")
        self._max_rows = max_rows
        self._num_rows = 0  # of parts that were begun and not taken
        self._waiting: dict[int, Chunk] = {}
        self._coming: dict[int, tuple[Future[np.ndarray], int]] = {}

    def fetch(self, key: int, epoch: int, refs: tuple[SampleRef, ...]) -> None:
        """Begin with these samples."""
        count = len(self._coming) + len(self._waiting)
        if count >= MAX_AHEAD or key in self._coming or key in self._waiting:
            raise ConfigError(f"{count} parts of batches are being made already, or {key} is one of them")
        if not refs or len({ref.id for ref in refs}) != len(refs):
            raise ConfigError("a part of a batch has no sample, or one twice")
        self._waiting[key] = replace(self._chunk, epoch=epoch, index=key, samples=refs)
        self._go_on()

    def take(self, key: int) -> np.ndarray:
        """Wait for them, as long as anybody wants them: a store may hang for ever. They are not kept."""
        if key in self._waiting:
            self._begin(key)
        if key not in self._coming:
            raise ConfigError(f"part {key} of a batch was not asked for")
        coming, num_rows = self._coming.pop(key)
        while not wait([coming], timeout=_LOOK_S).done:
            if self._abandoned():
                raise _given_up()
        found = coming.result()
        self._num_rows -= num_rows
        self._go_on()
        return found

    def forget(self) -> None:
        """Whatever was asked for is not needed."""
        for each, _ in self._coming.values():
            each.cancel()
        self._coming.clear()
        self._waiting.clear()
        self._num_rows = 0

    def _go_on(self) -> None:
        """Begin with what there is room for, in the order in which it was asked for."""
        while self._waiting:
            key, chunk = next(iter(self._waiting.items()))
            if self._max_rows is not None and self._num_rows and self._num_rows + len(chunk.samples) > self._max_rows:
                return
            self._begin(key)

    def _begin(self, key: int) -> None:
        chunk = self._waiting.pop(key)
        self._coming[key] = (self._pool.submit(self._make, chunk, self._abandoned, self.weight, self._place),
                              len(chunk.samples))  # fmt: skip
        self._num_rows += len(chunk.samples)

    def close(self) -> None:
        self.forget()
        self._pool.shutdown(wait=False, cancel_futures=True)

"""The slow, obvious way to carry out a plan: one sample after the other, in one process, with PyTorch alone.

Owns `InlineWorker`. It defines correct: faster runtimes are judged against it. No threads, no ONNX, no wire; only the
codec is applied, because it is part of what the plan says a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event

import numpy as np

from headwater.core import codecs
from headwater.core.draw import Draw
from headwater.data.shards.reading import read_sample
from headwater.data.store import Store
from headwater.data.wire import Bad, Chunk
from headwater.errors import BadSampleError
from headwater.train.reply import Gathering, Reply

Prefix = Callable[..., Sequence[np.ndarray]]


class InlineWorker:
    """Reads, decodes, transforms and runs the prefix, here and now."""

    name = "inline"

    def __init__(self, store: Store, prefix: Prefix | None) -> None:
        self._store = store
        self._prefix = prefix

    def prepare(self) -> None:
        """Always there."""

    def rows(self, chunk: Chunk, stopped: Event) -> Reply:
        want = chunk.extraction
        gathering = Gathering(chunk, want.boundary)
        for ref in chunk.samples:
            draw = Draw(chunk.seed, chunk.epoch, ref.id)
            try:
                pixels = want.transforms.pixels(read_sample(self._store, ref), ref.key, draw)
            except BadSampleError as error:
                gathering.add_bad([Bad(ref.id, ref.key, error.reason)])
                continue
            if self._prefix is None:
                whole = pixels[None]
                tensors: Sequence[np.ndarray] = [want.transforms.finish(whole) if want.sends_input else whole]
            else:
                tensors = self._prefix(*want.transforms.inputs_of(want.transforms.finish(pixels[None])))
            columns = codecs.encode(want.codec, tensors, want.boundary)
            gathering.add(np.array([ref.id]), codecs.decode(want.codec, columns, want.boundary))
        return gathering.reply()

    def stop(self, stopped: Event) -> None:
        """Nothing is ever under way."""

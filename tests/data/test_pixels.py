"""Inputs made ahead: no more of them than there is room for, and never any that were given up halfway."""

import threading

import numpy as np
import pytest

from headwater.core.spec import TensorSpec
from headwater.data.extract import Extractor
from headwater.data.layouts import list_samples
from headwater.data.pixels import Pixels, pixels_of
from headwater.data.store import open_store
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import UnreachableError

PIXELS = Transforms([Resize((8, 8)), ToFloat()])


@pytest.fixture
def made(pictures):
    """(extractor, store, a pattern of chunks, samples)"""
    samples, extractor = list_samples(str(pictures)), Extractor(2, 4)
    spec: TensorSpec = PIXELS.output_spec
    yield extractor, open_store(samples.url), Chunk(Extraction(samples.url, PIXELS, None, (spec,)), "job", 0, 0, 0,
                                                    ()), samples  # fmt: skip
    extractor.close()


def test_rows_that_were_given_up_do_not_pass_for_rows(made):
    """A node that is stopped in the middle would send memory as it came."""
    extractor, store, pattern, samples = made
    chunk = Chunk(pattern.extraction, "job", 0, 0, 0, tuple(samples.take(range(4))))
    with pytest.raises(UnreachableError, match="given up"):
        pixels_of(extractor, lambda: store, chunk, lambda: True)


def test_parts_begin_when_there_is_room_for_their_rows_and_all_come(made):
    extractor, store, pattern, samples = made
    begun, lock, most = [], threading.Lock(), []

    def opened():
        with lock:
            begun.append(len(begun))
            most.append(len(begun) - len(taken))
        return store

    taken = []
    pixels = Pixels(extractor, opened, pattern, lambda: False, 1.0, max_rows=3)
    for key in range(4):
        pixels.fetch(key, 0, tuple(samples.take(range(3 * key, 3 * key + 3))))
    for key in (1, 0, 2, 3):  # one out of turn
        assert np.isfinite(pixels.take(key)).all()
        taken.append(key)
    assert len(begun) == 4
    assert max(most) <= 2  # the one that was wanted out of turn beside the first
    pixels.close()


def test_rows_of_a_store_that_hangs_are_waited_for_as_long_as_anybody_wants_them(made, monkeypatch):
    monkeypatch.setattr("headwater.data.pixels._LOOK_S", 0.01)
    extractor, store, pattern, samples = made
    hangs, asked = threading.Event(), []

    def opened():
        hangs.wait()
        return store

    def abandoned():
        asked.append(True)
        return len(asked) == 3

    pixels = Pixels(extractor, opened, pattern, abandoned)
    pixels.fetch(1, 0, tuple(samples.take(range(3))))
    with pytest.raises(UnreachableError, match="given up"):
        pixels.take(1)
    assert len(asked) == 3
    pixels.close()
    hangs.set()

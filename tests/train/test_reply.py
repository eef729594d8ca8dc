"""A chunk's rows come in parts, in any order; what is whole and in order is not copied."""

from types import SimpleNamespace

import numpy as np
import pytest

from headwater.core.spec import TensorSpec
from headwater.data.wire import Bad
from headwater.errors import DamagedError
from headwater.train.reply import Gathering

BOUNDARY = (TensorSpec("pixels", (2,), "uint8"),)
EMPTY = np.empty(0, np.int64), [np.empty((0, 2), np.uint8)]


def gathering(*ids):
    return Gathering(SimpleNamespace(samples=[SimpleNamespace(id=each) for each in ids]), BOUNDARY)


def part(*ids):
    rows = np.array([[each, each + 1] for each in ids], np.uint8)
    rows.flags.writeable = False  # as Arrow's buffers are
    return np.array(ids, np.int64), [rows]


@pytest.mark.parametrize("parts", [[(3, 1, 2)], [(1, 2, 3)], [(1,), (3, 2)], [(3, 1), (2,)]])
@pytest.mark.parametrize("keep", [True, False])
def test_parts_in_any_order_give_the_rows_in_the_chunks_order(parts, keep):
    one = gathering(3, 1, 2)
    for ids in parts:
        one.add(*EMPTY, keep=keep)
        one.add(*part(*ids), keep=keep)
        one.add(*EMPTY, keep=keep)
    reply = one.reply()
    assert reply.tensors[0].tolist() == [[3, 4], [1, 2], [2, 3]]
    assert reply.good.all()


def test_what_is_whole_and_in_order_is_not_copied_if_it_may_be_kept():
    ids, (rows,) = part(3, 1, 2)
    kept, copied = gathering(3, 1, 2), gathering(3, 1, 2)
    kept.add(ids, [rows], keep=True)
    copied.add(ids, [rows])
    assert np.shares_memory(kept.reply().tensors[0], rows)
    assert not np.shares_memory(copied.reply().tensors[0], rows)


def test_a_bad_sample_has_no_row():
    one = gathering(3, 1, 2)
    one.add(*part(3, 2), keep=True)
    one.add_bad([Bad(1, "1.jpg", "broken")])
    reply = one.reply()
    assert reply.tensors[0].tolist() == [[3, 4], [2, 3]]
    assert reply.good.tolist() == [True, False, True]


@pytest.mark.parametrize("again", [(1,), (7,)])
def test_rows_that_come_twice_or_unasked_are_damaged(again):
    one = gathering(3, 1)
    one.add(*part(3, 1), keep=True)
    with pytest.raises(DamagedError, match=r"twice|nobody asked for"):
        one.add(*part(*again), keep=True)

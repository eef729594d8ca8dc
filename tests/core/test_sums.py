"""The arithmetic of a slot."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headwater.core import sums

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


@pytest.mark.parametrize("number", [sums.FP32, sums.FP64], ids=lambda each: each.name)
def test_floats_are_added_in_rank_order(number):
    parts = [np.array([1e20], number.wire), np.array([-1e20], number.wire), np.array([1.0], number.wire)]
    out = np.empty(1, number.wire)
    sums.add_up(parts, number, 1, out)
    assert out[0] == 1.0
    sums.add_up([parts[2], parts[0], parts[1]], number, 1, out)
    assert out[0] == 0.0, "another order has other bits, so the order is fixed"


@pytest.mark.parametrize("number", [sums.FP16, sums.BF16], ids=lambda each: each.name)
def test_half_precision_is_added_as_fp32_and_rounded_once(number):
    values = [np.float32([2048.0, 1.0]), np.float32([1.0, 1.0]), np.float32([1.0, 1.0])]
    parts = [sums.narrow(each, number) for each in values]
    out = np.empty(2, number.wire)
    sums.add_up(parts, number, 1, out)
    assert sums.widen(out, number).tolist() == [2050.0 if number is sums.FP16 else 2048.0, 3.0]


def test_a_mean_of_fp16_does_not_overflow_where_the_sum_does():
    out = np.empty(1, np.float16)
    sums.add_up([np.float16([60000])] * 2, sums.FP16, 2, out)
    assert out[0] == np.float16(60000)


@given(arrays.arrays(np.float32, st.integers(1, 40), elements=FLOATS))
def test_bf16_there_and_back_is_within_its_precision(values):
    found = sums.widen(sums.narrow(values, sums.BF16), sums.BF16)
    assert np.all(np.abs(found - values) <= np.abs(values) * 2.0**-8 + 1e-38)


@given(st.lists(arrays.arrays(np.float32, 24, elements=FLOATS), min_size=1, max_size=9))
def test_integers_with_a_shared_exponent_never_overflow_and_are_off_by_less_than_they_say(parts):
    exponent = int(np.max([sums.exponents(part, 24) for part in parts]))
    count = len(parts)
    total = np.sum([sums.to_integers(part, exponent, count).astype(np.int64) for part in parts], axis=0)
    assert np.abs(total).max() <= 2**31 - 1
    mean = sums.from_integers(total.astype(np.int32), exponent, count, count)
    exact = np.mean(np.asarray(parts, np.float64), axis=0)
    assert np.all(np.abs(mean - exact) <= count * 2.0**exponent / (2**31 - 1))


def test_exponents_of_blocks_the_last_of_which_is_short():
    values = np.float32([0, 0, 1, 3, np.inf, 0, 0.25])
    assert sums.exponents(values, 2).tolist() == [sums.ZEROS, 2, sums.WILD, -1]


def test_what_is_not_finite_on_one_worker_is_nan_on_all():
    assert np.isnan(sums.from_integers(np.zeros(3, np.int32), sums.WILD, 4, 4)).all()

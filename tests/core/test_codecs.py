"""A codec brings rows back within the error it states, in the bytes it states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headwater.core import codecs
from headwater.core.spec import TensorSpec
from headwater.errors import ConfigError

rows = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 3)),
    elements=st.floats(-60000, 60000, width=32, allow_subnormal=False),
)


def round_trip(name, array):
    spec = TensorSpec("t", array.shape[1:], str(array.dtype))
    columns = codecs.encode(name, [array], (spec,))
    assert sum(column.nbytes for column in columns) == len(array) * codecs.wire_row_bytes(name, (spec,))
    (back,) = codecs.decode(name, columns, (spec,))
    assert back.shape == array.shape
    assert back.dtype == array.dtype
    return back


@given(rows)
def test_raw_is_exact(array):
    assert np.array_equal(round_trip("raw", array), array)


@given(rows)
def test_fp16_stays_within_its_stated_error(array):
    assert np.all(np.abs(round_trip("fp16", array) - array) <= np.abs(array) * 2**-11 + 2**-25)


@given(rows)
def test_bf16_stays_within_its_stated_error(array):
    assert np.all(np.abs(round_trip("bf16", array) - array) <= np.abs(array) * 2**-8)


@given(rows)
def test_int8_stays_within_its_stated_error(array):
    largest = np.abs(array).reshape(len(array), -1).max(axis=1, initial=0) if len(array) else np.zeros(0)
    limit = (largest / 254 * 1.001 + 1e-37).reshape(-1, 1, 1)
    assert np.all(np.abs(round_trip("int8", array) - array) <= limit)


def test_bf16_keeps_infinities_and_nans():
    array = np.array([[np.inf, -np.inf, np.nan, 0.0, 3.4e38]], dtype=np.float32)
    back = round_trip("bf16", array)
    assert np.array_equal(np.isnan(back), np.isnan(array))
    assert np.array_equal(back[0, :2], array[0, :2])


@pytest.mark.parametrize("name", codecs.CODECS)
def test_integer_tensors_travel_as_they_are(name):
    array = np.arange(24, dtype=np.uint8).reshape(2, 12)
    assert np.array_equal(round_trip(name, array), array)


def test_fp16_rounds_as_numpy_does_at_every_half_and_between_them():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    between = (halves[:-1] + halves[1:]) / 2
    around = [np.nextafter(between, np.float32(side)) for side in (-np.inf, np.inf)]
    rows = np.concatenate([halves, between, *around, np.float32([-0.0, 1e-30, -1e-30])]).reshape(-1, 1)
    (made,) = codecs.encode("fp16", [rows], (TensorSpec("t", (1,), "float32"),))
    assert np.array_equal(made.view(np.uint16), rows.astype(np.float16).view(np.uint16))


def test_a_value_that_fp16_cannot_hold_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="use codec bf16 or raw"):
        codecs.encode("fp16", [np.array([[7e4]], dtype=np.float32)], (TensorSpec("t", (1,), "float32"),))


@pytest.mark.parametrize("beside", [np.inf, np.nan])
def test_what_is_not_finite_does_not_hide_a_value_that_fp16_cannot_hold(beside):
    spec = TensorSpec("t", (2,), "float32")
    with pytest.raises(ConfigError, match="is more than fp16 can hold"):
        codecs.encode("fp16", [np.array([[beside, 1e5]], dtype=np.float32)], (spec,))
    (back,) = codecs.encode("fp16", [np.array([[beside, 1.0]], dtype=np.float32)], (spec,))
    assert np.array_equal(back, [[beside, 1.0]], equal_nan=True)


def test_int8_refuses_what_has_no_scale():
    with pytest.raises(ConfigError, match="use codec raw"):
        codecs.encode("int8", [np.array([[np.inf]], dtype=np.float32)], (TensorSpec("t", (1,), "float32"),))


def test_an_unknown_codec_lists_the_known_ones():
    with pytest.raises(ConfigError, match="raw, fp16, bf16, int8"):
        codecs.wire_columns("gzip", (TensorSpec("t", (1,), "float32"),))

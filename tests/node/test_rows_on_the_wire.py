"""Rows arrive as they were sent, in every codec; a damaged batch is found."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.codecs import CODECS
from headwater.core.spec import TensorSpec
from headwater.data import wire
from headwater.data.wire import Bad
from headwater.errors import DamagedError

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
TOLERANCE = {"raw": 0.0, "fp16": 2**-10, "bf16": 2**-7, "int8": 1 / 120}
specs = st.builds(
    TensorSpec,
    st.sampled_from(["a", "b", "sample", "a.scale"]),
    st.lists(st.integers(1, 4), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
)


def some_rows(boundary, count, seed):
    generator = np.random.default_rng(seed)
    return [generator.uniform(-100, 100, (count, *spec.shape)).astype(spec.dtype) for spec in boundary]


@settings(deadline=None)
@given(boundary=st.lists(specs, min_size=1, max_size=4).map(tuple), codec=st.sampled_from(sorted(CODECS)),
       count=st.integers(0, 5), seed=st.integers(0, 99))  # fmt: skip
def test_rows_arrive_as_they_were_sent(boundary, codec, count, seed):
    tensors, ids = some_rows(boundary, count, seed), np.arange(count, dtype=np.int64) * 7
    batch = wire.pack_rows(codec, boundary, ids, tensors)
    batch.validate(full=True)
    found_ids, found = wire.unpack_rows(codec, boundary, batch)
    assert found_ids.tolist() == ids.tolist()
    for spec, sent, got in zip(boundary, tensors, found, strict=True):
        assert got.shape == sent.shape
        assert got.dtype == np.dtype(spec.dtype)
        exact = codec == "raw" or spec.dtype not in ("float32", "float64")
        scale = float(np.abs(sent).max()) if sent.size and not exact else 0.0
        np.testing.assert_allclose(got, sent, rtol=0, atol=TOLERANCE[codec] * scale)


BOUNDARY = (TensorSpec("a", (2, 3), "float32"),)


@pytest.fixture
def is_wary():
    return False


def damaged(name):
    good = wire.pack_rows("raw", BOUNDARY, np.arange(4), some_rows(BOUNDARY, 4, 0))
    return {
        "no columns": pa.record_batch({}),
        "only ids": good.select(["sample"]),
        "another name": good.rename_columns(["sample", "b"]),
        "ids as floats": good.set_column(0, "sample", good.column(0).cast("float64")),
        "one more column": good.append_column("more", good.column(0)),
        "another shape": wire.pack_rows("raw", (TensorSpec("a", (6,), "float64"),), np.arange(4), [np.zeros((4, 6))]),
        "a missing row": pa.RecordBatch.from_arrays(
            [good.column(0), pa.array([[0.0] * 6, None, None, None], pa.list_(pa.float32(), 6))], schema=good.schema
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    ["no columns", "only ids", "another name", "ids as floats", "one more column", "another shape", "a missing row"],
)  # fmt: skip
def test_a_damaged_batch_is_found(name):
    with pytest.raises(DamagedError, match="rows came"):
        wire.unpack_rows("raw", BOUNDARY, damaged(name))


@given(st.lists(st.builds(Bad, st.integers(0, 99), st.text(), st.text()), min_size=1))
@settings(deadline=None)
def test_bad_samples_arrive_as_they_were_sent(bad):
    assert wire.unpack_bad(wire.pack_bad(bad)) == bad


@pytest.mark.parametrize("metadata", [b"x", b"{}", b'{"bad":5}', b'{"bad":[[1]]}', b'{"bad":[["a","b","c"]]}', b"["])
def test_damaged_metadata_is_found(metadata):
    with pytest.raises(DamagedError, match="metadata"):
        wire.unpack_bad(metadata)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_codec_and_compression_goes_through_a_node(codec, compression, client, upload, build, chunk_of, never):
    prefix = upload(build.model())
    exact = client.rows(chunk_of(prefix), never).tensors[0]
    found = client.rows(chunk_of(prefix, codec=codec, compression=compression), never).tensors[0]
    np.testing.assert_allclose(found, exact, atol=TOLERANCE[codec])

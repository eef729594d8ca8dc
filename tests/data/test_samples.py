"""The listing in columns: order, fingerprint, travel as Arrow, and what is refused on arrival."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.samples import SampleRef, Samples
from headwater.errors import ConfigError


def _samples(url: str = "file:///data", etag: str = "e", **columns: Any) -> Samples:
    given = {"keys": ["b", "a", "é"], "sizes": [2, 1, 3], "etags": [etag] * 3, "labels": [1, 0, 1]}
    return Samples.build(url, ("x", "y"), **(given | columns))


def test_samples_are_sorted_by_key_and_then_offset() -> None:
    samples = _samples(keys=["s2", "s1", "s1"], offsets=[0, 900, 5], lengths=[1, 2, 3])
    assert samples.keys.to_pylist() == ["s1", "s1", "s2"]
    assert samples.offsets.tolist() == [5, 900, 0]
    assert [ref.length for ref in samples.take([2, 0])] == [1, 3]


def test_the_fingerprint_ignores_url_etag_and_the_order_of_listing() -> None:
    other = _samples("s3://bucket", "f", keys=["é", "b", "a"], sizes=[3, 2, 1], labels=[1, 1, 0])
    assert other.fingerprint == _samples().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"keys": ["b", "a", "c"]},
        {"sizes": [2, 1, 4]},
        {"labels": [1, 1, 1]},
        {"lengths": [2, 1, 9]},
        {"offsets": [0, 0, 7], "lengths": [2, 1, 3]},
        {"keys": ["ab", "", "é"]},
    ],
)
def test_the_fingerprint_changes_with_the_data(change: dict[str, Any]) -> None:
    assert _samples(**change).fingerprint != _samples().fingerprint


def test_a_listing_survives_the_trip_through_arrow() -> None:
    sent = _samples()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sent.to_table().schema) as writer:
        writer.write_table(sent.to_table(), max_chunksize=2)
    got = Samples.from_table(pa.ipc.open_stream(sink.getvalue()).read_all())
    assert (got.fingerprint, got.classes, got.url) == (sent.fingerprint, sent.classes, sent.url)
    assert got.take(range(3)) == sent.take(range(3))


def test_an_empty_listing_survives_too() -> None:
    empty = _samples(keys=[], sizes=[], etags=[], labels=[])
    assert len(Samples.from_table(empty.to_table())) == 0


def test_a_listing_damaged_on_its_way_is_refused() -> None:
    table = _samples().to_table()
    labels = table.set_column(5, "label", pa.array([0, 0, 0]))
    with pytest.raises(ConfigError, match="damaged on its way"):
        Samples.from_table(labels.replace_schema_metadata(table.schema.metadata))
    with pytest.raises(ConfigError, match="bad or missing metadata"):
        Samples.from_table(table.replace_schema_metadata(None))
    with pytest.raises(ConfigError, match="expected"):
        Samples.from_table(pa.table({"a": [1]}))


def test_a_sample_that_is_not_there_is_refused() -> None:
    for bad in (-1, 3):
        with pytest.raises(ConfigError, match="not among the 3"):
            _samples().take([0, bad])


def test_samples_and_refs_can_not_be_changed() -> None:
    samples = _samples()
    with pytest.raises(ValueError, match="read-only"):
        samples.labels[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        samples.take([0])[0].key = "other"  # type: ignore[misc]


counts = st.integers(0, 2**40)


@given(counts, st.from_regex(r"[a-zé]{1,9}(/[a-z0-9]{1,9}){0,3}", fullmatch=True), counts, counts, counts)
def test_a_ref_survives_json(number: int, key: str, offset: int, length: int, size: int) -> None:
    ref = SampleRef(number, key, offset, length, size, "etag")
    assert SampleRef.from_json(ref.to_json()) == ref


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [1, "a"],
        [1, "../a", 0, -1, 1, ""],
        [1, "/etc/passwd", 0, -1, 1, ""],
        [1, 7, 0, -1, 1, ""],
        [-1, "a", 0, -1, 1, ""],
        [True, "a", 0, -1, 1, ""],
        [1, "a", -1, 5, 1, ""],
        [1, "a", 0, -2, 1, ""],
        [1, "a", 5, -1, 1, ""],
        [1, "a", 0.5, 1, 1, ""],
        [1, "a", 0, 2**63, 1, ""],
        [1, "a", 2**62, 2**62, 1, ""],
        [1, "a", 0, -1, "1", ""],
        [1, "a", 0, -1, 1, None],
        [1, "a", 0, -1, 1, "x" * 2000],
    ],
)
def test_a_ref_with_anything_wrong_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError):
        SampleRef.from_json(data)


def test_a_million_samples_are_listed_in_columns() -> None:
    count = 1_000_000
    keys = pa.array(np.char.mod("k%07d", np.arange(count)[::-1]), pa.large_string())
    zeros = np.zeros(count, np.int64)
    etags = pa.array(np.full(count, "e"), pa.large_string())
    samples = Samples.build("file:///d", ("x",), keys=keys, sizes=zeros, etags=etags, labels=zeros)
    assert len(samples.fingerprint) == 64
    assert samples.take([5])[0].key == "k0000005"

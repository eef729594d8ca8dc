"""Packed sets: the samples, order and pixels of their source; nothing half done looks whole; damage is found."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

from headwater.core.draw import Draw
from headwater.data import mapped
from headwater.data import store as stores
from headwater.data.extract import Extractor
from headwater.data.layouts import list_samples
from headwater.data.samples import Samples
from headwater.data.shards import pack as packing
from headwater.data.shards import reading
from headwater.data.shards.manifest import check_transforms, read_manifest
from headwater.data.shards.pack import pack
from headwater.data.shards.reading import read_sample
from headwater.data.shards.record import ALIGN, HEADER_BYTES, check_record, header_of, read_record
from headwater.data.shards.verify import verify_set
from headwater.data.store import Store, open_store
from headwater.data.transforms import (
    CenterCrop,
    Grayscale,
    HorizontalFlip,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transforms,
)
from headwater.data.wire import Chunk, Extraction
from headwater.errors import (
    BadSampleError,
    ChangedError,
    ConfigError,
    DataError,
    EmptyDataError,
    StoreError,
    TransformError,
)

FIXED = Transforms([Resize(32), CenterCrop(24), ToFloat()])
FLIPPED = Transforms([Resize(32), CenterCrop(24), HorizontalFlip(0.5), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])
VARYING = Transforms([Resize(32), Grayscale(), RandomCrop(24), ToFloat()])
SHARD = 10 * (HEADER_BYTES + 24 * 24 * 3)  # ten pictures, and five shards of the fifty


@pytest.fixture
def source(pictures: Path, tmp_path: Path) -> Path:
    """The pictures, free to be damaged."""
    return Path(shutil.copytree(pictures, tmp_path / "source"))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "packed"


def _pack(source: Path | str, target: Path | str, transforms: Transforms = FIXED, **options: Any) -> packing.Packing:
    return pack(str(source), str(target), transforms, **{"shard_bytes": SHARD, "num_threads": 2, **options})


def _pixels(samples: Samples, transforms: Transforms, epoch: int = 3) -> list[np.ndarray]:
    store = open_store(samples.url)
    return [
        transforms.pixels(read_sample(store, ref), ref.key, Draw(7, epoch, ref.id))
        for ref in samples.take(range(len(samples)))
    ]


def _assert_same(source: str, target: str, transforms: Transforms) -> None:
    theirs, ours = list_samples(source), list_samples(target)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.classes == theirs.classes
    assert np.array_equal(ours.labels, theirs.labels)
    for expected, found in zip(_pixels(theirs, transforms), _pixels(ours, transforms), strict=True):
        assert np.array_equal(expected, found)


def _shards(target: Path) -> list[Path]:
    return sorted((target / "shards").iterdir())


# The law


@pytest.mark.parametrize("transforms", [FIXED, FLIPPED, VARYING, Transforms([RandomResizedCrop(24), ToFloat()])])
def test_a_packed_set_has_the_order_and_the_pixels_of_its_source(
    pictures: Path, target: Path, transforms: Transforms
) -> None:
    done = _pack(pictures, target, transforms)
    assert done.manifest.num_samples == 50
    _assert_same(str(pictures), str(target), transforms)


def test_further_fixed_steps_than_were_packed_give_the_same_pixels(pictures: Path, target: Path) -> None:
    _pack(pictures, target, Transforms([Resize(32)]))
    _assert_same(str(pictures), str(target), Transforms([Resize(32), Pad(2), CenterCrop(24), HorizontalFlip(0.5)]))


def test_tars_and_manifests_are_packed_like_folders(
    tmp_path: Path, target: Path, make_tar: Any, picture: Callable[..., Any], encode: Callable[..., bytes]
) -> None:
    for number in range(2):
        members = {f"{n}.{end}": data for n in range(5)
                   for end, data in (("png", encode(picture(seed=n + 5 * number))), ("cls", b"%d" % n))}  # fmt: skip
        make_tar(tmp_path / "tars" / f"{number}.tar", members)
    _pack(tmp_path / "tars", target)
    _assert_same(str(tmp_path / "tars"), str(target), FIXED)
    (tmp_path / "set" / "a").mkdir(parents=True)
    for n in range(3):
        (tmp_path / "set" / "a" / f"{n}.png").write_bytes(encode(picture(seed=n)))
    table = tmp_path / "set" / "train.csv"
    table.write_text("path,label\na/2.png,x\na/0.png,y\na/0.png,x\n")
    _pack(table, tmp_path / "other")
    _assert_same(str(table), str(tmp_path / "other"), FIXED)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5), st.binary(min_size=16, max_size=16), st.data())
def test_a_record_comes_back_and_no_changed_byte_goes_unnoticed(
    height: int, width: int, num_steps: int, digest: bytes, data: st.DataObject
) -> None:
    pixels = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)
    header, _ = header_of(pixels, num_steps, digest)
    record = bytearray(header + pixels.tobytes())
    found = read_record(record, "k")
    assert np.array_equal(found.pixels, pixels)
    assert (found.num_steps, found.digest) == (num_steps, digest)
    check_record(record, "k", 0)
    at = data.draw(st.integers(0, len(record) - 1).filter(lambda at: not 40 <= at < HEADER_BYTES))
    record[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadSampleError):
        check_record(record, "k", 0)
    with pytest.raises(BadSampleError):
        check_record(record[: data.draw(st.integers(0, len(record) - 1))], "k", 0)


def test_records_begin_on_a_cache_line(pictures: Path, target: Path) -> None:
    _pack(pictures, target, VARYING)
    samples = list_samples(str(target))
    assert (samples.offsets % ALIGN == 0).all()
    assert all(path.stat().st_size % ALIGN == 0 for path in _shards(target))


def test_it_survives_the_trip_to_a_trainer(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    samples = list_samples(str(target))
    got = Samples.from_table(samples.to_table())
    assert got.fingerprint == samples.fingerprint == list_samples(str(pictures)).fingerprint
    assert got.packed == samples.packed
    damaged = samples.to_table().replace_schema_metadata({**samples.to_table().schema.metadata, b"packed": b"[1]"})
    with pytest.raises(ConfigError, match="packed must be"):
        Samples.from_table(damaged)


@pytest.mark.parametrize("run", [None, lambda rows: [rows]])
def test_the_extractor_gives_the_rows_of_the_source(pictures: Path, target: Path, run: Any) -> None:
    _pack(pictures, target, FLIPPED)
    extractor = Extractor(2, 4)
    rows = []
    try:
        for url in (pictures, target):
            samples = list_samples(str(url))
            spec = FLIPPED.output_spec if run else FLIPPED.pixel_spec
            want = Extraction(samples.url, FLIPPED, None, (spec,), node_batch=8)
            chunk = Chunk(want, "job", 5, 1, 0, tuple(samples.take(range(50))))
            parts = list(extractor.rows(open_store(samples.url), chunk, run))
            ids = np.concatenate([part.ids for part in parts])
            rows.append(np.concatenate([part.tensors[0] for part in parts])[np.argsort(ids)])
    finally:
        extractor.close()
    assert rows[0].dtype == rows[1].dtype
    assert np.array_equal(rows[0], rows[1])


# Transforms that do not fit


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Transforms([Resize(33), CenterCrop(24), ToFloat()]), r"Resize\(size=32.*step 1.*have Resize\(size=33"),
        (Transforms([Resize(32)]), "with step 2, CenterCrop.*the transforms end before it"),
        (Transforms([Resize(32), HorizontalFlip(), CenterCrop(24)]), "CenterCrop.*step 2.*HorizontalFlip"),
    ],
)
def test_other_transforms_are_refused_with_the_step_and_the_way_out(
    pictures: Path, target: Path, other: Transforms, text: str
) -> None:
    _pack(pictures, target)
    samples = list_samples(str(target))
    check_transforms(samples, FIXED)
    with pytest.raises(TransformError, match=f"{text}.*headwater pack SRC DST --job"):
        check_transforms(samples, other)
    with pytest.raises(TransformError, match="packed with other transforms"):
        _pixels(samples, other)


# Going on after an interruption


def test_a_finished_set_is_left_alone(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    done = _pack(pictures, target)
    assert (done.num_made, done.num_kept) == (0, 5)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    assert sorted(path.name for path in target.iterdir() if path.is_file()) == ["index.parquet", "manifest.json"]


class _StoppedError(Exception):
    pass


def _interrupt(source: Path, target: Path, after: int, **options: Any) -> None:
    """Pack until `after` pictures are packed."""

    def stop(what: str, count: int) -> None:
        if what == "packing" and count >= after:
            raise _StoppedError

    with pytest.raises(_StoppedError):
        _pack(source, target, tell=stop, **options)


def test_an_interrupted_pack_goes_on_and_ends_like_one_that_was_not(
    pictures: Path, target: Path, tmp_path: Path
) -> None:
    _pack(pictures, tmp_path / "whole")
    _interrupt(pictures, target, 35, num_threads=1)
    with pytest.raises(DataError, match=r"not finished.*goes on where it stood"):
        list_samples(str(target))
    with pytest.raises(DataError, match="not finished"):
        verify_set(str(target))
    done = _pack(pictures, target)
    assert done.num_kept >= 2
    assert done.num_made + done.num_kept == 5
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            assert (target / path.relative_to(tmp_path / "whole")).read_bytes() == path.read_bytes()
    assert not list(target.glob("parts/*"))


def test_what_is_kept_was_checked(pictures: Path, target: Path) -> None:
    _interrupt(pictures, target, 45)
    kept = len(list(target.glob("parts/*")))
    (first, second, *_) = _shards(target)
    data = bytearray(first.read_bytes())
    data[500] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-64])
    (target / "shards" / "00000004.hws#1").write_bytes(b"torn")
    done = _pack(pictures, target)
    assert done.num_kept == kept - 2
    assert not list(target.rglob("*#*"))
    assert verify_set(str(target)) == []


def test_a_source_that_changes_meanwhile_stops_the_pack_and_the_next_one_packs_it_as_it_is(
    source: Path, target: Path
) -> None:
    path = source / "c" / "002.jpg"
    touched = []

    def touch(what: str, count: int) -> None:
        if what == "packing" and not touched:
            touched.append(path.write_bytes((source / "c" / "005.jpg").read_bytes()))

    with pytest.raises(ChangedError, match=r"c/002\.jpg.*changed while it was packed; run the same command again"):
        _pack(source, target, num_threads=1, tell=touch)
    done = _pack(source, target)
    assert done.num_made >= 1
    _assert_same(str(source), str(target), FIXED)


def test_a_picture_replaced_between_two_runs_is_packed_anew(source: Path, target: Path) -> None:
    _interrupt(source, target, 45)
    path = source / "a" / "000.jpg"
    path.write_bytes((source / "a" / "003.jpg").read_bytes())
    _pack(source, target)
    _assert_same(str(source), str(target), FIXED)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"transforms": VARYING}, "step 2 is .*CenterCrop"),
        ({"shard_bytes": 2 * SHARD}, "shard-size"),
        ({"source": "other"}, "it is of file://.*source, not of file://.*other"),
    ],
)
def test_a_folder_with_another_pack_is_refused(
    source: Path, target: Path, tmp_path: Path, change: dict[str, Any], text: str, finished: bool
) -> None:
    if finished:
        _pack(source, target)
    else:
        _interrupt(source, target, 30)
    if "source" in change:
        shutil.copytree(source / "a", tmp_path / "other" / "a")
        change = {"source": tmp_path / "other"}
    with pytest.raises(ConfigError, match=f"{text}.*another folder"):
        _pack(**{"source": source, "target": target, **change})


def test_a_finished_set_of_a_source_that_changed_since_is_refused(source: Path, target: Path) -> None:
    _pack(source, target)
    (source / "a" / "000.jpg").unlink()
    with pytest.raises(ConfigError, match="files were added, removed or changed in size since"):
        _pack(source, target)


def test_a_picture_replaced_by_one_of_the_same_size_is_told_of(source: Path, target: Path) -> None:
    _pack(source, target)
    assert _pack(source, target).touched == ()
    os.utime(source / "a" / "000.jpg", ns=(1, 1))
    assert _pack(source, target).touched == ("a/000.jpg",)


@pytest.mark.parametrize("name", ["holiday.jpg", "budget#2024"])  # a listing shows the first alone
def test_a_folder_with_other_things_is_refused(pictures: Path, target: Path, name: str) -> None:
    target.mkdir()
    (target / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match=rf"1 objects that are not of a pack \({name}\); choose an empty"):
        _pack(pictures, target)
    assert [path.name for path in target.iterdir()] == [name]


def test_only_what_a_killed_pack_left_is_cleared_away(pictures: Path, target: Path) -> None:
    target.mkdir()
    (target / "packing.json#1").write_bytes(b"torn")
    _interrupt(pictures, target, 30)
    torn = [target / name for name in ("manifest.json#2", "index.parquet#12", "shards/00000004.hws#1")]
    mine = [target / name for name in ("budget#2024", "shards/x.hws#1", "shards/notes", "parts/notes")]
    for path in [*torn, *mine]:
        path.write_bytes(b"x")
    _pack(pictures, target)
    assert not any(path.exists() for path in torn)
    assert all(path.exists() for path in mine)


def test_a_manifest_of_somebody_else_is_not_taken_for_a_damaged_one(pictures: Path, target: Path) -> None:
    target.mkdir()
    (target / "manifest.json").write_text('{"name": "my web page, which has a manifest, too"}')
    with pytest.raises(ConfigError, match="objects that are not of a pack"):
        _pack(pictures, target)


def test_a_packed_set_is_not_packed_again(pictures: Path, target: Path, tmp_path: Path) -> None:
    _pack(pictures, target)
    with pytest.raises(ConfigError, match="is a packed set itself"):
        _pack(target, tmp_path / "twice")


# Bad pictures


def test_a_picture_that_cant_be_read_stops_the_pack_with_its_name(source: Path, target: Path) -> None:
    (source / "b" / "004.jpg").write_bytes(b"no picture")
    with pytest.raises(BadSampleError, match=r"b/004\.jpg: not a picture.*--on-bad-sample skip"):
        _pack(source, target)
    with pytest.raises(DataError, match="not finished"):
        list_samples(str(target))


def test_left_out_pictures_are_listed_and_the_rest_counts_as_the_source_without_them(
    source: Path, target: Path, tmp_path: Path
) -> None:
    bad = [source / "b" / "004.jpg", source / "c" / "047.jpg"]
    for path in bad:
        path.write_bytes(b"no picture")
    manifest = _pack(source, target, FLIPPED, on_bad_sample="skip").manifest
    assert [key for key, _ in manifest.left_out] == ["b/004.jpg", "c/047.jpg"]
    assert all("not a picture" in why for _, why in manifest.left_out)
    assert manifest.fingerprint != manifest.note.source_fingerprint
    for path in bad:
        path.unlink()
    _assert_same(str(source), str(target), FLIPPED)


def test_what_was_left_out_is_not_taken_for_good_by_a_run_that_must_not(source: Path, target: Path) -> None:
    (source / "a" / "000.jpg").write_bytes(b"no picture")
    _interrupt(source, target, 45, on_bad_sample="skip")
    with pytest.raises(BadSampleError, match=r"a/000\.jpg"):
        _pack(source, target)


def test_a_source_without_a_readable_picture_is_an_error(source: Path, target: Path) -> None:
    for path in source.rglob("*.jpg"):
        path.write_bytes(b"no picture")
    with pytest.raises(EmptyDataError, match="none of the 50 samples can be packed; the first: not a picture"):
        _pack(source, target, on_bad_sample="skip")
    assert not (target / "manifest.json").exists()


# Damage


def _bad(url: Path | str, transforms: Transforms = FIXED) -> dict[int, str]:
    """The samples that the extractor reports as bad."""
    samples = list_samples(str(url))
    want = Extraction(samples.url, transforms, None, (transforms.pixel_spec,), node_batch=8)
    chunk = Chunk(want, "job", 0, 0, 0, tuple(samples.take(range(len(samples)))))
    extractor = Extractor(2, 4)
    try:
        parts = list(extractor.rows(open_store(samples.url), chunk, None))
    finally:
        extractor.close()
    found = {bad.sample: f"{bad.key}: {bad.reason}" for part in parts for bad in part.bad}
    assert sorted([*found, *(int(each) for part in parts for each in part.ids)]) == list(range(len(samples)))
    return found


def test_a_damaged_byte_is_a_bad_sample_and_found_and_repaired(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    shard = _shards(target)[2]
    data = bytearray(shard.read_bytes())
    data[int(list_samples(str(target)).offsets[23]) + HEADER_BYTES + 77] ^= 0x10
    shard.write_bytes(data)
    bad = _bad(target)
    assert list(bad) == [23]
    assert "shards/00000002.hws: the record at byte" in bad[23]
    assert "headwater pack SRC DST --verify" in bad[23]
    (fault,) = verify_set(str(target))
    key = list_samples(str(pictures)).take([23])[0].key
    assert f"1 of its 10 samples are damaged ({key})" in fault
    done = _pack(pictures, target, verify=True)
    assert (done.num_made, done.num_kept, len(done.damaged)) == (1, 4, 1)
    assert verify_set(str(target)) == []
    _assert_same(str(pictures), str(target), FIXED)


def test_shards_that_changed_places_are_bad_samples_and_found_and_repaired(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    one, two = _shards(target)[:2]
    one.rename(target / "x")
    two.rename(one)
    (target / "x").rename(two)
    bad = _bad(target)
    assert sorted(bad) == list(range(20))
    assert all("not the one that the index has there" in text and "--verify" in text for text in bad.values())
    assert ["10 of its 10 samples are damaged" in fault for fault in verify_set(str(target))] == [True, True]
    assert _pack(pictures, target, verify=True).num_made == 2
    assert _bad(target) == {}
    _assert_same(str(pictures), str(target), FIXED)


def test_a_new_index_over_old_shards_does_not_give_old_pictures_new_labels(
    source: Path, target: Path, tmp_path: Path
) -> None:
    """As after `rsync --size-only` of a set that was packed again; and although the records were checked before."""
    _pack(source, target)
    assert _bad(target) == {}
    (source / "b" / "004.jpg").write_bytes((source / "c" / "005.jpg").read_bytes())
    _pack(source, tmp_path / "again")
    for name in ("index.parquet", "manifest.json"):
        shutil.copy(tmp_path / "again" / name, target / name)
    number = list_samples(str(source)).keys.to_pylist().index("b/004.jpg")
    assert list(_bad(target)) == [number]


def test_another_record_is_another_sample_to_a_cache(source: Path, target: Path, tmp_path: Path) -> None:
    """Kept rows are found by the etag: it tells records apart where that of the file does not."""
    _pack(source, target)
    (before,) = list_samples(str(target)).take([0])
    (source / "a" / "000.jpg").write_bytes((source / "b" / "001.jpg").read_bytes())
    _pack(source, tmp_path / "again")
    for name in ("index.parquet", "manifest.json"):
        shutil.copy(tmp_path / "again" / name, target / name)
    (after,) = list_samples(str(target)).take([0])
    assert (after.key, after.offset, after.length) == (before.key, before.offset, before.length)
    assert after.etag != before.etag


def test_a_shard_cut_short_loses_the_samples_behind_the_cut_and_no_others(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    shard = _shards(target)[4]
    offsets = list_samples(str(target)).offsets
    os.truncate(shard, int(offsets[47]) + 100)
    bad = _bad(target)
    assert sorted(bad) == [47, 48, 49]
    assert all("00000004.hws" in text and "cut short" in text and "--verify" in text for text in bad.values())
    done = _pack(pictures, target)  # a listing shows that it is too short
    assert (done.num_made, done.num_kept) == (1, 4)
    assert _bad(target) == {}


def test_an_empty_shard_and_a_missing_one(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    _shards(target)[0].write_bytes(b"")
    assert sorted(_bad(target)) == list(range(10))
    _shards(target)[0].unlink()
    with pytest.raises(DataError, match=r"1 of 5 shards are not there: shards/00000000\.hws; .*--verify"):
        list_samples(str(target))
    assert _pack(pictures, target).num_made == 1
    assert _bad(target) == {}


def test_a_shard_replaced_under_a_job_is_an_error(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    samples = list_samples(str(target))
    store, (ref,) = open_store(samples.url), samples.take([0])
    read_sample(store, ref)
    shard = _shards(target)[0]
    os.utime(shard, ns=(1, 1))
    with pytest.raises(ChangedError, match=r"shards/00000000\.hws"):
        read_sample(store, ref)


def test_a_damaged_index_is_found_and_made_again(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    index = target / "index.parquet"
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.write_bytes(data)
    with pytest.raises(DataError, match=r"index\.parquet is damaged.*--verify"):
        list_samples(str(target))
    done = _pack(pictures, target, verify=True)
    assert done.num_made == 5
    _assert_same(str(pictures), str(target), FIXED)


@pytest.mark.parametrize(("name", "which"), [("shards/00000002.hws", 1), ("index.parquet", 1), ("index.parquet", 2)])
def test_a_store_that_fails_while_a_set_is_checked_is_not_taken_for_damage(
    pictures: Path, target: Path, monkeypatch: pytest.MonkeyPatch, name: str, which: int
) -> None:
    _pack(pictures, target)
    shard = _shards(target)[4]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # so that the set is opened again, which reads the index again
    shard.write_bytes(data)
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    real, asked = Store.read, []

    def read(store: Store, key: str, *args: Any, **options: Any) -> Any:
        asked.append(key)
        if key == name and asked.count(name) == which:
            raise StoreError(f"{key} can't be read: no answer")
        return real(store, key, *args, **options)

    monkeypatch.setattr(Store, "read", read)
    with pytest.raises(StoreError, match="no answer"):
        _pack(pictures, target, verify=True)
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == before
    assert _pack(pictures, target, verify=True).num_made == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda found: found | {"version": 2}, "format version 2, and this Headwater reads 1; install the Headwater"),
        (lambda found: {**found, "shards": 5}, "damaged: its 'shards' is not list"),
        (lambda found: {**found, "note": {**found["note"], "steps": [{"op": "Melt"}]}}, "damaged: .*Melt"),
        (lambda found: {**found, "shards": [{}]}, "damaged: its 'number' is not int"),
        (lambda found: {**found, "num_samples": 49}, "the index has 50 samples, manifest.json says 49"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(pictures: Path, target: Path, change: Any, text: str) -> None:
    _pack(pictures, target)
    path = target / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(DataError, match=text):
        list_samples(str(target))


def test_a_manifest_cut_short_is_refused(pictures: Path, target: Path) -> None:
    _pack(pictures, target)
    path = target / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged: it is not JSON"):
        list_samples(str(target))


def test_a_manifest_of_somebody_else_is_none_of_ours(class_folders: Path) -> None:
    (class_folders / "manifest.json").write_text('{"format": "other"}')
    assert list_samples(str(class_folders)).num_ignored == 1
    with pytest.raises(EmptyDataError, match="no packed set among 4 objects"):
        list_samples(str(class_folders), "shards")


def test_a_link_out_of_the_folder_is_not_followed(pictures: Path, target: Path, tmp_path: Path) -> None:
    _pack(pictures, target)
    samples = list_samples(str(target))
    shard = _shards(target)[0]
    shard.rename(tmp_path / "elsewhere.hws")
    shard.symlink_to(tmp_path / "elsewhere.hws")
    (ref,) = samples.take([0])
    with pytest.raises(BadSampleError, match="leads out of the folder"):
        read_sample(open_store(samples.url), dataclasses.replace(ref, etag=""))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 60 KB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "none", place], capture_output=True).returncode:
        pytest.skip("needs to mount a small disk, which takes root")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_a_plain_error_and_leaves_nothing_that_looks_whole(pictures: Path, tiny_disk: Path) -> None:
    with pytest.raises(StoreError, match=r"can't be written.*the disk is full: make room there, and run this again"):
        _pack(pictures, tiny_disk)
    with pytest.raises(DataError, match="not finished"):
        list_samples(str(tiny_disk))
    subprocess.run(["mount", "-o", "remount,size=10m", tiny_disk], check=True)
    assert _pack(pictures, tiny_disk).num_kept >= 1
    _assert_same(str(pictures), str(tiny_disk), FIXED)


# Mapped files


def test_threads_that_may_wait_look_at_records_before_they_are_decoded(
    pictures: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every time: what was checked before may have left the memory since."""
    _pack(pictures, target)
    threads, real = [], reading._touch

    def touch(data: memoryview) -> None:
        threads.append(threading.current_thread().name.partition("-")[0])
        real(data)

    monkeypatch.setattr(reading, "_touch", touch)
    for _ in range(2):
        assert _bad(target) == {}
    assert threads == ["read"] * 100


def test_a_file_that_is_mapped_again_need_not_be_checked_again_unless_it_changed(
    pictures: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pack(pictures, target)
    checked, real = [], reading.check_record

    def check(data: Any, key: str, offset: int, *args: Any) -> None:
        checked.append((key, offset))
        real(data, key, offset, *args)

    monkeypatch.setattr(reading, "check_record", check)
    monkeypatch.setattr(mapped, "MAX_MAPS", 2)
    maps = mapped.Maps()
    monkeypatch.setattr(stores, "_MAPS", maps)
    for _ in range(2):
        _pixels(list_samples(str(target)), FIXED)
        assert len(maps._maps) == 2
    assert len(checked) == len(set(checked)) == 50
    shard = _shards(target)[0]
    shard.write_bytes(shard.read_bytes())
    os.utime(shard, ns=(1, 1))
    _pixels(list_samples(str(target)), FIXED)
    assert len(checked) == 60


def test_the_mapping_that_was_used_longest_ago_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "MAX_MAPS", 2)
    maps = mapped.Maps()
    for name in "abac":
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, ns=(1, 1))
        assert bytes(maps.get(str(tmp_path / name), lambda: "etag").view) == name.encode()
    assert [Path(path).name for _, path in maps._maps] == ["a", "c"]


def test_a_file_that_is_gone_is_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "TIDY_EVERY_S", 0.05)
    maps = mapped.Maps()
    for name in "abc":
        (tmp_path / name).write_text(name)
        maps.get(str(tmp_path / name), lambda: "etag")
    (tmp_path / "a").unlink()
    (tmp_path / "b").rename(tmp_path / "d")
    deadline = time.monotonic() + 20
    while [Path(path).name for _, path in maps._maps] != ["c"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


# An object store


def _bucket(url: str) -> Any:
    return S3Store.from_url(url, client_options={"allow_http": True})


def test_from_and_to_an_object_store(pictures: Path, s3: str) -> None:
    bucket = _bucket(s3)
    for path in pictures.rglob("*.jpg"):
        bucket.put(f"jpeg/{path.relative_to(pictures)}", path.read_bytes())
    done = _pack(f"{s3}/jpeg", f"{s3}/packed", FLIPPED)
    assert done.num_made == 5
    assert _pack(f"{s3}/jpeg", f"{s3}/packed", FLIPPED).num_made == 0
    _assert_same(f"{s3}/jpeg", f"{s3}/packed", FLIPPED)
    assert list_samples(f"{s3}/packed").fingerprint == list_samples(str(pictures)).fingerprint
    assert verify_set(f"{s3}/packed") == []
    data = bytearray(bucket.get("packed/shards/00000001.hws").bytes())
    data[200] ^= 1
    bucket.put("packed/shards/00000001.hws", bytes(data))
    bucket.put("packed/shards/00000003.hws", bytes(bucket.get("packed/shards/00000003.hws").bytes())[:-64])
    assert sorted(_bad(f"{s3}/packed", FLIPPED)) == [10, 39]
    assert len(verify_set(f"{s3}/packed")) == 2
    assert _pack(f"{s3}/jpeg", f"{s3}/packed", FLIPPED, verify=True).num_made == 2
    assert _bad(f"{s3}/packed", FLIPPED) == {}
    keys = ["packed/shards/00000000.hws", "packed/shards/00000001.hws"]
    for key, data in zip(keys, [bytes(bucket.get(key).bytes()) for key in reversed(keys)], strict=True):
        bucket.put(key, data)
    assert sorted(_bad(f"{s3}/packed", FLIPPED)) == list(range(20))


def test_an_interrupted_pack_to_an_object_store_goes_on(pictures: Path, s3: str) -> None:
    _bucket(s3).put("other", b"")
    _interrupt(pictures, f"{s3}/packed", 45)  # type: ignore[arg-type]
    done = _pack(pictures, f"{s3}/packed")
    assert done.num_kept >= 3
    assert read_manifest(open_store(f"{s3}/packed")).num_samples == 50
    _assert_same(str(pictures), f"{s3}/packed", FIXED)


def test_shards_are_uploaded_and_checked_in_pieces(pictures: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _bucket(s3).put("other", b"")
    monkeypatch.setattr(stores, "PIECE_BYTES", 1 << 20)
    large = Transforms([Resize((256, 256)), ToFloat()])
    (shard,) = _pack(pictures, f"{s3}/packed", large, shard_bytes=64_000_000).manifest.shards
    assert shard.num_bytes > 5 << 20, "more than goes in one request"
    assert verify_set(f"{s3}/packed") == []
    _assert_same(str(pictures), f"{s3}/packed", large)


def test_two_packs_into_one_folder_do_not_meet(source: Path, target: Path) -> None:
    target.mkdir()
    with (
        open_store(str(target)).alone(),
        pytest.raises(ConfigError, match=r"another process is writing .*choose another folder"),
    ):
        pack(str(source), str(target), FIXED)
    pack(str(source), str(target), FIXED)

"""The same promises on a real S3: SeaweedFS on loopback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from headwater.data.decode import decode
from headwater.data.layouts import list_samples
from headwater.data.store import open_store
from headwater.errors import BadSampleError, ChangedError, DataError, EmptyDataError, StoreError


def _bucket(url: str) -> Any:
    return S3Store.from_url(url, client_options={"allow_http": True})


def _copy(folder: Path, url: str) -> None:
    bucket = _bucket(url)
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(str(path.relative_to(folder)), path.read_bytes())


def test_list_read_range_size_and_missing(s3: str) -> None:
    _bucket(s3).put("set/a b/é%20.bin", b"0123456789")
    _bucket(s3).put("other/x", b"x")
    store = open_store(f"{s3}/set")
    assert [(entry.key, entry.size) for page in store.list() for entry in page] == [("a b/é%20.bin", 10)]
    assert bytes(store.read("a b/é%20.bin")) == b"0123456789"
    assert bytes(store.read("a b/é%20.bin", 2, 3)) == b"234"
    assert store.size("a b/é%20.bin") == 10
    with pytest.raises(BadSampleError, match="ends before byte 16"):
        store.read("a b/é%20.bin", 12, 4)
    with pytest.raises(BadSampleError, match=r"none: is not in s3://"):
        store.read("none")


@pytest.mark.parametrize("folder", ["my set", "é", "a+b=c&d"])
def test_a_folder_with_an_unusual_name_is_read(s3: str, folder: str) -> None:
    _bucket(s3).put(f"{folder}/x/1 2.png", b"1")
    samples = list_samples(f"{s3}/{folder}")
    assert samples.keys.to_pylist() == ["x/1 2.png"]
    assert bytes(open_store(samples.url).read("x/1 2.png")) == b"1"


def test_a_changed_object_is_refused_with_both_etags(s3: str) -> None:
    _bucket(s3).put("one", b"1")
    store = open_store(s3)
    ((entry,),) = store.list()
    assert bytes(store.read("one", etag=entry.etag)) == b"1"
    _bucket(s3).put("one", b"2")
    with pytest.raises(ChangedError, match=rf"{store.etag('one')}.*{entry.etag}"):
        store.read("one", 0, 1, etag=entry.etag)


def test_wrong_credentials_are_a_store_error_without_the_secret(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID") as caught:
        open_store(s3).read("one")
    assert "not-the-secret" not in str(caught.value)


def test_who_was_asked_is_said_where_no_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    said = str(open_store("s3://photos")._refusal("can't be listed", OSError("error sending request")))
    assert "AWS_ENDPOINT_URL is not set, so Amazon's S3 was asked" in said


def test_a_store_that_says_403_is_asked_with_wrong_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said = str(open_store("s3://photos")._refusal("can't be listed", OSError("Error after 0 retries: 403 Forbidden")))
    assert "check the credentials" in said


def test_a_bucket_that_is_not_there_is_a_store_error(s3: str) -> None:
    with pytest.raises(StoreError, match=r"can't be listed: .*NoSuchBucket|404.*check the bucket"):
        list_samples(s3)


def test_a_store_that_is_down_is_a_store_error(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("headwater.data.store._RETRY", {"max_retries": 0})
    with pytest.raises(StoreError, match="AWS_ENDPOINT_URL"):
        open_store(s3).read("one")


def test_class_folders_have_the_same_fingerprint_as_on_disk(s3: str, class_folders: Path) -> None:
    _copy(class_folders, f"{s3}/deep/set")
    here, there = list_samples(str(class_folders)), list_samples(f"{s3}/deep/set/")
    assert here.fingerprint == there.fingerprint
    assert here.take(range(3))[1].key == there.take(range(3))[1].key == "cat/deep/2.PNG"
    assert there.classes == ("cat", "dog")


def test_a_manifest_has_the_same_fingerprint_as_on_disk(s3: str, class_folders: Path) -> None:
    (class_folders / "train.csv").write_text("path,label\ncat/1.png,feline\ndog/3.png,canine\n")
    _copy(class_folders, s3)
    here, there = list_samples(str(class_folders / "train.csv")), list_samples(f"{s3}/train.csv")
    assert here.fingerprint == there.fingerprint
    assert there.classes == ("canine", "feline")
    assert there.url == s3


@pytest.mark.parametrize("name", ["", "/0.tar"])
def test_tars_have_the_same_fingerprint_and_their_samples_decode(
    s3: str, name: str, tmp_path: Path, make_tar: Any, picture: Callable[..., Any], encode: Callable[..., bytes]
) -> None:
    members = {f"{n}.{end}": data for n in range(5) for end, data in (("png", encode(picture(seed=n))), ("cls", b"1"))}
    make_tar(tmp_path / "set" / "0.tar", members)
    _copy(tmp_path / "set", s3)
    here, there = list_samples(f"{tmp_path}/set{name}"), list_samples(s3 + name)
    assert here.fingerprint == there.fingerprint
    store = open_store(there.url)
    for n, ref in enumerate(there.take(range(5))):
        data = store.read(ref.key, ref.offset, ref.length, ref.etag)
        assert decode(data, ref.key).tobytes() == picture(seed=n).tobytes()


def test_a_truncated_tar_is_a_data_error(s3: str, tmp_path: Path, make_tar: Any) -> None:
    data = make_tar(tmp_path / "0.tar", {"1.png": b"x" * 5000, "1.cls": b"1"})
    _bucket(s3).put("0.tar", data[:3000])
    with pytest.raises(DataError, match=r"0\.tar: not a whole tar \(3,000 bytes\)"):
        list_samples(s3)


def test_an_empty_folder_names_what_was_looked_for(s3: str) -> None:
    _bucket(s3).put("other/readme.md", b"")
    with pytest.raises(EmptyDataError, match=r"looked for pictures in class folders.*manifest.*tars"):
        list_samples(f"{s3}/set")

"""Stores on a file system: keys stay inside, changes are noticed, errors say what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headwater.data import store as stores
from headwater.data.store import Store, full_url, key_fault, open_store, redact, split_url, store_name
from headwater.errors import BadSampleError, ChangedError, ConfigError, StoreError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "a b"
    (folder / "x").mkdir(parents=True)
    (folder / "x" / "é%20.bin").write_bytes(b"0123456789")
    (folder / "one").write_bytes(b"1")
    return folder


def _listed(store: Store) -> dict[str, int]:
    return {entry.key: entry.size for page in store.list() for entry in page}


def test_a_plain_path_and_its_file_url_are_the_same_store(root: Path) -> None:
    assert open_store(str(root)).url == open_store(root.as_uri() + "/").url
    assert _listed(open_store(root.as_uri())) == {"x/é%20.bin": 10, "one": 1}


def test_a_read_gives_the_whole_object_or_the_range_asked_for(root: Path) -> None:
    store = open_store(str(root))
    assert bytes(store.read("x/é%20.bin")) == b"0123456789"
    assert bytes(store.read("x/é%20.bin", 2, 3)) == b"234"
    assert bytes(store.read("x/é%20.bin", 7)) == b"789"
    assert bytes(store.read("x/é%20.bin", 3, 0)) == b""
    assert store.size("x/é%20.bin") == 10


def test_a_large_object_is_read_in_several_requests(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PIECE_BYTES", 4)
    (root / "empty").write_bytes(b"")
    store, asked = open_store(str(root)), []
    real = store.read
    monkeypatch.setattr(store, "read", lambda *args: asked.append(args[1:]) or real(*args))
    assert bytes(store.read_whole("x/é%20.bin")) == b"0123456789"
    assert asked == [(0, 4), (4, 4), (8, 2)]
    assert bytes(store.read_whole("empty")) == b""


@pytest.mark.parametrize(("offset", "length"), [(5, 6), (10, 1), (90, 5)])
def test_a_range_beyond_the_end_is_a_bad_sample_and_not_fewer_bytes(root: Path, offset: int, length: int) -> None:
    with pytest.raises(BadSampleError, match=r"ends before byte .*it has 10.*list the data again"):
        open_store(str(root)).read("x/é%20.bin", offset, length)


def test_a_changed_file_is_refused_with_both_etags(root: Path) -> None:
    store = open_store(str(root))
    (before,) = (entry.etag for page in store.list() for entry in page if entry.key == "one")
    assert bytes(store.read("one", etag=before)) == b"1"
    (root / "one").write_bytes(b"other")
    with pytest.raises(ChangedError) as caught:
        store.read("one", etag=before)
    assert before in str(caught.value)
    assert store.etag("one") in str(caught.value)
    assert "list the data again" in str(caught.value)


def test_a_missing_object_is_a_bad_sample_that_names_key_and_store(root: Path) -> None:
    with pytest.raises(BadSampleError, match=r"x/none: is not in file://.*put it back") as caught:
        open_store(str(root)).read("x/none")
    assert caught.value.key == "x/none"


@pytest.mark.parametrize(
    "key", ["../one", "x/../../one", "/etc/hostname", "", ".", "x//y", "x\\y", "x\0y", "\ud800", "k" * 5000]
)
def test_a_key_that_could_leave_its_root_is_refused(root: Path, key: str) -> None:
    assert key_fault(key)
    for call in (open_store(str(root)).read, open_store(str(root)).size):
        with pytest.raises(BadSampleError, match="refused"):
            call(key)


def test_a_link_out_of_the_folder_is_refused_when_read_and_when_listed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    (root / "x" / "link").symlink_to(tmp_path / "outside")
    store = open_store(str(root))
    with pytest.raises(BadSampleError, match="leads out of the folder through a link"):
        store.read("x/link")
    with pytest.raises(StoreError, match=r"x/link is a link to .*copy the files into it"):
        _listed(store)


def test_a_folder_that_links_out_is_refused_when_listed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"secret")
    os.symlink(tmp_path / "other", root / "folder")
    with pytest.raises(StoreError, match=r"folder/file is a link"):
        _listed(open_store(str(root)))


def test_a_link_within_the_folder_is_read(root: Path) -> None:
    (root / "again").symlink_to(root / "one")
    assert bytes(open_store(str(root)).read("again")) == b"1"
    assert _listed(open_store(str(root)))["again"] == 1


def test_a_prefix_is_listed_and_may_not_escape(root: Path) -> None:
    store = open_store(str(root))
    assert [entry.key for page in store.list("x/") for entry in page] == ["x/é%20.bin"]
    with pytest.raises(ConfigError, match="can't list"):
        list(store.list("../"))


@pytest.mark.parametrize("url", ["ftp://host/x", "http://host/x", "s3://", ""])
def test_a_url_that_is_no_store_says_what_would_be(url: str) -> None:
    with pytest.raises(ConfigError, match=r"file://|bucket"):
        open_store(url)


def test_a_folder_that_is_not_there_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"does not exist; give the URL"):
        open_store(str(tmp_path / "none"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match=r"is a file"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize("name", [b"a\nb.jpg", b"\xff.jpg"])
def test_a_file_name_that_can_be_no_key_is_named_when_listed(root: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_bytes(b"")
    with pytest.raises(StoreError, match=r"invalid path.*rename what is called so"):
        _listed(open_store(str(root)))


def test_secrets_in_urls_never_reach_a_message() -> None:
    assert redact("s3://user:hunter2@bucket/x?sig=abc&a=1") == "s3://***@bucket/x?sig=***&a=1"
    with pytest.raises(ConfigError) as caught:
        open_store("ftp://user:hunter2@host/x")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(open_store("s3://user:hunter2@bucket/x"))


def test_a_url_splits_into_folder_and_name() -> None:
    assert split_url("s3://bucket/a/train.csv") == ("s3://bucket/a", "train.csv")
    assert split_url("/data/my set/a%20b.csv") == ("file:///data/my%20set", "a%20b.csv")
    assert full_url("s3://bucket/a/") == "s3://bucket/a"


def test_threads_read_at_once(root: Path) -> None:
    store = open_store(str(root))
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda at: bytes(store.read("x/é%20.bin", at % 10, 1)), range(400)))
    assert parts == [str(at % 10).encode() for at in range(400)]


def test_the_data_package_needs_no_torch() -> None:
    modules = "headwater.data.layouts, headwater.data.torchvision, headwater.data.transforms"
    check = f"import sys, {modules}; assert not {{'torch', 'torchvision', 'timm'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_copies_of_a_folder_have_the_same_etags_and_a_rewritten_file_another(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    (first / "x").write_bytes(b"one")
    shutil.copytree(first, second)  # times are kept, as cp -p and rsync -t do
    assert open_store(str(first)).etag("x") == open_store(str(second)).etag("x")
    before = open_store(str(second)).etag("x")
    (second / "x").write_bytes(b"two")
    os.utime(second / "x", (1, 1))
    assert open_store(str(second)).etag("x") != before


def test_what_is_mapped_below_one_root_is_not_thereby_allowed_below_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "secret").write_bytes(b"secret")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    assert bytes(open_store(str(tmp_path)).map("a/link/secret").view) == b"secret"
    with pytest.raises(BadSampleError, match="leads out of the folder through a link"):
        open_store(str(tmp_path / "a")).map("link/secret")


def test_a_store_has_a_name_without_its_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:secret@store:8333/path")
    assert store_name("s3://key:secret@photos/train?token=secret") == "s3://photos of store:8333"
    assert store_name("gs://photos/train") == "gs://photos"
    assert store_name(str(tmp_path)) == "file"

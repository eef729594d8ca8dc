"""WebDataset tars: members that share a name up to its first dot form a sample, such as `7.jpg` with `7.cls`.

A tar is indexed by its headers; the pictures are not read. A sample is then (shard, offset, length), and one ranged
read fetches it.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from headwater.core.form import shown
from headwater.data.decode import SUFFIXES
from headwater.data.layouts.listing import Listing, number_labels, some
from headwater.data.layouts.members import Member, read_members
from headwater.data.samples import Samples
from headwater.data.store import Store, redact
from headwater.errors import DataError, EmptyDataError, LabelError

LOOKED_FOR = "WebDataset tars (.tar with 7.jpg and 7.cls or 7.json inside)"
# A header takes 512 bytes and is followed by its data, so a small block wastes little of each request and a label
# beside its picture's end comes with it.
_BLOCK = 16 * 1024
_MAX_LABEL_BYTES = 1024 * 1024
_PAGE = 1000  # samples, of which it is told that they were seen
_THREADS = 8  # shards indexed at once: the work is waiting for the store


class _ObjectFile(io.RawIOBase):
    """An object of a store as a seekable file."""

    def __init__(self, store: Store, key: str, size: int, etag: str) -> None:
        self._store, self._key, self._size, self._etag = store, key, size, etag
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        buffer[:length] = memoryview(self._store.read(self._key, self._at, length, self._etag))
        self._at += length
        return length


@dataclass
class _Group:
    """The members of one sample, as they are found."""

    offset: int = -1
    length: int = -1
    label: str | None = None
    fault: str = ""


@dataclass
class _Shard:
    key: str
    groups: dict[str, _Group] = field(default_factory=dict)
    num_other: int = 0


def read_tars(listing: Listing, on_page: Callable[[int], None] | None = None) -> Samples:
    """Samples of all .tar objects of the listing. `on_page` hears the number of samples seen so far: also within a tar,
    which may be large, and in any thread."""
    chosen = listing.where(listing.ending(".tar"))
    if not len(chosen):
        packed = int(listing.ending(".tar.gz", ".tgz", ".tar.zst").sum())
        hint = f" ({packed:,} compressed tars can't be read in place; unpack them to .tar)" if packed else ""
        raise EmptyDataError(
            f"{listing.shown}: none of {len(listing):,} objects is a tar; looked for {LOOKED_FOR}{hint}"
        )
    rows = list(zip(chosen.keys.to_pylist(), chosen.sizes.tolist(), chosen.etags.to_pylist(), strict=True))
    columns: dict[str, list[Any]] = {name: [] for name in ("keys", "offsets", "lengths", "etags", "written", "names")}
    num_other = len(listing) - len(chosen)
    lock, num_seen = threading.Lock(), 0

    def seen(count: int) -> None:
        nonlocal num_seen
        with lock:
            num_seen += count
        if on_page is not None and count:
            on_page(num_seen)

    with ThreadPoolExecutor(_THREADS) as pool:
        indexed = pool.map(lambda row: _index(listing.store, row[0], row[1], row[2], seen), rows)
        for shard, (_, _, etag) in zip(indexed, rows, strict=True):
            _check(shard, listing.shown)
            num_other += shard.num_other
            for name, group in shard.groups.items():
                values = (shard.key, group.offset, group.length, etag, group.label, f"{shard.key}: {name}")
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
    if not columns["keys"]:
        raise EmptyDataError(f"{listing.shown}: {len(chosen):,} tars hold no picture; looked for {LOOKED_FOR}")
    labels, classes = number_labels(columns["written"], columns["names"].__getitem__, listing.shown)
    return Samples.build(
        listing.store.url,
        classes,
        keys=columns["keys"],
        sizes=columns["lengths"],
        etags=columns["etags"],
        labels=labels,
        offsets=columns["offsets"],
        lengths=columns["lengths"],
        num_ignored=num_other,
    )


def _index(store: Store, key: str, size: int, etag: str, seen: Callable[[int], None]) -> _Shard:
    shard, told = _Shard(key), 0
    file = io.BufferedReader(_ObjectFile(store, key, size, etag), _BLOCK)
    try:
        for member in read_members(file, size):
            _add(shard, file, member)
            if len(shard.groups) - told >= _PAGE:
                seen(len(shard.groups) - told)
                told = len(shard.groups)
    except ValueError as error:
        raise DataError(
            f"{redact(store.url)}/{key}: not a whole tar ({size:,} bytes): {error}; it was cut short or is no tar: "
            "write it again"
        ) from None
    seen(len(shard.groups) - told)
    return shard


def _add(shard: _Shard, file: BinaryIO, member: Member) -> None:
    folder, _, base = member.name.rpartition("/")
    name, dot, ending = base.partition(".")
    ending = ending.lower()
    is_picture, is_label = f".{ending}" in SUFFIXES, ending in ("cls", "json")
    if not name or not dot or not (is_picture or is_label):
        shard.num_other += 1
        return
    group = shard.groups.setdefault(f"{folder}/{name}" if folder else name, _Group())
    if is_picture:
        if group.offset >= 0:
            group.fault = "two pictures"
        group.offset, group.length = member.offset, member.size
        return
    if member.size > _MAX_LABEL_BYTES:
        group.fault = f"a label of {member.size:,} bytes"
        return
    file.seek(member.offset)
    text = file.read(member.size)
    if ending == "cls":
        group.label = text.decode("utf-8", "replace").strip()
    elif group.label is None:
        group.label, group.fault = _json_label(text, group.fault)


def _json_label(text: bytes, fault: str) -> tuple[str | None, str]:
    try:
        value = json.loads(text).get("label")
    except (ValueError, AttributeError, RecursionError):
        return None, "a .json that is not an object"
    if value is None:
        return None, fault
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None, f'"label" is {shown(value)}, neither a whole number nor a name'
    return str(value).strip(), fault


def _check(shard: _Shard, where: str) -> None:
    faults = []
    for name, group in shard.groups.items():
        if group.fault:
            faults.append(f"{name} ({group.fault})")
        elif group.offset < 0:
            faults.append(f"{name} (a label without a picture)")
        elif not group.label:
            faults.append(f"{name} (a picture without a label)")
    if faults:
        raise LabelError(
            f"{where}: {shard.key} has {len(faults):,} samples without one picture and one label: {some(faults)}; "
            'put name.cls, or name.json with "label", beside each name.jpg'
        )

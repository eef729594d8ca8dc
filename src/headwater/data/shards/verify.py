"""Checks a packed set: every shard, the index and the manifest against their checksums. Owns `verify_set`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc

from headwater.data.layouts.listing import list_store, some
from headwater.data.shards.manifest import MANIFEST, NOTE, Shard, read_index, read_manifest, sha256, shard_key
from headwater.data.shards.record import check_record
from headwater.data.store import Store, open_store, redact
from headwater.errors import BadSampleError, DataError, EmptyDataError

AT_ONCE = 4  # shards that are read at once: what is in memory, and what shares the way from the store


def verify_set(url: str, tell: Callable[[int], None] = lambda count: None) -> list[str]:
    """What is wrong with each damaged shard, in a sentence; empty if the set is whole.

    Raises if the manifest or the index can't be read: they tell what the shards should be.
    """
    store = open_store(url)
    present = list_store(store).keys.to_pylist()
    if MANIFEST not in present:
        where = redact(store.url)
        if NOTE in present:
            raise DataError(
                f"{where} is not finished: run the same `headwater pack` again, which goes on where it stood"
            )
        raise EmptyDataError(f"{where} is not a packed set: it has no {MANIFEST}")
    manifest = read_manifest(store)
    index = read_index(store, manifest)
    faults = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for count, fault in enumerate(pool.map(lambda shard: _fault(store, shard, index), manifest.shards), 1):
            if fault:
                faults.append(fault)
            tell(count)
    return faults


def _fault(store: Store, shard: Shard, index: pa.Table) -> str:
    key = shard_key(shard.number)
    try:
        data = store.read_whole(key)
    except BadSampleError as error:
        return str(error)
    if len(data) == shard.num_bytes and sha256(data) == shard.sha256:
        return ""
    rows = index.filter(pc.and_(pc.equal(index["shard"], shard.number), pc.greater(index["length"], 0)))
    bad, columns = [], (rows[each].to_pylist() for each in ("key", "offset", "length", "crc32"))
    for name, offset, length, crc32 in zip(*columns, strict=True):
        try:
            check_record(data[offset : offset + length], key, offset, crc32)
        except BadSampleError:
            bad.append(name)
    what = (
        f"{len(bad):,} of its {shard.num_samples:,} samples are damaged ({some(bad)})" if bad else "samples are whole"
    )
    return f"{key} has {len(data):,} bytes of {shard.num_bytes:,}, or others than were written: {what}"

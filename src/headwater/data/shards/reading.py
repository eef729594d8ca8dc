"""How a sample's bytes are fetched, packed or not.

Owns `read_sample`, which every worker uses, and what the etag of a packed sample says.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.data.samples import WHOLE, SampleRef
from headwater.data.shards.record import SUFFIX, WAY_OUT, check_record, check_which
from headwater.data.store import Store
from headwater.data.textfile import is_text, read_text
from headwater.errors import BadSampleError

# Of one picture's file, or of one record. The largest record has MAX_PIXELS of `data.decode`, 537 MB; several are read
# at a time.
MAX_SAMPLE_BYTES = 1 << 30


def is_mapped(store: Store, ref: SampleRef) -> bool:
    """Whether this sample is in a mapped file: no request is needed, and mostly nothing has to be waited for."""
    return store.is_local and ref.key.endswith(SUFFIX)


def packed_etags(etags: pa.LargeStringArray, sums: pa.UInt32Array) -> pa.LargeStringArray:
    """Etags of packed samples: that of the shard, a blank (an etag has none) and the CRC-32 of the sample's record.

    So whoever is asked for a sample knows which record it is, without the index, and a kept row is of that record.
    """
    return pc.binary_join_element_wise(etags, sums.cast(pa.large_string()), pa.scalar(" ", pa.large_string()))


def sum_of_record(etag: str) -> int | None:
    """The CRC-32 of a packed sample's record; the same wherever the same shard lies."""
    return _split(etag)[1]


def _split(etag: str) -> tuple[str, int | None]:
    """The way back: the shard's etag and the record's CRC-32; None if it says nothing of a record."""
    shard, blank, crc32 = etag.rpartition(" ")
    return (shard, int(crc32)) if blank and crc32.isascii() and crc32.isdigit() else (etag, None)


def read_sample(store: Store, ref: SampleRef) -> Any:
    """The bytes of a sample: of a shard on this machine a view of the file, anything else by a request.

    Afterwards they are in memory: whoever waits for the disk does it here, without Python's lock. A record's checksum
    is computed when it comes over a wire, and when it is the first time in a mapped file. That it is the record which
    the index has there is looked at every time. More bytes than the listing has are not read: a node counts on those.
    """
    length, listed_bytes = (None, ref.size) if ref.length == WHOLE else (ref.length, None)
    if is_text(ref.key):
        return read_text(store, ref)
    if not ref.key.endswith(SUFFIX):
        return store.read(ref.key, ref.offset, length, ref.etag, MAX_SAMPLE_BYTES, listed_bytes)
    etag, crc32 = _split(ref.etag)
    mapped = store.map(ref.key) if store.is_local else None
    if mapped is None:
        try:
            data = store.read(ref.key, ref.offset, length, etag, MAX_SAMPLE_BYTES, listed_bytes)
        except BadSampleError as error:
            raise BadSampleError(ref.key, f"{error.reason}; {WAY_OUT}") from None
        check_record(data, ref.key, ref.offset, crc32)
        return data
    store.check_etag(ref.key, mapped.etag, etag)
    end = len(mapped.view) if length is None else ref.offset + length
    if end > len(mapped.view):
        raise BadSampleError(
            ref.key,
            f"the shard ends at byte {len(mapped.view):,}, before the end of the record at byte {ref.offset:,}: it was "
            f"cut short; {WAY_OUT}",
        )
    data = mapped.view[ref.offset : end]
    _touch(data)
    if ref.offset not in mapped.checked:
        check_record(data, ref.key, ref.offset)
        if length is not None:
            mapped.checked.add(ref.offset)
    check_which(data, ref.key, ref.offset, crc32)
    return data


def _touch(data: memoryview) -> None:
    """Have every page of it read. NumPy's reductions let go of Python's lock meanwhile; most others don't."""
    np.frombuffer(data, np.uint8).max(initial=0)  # without `initial`, the first byte is looked at with the lock held

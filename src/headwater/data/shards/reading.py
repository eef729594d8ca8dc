"""How a sample's bytes are fetched, packed or not. Owns `read_sample`, which every worker uses."""

from __future__ import annotations

from typing import Any

from headwater.data.samples import SampleRef
from headwater.data.shards.record import SUFFIX, WAY_OUT, check_record
from headwater.data.store import Store
from headwater.errors import BadSampleError


def is_mapped(store: Store, ref: SampleRef) -> bool:
    """Whether this sample is in memory, as good as: no request is needed, and nothing has to be waited for."""
    return store.is_local and ref.key.endswith(SUFFIX)


def read_sample(store: Store, ref: SampleRef) -> Any:
    """The bytes of a sample: of a shard on this machine a view of the file, anything else by a request.

    A record's checksum is looked at when it comes over a wire, and when it is the first time in a mapped file.
    """
    length = None if ref.length < 0 else ref.length
    if not ref.key.endswith(SUFFIX):
        return store.read(ref.key, ref.offset, length, ref.etag)
    mapped = store.map(ref.key) if store.is_local else None
    if mapped is None:
        try:
            data = store.read(ref.key, ref.offset, length, ref.etag)
        except BadSampleError as error:
            raise BadSampleError(ref.key, f"{error.reason}; {WAY_OUT}") from None
        check_record(data, ref.key, ref.offset)
        return data
    store.check_etag(ref.key, mapped.etag, ref.etag)
    end = len(mapped.view) if length is None else ref.offset + length
    if end > len(mapped.view):
        raise BadSampleError(
            ref.key,
            f"the shard ends at byte {len(mapped.view):,}, before the end of the record at byte {ref.offset:,}: it was "
            f"cut short; {WAY_OUT}",
        )
    data = mapped.view[ref.offset : end]
    if ref.offset not in mapped.checked:
        check_record(data, ref.key, ref.offset)
        if length is not None:
            mapped.checked.add(ref.offset)
    return data

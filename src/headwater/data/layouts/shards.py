"""Packed sets: shards with a manifest, as `headwater pack` writes them (docs/shards.md).

The samples have the ids, labels and fingerprint of those that were packed; what is read of them is in the shards.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.data.layouts.listing import Listing, some
from headwater.data.samples import Packed, Samples
from headwater.data.shards.manifest import MANIFEST, NOTE, START, read_index, read_manifest, shard_key
from headwater.data.shards.reading import packed_etags
from headwater.data.shards.record import WAY_OUT
from headwater.errors import DataError, EmptyDataError

LOOKED_FOR = f"a packed set ({MANIFEST} of `headwater pack`)"


def is_packed(listing: Listing) -> bool:
    """Whether `headwater pack` wrote, or began to write, what is listed."""
    return any(is_ours(listing, name) for name in (MANIFEST, NOTE))


def is_ours(listing: Listing, name: str) -> bool:
    """Whether the object of this name is there and begins as `headwater pack` begins it."""
    at = pc.index(listing.keys, pa.scalar(name, pa.large_string())).as_py()
    if at < 0 or listing.sizes[at] < len(START):
        return False
    head = bytes(
        listing.store.read(name, 0, min(int(listing.sizes[at]), 2 * len(START)))
    )  # no more: it may be anyone's
    return b"".join(head.split()).startswith(START)


def read_shards(listing: Listing) -> Samples:
    """The samples of a packed set. Damaged shards show when they are read; missing ones now."""
    if not is_ours(listing, MANIFEST):
        if is_ours(listing, NOTE):
            raise DataError(
                f"{listing.shown} is a packed set that is not finished: it has {NOTE} and no {MANIFEST}; run the same "
                "`headwater pack` again, which goes on where it stood"
            )
        raise EmptyDataError(f"{listing.shown}: no packed set among {len(listing):,} objects; looked for {LOOKED_FOR}")
    manifest = read_manifest(listing.store)
    index = read_index(listing.store, manifest)
    index = index.filter(pc.greater(index["length"], 0))
    if len(index) != manifest.num_samples:
        raise DataError(f"{listing.shown}: the index has {len(index):,} samples, {MANIFEST} says "
                        f"{manifest.num_samples:,}; {WAY_OUT}")  # fmt: skip
    numbers = pa.array([shard.number for shard in manifest.shards], pa.int32())
    names = pa.array([shard_key(shard.number) for shard in manifest.shards], pa.large_string())
    found = pc.index_in(names, value_set=listing.keys)
    if found.null_count:
        missing = names.filter(pc.is_null(found)).to_pylist()
        raise DataError(f"{listing.shown}: {len(missing):,} of {len(names):,} shards are not there: {some(missing)}; "
                        f"{WAY_OUT}")  # fmt: skip
    etags = listing.etags.take(found)
    which = pc.index_in(index["shard"].combine_chunks(), value_set=numbers)
    if which.null_count:
        raise DataError(f"{listing.shown}: the index names shards that {MANIFEST} does not have; {WAY_OUT}")
    lengths = np.asarray(index["length"].to_numpy(), np.int64)
    if len(index) and pc.min(index["offset"]).as_py() < 0:
        raise DataError(f"{listing.shown}: the index has a record in front of its shard; {WAY_OUT}")
    return Samples.build(
        listing.store.url,
        manifest.classes,
        keys=names.take(which),
        offsets=index["offset"].to_numpy(),
        lengths=lengths,
        sizes=lengths,
        etags=packed_etags(etags.take(which), index["crc32"].combine_chunks()),
        labels=index["label"].to_numpy(),
        num_ignored=0,
        packed=Packed(manifest.fingerprint, json.dumps(manifest.note.steps)),
    )

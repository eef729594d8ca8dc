"""Class folders: `root/class/…/picture.jpg`. The first part of the path is the class, whatever lies below it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.data.layouts.listing import Listing, some
from headwater.data.samples import Samples
from headwater.errors import EmptyDataError, LabelError

LOOKED_FOR = "pictures in class folders (root/class/picture.jpg)"


def read_folders(listing: Listing) -> Samples:
    """Samples of class folders. Hidden files and files that are not pictures are left out and counted."""
    found = listing.where(listing.pictures())
    if not len(found):
        raise EmptyDataError(f"{listing.shown}: none of {len(listing):,} objects is a sample; looked for {LOOKED_FOR}")
    slash = pc.find_substring(found.keys, "/").to_numpy()
    bare = np.flatnonzero(slash < 0)
    if len(bare):
        faults = [found.keys[int(row)].as_py() for row in bare[:5]]
        raise LabelError(
            f"{listing.shown}: {len(bare):,} pictures lie in no class folder: {some(faults, len(bare))}; "
            "move each into a folder named like its class, or give the URL of a manifest (CSV or Parquet)"
        )
    names = pc.list_element(pc.split_pattern(found.keys, "/", max_splits=1), 0)
    classes = sorted(pc.unique(names).to_pylist())
    labels = pc.index_in(names, value_set=pa.array(classes, names.type))
    return Samples.build(
        listing.store.url,
        classes,
        keys=found.keys,
        sizes=found.sizes,
        etags=found.etags,
        labels=labels.to_numpy().astype(np.int64),
        num_ignored=len(listing) - len(found),
    )

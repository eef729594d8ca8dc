"""Puts the pictures into the store, once in the format of each side."""

from __future__ import annotations

import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import obstore
from obstore.store import from_url

from bench.peers.common import BUCKET
from bench.peers.worker import FILES
from headwater.data.layouts import list_samples

# headwater and Ray Data read the plain side's class folders.
ITS_OWN = ("plain", "webdataset", "litdata", "mosaic")


def prepare(folder: str, sides: list[str], under: str = "") -> dict[str, int]:
    """Upload the class folders at `folder`, below `under`; how many objects each side has. Runs in a host that reaches
    the store."""
    listed = list_samples(folder)
    keys, labels = listed.keys.to_pylist(), listed.labels.tolist()
    samples = [(key, label, Path(folder, key).read_bytes()) for key, label in zip(keys, labels, strict=True)]
    # As the peers' documents advise: what is packed together should be mixed before, so that an epoch can be read
    # nearly in the order of the files.
    random.Random(0).shuffle(samples)
    under = f"{under}/" if under else ""
    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True}, virtual_hosted_style_request=False)
    counts = {}
    for side in (side for side in sides if side in ITS_OWN):
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
            root = Path(scratch, side)
            import_module(f"bench.peers.{FILES[side]}").prepare(samples, root)
            files = [Path(where, name) for where, _, names in os.walk(root) for name in names]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda file: obstore.put(store, f"{under}{side}/{file.relative_to(root)}", file), files))  # noqa: B023
            counts[side] = len(files)
    return counts

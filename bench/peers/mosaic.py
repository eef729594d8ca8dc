"""mosaicml-streaming: MDS shards that are downloaded whole into a local folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bench.models import torchvision
from bench.peers.common import BATCH, Learner, Place, collate

# A shard has to be there as a whole before its first picture is used: at 2 Mbit/s, the default of 64 MB would take four
# minutes. At 0.5 MB (22 pictures) it is 2 s there, and on fast links requests are still few.
SHARD_BYTES = 1 << 19
# The default shuffles over 262,144 pictures, so the first batch would need every shard. Blocks of about a shard and a
# half mix neighbours, and the first batch comes early.
SHUFFLE, SHUFFLE_BLOCK = "py1br", 32
AHEAD = 256  # pictures; the default is 8 batches, too
WORKERS = 0


def prepare(samples: list[tuple[str, int, bytes]], folder: Path) -> None:
    torchvision()
    from streaming import MDSWriter

    columns = {"jpeg": "bytes", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=SHARD_BYTES, progress_bar=False) as writer:
        for _, label, data in samples:
            writer.write({"jpeg": data, "label": label})


def batches(place: Place, learner: Learner, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
    torchvision()
    os.environ["S3_ENDPOINT_URL"] = place.endpoint
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Pictures(StreamingDataset):
        def __getitem__(self, at: Any) -> tuple[np.ndarray, int]:
            item = super().__getitem__(at)
            return learner.pixels(item["jpeg"]), int(item["label"])

    clean_stale_shared_memory()  # of the epoch before
    local = place.scratch / "mosaic"
    shutil.rmtree(local, ignore_errors=True)  # cold
    data = Pictures(
        remote=place.url("mosaic"),
        local=str(local),
        shuffle=True,
        shuffle_seed=epoch,
        shuffle_algo=SHUFFLE,
        shuffle_block_size=SHUFFLE_BLOCK,
        num_canonical_nodes=1,
        batch_size=BATCH,
        predownload=AHEAD,
    )
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate)


def close() -> None:
    """It leaves named shared memory behind, which outlives the process."""
    import gc

    from streaming.base.util import clean_stale_shared_memory

    gc.collect()
    clean_stale_shared_memory()

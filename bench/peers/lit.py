"""LitData: chunks that are downloaded whole into a local folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from bench.peers.common import BATCH, Learner, Place, collate

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # there is no way out of the rig's network

# A chunk has to be there as a whole before its first picture is used: at 2 Mbit/s, the default of 64 MB would take four
# minutes. At 1 MB (45 pictures) it is 4 s there, and on fast links requests are still few.
CHUNK_BYTES = 1 << 20
# Chunks downloaded at once: below which Mbit/s, how many. They share the link, and none is of use before it is whole:
# at 10 Mbit/s, with the default of 8 the first batch took 9.6 s, with one 1.5 s.
DOWNLOADS = ((50, 1), (float("inf"), 8))
AHEAD = 4  # chunks; the default is 2
# It downloads in a thread of its own anyway, and there is one core: a worker process only added its start (the first
# batch after 1.8 s instead of 0.7 s at 1000 Mbit/s).
WORKERS = 0


def prepare(samples: list[tuple[str, int, bytes]], folder: Path) -> None:
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes=CHUNK_BYTES)
    for number, (_, label, data) in enumerate(samples):
        writer[number] = {"jpeg": data, "label": label}
    writer.done()
    writer.merge()


def batches(place: Place, learner: Learner, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
    import litdata
    from litdata.streaming import downloader

    # It reads chunks by obstore, its fastest way, and has no setting for a store without TLS.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    downloads = next(count for below, count in DOWNLOADS if place.mbit_per_s < below)
    os.environ["LITDATA_ASYNC_DOWNLOAD_CONCURRENCY"] = str(downloads)
    cache = place.scratch / "litdata"
    shutil.rmtree(cache, ignore_errors=True)  # cold
    cache.mkdir(parents=True)
    data = litdata.StreamingDataset(
        place.url("litdata"),
        cache_dir=str(cache),
        shuffle=True,
        seed=epoch,
        drop_last=False,
        storage_options={"endpoint_url": place.endpoint},
        max_pre_download=AHEAD,
        max_cache_size="10GB",
        transform=partial(sample, learner),
    )
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, collate_fn=collate)


def sample(learner: Learner, item: dict[str, Any]) -> tuple[np.ndarray, int]:
    return learner.pixels(item["jpeg"]), int(item["label"])

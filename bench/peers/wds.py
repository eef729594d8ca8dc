"""WebDataset: tars that are streamed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import webdataset
from torch import Tensor

from bench.peers.common import BATCH, BUCKET, Learner, Place, collate, in_batches

# A tar is streamed, so its size hardly matters to a thin link; at 2 MB (90 pictures) the epoch has enough of them to
# shuffle, and opening one (a process and a connection) comes once in three batches.
SHARD_BYTES = 2 << 20
# The buffer that pictures are drawn from. Small, since it fills before the first batch is complete: with 64, the first
# one took 8.1 s at 2 Mbit/s, with 16 5.5 s. The tars are written mixed.
SHUFFLE, SHUFFLE_FROM = 16, 1
# Processes: below which Mbit/s, how many. A worker reads on while a step runs, which a thin link needs; on a fast link
# and one core it is only one more process (1000 Mbit/s: 133 pictures/s with it, 164 without; 10 Mbit/s, once it flows:
# 48 with it, 44 without; MobileNetV3-small, a shared machine).
WORKERS = ((200, 1), (float("inf"), 0))
PREFETCH = 2


def prepare(samples: list[tuple[str, int, bytes]], folder: Path) -> None:
    folder.mkdir(parents=True)
    with webdataset.ShardWriter(f"{folder}/%06d.tar", maxsize=SHARD_BYTES, maxcount=10**9, verbose=0) as writer:
        for number, (_, label, data) in enumerate(samples):
            writer.write({"__key__": f"{number:06d}", "jpg": data, "cls": label})


def urls(place: Place, prefix: str) -> list[str]:
    """Signed addresses: WebDataset reads http by curl, and has no credentials of its own for a private store."""
    import boto3

    client = boto3.client("s3", endpoint_url=place.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return [
        client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key}, ExpiresIn=86400) for key in keys
    ]


def batches(place: Place, learner: Learner, epoch: int, prefix: str = "webdataset/") -> Iterable[tuple[Tensor, Tensor]]:
    shards = [f"pipe:curl --silent --fail '{url}'" for url in urls(place, prefix)]

    def sample(entry: dict[str, bytes]) -> tuple[object, int]:
        return learner.pixels(entry["jpg"]), int(entry["cls"])

    data = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), seed=epoch, nodesplitter=None, empty_check=False)
        .shuffle(SHUFFLE, initial=SHUFFLE_FROM)
        .map(sample)
    )
    workers = next(count for below, count in WORKERS if place.mbit_per_s < below)
    if workers == 0:
        return in_batches(iter(data))
    return webdataset.WebLoader(
        data.batched(BATCH, collation_fn=collate), batch_size=None, num_workers=workers, prefetch_factor=PREFETCH
    )

"""WebDataset: tars that are streamed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import webdataset
from torch import Tensor

from bench.peers.common import BUCKET, Learner, Place, collate, in_batches

# A tar is streamed, so its size hardly matters to a thin link; at 2 MB (90 pictures) the epoch has enough of them to
# shuffle, and opening one (a process and a connection) comes once in three batches.
SHARD_BYTES = 2 << 20
# The buffer that pictures are drawn from; it starts to give as soon as it holds a few, so the first batch isn't late.
SHUFFLE, SHUFFLE_FROM = 64, 8
WORKERS, PREFETCH = 1, 2


def prepare(samples: list[tuple[str, int, bytes]], folder: Path) -> None:
    folder.mkdir(parents=True)
    with webdataset.ShardWriter(f"{folder}/%06d.tar", maxsize=SHARD_BYTES, maxcount=10**9, verbose=0) as writer:
        for number, (_, label, data) in enumerate(samples):
            writer.write({"__key__": f"{number:06d}", "jpg": data, "cls": label})


def urls(place: Place) -> list[str]:
    """Signed addresses: WebDataset reads http by curl, and has no credentials of its own for a private store."""
    import boto3

    client = boto3.client("s3", endpoint_url=place.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix="webdataset/")
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return [
        client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": key}, ExpiresIn=86400) for key in keys
    ]


def batches(place: Place, learner: Learner, epoch: int, workers: int = WORKERS) -> Iterable[tuple[Tensor, Tensor]]:
    shards = [f"pipe:curl --silent --fail '{url}'" for url in urls(place)]

    def sample(entry: dict[str, bytes]) -> tuple[object, int]:
        return learner.pixels(entry["jpg"]), int(entry["cls"])

    data = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), seed=epoch, nodesplitter=None, empty_check=False)
        .shuffle(SHUFFLE, initial=SHUFFLE_FROM)
        .map(sample)
    )
    if workers == 0:
        return in_batches(iter(data))
    return webdataset.WebLoader(
        data.batched(32, collation_fn=collate), batch_size=None, num_workers=workers, prefetch_factor=PREFETCH
    )

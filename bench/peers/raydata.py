"""Ray Data: decode and the frozen part in an actor on the storage host, features to the trainer.

The cluster has its head beside the trainer, with no CPU of its own to give, and one Ray node in the storage host. Its
tokens stay on, with a token of this run. Nothing but keys and descriptions of work goes there: the actor builds the
model from the packages that are installed on either side, as a user with thin links would have it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.models import keep_blocks
from bench.peers.common import BATCH, Learner, Place
from bench.peers.plain import listing, open_bucket

PORT = 6379
# One task at a time: it fills the core.
RESOURCES = {"storage": 1}
BLOCK = 32  # pictures a task: a batch, so that the first one comes early, and what a block costs is spread over it
READERS = 16
AHEAD = 8  # batches on their way to the trainer
_OBJECT_STORE_BYTES = 200 << 20


def start_command(address: str, head: str, scratch: Path) -> list[str]:
    """What starts the Ray node of the host at `address`; the head if that is its own."""
    program = shutil.which("ray", path=os.path.dirname(sys.executable)) or "ray"
    common = [
        program, "start", "--block", f"--node-ip-address={address}", "--disable-usage-stats", "--log-style=record",
        f"--temp-dir={scratch / 'ray'}", f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-log-monitor=false",
    ]  # fmt: skip
    if address == head:
        return [*common, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
    return [*common, f"--address={head}:{PORT}", "--num-cpus=1", '--resources={"storage": 1}']


def open_(place: Place, learner: Learner) -> None:
    """Join the cluster."""
    import logging

    import ray

    ray.init(address=f"{os.environ['RAY_HEAD']}:{PORT}", logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False


def close() -> None:
    import ray

    ray.shutdown()


def batches(place: Place, learner: Learner, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
    import ray

    # One stage that reads, decodes and infers: with read_binary_files before it, Ray read all files before the first
    # one was decoded. An actor, since tasks built the model anew (2 s for each).
    _, keys, labels = listing(place.url("plain"))
    order = np.random.default_rng(epoch).permutation(len(keys))
    data = ray.data.from_items(
        [{"key": keys[number], "label": labels[number]} for number in order],
        override_num_blocks=-(-len(keys) // BLOCK),
    ).map_batches(
        Features,
        batch_size=BLOCK,
        fn_constructor_args=(place.url("plain"), learner.name, place.num_classes),
        compute=ray.data.ActorPoolStrategy(size=1),
        resources=RESOURCES,
        num_cpus=1,
    )
    stream = iter(data.iter_torch_batches(batch_size=BATCH, prefetch_batches=AHEAD, device="cpu"))
    # An actor starts with each epoch, for seconds. Ray's favour: the clock starts when its first batch is here.
    first = next(stream)
    return ((batch["features"], batch["label"]) for batch in chain([first], stream))


class Features:
    """Runs beside the storage, and keeps model and connections. Features go as fp16, as Headwater's may."""

    def __init__(self, url: str, model: str, num_classes: int) -> None:
        keep_blocks()
        torch.set_num_threads(1)
        self._learner = Learner(model, num_classes)
        self._store, self._pool = open_bucket(url), ThreadPoolExecutor(READERS)

    def __call__(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        data = self._pool.map(lambda key: self._store.get(key).bytes(), batch["key"])
        pixels = torch.from_numpy(np.stack([self._learner.pixels(each) for each in data]))
        return {"features": self._learner.frozen(pixels).half().numpy(), "label": batch["label"]}

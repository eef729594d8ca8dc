"""Ray Data: decode and the frozen part in tasks on the storage host, features to the trainer.

The cluster has its head beside the trainer, with no CPU of its own to give, and one Ray node in the storage host. Its
tokens stay on, with a token of this run. Nothing but paths and task descriptions goes there: tasks build the model from
the packages that are installed on either side, as a user with thin links would have it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from torch import Tensor

from bench.peers.common import BATCH, BUCKET, Learner, Place, keep_freed_memory

PORT = 6379
# Fractions keep Ray from starting a second task beside the one that fills the core.
RESOURCES = {"storage": 1}
BLOCK = 32  # pictures a task: a batch, so that the first one comes early, and a task's overhead is spread over it
AHEAD = 8  # batches on their way to the trainer
_OBJECT_STORE_BYTES = 200 << 20


def start_command(address: str, head: str, scratch: Path) -> list[str]:
    """What starts the Ray node of the host at `address`; the head if that is its own."""
    program = shutil.which("ray", path=os.path.dirname(os.sys.executable)) or "ray"
    common = [
        program, "start", "--block", f"--node-ip-address={address}", "--disable-usage-stats", "--log-style=record",
        f"--temp-dir={scratch / 'ray'}", f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-log-monitor=false",
    ]  # fmt: skip
    if address == head:
        return [*common, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
    return [*common, f"--address={head}:{PORT}", "--num-cpus=1", '--resources={"storage": 1}']


def open_(place: Place, learner: Learner) -> None:
    """Join the cluster, and let its workers import and build once: a job would have long done so."""
    import logging

    import ray

    ray.init(address=f"{os.environ['RAY_HEAD']}:{PORT}", logging_level=logging.ERROR, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    stream = iter(batches(place, learner, 0))
    next(stream)
    stream.close()


def close() -> None:
    import ray

    ray.shutdown()


def batches(place: Place, learner: Learner, epoch: int) -> Iterable[tuple[Tensor, Tensor]]:
    import ray
    from pyarrow.fs import S3FileSystem
    from ray.data import FileShuffleConfig

    endpoint = urlparse(place.endpoint)
    files = S3FileSystem(
        access_key=os.environ["AWS_ACCESS_KEY_ID"], secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        endpoint_override=endpoint.netloc, scheme=endpoint.scheme, region=os.environ["AWS_REGION"],
    )  # fmt: skip
    data = ray.data.read_binary_files(
        f"{BUCKET}/plain/",
        filesystem=files,
        include_paths=True,
        shuffle=FileShuffleConfig(seed=epoch),
        override_num_blocks=-(-place.num_pictures // BLOCK),
        ray_remote_args={"resources": RESOURCES, "num_cpus": 1},
    ).map_batches(
        features,
        batch_size=BLOCK,
        fn_kwargs={"model": learner.name, "num_classes": place.num_classes},
        resources=RESOURCES,
        num_cpus=1,
    )

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in data.iter_torch_batches(batch_size=BATCH, prefetch_batches=AHEAD, device="cpu"):
            yield batch["features"], batch["label"]

    return stream()


@lru_cache
def worker_learner(model: str, num_classes: int) -> Learner:
    keep_freed_memory()
    torch.set_num_threads(1)
    return Learner(model, num_classes)


def features(batch: dict[str, Any], model: str, num_classes: int) -> dict[str, np.ndarray]:
    """Runs beside the storage. Features go as fp16, as Headwater's do."""
    learner = worker_learner(model, num_classes)
    pixels = torch.from_numpy(np.stack([learner.pixels(data) for data in batch["bytes"]]))
    # Class folders are named by number.
    labels = np.array([int(path.rsplit("/", 2)[1]) for path in batch["path"]], np.int64)
    return {"features": learner.frozen(pixels).half().numpy(), "label": labels}

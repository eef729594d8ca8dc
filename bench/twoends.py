"""The trainer of `bench prongs`, run in a host of the rig: models that are trained in full, and the ways to feed them.

Owns what a measurement is there: one whole epoch, every picture once, from asking for the first batch to the end of the
last step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, Dataset

import headwater as hw
from bench.models import keep_blocks, torchvision
from bench.peers.common import BUCKET, Place, collate
from bench.peers.plain import open_bucket
from headwater.core.draw import Draw
from headwater.core.plan import FILE, WIRE, near_plan
from headwater.core.prongs import STRATEGIES
from headwater.data.transforms import (
    ColorJitter,
    HorizontalFlip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    ToFloat,
    Transforms,
)

BATCH = 32
NUM_STEPS = 20  # that are measured alone
NUM_CLASSES = 100
_VALUES = [ToFloat(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
PIPELINES = {
    "imagenet": Transforms([RandomResizedCrop(224), HorizontalFlip(), ColorJitter(0.4, 0.4, 0.4), *_VALUES]),
    "cifar": Transforms([RandomCrop(32, padding=4), HorizontalFlip(), *_VALUES]),
}
CPU, LOADER, WEBDATASET = "cpu only", "DataLoader", "webdataset"


class Block(nn.Module):
    """Two convolutions and a way round them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm_one = nn.BatchNorm2d(after)
        self.two = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_two = nn.BatchNorm2d(after)
        self.way = nn.Sequential()
        if stride > 1 or before != after:
            self.way = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_two(self.two(relu(self.norm_one(self.one(x)))))
        return relu(inner + self.way(x))


def residual(widths: tuple[int, ...], stem_stride: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, stem_stride, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    if stem_stride > 1:
        layers.append(nn.MaxPool2d(2))
    for before, after in pairwise(widths):
        layers.append(Block(before, after, 2 if after > before else 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], NUM_CLASSES))


def vit(size: int, patch: int) -> nn.Module:
    torchvision()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=size, patch_size=patch, embed_dim=64, depth=3, num_heads=4, num_classes=NUM_CLASSES
    )


# (pipeline, model) → how it is made; small, since one core without an accelerator trains them
MODELS: dict[tuple[str, str], Callable[[], nn.Module]] = {
    ("imagenet", "resnet"): lambda: residual((8, 8, 16, 32), 4),
    ("imagenet", "wrn"): lambda: residual((8, 16, 32, 64), 4),
    ("imagenet", "vit"): lambda: vit(224, 32),
    ("cifar", "resnet"): lambda: residual((8, 8, 16, 32), 1),
    ("cifar", "wrn"): lambda: residual((8, 16, 32, 64), 1),
    ("cifar", "vit"): lambda: vit(32, 4),
}


class Stored(Dataset[tuple[np.ndarray, int]]):
    """Pictures of the store for a plain DataLoader: read and made one by one, in a worker process."""

    def __init__(self, url: str, keys: list[str], labels: list[int], transforms: Transforms) -> None:
        self._url, self._keys, self._labels = url, keys, labels
        self._transforms = transforms
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._store: Any = None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        self._store = self._store or open_bucket(self._url)
        data = self._store.get(self._keys[number]).bytes()
        pixels = self._transforms.pixels(data, self._keys[number], Draw(0, int(self.epoch), number))
        return pixels, self._labels[number]


class Trainer:
    """One model and pipeline at a time, fed in several ways."""

    def __init__(self, scratch: str, node: str, pipeline: str, model: str, mbit_per_s: float) -> None:
        keep_blocks()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._node, self._url = node, f"s3://{BUCKET}/{pipeline}/plain"
        self._place, self._mbit_per_s = Place(Path(scratch), 0, NUM_CLASSES), mbit_per_s
        self._pipeline, self._transforms = pipeline, PIPELINES[pipeline]
        self._model = MODELS[pipeline, model]().train()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._jobs: dict[str, hw.Job] = {}
        self._loader: DataLoader[Any] | None = None

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def open(self, sides: list[str]) -> dict[str, Any]:
        """Plan for the machines as they are now; the trainer's share that each strategy begins with."""
        self.close()
        for side in sides:
            if side not in (LOADER, WEBDATASET):
                self._jobs[side] = self._job(side)
        return {side: job.plan.to_json() for side, job in self._jobs.items()}

    def _job(self, side: str) -> hw.Job:
        options: dict[str, Any] = {"prongs": side} if side in STRATEGIES else {"plan": hw.Plan()}
        job = hw.near(self._model, self._url, transforms=self._transforms, nodes=[self._node], batch_size=BATCH,
                      seed=0, **options)  # fmt: skip
        if job._watch is not None:
            job._watch.close()  # the plan stays what it is, so that rounds can be compared
        return job

    def alone(self) -> dict[str, float]:
        """Each stage with nothing beside it, in seconds a picture: the step, this machine's preprocessing, the nodes';
        and what taking pixels from nodes costs here."""
        job = self._jobs[CPU]
        # Other pictures each time, as in an epoch: those of the step before would still be in the processor's cache.
        batches = list(islice(job.loader, NUM_STEPS))
        step_s = statistics.median(self._timed(x, y) / len(y) for x, y in batches)
        cpu_s, _ = self._drained(job)
        job.adopt(near_plan(job.cuts[0], chunk_rows=BATCH, node_batch=BATCH))
        node_s, receive_s = self._drained(job)
        job.adopt(hw.Plan())
        return {"step_s": step_s, "cpu_s": cpu_s, "node_s": node_s, "receive_s": receive_s}

    def direct(self, node: str, rounds: int) -> dict[str, float]:
        """Pixels from this node over the wire and as files, in turns: seconds a picture, and CPU-seconds here."""
        found: dict[str, list[tuple[float, float]]] = {WIRE: [], FILE: []}
        with hw.near(self._model, self._url, transforms=self._transforms, nodes=[node], batch_size=BATCH, seed=0,
                     plan=None, cut="input") as job:  # fmt: skip
            for number in range(1 + rounds):  # the first warms up
                for way in found:
                    job.adopt(near_plan(job.cuts[0], chunk_rows=BATCH, node_batch=BATCH, hand_over=way))
                    taken = self._drained(job)
                    if number:
                        found[way].append(taken)
        medians = {way: [statistics.median(each) for each in zip(*some, strict=True)] for way, some in found.items()}
        return {f"{way}_{name}": value for way, pair in medians.items()
                for name, value in zip(("s", "cpu_s"), pair, strict=True)}  # fmt: skip

    def _timed(self, x: Tensor, y: Tensor) -> float:
        start = time.perf_counter()
        self._step(x, y)
        return time.perf_counter() - start

    def _drained(self, job: hw.Job) -> tuple[float, float]:
        """An epoch that nobody trains on: seconds, and CPU-seconds here, a picture; its start is left out."""
        images, start, cpu = 0, 0.0, 0.0
        for number, (_, y) in enumerate(job.loader):
            if number == 1:
                start, cpu, images = time.perf_counter(), time.process_time(), 0
            images += len(y)
        return (time.perf_counter() - start) / images, (time.process_time() - cpu) / images

    def epoch(self, side: str, number: int) -> dict[str, float]:
        """A whole one."""
        share = self._jobs[side].plan.host_share if side in self._jobs else None  # under mte, of this epoch
        batches = self._batches(side, number)
        begin, images = time.perf_counter(), 0
        for x, y in batches:
            self._step(x, y)
            images += len(y)
        found = {"images": images, "seconds": time.perf_counter() - begin}
        return found if share is None else {**found, "share": share}

    def _batches(self, side: str, number: int) -> Iterable[tuple[Tensor, Tensor]]:
        if side in self._jobs:
            self._jobs[side].loader.set_epoch(number)
            return self._jobs[side].loader
        if side == LOADER:
            return self._floats(self._plain_loader(number))
        from bench.peers import wds

        counter = iter(range(1 << 40))

        def pixels(data: bytes) -> np.ndarray:
            return self._transforms.pixels(data, "", Draw(0, number, next(counter)))

        place = SimpleNamespace(endpoint=self._place.endpoint, mbit_per_s=self._mbit_per_s)
        return self._floats(wds.batches(place, SimpleNamespace(pixels=pixels), number, f"{self._pipeline}/webdataset/"))

    def _plain_loader(self, epoch: int) -> DataLoader[Any]:
        """One worker, since there is one core; it lives on from epoch to epoch."""
        if self._loader is None:
            samples = self._jobs[CPU].samples
            stored = Stored(self._url, samples.keys.to_pylist(), samples.labels.tolist(), self._transforms)
            self._loader = DataLoader(stored, BATCH, shuffle=True, num_workers=1, collate_fn=collate, prefetch_factor=4,
                                      multiprocessing_context="spawn", persistent_workers=True)  # fmt: skip
        stored = self._loader.dataset
        stored.epoch.fill_(epoch)
        return self._loader

    def _floats(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for pixels, labels in batches:
            yield torch.from_numpy(self._transforms.finish(pixels.numpy())), labels

    def _step(self, x: Tensor, y: Tensor) -> None:
        loss = cross_entropy(self._model(x), y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def usage(self, side: str) -> dict[str, Any]:
        """What each tier took since this was last asked."""
        return {name: each.to_json() for name, each in self._jobs[side].usage().items()}

    def close(self) -> None:
        for job in self._jobs.values():
            job.close()
        self._jobs.clear()
        self._loader = None

"""What runs in the trainer's host of `bench partition`: jobs with the same model, cut in different places, step by
step."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.codecs import wire_row_bytes
from headwater.data.transforms import Normalize, Resize, ToFloat, Transforms
from headwater.train.partition import PartitionJob

SIZE = 64
PIXELS = Transforms([Resize((SIZE, SIZE)), ToFloat(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
CODEC = "fp16"


def vgg(num_classes: int) -> nn.Module:
    """Seven convolutions, no batch-norm: batches go through in parts."""
    widths = ((3, 12), (12, 24, 24), (24, 48, 48), (48, 96, 96))
    blocks = []
    for block in widths:
        layers: list[nn.Module] = []
        for wide_in, wide_out in pairwise(block):
            layers += [nn.Conv2d(wide_in, wide_out, 3, padding=1), nn.ReLU(inplace=True)]
        blocks.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(96 * 16, num_classes))


def vgg_bn(num_classes: int) -> nn.Module:
    """The same with batch-norms, whose statistics are those of the whole batch: nodes and trainer take turns."""
    model = vgg(num_classes)
    for place, block in enumerate(model):
        if isinstance(block, nn.Sequential):
            layers: list[nn.Module] = []
            for layer in block:
                layers.append(layer)
                if isinstance(layer, nn.Conv2d):
                    layers.append(nn.BatchNorm2d(layer.out_channels))
            model[place] = nn.Sequential(*layers)
    return model


MODELS = {"vgg": vgg, "vgg_bn": vgg_bn}


class Trainer:
    """Jobs by name. Each has a model and an optimizer of its own, which begin alike."""

    def __init__(self, url: str, model: str, num_classes: int, batch_size: int) -> None:
        torch.set_num_threads(1)
        self._url, self._model = url, model
        self._num_classes, self._batch_size = num_classes, batch_size
        self._jobs: dict[str, tuple[PartitionJob, Any, Any]] = {}

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def open(self, side: str, nodes: list[str] | None, cut: str) -> dict[str, Any]:
        """A job, and its first step."""
        self.close(side)
        torch.manual_seed(0)
        model = MODELS[self._model](self._num_classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        start = time.perf_counter()
        job = hw.partition(model, self._url, transforms=PIXELS, nodes=nodes, cut=cut, batch_size=self._batch_size,
                           drop_last=True, codec=CODEC, patience_s=120)  # fmt: skip
        opened_s = time.perf_counter() - start
        self._jobs[side] = job, optimizer, iter(())
        self.steps(side, 1)
        plan = job.plan
        cut_at = job.cuts[plan.cut_index]
        crossing = wire_row_bytes(plan.codec, cut_at.boundary) if plan.cut_index else PIXELS.pixel_spec.row_bytes
        estimate = {tuple_of(each): seconds for seconds, each in job.ranking}.get(tuple_of(plan))
        return {"cut": plan.cut_name, "place": plan.place, "codec": plan.codec, "micro_batches": job.num_micro,
                "row_bytes": crossing, "opened_s": opened_s, "estimate_s": estimate,
                "plan": job.describe()}  # fmt: skip

    def steps(self, side: str, count: int) -> list[float]:
        """Seconds of each of so many steps."""
        found: list[float] = []
        for _ in range(count):
            job, optimizer, batches = self._jobs[side]
            batch = next(batches, None)
            if batch is None:  # the next epoch
                batches = iter(job.steps())
                self._jobs[side] = job, optimizer, batches
                batch = next(batches)
            start = time.perf_counter()
            optimizer.zero_grad()
            batch.backward(cross_entropy)
            optimizer.step()
            found.append(time.perf_counter() - start)
        return found

    def close(self, side: str) -> None:
        if side in self._jobs:
            self._jobs.pop(side)[0].close()

    def close_all(self) -> None:
        for side in list(self._jobs):
            self.close(side)


def tuple_of(plan: Any) -> tuple[Any, ...]:
    return plan.place, plan.cut_index, plan.codec, plan.micro_batches

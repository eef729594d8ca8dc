"""What `bench reduce` runs in a worker's host. Owns `Worker`: all-reduces and training steps by Gloo and by Headwater.

All hosts are one machine, so they share a clock: each measured all-reduce begins at a moment that all workers agreed on
beforehand, with links idle, and ends when the last worker has its sum.
"""

from __future__ import annotations

import hashlib
import math
import resource
import time
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.lossy import LossyWire
from bench.reduce import WAYS
from headwater.reduce import Reducer, attach

AHEAD_S = 0.03  # of a start; a link's burst is full again after 4 ms
BUCKET_MB = 2.0  # so that there is something to overlap in small models


class Worker:
    """One worker, of a Gloo group and of a job on the aggregator."""

    def __init__(self, rank: int, num_workers: int, meet: str, switch: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://{meet}", rank=rank, world_size=num_workers,
                                timeout=timedelta(seconds=120))  # fmt: skip
        self._rank, self._num_workers, self._switch = rank, num_workers, switch
        self._reducer = Reducer(switch, rank=rank, num_workers=num_workers, job=f"sums-{num_workers}")
        self._by_packets = Reducer(switch, rank=rank, num_workers=num_workers, job=f"packets-{num_workers}", lane="udp")
        self._trained: dict[str, Any] = {}

    def __call__(self, do: str, **about: Any) -> Any:
        return getattr(self, do)(**about)

    def close(self) -> None:
        self._reducer.close()
        self._by_packets.close()

    # All-reduces

    def all_reduce(self, num_bytes: int, repeats: int) -> list[dict[str, float]]:
        """In turns; per turn and way: begin and end by the shared clock, and CPU seconds, own and the kernel's."""
        values = np.random.default_rng(self._rank).standard_normal(num_bytes // 4).astype(np.float32)
        found = []
        for turn in range(repeats + 1):
            one: dict[str, float] = {}
            ways = WAYS if turn % 2 == 0 else WAYS[::-1]
            for way in ways:
                mine = values.copy()
                tensor = torch.from_numpy(mine)
                one[f"{way}_begin"] = self._start_together()
                before = resource.getrusage(resource.RUSAGE_SELF)
                if way == "gloo":
                    dist.all_reduce(tensor)
                elif way == "headwater":
                    self._reducer.all_reduce(mine)
                else:
                    self._by_packets.all_reduce(mine)
                one[f"{way}_end"] = time.monotonic()
                after = resource.getrusage(resource.RUSAGE_SELF)
                one[f"{way}_user_s"] = after.ru_utime - before.ru_utime
                one[f"{way}_kernel_s"] = after.ru_stime - before.ru_stime
            found.append(one)
        return found[1:]  # the first one warms up both

    def _start_together(self) -> float:
        """Wait until a moment that is the same for all; that moment."""
        dist.barrier()
        moment = torch.tensor([time.monotonic() + AHEAD_S], dtype=torch.float64)
        dist.broadcast(moment, src=0)
        begin = float(moment)
        time.sleep(max(0.0, begin - time.monotonic()))
        return begin

    def faulty(self, num_bytes: int, loss: float, double: float, reorder: float, repeats: int) -> dict[str, Any]:
        """The same sum over a wire with faults: seconds, a digest, and what was lost."""
        values = np.random.default_rng(self._rank).standard_normal(num_bytes // 4).astype(np.float32)
        make = partial(LossyWire, loss=loss, double=double, reorder=reorder, seed=self._rank)
        found: dict[str, Any] = {"begins": [], "ends": []}
        with Reducer(self._switch, rank=self._rank, num_workers=self._num_workers, job=f"faulty-{loss}-{double}",
                     lane="udp", make_wire=make) as reducer:  # fmt: skip
            for _ in range(repeats):
                mine = values.copy()
                found["begins"].append(self._start_together())
                reducer.all_reduce(mine)
                found["ends"].append(time.monotonic())
            wire: Any = reducer.stream.wire
            dist.barrier()  # nobody leaves while another still asks
            return {**found, "digest": hashlib.sha256(mine.tobytes()).hexdigest(), "lost": wire.num_lost,
                    "doubled": wire.num_doubled, "reordered": wire.num_reordered}  # fmt: skip

    # Training

    def train(self, model: str, steps: int) -> dict[str, Any]:
        """Steps in turns: without sums, with Gloo's, with Headwater's. Per way: medians of step, backward and CPU."""
        torch.manual_seed(0)
        data = _batch(model, self._rank)
        gloo = DistributedDataParallel(_build(model), bucket_cap_mb=BUCKET_MB)
        torch.manual_seed(0)
        ours = DistributedDataParallel(_build(model), bucket_cap_mb=BUCKET_MB)
        attached = attach(ours, switch=self._switch, job=f"train-{model}")
        found: dict[str, list[tuple[float, float, float]]] = {"alone": [], "gloo": [], "headwater": []}
        for turn in range(steps + 2):  # DDP makes its buckets anew after the first
            for way in found if turn % 2 == 0 else reversed(found):
                wrapped = ours if way == "headwater" else gloo
                dist.barrier()
                one = _step(wrapped, data, is_alone=way == "alone")
                if turn >= 2:
                    found[way].append(one)
        stats = attached.stats
        attached.detach()
        num_bytes = sum(each.numel() * 4 for each in ours.parameters())
        return {"ways": found, "num_bytes": num_bytes, "stats": stats}


def _step(wrapped: DistributedDataParallel, data: tuple[torch.Tensor, torch.Tensor], *, is_alone: bool) -> Any:
    """Seconds of a step and of its backward, and CPU seconds."""
    x, y = data
    cpu, begin = time.process_time(), time.monotonic()
    wrapped.zero_grad(set_to_none=False)
    if is_alone:
        with wrapped.no_sync():
            loss = nn.functional.cross_entropy(wrapped(x).flatten(0, -2), y.flatten())
            middle = time.monotonic()
            loss.backward()
    else:
        loss = nn.functional.cross_entropy(wrapped(x).flatten(0, -2), y.flatten())
        middle = time.monotonic()
        loss.backward()
    end = time.monotonic()
    with torch.no_grad():
        for each in wrapped.parameters():
            assert each.grad is not None
            each.add_(each.grad, alpha=-1e-3)
    return time.monotonic() - begin, end - middle, time.process_time() - cpu


class Gpt(nn.Module):
    """A small model of the kind of GPT: causal attention over 64 tokens."""

    def __init__(self, width: int = 256, depth: int = 4, words: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1)
        found: torch.Tensor = self.head(self.layers(self.words(x) + self.places(torch.arange(length)), mask=mask))
        return found


class Residual(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                                  nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(x + self.body(x))


def _build(model: str) -> nn.Module:
    if model == "gpt":
        return Gpt()
    layers: list[nn.Module] = []
    before = 3
    for width in (32, 96, 256):  # most parameters are in the last part, as in ResNets
        layers += [nn.Conv2d(before, width, 3, stride=2, padding=1), Residual(width), Residual(width)]
        before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 100))


def _batch(model: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    if model == "gpt":
        return torch.randint(0, 512, (4, 64), generator=drawn), torch.randint(0, 512, (4, 64), generator=drawn)
    return torch.randn(16, 3, 32, 32, generator=drawn), torch.randint(0, 100, (16,), generator=drawn)

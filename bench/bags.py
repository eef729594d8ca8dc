"""The trainer of `bench embedding`: a DLRM-shaped model whose tables are near the storage, or mapped from its own disk.

Owns `Trainer`, which takes steps one way or the other when asked, and the stream of ids that all ways get.

Bags are those of MLPerf's DLRM-DCNv2: 26 features with 1 to 100 ids each, 214 for a sample. Ids are Zipf-distributed
over each feature's part of one table, and scattered, so that popular ones are not neighbours.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import headwater as hw
from headwater.core.bags import Bags, Sorting, gradients, pool
from headwater.core.table import TableSpec, initial

BATCH, DIM, DENSE = 64, 128, 13
POOLING = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
ZIPF = 1.05
SCALE, LR = 0.01, 0.05
_SCATTER = 2_654_435_761  # a prime: times it, modulo a smaller number, every rank has an id of its own


def batch(number: int, num_vectors: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets of step `number`: sample after sample, feature after feature."""
    generator = np.random.default_rng(number)
    per_feature = num_vectors // len(POOLING)
    lengths = np.tile(POOLING, BATCH)
    drawn = generator.random(lengths.sum())
    # The inverse of a bounded Zipf distribution's sum, as an integral.
    ranks = (((per_feature ** (1 - ZIPF) - 1) * drawn + 1) ** (1 / (1 - ZIPF))).astype(np.int64) - 1
    features = np.repeat(np.tile(np.arange(len(POOLING)), BATCH), lengths)
    ids = features * per_feature + ranks.clip(0, per_feature - 1) * _SCATTER % per_feature
    return torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths)


class Mapped(torch.autograd.Function):
    """Bags of a table that is mapped from this machine's disk; the backward pass trains it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, table: MappedTable, ids: torch.Tensor, offsets: torch.Tensor) -> Any:
        ctx.table, (vectors, ctx.seen) = table, table.pooled(ids.numpy(), offsets.numpy())
        return torch.from_numpy(vectors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.table.train(ctx.seen, grads[0].numpy())
        return (None,) * 4


class MappedTable:
    """Vectors in a sparse file, with the same initial values, the same sums and the same step; nothing is logged."""

    def __init__(self, path: Path, num_vectors: int) -> None:
        self._spec = TableSpec(num_vectors, DIM, init="uniform", scale=SCALE)
        self._records = np.memmap(path, np.float32, "w+", shape=(num_vectors, DIM + 1))
        self._records._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]

    def pooled(self, ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, Any]:
        bags = Bags(ids, np.diff(offsets, append=len(ids)))
        sorting = Sorting.of(ids)
        records = np.asarray(self._records[sorting.unique])
        new = np.flatnonzero(records[:, DIM] == 0)
        records[new, :DIM] = initial(self._spec, sorting.unique[new])
        return pool(records[:, :DIM], bags, sorting.inverse), (bags, sorting, records)

    def train(self, seen: Any, grads: np.ndarray) -> None:
        bags, sorting, records = seen
        records[:, :DIM] -= np.float32(LR) * gradients(bags, sorting, grads)
        records[:, DIM] = 1
        self._records[sorting.unique] = records


class Model(nn.Module):
    """The dense part of a DLRM: an MLP for numbers, dot products of all features, an MLP for the answer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = (len(POOLING) + 1) * len(POOLING) // 2
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, DIM)
        )
        self.top = nn.Sequential(
            nn.Linear(DIM + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )
        self._places = torch.tril_indices(len(POOLING) + 1, len(POOLING) + 1, -1)

    def forward(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        features = torch.cat([bottom[:, None], pooled.reshape(-1, len(POOLING), DIM)], 1)
        products = torch.bmm(features, features.mT)
        answer: torch.Tensor = self.top(torch.cat([bottom, products[:, self._places[0], self._places[1]]], 1))
        return answer.squeeze(1)


class Trainer:
    """All ways, each with a table and a model of its own; every way gets the same batches."""

    def __init__(self, address: str, table_bytes: int, scratch: str, caches: dict[str, str]) -> None:
        """`caches`: the memory that the node gives each way's table."""
        torch.set_num_threads(1)
        self._num = table_bytes // (DIM * 4)
        self._bags = {
            way: hw.EmbeddingBag(self._num, DIM, mode="sum", name=f"bench-{number}", nodes=address, lr=LR,
            init="uniform",
                                 scale=SCALE, cache=cache, travels="vectors" if way == "rows" else "pooled")
            for number, (way, cache) in enumerate(caches.items())
        }  # fmt: skip
        self._local = MappedTable(Path(scratch, "local"), self._num)
        self._models = {way: Model() for way in (*self._bags, "local")}
        self._steps = dict.fromkeys(self._models, 0)

    def __call__(self, way: str, steps: int) -> dict[str, Any]:
        """Take so many steps; the median of their times, the bytes that crossed in one, and the losses."""
        bag, model, first = self._bags.get(way), self._models[way], self._steps[way]
        optimizer = torch.optim.SGD(model.parameters(), LR)
        batches = [batch(number, self._num) for number in range(first, first + steps)]  # made before the clock runs
        dense = [torch.from_numpy(np.random.default_rng([1, number]).normal(size=(BATCH, DENSE)).astype(np.float32))
                 for number in range(first, first + steps)]  # fmt: skip
        labels = [(numbers.sum(1) > 0).float() for numbers in dense]
        pooled: Callable[..., torch.Tensor]
        if bag is None:
            anchor = torch.zeros((), requires_grad=True)
            pooled, stream = (lambda *given: Mapped.apply(anchor, self._local, *given)), iter(batches)
        else:
            pooled, stream = bag, bag.ahead(batches, lambda each: each)
        before = sum(bag.table.num_bytes) if bag is not None else 0
        taken, losses, start = [], [], time.perf_counter()
        for number, given in enumerate(stream):
            answer = model(dense[number], pooled(*given))
            loss = nn.functional.binary_cross_entropy_with_logits(answer, labels[number])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            taken.append(time.perf_counter() - start)
            start = time.perf_counter()
        self._steps[way] += steps
        found: dict[str, Any] = {
            "step_s": statistics.median(taken[2:]),
            "mean_s": statistics.fmean(taken[1:]),
            "losses": losses,
        }
        if bag is not None:
            bag.sync()
            about = bag.table.about()[0]
            found |= {"step_bytes": (sum(bag.table.num_bytes) - before) / steps, "disk_bytes": about["disk_bytes"],
                      "cache_vectors": about["cache_vectors"], "checkpoint": about["checkpoint"],
                      "found": about["cache_found"], "asked": about["cache_asked"]}  # fmt: skip
        return found

    def close(self) -> None:
        for bag in self._bags.values():
            bag.drop()

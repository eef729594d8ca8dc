"""The trainings that `bench faults` kills in the middle of a step: first layers that train on nodes, and a table there.

Owns `Partitioned` and `Embedded`. Each takes an epoch of steps from the same start, writes down what it did, and can go
on from what a killed process had saved. Both compute in float64: what differs then is the fault's, not the order's in
which nodes that are left add up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.data.transforms import Normalize, Resize, ToFloat, Transforms
from headwater.errors import HeadwaterError

PATIENCE_S = 60.0
PIXELS = Transforms([Resize((32, 32)), ToFloat(), Normalize((0.5,) * 3, (0.25,) * 3)])
BATCH = 32
NUM_VECTORS, DIM, STEPS = 20_000, 32, 80  # of the table
BAGS, POOLING = 64, 20
_TABLE = "faults"


class Record:
    """What an epoch did: ids in order, the loss of each step. Saved along with the rest."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ids": self.ids, "losses": self.losses}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ids, self.losses = list(state["ids"]), list(state["losses"])

    def found(self, begin: float, stopped: str = "", hits: int = 0) -> dict[str, Any]:
        return {"ids": self.ids, "losses": self.losses, "seconds": time.perf_counter() - begin, "stopped": stopped,
                "begun": True, "hits": hits}  # fmt: skip


NOT_BEGUN: dict[str, Any] = {"ids": [], "losses": [], "seconds": 0.0, "stopped": "", "begun": False, "hits": 0}


def net(num_classes: int) -> nn.Module:
    """A batch-norm on each side of the cut (module 0): nodes wait for each other in the middle of a step."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, num_classes),
    ).double()


class Partitioned:
    """Pictures of which nodes make rows and train the first layers. Ids are those of samples; the last "loss" is that
    of nothing: what the weights and running statistics come to in the end."""

    def __init__(self, url: str, nodes: list[str], num_classes: int) -> None:
        self._model = net(num_classes)
        self._start = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._num_nodes = len(nodes)
        self._job = hw.partition(self._model, url, transforms=PIXELS, nodes=nodes, cut="0", batch_size=BATCH, seed=0,
                                 patience_s=PATIENCE_S)  # fmt: skip
        self._forget()

    def ready(self) -> None:
        """Until all nodes take part: one that was killed has to be back before another is."""
        while len(self._job._replicas.present()) < self._num_nodes:
            time.sleep(0.05)

    def epoch(self, epoch: int, checkpoint: str = "") -> dict[str, Any]:
        self._forget()
        self._model.load_state_dict(self._start)
        self._job.load_state_dict({**self._job.state_dict(), "epoch": epoch, "position": 0, "steps": 0})
        return self._go(checkpoint)

    def resume(self, checkpoint: str) -> dict[str, Any]:
        if not os.path.exists(checkpoint):
            return NOT_BEGUN
        self._forget()
        self._job.load(checkpoint, self._optimizer, record=self._record)
        return self._go(checkpoint)

    def go_on(self) -> dict[str, Any]:
        return self._go("")

    def close(self) -> None:
        self._job.close()

    def _forget(self) -> None:
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._record = Record()

    def _go(self, checkpoint: str) -> dict[str, Any]:
        begin, before, stopped = time.perf_counter(), self._job.num_rolled_back, ""
        try:
            for batch in self._job.steps():
                self._optimizer.zero_grad()
                loss = batch.backward(cross_entropy)
                self._optimizer.step()
                self._record.ids += batch.ids.tolist()
                self._record.losses.append(loss.item())
                if checkpoint:
                    self._job.save(checkpoint, self._optimizer, record=self._record)
            state = self._model.state_dict().values()
            self._record.losses.append(sum(each.double().square().sum().item() for each in state))
        except HeadwaterError as error:
            stopped = f"{type(error).__name__}: {error}"
        return self._record.found(begin, stopped, self._job.num_rolled_back - before)


class Embedded:
    """A table on nodes, and a weight here. Ids are the steps that each node says it has done; the last "loss" is what
    all vectors come to in the end."""

    def __init__(self, url: str, nodes: list[str], num_classes: int) -> None:
        self._nodes = nodes
        self._bag = self._opened()
        self._forget()

    def ready(self) -> None:
        self._renew()

    def epoch(self, epoch: int, checkpoint: str = "") -> dict[str, Any]:
        if self._bag.version:  # of one that was killed before it had saved anything
            self._renew()
        self._forget()
        return self._go(epoch, 0, checkpoint)

    def resume(self, checkpoint: str) -> dict[str, Any]:
        if not os.path.exists(checkpoint):
            return NOT_BEGUN
        saved = torch.load(checkpoint, weights_only=True)
        self._bag.set_extra_state(saved["table"])
        self._weight.data.copy_(saved["weight"])
        self._record.load_state_dict(saved["record"])
        return self._go(saved["epoch"], len(self._record.losses), checkpoint)

    def go_on(self) -> dict[str, Any]:
        return self._go(self._epoch, len(self._record.losses), "")

    def close(self) -> None:
        self._bag.drop()

    def _opened(self) -> hw.EmbeddingBag:
        return hw.EmbeddingBag(NUM_VECTORS, DIM, mode="sum", dtype=torch.float64, name=_TABLE, nodes=self._nodes,
                               optimizer="rowwise_adagrad", lr=0.05, scale=0.1, travels="pooled",
                               patience_s=PATIENCE_S)  # fmt: skip

    def _renew(self) -> None:
        """The table as it is before anybody has trained it."""
        self._bag.drop()
        self._bag = self._opened()

    def _forget(self) -> None:
        torch.manual_seed(0)
        self._weight = nn.Parameter(torch.randn(DIM, 1, dtype=torch.float64))
        self._record = Record()

    def _go(self, epoch: int, first: int, checkpoint: str) -> dict[str, Any]:
        begin, record, stopped, self._epoch = time.perf_counter(), self._record, "", epoch
        lines = self._bag.table.lines
        before = sum(line.num_repeats for line in lines)
        try:
            for ids in self._bag.ahead((_ids(epoch, number) for number in range(first, STEPS)), lambda each: each):
                loss = torch.tanh(self._bag(ids) @ self._weight).square().mean()
                loss.backward()
                with torch.no_grad():
                    self._weight -= 0.1 * self._weight.grad
                self._weight.grad = None
                record.losses.append(loss.item())
                if checkpoint:
                    self._save(epoch, checkpoint)
            self._bag.sync()
            record.ids = [part * STEPS + step for part, about in enumerate(self._bag.table.about())
                          for step in range(about["version"])]  # fmt: skip
            record.losses.append(self._bag.export().square().sum().item())
        except HeadwaterError as error:
            stopped = f"{type(error).__name__}: {error}"
        return record.found(begin, stopped, sum(line.num_repeats for line in lines) - before)

    def _save(self, epoch: int, checkpoint: str) -> None:
        """Whole or not at all."""
        torch.save({"table": self._bag.get_extra_state(), "weight": self._weight.data, "epoch": epoch,
                    "record": self._record.state_dict()}, f"{checkpoint}.new")  # fmt: skip
        os.replace(f"{checkpoint}.new", checkpoint)


def _ids(epoch: int, step: int) -> torch.Tensor:
    generator = np.random.default_rng([epoch, step])
    return torch.from_numpy(np.minimum(generator.zipf(1.2, (BAGS, POOLING)) - 1, NUM_VECTORS - 1))


COURSES: dict[str, Callable[[str, list[str], int], Partitioned | Embedded]] = {
    "partitioned": Partitioned,
    "embedded": Embedded,
}

"""The trainer of `bench faults`, run in a host of the rig. Owns what an epoch is there: which samples came, in which
order, and the loss of each step; and how it goes on after it was stopped or killed. Jobs that train on nodes are those
of `bench.trained`."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import headwater as hw
from bench import pictures, trained
from headwater.core.cut import smallest_cut
from headwater.core.plan import Plan, near_plan
from headwater.data.transforms import CenterCrop, Resize, Transforms
from headwater.errors import HeadwaterError
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.train.access import Access
from headwater.train.client import NodeClient

PIXELS = 96
BATCH = 16
CHUNK_ROWS = 8
PATIENCE_S = 60.0
# All nodes run the prefix on one engine, as in a planned job (docs/engines.md); this plan is made by hand. Left to
# themselves they may choose different ones, and undisturbed runs then differ, since who makes a row is chance.
ENGINE = "onnxruntime"
RESIZED = 112
TRANSFORMS = Transforms([Resize(RESIZED), CenterCrop(PIXELS), *pictures.LITE0.ops[-2:]])


class Trainer:
    """EfficientNet-lite0 with its real weights on small pictures; a new head, trained by SGD from the same start."""

    def __init__(self, num_classes: int) -> None:
        torch.set_num_threads(1)
        self._num_classes = num_classes
        self._jobs: dict[str, hw.Job] = {}
        self._courses: dict[str, trained.Partitioned | trained.Embedded] = {}  # jobs that train on nodes
        self._plan: Plan | None = None
        self._ids: list[int] = []
        self._losses: list[float] = []

    def __call__(self, do: str, **arguments: Any) -> Any:
        course = self._courses.get(arguments.get("name", ""))
        if course is None:
            return getattr(self, do)(**arguments)
        del arguments["name"]
        return getattr(course, do)(**arguments)

    def open(self, name: str, url: str, nodes: list[str]) -> int:
        """Begin a job, which stays open beside others; how many samples it has."""
        if name in trained.COURSES:
            self._courses[name] = trained.COURSES[name](url, nodes, self._num_classes)
            return 0
        if self._plan is None:
            self._model = pictures.lite0(self._num_classes)
            head = self._model._fc
            assert isinstance(head, torch.nn.Linear)
            self._head = head
            self._start = {name: value.clone() for name, value in self._head.state_dict().items()}
            self._forget()
            cut = smallest_cut(cuts(capture(self._model, (torch.zeros(2, 3, PIXELS, PIXELS),))))
            self._plan = near_plan(cut, chunk_rows=CHUNK_ROWS, node_batch=CHUNK_ROWS, prefetch=2, engine=ENGINE)
        self._jobs[name] = hw.near(self._model, url, transforms=TRANSFORMS, nodes=nodes, batch_size=BATCH, seed=0,
                                   plan=self._plan, patience_s=PATIENCE_S)  # fmt: skip
        return len(self._jobs[name].samples)

    def epoch(self, name: str, epoch: int, checkpoint: str = "") -> dict[str, Any]:
        """One epoch from the same start; with `checkpoint`, where it stands is in that file after each step."""
        self._forget()
        self._jobs[name].loader.set_epoch(epoch)
        return self._go(name, checkpoint)

    def go_on(self, name: str) -> dict[str, Any]:
        """The epoch that was stopped, from where it stands."""
        loader = self._jobs[name].loader
        loader.load_state_dict(loader.state_dict())
        return self._go(name, "")

    def resume(self, name: str, checkpoint: str) -> dict[str, Any]:
        """The epoch that another process left in this file; from the start, if it was killed before the first step."""
        if not os.path.exists(checkpoint):
            return {"ids": [], "losses": [], "seconds": 0.0, "stopped": "", "begun": False}
        saved = torch.load(checkpoint, weights_only=True)
        self._head.load_state_dict(saved["head"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._ids, self._losses = saved["ids"], saved["losses"]
        self._jobs[name].loader.load_state_dict(saved["loader"])
        return self._go(name, checkpoint)

    def damaged(self, name: str, address: str) -> int:
        """Kept rows that a node has found damaged since it was started."""
        client = NodeClient(address, Access.of())
        try:
            return int(client.hello()["busy"]["num_cache_damaged"])
        finally:
            client.close()

    def close(self) -> None:
        while self._jobs:
            self._jobs.popitem()[1].close()
        while self._courses:
            self._courses.popitem()[1].close()

    def _forget(self) -> None:
        self._head.load_state_dict(self._start)
        self._optimizer = torch.optim.SGD(self._head.parameters(), lr=0.01, momentum=0.9)
        self._ids, self._losses = [], []

    def _go(self, name: str, checkpoint: str) -> dict[str, Any]:
        job, begin, stopped = self._jobs[name], time.perf_counter(), ""
        try:
            for x, y in job.loader:
                loss = cross_entropy(job.model(x), y)
                self._optimizer.zero_grad()
                loss.backward()
                self._optimizer.step()
                self._ids += x.samples.tolist()
                self._losses.append(loss.item())
                if checkpoint:
                    self._save(job, checkpoint)
        except HeadwaterError as error:
            stopped = f"{type(error).__name__}: {error}"
        return {"ids": self._ids, "losses": self._losses, "seconds": time.perf_counter() - begin, "stopped": stopped,
                "begun": True}  # fmt: skip

    def _save(self, job: hw.Job, checkpoint: str) -> None:
        """Whole or not at all."""
        torch.save({"head": self._head.state_dict(), "optimizer": self._optimizer.state_dict(), "ids": self._ids,
                    "losses": self._losses, "loader": job.loader.state_dict()}, f"{checkpoint}.new")  # fmt: skip
        os.replace(f"{checkpoint}.new", checkpoint)

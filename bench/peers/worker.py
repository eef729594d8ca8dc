"""One side of `bench offload`, in a process that lives for the whole benchmark; `RigUp.open` starts it.

Owns what a measurement is: it ends with the first step that ends after so many seconds, and counts whole steps only,
from the moment the first batch is asked for.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.models import keep_blocks
from bench.peers.common import BATCH, Learner, Place

# side → its file
FILES = {"plain": "plain", "webdataset": "wds", "litdata": "lit", "mosaic": "mosaic", "ray": "raydata"}


class Peer:
    """A side that hands over batches of pictures (or, Ray's, of features)."""

    def __init__(self, side: str, place: Place) -> None:
        self._module = import_module(f"bench.peers.{FILES[side]}")
        self._place = place

    def open(self, learner: Learner, mbit_per_s: float) -> dict[str, Any]:
        self._learner = learner
        self._place = replace(self._place, mbit_per_s=mbit_per_s)
        if hasattr(self._module, "open_"):
            self._module.open_(self._place, learner)
        return {}

    def start(self, epoch: int) -> Callable[[], Iterator[int]]:
        """Make the loader, which is not measured; what is returned runs it."""
        batches = self._module.batches(self._place, self._learner, epoch)

        def steps() -> Iterator[int]:
            for x, y in batches:
                self._learner.train_step(x, y)
                yield len(y)

        return steps

    def close(self) -> None:
        if hasattr(self._module, "close"):
            self._module.close()


class Worker:
    """A side that is told what to do, one thing at a time."""

    def __init__(self, side: str, scratch: str, num_pictures: int, num_classes: int, node: str) -> None:
        keep_blocks()
        torch.set_num_threads(1)
        self._place = Place(Path(scratch), num_pictures, num_classes)
        self._steps: Iterator[int] | None = None
        if side == "headwater":
            from bench.peers.near import Near

            self._side: Any = Near(self._place, node)
        else:
            self._side = Peer(side, self._place)

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def open(self, model: str, mbit_per_s: float) -> dict[str, Any]:
        """Build or plan what can be reused over epochs."""
        learner = Learner(model, self._place.num_classes)
        warm(learner)
        found: dict[str, Any] = self._side.open(learner, mbit_per_s)
        return found

    def measure(self, seconds: float, epoch: int) -> dict[str, float]:
        """Train on this epoch from its start, for so long or to its end. What is still under way goes on until `rest`:
        the caller first reads what was used."""
        self._steps = self._side.start(epoch)()
        start = time.perf_counter()
        num_images, taken_s, first_s, first_images = 0, 0.0, 0.0, 0
        for count in self._steps:
            taken_s = time.perf_counter() - start
            num_images += count
            if not first_images:
                first_s, first_images = taken_s, count
            if taken_s >= seconds:
                break
        found = {"images": num_images, "seconds": taken_s, "first_s": first_s, "memory_bytes": memory_bytes()}
        # Without what comes once an epoch, until the first step is done.
        if num_images > first_images:
            found["steady_per_s"] = (num_images - first_images) / (taken_s - first_s)
        return found

    def rest(self) -> None:
        """End the epoch."""
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]
            self._steps = None
        gc.collect()  # loaders end their threads and processes when they go

    def close(self) -> None:
        """Let go of what is open."""
        self._side.close()


def memory_bytes() -> int:
    """Of this process and those it started; what they share is counted once."""
    found, pids = 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        except OSError:  # ended meanwhile
            continue
    return found


def warm(learner: Learner) -> None:
    """The first step of a process is slow, whatever side it is."""
    learner.train_step(torch.zeros(BATCH, 224, 224, 3, dtype=torch.uint8), torch.zeros(BATCH, dtype=torch.int64))

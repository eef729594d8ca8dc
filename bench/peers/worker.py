"""One side of `bench offload` in a process that lives for the whole benchmark: `python -m bench.peers.worker SIDE`.

Takes commands as lines of JSON, first the side's `Place` (and the node's address), then:

    {"do": "open", "model": NAME, "mbit_per_s": R}      build or plan what can be reused over epochs
    {"do": "measure", "seconds": S, "epoch": N}         train on epoch N from its start, for S seconds or to its end
    {"do": "close"}                                     let go of what is open

and answers each with one line. Owns what a measurement is: it ends with the first step that ends after S seconds, and
counts whole steps only, from the moment the first batch is asked for.
"""

from __future__ import annotations

import gc
import json
import os
import sys
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


def measure(side: Any, seconds: float, epoch: int) -> tuple[dict[str, float], Iterator[int]]:
    """What a time-boxed epoch came to, and its iterator, which the caller closes once it has told."""
    steps = side.start(epoch)()
    start = time.perf_counter()
    num_images, taken_s, first_s, first_images = 0, 0.0, 0.0, 0
    for count in steps:
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
    return found, steps


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


def main() -> None:
    # What libraries print goes to standard error; standard output is for answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    keep_blocks()
    torch.set_num_threads(1)
    about = json.loads(sys.stdin.readline())
    place = Place(Path(about["scratch"]), about["num_pictures"], about["num_classes"])
    if sys.argv[1] == "headwater":
        from bench.peers.near import Near

        side: Any = Near(place, about["node"])
    else:
        side = Peer(sys.argv[1], place)
    answer({})
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "open":
            learner = Learner(command["model"], place.num_classes)
            warm(learner)
            answer(side.open(learner, command["mbit_per_s"]))
        elif command["do"] == "measure":
            found, steps = measure(side, command["seconds"], command["epoch"])
            answer(found)
            steps.close()
            del steps
            gc.collect()  # loaders end their threads and processes when they go
        else:
            side.close()
            answer({})
    side.close()


def warm(learner: Learner) -> None:
    """The first step of a process is slow, whatever side it is."""
    learner.train_step(torch.zeros(BATCH, 224, 224, 3, dtype=torch.uint8), torch.zeros(BATCH, dtype=torch.int64))


if __name__ == "__main__":
    main()

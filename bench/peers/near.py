"""Headwater's side: the loop of the README, planned anew for each link."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import headwater as hw
from bench.peers.common import BATCH, Learner, Place

# Rows as fp16 or exactly, whatever the planner picks.
OPTIONS: dict[str, Any] = {"codec": "fp16"}


class Near:
    def __init__(self, place: Place, node: str) -> None:
        self._place = place
        self._node = node
        self._job: hw.Job | None = None

    def open(self, learner: Learner, mbit_per_s: float) -> dict[str, Any]:
        """Plan for the link as it is now, whose rate it is not told; what was chosen and how long that took."""
        self.close()
        self._learner = learner
        start = time.perf_counter()
        self._job = hw.near(
            learner.model,
            self._place.url("plain"),
            transforms=learner.transforms,
            nodes=[self._node],
            batch_size=BATCH,
            seed=0,
            **OPTIONS,
        )
        plan = self._job.plan
        crosses = "JPEGs" if not plan.uses_storage else "features" if plan.has_prefix else "pixels"
        if plan.host_share:
            crosses += f", {100 * plan.host_share:.3g} % made here,"
        return {
            "plan_s": time.perf_counter() - start,
            "plan": f"{crosses} at {plan.cut_name}, {plan.codec}, {plan.node_batch}/{plan.chunk_rows}/{plan.prefetch}"
            + (", by pace" if plan.split == "pace" else ""),
        }

    def start(self, epoch: int) -> Callable[[], Iterator[int]]:
        """What runs the epoch, and yields after each step how many pictures were in it."""
        job, learner = self._job, self._learner
        assert job is not None
        job.loader.set_epoch(epoch)

        def steps() -> Iterator[int]:
            for x, y in job.loader:
                learner.learn(job.model(x), y)
                yield len(y)

        return steps

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

"""The trainer of `bench cache`, run in a host of the rig. Owns what an epoch is there: every picture once, from asking
for the first batch to the end of the last step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

import headwater as hw
from bench.models import keep_blocks
from bench.peers.common import BATCH, BUCKET, Learner
from bench.peers.worker import warm


class Trainer:
    """EfficientNet-lite0, cut where the fewest bytes cross; a job for each node that it is pointed at."""

    def __init__(self, num_classes: int) -> None:
        keep_blocks()
        torch.set_num_threads(1)
        self._learner = Learner("lite0", num_classes)
        warm(self._learner)
        self._job: hw.Job | None = None

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def open(self, node: str, codec: str) -> dict[str, Any]:
        """Begin a job with this node."""
        self.close()
        self._job = hw.near(self._learner.model, f"s3://{BUCKET}/plain", transforms=self._learner.transforms,
                            nodes=[node], batch_size=BATCH, seed=0, plan=None, codec=codec)  # fmt: skip
        return {"cut": self._job.plan.cut_name, "num_pictures": len(self._job.samples)}

    def agreement(self, node: str, codec: str, num_pictures: int) -> float:
        """For how many pictures the head, as it is now, has the same first choice from exact rows."""
        first_choices = []
        for each in ("raw", codec):
            self.open(node, each)
            assert self._job is not None
            found: list[torch.Tensor] = []
            batches = iter(self._job.loader)
            with torch.no_grad():
                while sum(map(len, found)) < num_pictures and (batch := next(batches, None)) is not None:
                    found.append(self._job.model(batch[0]).argmax(1))
            batches.close()  # type: ignore[attr-defined]
            first_choices.append(torch.cat(found)[:num_pictures])
        return float((first_choices[0] == first_choices[1]).double().mean())

    def epoch(self) -> dict[str, float]:
        """The next one, to its end."""
        job, learner = self._job, self._learner
        assert job is not None
        start, cpu = time.perf_counter(), time.process_time()
        images, first_s, first_images, taken_s = 0, 0.0, 0, 0.0
        for x, y in job.loader:
            learner.learn(job.model(x), y)
            images += len(y)
            taken_s = time.perf_counter() - start
            if not first_images:
                first_s, first_images = taken_s, images
        return {
            "images": images,
            "seconds": taken_s,
            "steady_per_s": (images - first_images) / (taken_s - first_s),
            "cpu_s": time.process_time() - cpu,
        }

    def step(self) -> float:
        """Seconds a picture of the head's step alone, on features that are there."""
        job, learner = self._job, self._learner
        assert job is not None
        batches = iter(job.loader)
        x, y = next(batches)
        batches.close()  # type: ignore[attr-defined]
        taken = []
        for _ in range(200):
            start = time.perf_counter()
            learner.learn(job.model(x), y)
            taken.append(time.perf_counter() - start)
        return statistics.median(taken) / len(y)

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

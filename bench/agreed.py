"""The trainer of `bench agreement`, run in a host of the rig. Owns how long some rows take there, live."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch.nn.functional import cross_entropy

from bench import planned
from headwater.core.loads import JobSize
from headwater.core.rig import Rig
from headwater.core.search import search


class Trainer(planned.Trainer):
    """Measures once, and then carries out whatever plan it is given."""

    def profile(self, codec: str) -> dict[str, Any]:
        """What was measured on the rig as it is now."""
        self.plan(codec)
        assert self._job is not None
        assert self._job.measured is not None
        measured = self._job.measured
        return {
            "profile": replace(measured.profile, cuts=measured.offered).to_json(),
            "rig": measured.rig.to_json(),
            "num_samples": len(self._job.samples),
        }

    def plans(self, rig: dict[str, Any], codec: str) -> list[dict[str, Any]]:
        """Every plan for a rig as it is described, best first; nothing is measured."""
        assert self._job is not None
        assert self._job.measured is not None
        measured = self._job.measured
        size = JobSize(len(self._job.samples), planned.BATCH, counts_setup=False)
        ranking = search(measured.offered, measured.profile, Rig.from_json(rig), size,
                         codecs=tuple(dict.fromkeys(("raw", codec))), keep=10_000)  # fmt: skip
        return [each.plan.to_json() for each in ranking.plans]

    def seconds(self, plan: dict[str, Any], num_rows: int, at_most_s: float) -> dict[str, float]:
        """From the beginning of an epoch until the loop has done its steps for so many rows; cut off in the end."""
        job = self._job
        assert job is not None
        self.warm(plan)
        job.loader.set_epoch(0)
        begin, cpu, done = time.perf_counter(), time.process_time(), 0
        batches = iter(job.loader)
        for x, y in batches:
            loss = cross_entropy(job.model(x), y)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            done += len(y)
            now = time.perf_counter()
            if done >= num_rows or now - begin > at_most_s:
                break
        batches.close()  # type: ignore[attr-defined]
        return {"seconds": now - begin, "rows": done, "busy": (time.process_time() - cpu) / (now - begin)}

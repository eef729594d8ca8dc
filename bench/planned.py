"""The trainer of `bench planner`, run in a host of the rig. Owns how one plan's rate is measured there."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import headwater as hw
from bench import models
from headwater.core.loads import JobSize
from headwater.core.search import search

BATCH = 16
WARM_S = 60.0
SKIP_ROWS = 48  # in the beginning, whose chunks wait for each other
SKIP_SHARED_S = 10.0  # the same where both sides work: until all that is asked for at once has come, or for so long


class Trainer:
    """One model; a job for every setting of the rig, and a rate for every plan it is asked to carry out."""

    def __init__(self, name: str, url: str, address: str, num_classes: int) -> None:
        models.keep_blocks()
        torch.set_num_threads(1)
        model, self._transforms = models.build(name, num_classes)
        self._model = model.to(memory_format=torch.channels_last)
        trained = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(trained, lr=0.01)
        self._url, self._address = url, address
        self._job: hw.Job | None = None

    def __call__(self, what: str, **arguments: Any) -> Any:
        return getattr(self, what)(**arguments)

    def plan(self, codec: str) -> dict[str, Any]:
        """Measure and plan for the rig as it is; the choice, and an estimate for every cut with its own best knobs.

        For a run so long that setting a plan up does not count: rates are compared, and a node beside the trainer,
        which takes seconds to start, would not pay in three epochs of so few pictures.
        """
        self.close()
        start = time.perf_counter()
        self._job = hw.near(self._model, self._url, transforms=self._transforms, nodes=[self._address],
                            batch_size=BATCH, codec=codec)  # fmt: skip
        taken_s = time.perf_counter() - start
        measured = self._job.measured
        assert measured is not None
        every = measured.offered
        size = JobSize(len(self._job.samples), BATCH, counts_setup=False)
        ranking = search(every, measured.profile, measured.rig, size, codecs=tuple(dict.fromkeys(("raw", codec))),
                         keep=10_000)  # fmt: skip
        return {
            "plan": ranking.best.plan.to_json(),
            "plan_s": taken_s,
            "link_bytes_per_s": measured.rig.links[0].down_bytes_per_s,
            "cores": measured.rig.nodes[0].cores,
            "estimates": [each.to_json() for each in ranking.plans],
        }

    def warm(self, plan: dict[str, Any]) -> None:
        """Until both sides have loaded what they run under this plan."""
        assert self._job is not None
        if self._job._watch is not None:
            self._job._watch.close()  # the plan is pinned
        self._job._source.adopt(hw.Plan.from_json(plan), warm_s=WARM_S)

    def rate(self, plan: dict[str, Any], at_least_s: float, at_most_s: float, num_chunks: int) -> dict[str, float]:
        """Rows a second under this plan once it flows: the slope of rows over time.

        The lower of what the loop took and what arrived counts: chunks that were made ahead are taken faster than they
        are made, and chunks that nobody takes yet arrive faster than they will be. A slope through all of them, since
        chunks come in bursts where several are under way at once. And how busy this process was meanwhile. Stops after
        `num_chunks` and `at_least_s`, or `at_most_s` after the first chunk. The time until then is not in it: a node
        may load an engine first. Where more than half of an epoch is asked for at once, the whole epoch counts, from
        its beginning: it has no part in which things flow.
        """
        job = self._job
        assert job is not None
        self.warm(plan)
        counts = job.counts
        begin, cpu = time.perf_counter(), time.process_time()
        taken: list[tuple[float, float, int, int]] = []  # when, CPU-seconds, rows the loop has taken, rows that came
        rows_before = seen = counts.num_rows
        skip = max(1, SKIP_ROWS // job.plan.chunk_rows)
        shared, whole = job.plan.host_share > 0, False
        if shared:  # what is asked for at once, and a round of both sides: they begin with nothing, not at one pace
            skip = max(skip, 2 * job.plan.prefetch + math.ceil(1 / min(job.plan.host_share, 1 - job.plan.host_share)))
            whole = 2 * skip * job.plan.chunk_rows > len(job.samples)
        batches = iter(job.loader)
        for x, y in batches:
            loss = cross_entropy(job.model(x), y)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            now = time.perf_counter() - begin
            if counts.num_rows != seen:
                seen = counts.num_rows
                taken.append((now, time.process_time(), seen - rows_before, counts.num_arrived))
                if shared and len(taken) < skip and now > SKIP_SHARED_S:
                    skip = len(taken)
            enough = not whole and len(taken) > skip + num_chunks and now - taken[skip][0] >= at_least_s
            if enough or (taken and now - taken[0][0] > at_most_s):
                break
        else:
            if whole:
                cpu_s = time.process_time() - cpu
                return {"rate": taken[-1][2] / now, "busy": cpu_s / now}
        batches.close()  # type: ignore[attr-defined]
        used = taken[min(skip, max(0, len(taken) - 3)) :]
        if len(used) < 3:  # too slow to tell more
            return {"rate": (taken[-1][2] if taken else BATCH) / max(time.perf_counter() - begin, 1e-9), "busy": 1.0}
        when, cpu_s, *rows = np.array(used).T
        rate = min(float(np.polyfit(when, each, 1)[0]) for each in rows)
        return {"rate": rate, "busy": float((cpu_s[-1] - cpu_s[0]) / max(when[-1] - when[0], 1e-9))}

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

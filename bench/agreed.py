"""The trainer of `bench agreement`, run in a host of the rig. Owns how long some rows take there, live."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch.nn.functional import cross_entropy

from bench import planned
from headwater.core.cut import legal_cuts
from headwater.core.loads import JobSize, Pricing
from headwater.core.plan import PLACE, Plan
from headwater.core.profile import Profile, least
from headwater.core.rig import Rig
from headwater.core.search import search
from headwater.train.steps import PASS_S, model_costs

CALIBRATE_S = 4.0


class Trainer(planned.Trainer):
    """Measures once, and then carries out whatever plan it is given."""

    def profile(self, codec: str) -> dict[str, Any]:
        """What was measured on the rig as it is now, and what a step costs beyond its parts (`beyond_s`)."""
        self.plan(codec)
        assert self._job is not None
        assert self._job.measured is not None
        measured = self._job.measured
        node, trainer = measured.profile.node, measured.profile.trainer
        # The store runs on the node's core: what it takes of it for a node's read, it takes for a trainer's.
        node = replace(node, serve_s=max(0.0, node.read_s - (node.lone_read_s or node.read_s)))
        if planned.BATCH * (trainer.suffix_s[0] or 0.0) > PASS_S:
            # The better of two moments, which a profile takes only of models that are not so slow (`train.measure`).
            captured, deepest = self._job._source._setting.captured, legal_cuts(measured.cuts)[-1]
            again, _ = model_costs(captured, measured.cuts, deepest, planned.BATCH)
            trainer = replace(trainer, suffix_s=least(trainer.suffix_s, again))
        whole = replace(measured.profile, node=node, trainer=trainer, cuts=measured.offered)
        step_s = trainer.step_s + self.beyond_s(whole, codec)
        whole = replace(whole, trainer=replace(trainer, step_s=step_s))
        return {"profile": whole.to_json(), "rig": measured.rig.to_json(), "num_samples": len(self._job.samples)}

    def beyond_s(self, profile: Profile, codec: str) -> float:
        """CPU-seconds of this process for a step, beyond what the profile says of its parts.

        A profile has no cost of its own for a step and for receiving a chunk (docs/cost-model.md). One plan tells,
        run here, on the rig that was profiled: the best one near the data, with everything but the suffix on the node.
        """
        assert self._job is not None
        assert self._job.measured is not None
        measured = self._job.measured
        size = JobSize(len(self._job.samples), planned.BATCH, counts_setup=False)
        offered = [Plan.from_json(each) for each in self.plans(measured.rig.to_json(), codec)]
        plan = next(each for each in offered if each.uses_storage and each.has_prefix)
        plan = replace(plan, host_share=0.0, split=PLACE)
        found = [self.seconds(plan.to_json(), 30 * planned.BATCH, CALIBRATE_S) for _ in range(2)][-1]
        pricing = Pricing(measured.offered, profile, measured.rig, size)
        work = pricing.work(plan, pricing.choice(plan))
        cpu_s = found["busy"] * found["seconds"] / found["rows"]
        beyond = cpu_s - float(work.receive_s + work.loop_s + work.suffix_s)
        return max(0.0, planned.BATCH * beyond)

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

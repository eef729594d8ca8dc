"""A run in files, for whoever looks at it: how it goes, and what was planned.

Owns `Report`, the thread beside a job that writes them, and `planned`. `run.json` is written every few seconds,
`plans.json` once; each is whole at any moment, and stays when the run has ended, however it ended. `headwater ui
FOLDER` shows them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.cost import Estimate, estimate
from headwater.core.search import placement, sweep
from headwater.core.trace import strips
from headwater.errors import PlanError

if TYPE_CHECKING:
    from headwater.core.plan import Plan
    from headwater.train.job import Job

RUN, PLANS = "run.json", "plans.json"
FORMAT, VERSION = "headwater-run", 1
EVERY_S = 2.0
OVER_S = 10.0  # rates are of so long
SPANS = 20_000  # the last ones, in a live timeline
TIMELINE_EVERY = 5  # reports: it takes some milliseconds

log = logging.getLogger(__name__)


def planned(job: Job, pinned: Plan | None = None) -> dict[str, Any] | None:
    """The plan with its alternatives, as plain data; None where nothing was planned.

    `estimates` are the best plans and the two extremes, `cuts` what each cut would come to with the plan's settings.
    `pinned` is a plan that is carried out whatever the planner found.
    """
    if job.ranking is None:
        return None
    plan, cuts = pinned or job.plan, tuple[Estimate, ...]()
    if job.measured is not None:
        size, found = job.ranking.best.job, job.measured
        with contextlib.suppress(PlanError):  # what was measured need not price every cut in this plan's precision
            cuts = sweep(found.cuts, found.profile, found.rig, size, like=plan)
    return {
        "plan": plan.to_json(),
        "pinned": pinned is not None,
        "explanation": job.ranking.explain(),
        "estimates": [each.to_json() for _, each in ranked(job, pinned)],
        "cuts": [each.to_json() for each in cuts],
    }


def ranked(job: Job, pinned: Plan | None = None) -> list[tuple[str, Estimate]]:
    """The best plans with their places, and the two extremes and a pinned plan, each once."""
    assert job.ranking is not None
    rows = [(str(place), each) for place, each in enumerate(job.ranking.plans, start=1)]
    for each in (job.ranking.nothing, job.ranking.pixels):
        if each is not None and all(each.plan != other.plan for _, other in rows):
            rows.append(("", each))
    if pinned is not None:
        rows = [(f"{place} pinned".strip() if each.plan == pinned else place, each) for place, each in rows]
        if all(each.plan != pinned for _, each in rows) and job.measured is not None:
            found, size = job.measured, job.ranking.best.job
            with contextlib.suppress(PlanError):  # not every plan was measured
                rows.append(("pinned", estimate(pinned, found.offered, found.profile, found.rig, size)))
    return rows


class Report:
    """Writes until it is closed, or the job is gone. What can't be written is told once, and stops no run."""

    def __init__(self, job: Job, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._marks: deque[tuple[float, int, int, float]] = deque()  # time, rows, bytes, waited
        self._num_written = 0
        self._is_told = False
        self._timeline: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        (folder / PLANS).unlink(missing_ok=True)  # an earlier run's
        if (found := planned(job)) is not None:
            self._put(PLANS, found)
        self._write(job, ended=False)
        self._job = weakref.ref(job)
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._stopped), name="report", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """The last one, which says that the run has ended."""
        if not self._stopped.is_set():
            self._stopped.set()
            if (job := self._job()) is not None:
                self._write(job, ended=True)

    def again(self) -> bool:
        """Once more; False once there is nothing left to tell of."""
        if (job := self._job()) is None or self._stopped.is_set():
            return False
        self._write(job, ended=False)
        return True

    def _write(self, job: Job, ended: bool) -> None:
        with self._lock:
            if self._stopped.is_set() and not ended:
                return
            self._put(RUN, self._said(job, ended))
            self._num_written += 1

    def _put(self, name: str, data: dict[str, Any]) -> None:
        try:
            write(self._folder / name, data)
        except OSError as error:
            if not self._is_told:
                log.warning("how the run goes can't be written to %s (%s); it goes on without", self._folder,
                            error.strerror or error)  # fmt: skip
            self._is_told = True

    def _said(self, job: Job, ended: bool) -> dict[str, Any]:
        counts, now = job.counts, time.perf_counter()
        self._marks.append((now, counts.num_rows, counts.num_bytes, job.waited_s()))
        while len(self._marks) > 2 and now - self._marks[1][0] >= OVER_S:
            self._marks.popleft()
        (then, rows, num_bytes, waited_s), (_, *last) = self._marks[0], self._marks[-1]
        over_s, new_rows = now - then, last[0] - rows
        state = job.loader.state_dict()
        if job.trace is not None and (ended or self._num_written % TIMELINE_EVERY == 0):
            self._timeline = strips(job.trace.spans[-SPANS:])
        return {
            "format": FORMAT,
            "version": VERSION,
            "at_s": time.time(),
            "ended": ended,
            "describe": job.describe(),
            "placement": placement(job.plan),
            "plan": job.plan.to_json(),
            "num_samples": len(job.samples),
            "num_rows": counts.num_rows,
            "epoch": state["epoch"],
            "step": len(job.loader) - job.loader.num_steps_left(),
            "num_steps": len(job.loader),
            "num_skipped": len(job.loader.skipped),
            "rows_per_s": new_rows / over_s if over_s > 0 and new_rows else None,
            "bytes_per_row": (last[1] - num_bytes) / new_rows if new_rows else None,
            "waited_share": min(1.0, max(0.0, (last[2] - waited_s) / over_s)) if new_rows and over_s > 0 else None,
            "switches": [{"why": list(each.why), "before": each.before.cut_name, "after": each.after.cut_name,
                          "num_rows": each.num_rows} for each in job.switches],
            "timeline": self._timeline,
        }  # fmt: skip


def _run(report: weakref.ref[Report], stopped: threading.Event) -> None:
    while not stopped.wait(EVERY_S):
        found = report()
        if found is None or not found.again():
            return
        del found


def write(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all: somebody may read it at any moment."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise

"""Faults in the middle of an epoch: is every row there once, in order, and is the loss what it would have been?

Claim: whatever fails on nodes, links, store, disks or the trainer itself, no row is lost and none comes twice, and each
step's loss is that of the undisturbed run but for the last bits that another node batch makes (1e-5, relative). Where a
job can't go on by itself it stops with the reason and goes on from there when it is told to. Nothing is left over.

Each run of a fault is one epoch on the rig, from the same start; the fault strikes at a moment drawn from a seeded
generator. Undisturbed epochs run in between: they are what time lost is counted from.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import traces
from bench.breaking import FAULTS, Fault
from bench.faulty import ENGINE
from bench.result import Result
from bench.rig import RigError, RigUp
from bench.scene import RIG, Scene
from bench.trained import COURSES

SEED = 20
EARLIEST, LATEST = 0.05, 0.8  # of an undisturbed epoch: when a fault strikes
EVERY = 10  # runs, there is an undisturbed one
KILLED = "exit code -9"
MAX_STOPS = 5  # of one epoch, before it is given up
MAX_TRIES = 20  # epochs, for a fault to strike in
FULL, QUICK = (640, 20, 3), (240, 2, 1)  # pictures, runs of each fault, epochs that take turns


@dataclass(frozen=True)
class Run:
    """One epoch, held against the undisturbed one."""

    fault: str
    moment_s: float
    seconds: float
    num_lost: int
    num_doubled: int
    in_order: bool
    loss_diff: float
    stops: tuple[str, ...]
    num_hits: int = 0  # answers spoiled, rows found damaged: that it struck at all

    @property
    def is_right(self) -> bool:
        return not self.num_lost and not self.num_doubled and self.in_order


class Bench:
    """Epochs with and without faults on one scene."""

    def __init__(self, scene: Scene, num_epochs: int, console: Console) -> None:
        self._scene, self._num_epochs, self._console = scene, num_epochs, console
        # (kind of training, epoch) → ids and losses of the undisturbed run
        self._right: dict[tuple[str, int], dict[str, Any]] = {}
        self.undisturbed_s: defaultdict[str, list[float]] = defaultdict(list)
        self.noise = 0.0  # largest difference between two undisturbed runs

    def warm(self, fault: Fault) -> None:
        """Load engines, fill caches, and see what is right."""
        for epoch in (0, *range(self._num_epochs)):
            fault.prepare(self._scene)
            found = self._scene.ask("epoch", fault.job, epoch=epoch)
            if found["stopped"] or sorted(found["ids"]) != list(range(self._scene.num_ids(fault.job))):
                raise RigError(f"the first epoch of {fault.job} is not whole: {found['stopped'] or 'rows are missing'}")
            self._right.setdefault(_key(fault, epoch), found)

    def undisturbed(self, fault: Fault) -> None:
        """An epoch of the fault's job that nothing happens to."""
        fault.prepare(self._scene)
        begin = time.monotonic()
        found = self._scene.ask("epoch", fault.job, epoch=0)
        seconds = time.monotonic() - begin
        self.undisturbed_s[fault.job].append(seconds)
        run = held("none", self._right[_key(fault, 0)], 0.0, seconds, found, [])
        if not run.is_right or found["stopped"]:
            raise RigError(f"an undisturbed epoch of {fault.job} is not like the first one: {run} {found['stopped']}")
        self.noise = max(self.noise, run.loss_diff)

    def run(self, fault: Fault, number: int) -> Run:
        """One epoch with the fault at a random moment; afterwards all is whole. One that was over before it struck, or
        that it met nothing of, does not count."""
        for _ in range(MAX_TRIES):
            if (run := self._try(fault, number % self._num_epochs)) is not None:
                return run
        raise RigError(f"{fault.name}: it did not strike in {MAX_TRIES} epochs")

    def _try(self, fault: Fault, epoch: int) -> Run | None:
        scene, typical_s = self._scene, statistics.median(self.undisturbed_s[fault.job][-5:])
        moment_s = typical_s * scene.random.uniform(EARLIEST, LATEST)
        fault.prepare(scene)
        scene.checkpoint.unlink(missing_ok=True)
        options = {"checkpoint": str(scene.checkpoint)} if fault.kills_trainer else {}
        stops, hits, was_killed = list[str](), scene.num_hits, False
        begin, over = time.monotonic(), list[float]()
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(scene.ask, "epoch", fault.job, epoch=epoch, **options)
            going.add_done_callback(lambda _: over.append(time.monotonic()))
            time.sleep(moment_s)
            if going.done():
                return None
            try:
                fault.strike(scene)
                if fault.kills_trainer:
                    scene.replace_trainer()
                found = going.result()  # it may have been over before what struck was
            except RigError as error:
                if not fault.kills_trainer or KILLED not in str(error):
                    raise
                was_killed = True
                found = scene.ask("resume", fault.job, checkpoint=str(scene.checkpoint))
                if not found["begun"]:
                    found = scene.ask("epoch", fault.job, epoch=epoch, **options)
                over.append(time.monotonic())
            finally:
                fault.mend(scene)
        while found["stopped"]:
            stops.append(found["stopped"])
            if len(stops) > MAX_STOPS:
                break
            found = scene.ask("go_on", fault.job)
            over.append(time.monotonic())
        run = held(fault.name, self._right[_key(fault, epoch)], moment_s, over[-1] - begin, found, stops,
                   scene.num_hits - hits + found.get("hits", 0))  # fmt: skip
        if run.is_right and not fault.struck(run.num_hits, bool(stops), was_killed):
            return None
        self._console.print(f"{fault.name}: at {moment_s:.2f} s, took {run.seconds:.1f} s, lost {run.num_lost}, "
                            f"doubled {run.num_doubled}, loss off by {run.loss_diff:.1e}"
                            + (f"; stopped: {stops[0][:150]}" if stops else ""), style="dim")  # fmt: skip
        return run


def held(
    name: str,
    right: dict[str, Any],
    moment_s: float,
    seconds: float,
    found: dict[str, Any],
    stops: list[str],
    num_hits: int = 0,
) -> Run:
    """An epoch against the undisturbed one."""
    expected, came = Counter(right["ids"]), Counter(found["ids"])
    pairs = zip(found["losses"], right["losses"], strict=False)
    diff = max((abs(loss - wanted) / abs(wanted) for loss, wanted in pairs), default=0.0)
    if len(found["losses"]) != len(right["losses"]):
        diff = float("inf")
    return Run(name, moment_s, seconds, (expected - came).total(), (came - expected).total(),
               found["ids"] == right["ids"], diff, tuple(stops), num_hits)  # fmt: skip


def _key(fault: Fault, epoch: int) -> tuple[str, int]:
    """What an epoch is to be like: wherever the rows come from, it is the same training."""
    return fault.job if fault.job in COURSES else "", epoch


def run(*, quick: bool, console: Console) -> Result:
    num_pictures, num_runs, num_epochs = QUICK if quick else FULL
    runs: dict[str, list[Run]] = {}
    with traces.marked() as mark:
        before = traces.look(mark)
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as name, ExitStack() as stack:
            scratch = Path(name)
            up = stack.enter_context(RigUp(RIG))
            scene = Scene(up, scratch, stack, num_pictures, SEED)
            bench = Bench(scene, num_epochs, console)
            for fault in FAULTS:
                if fault.job not in bench.undisturbed_s:
                    bench.warm(fault)
                    bench.undisturbed(fault)
                runs[fault.name] = []
                for number in range(num_runs):
                    if number % EVERY == 0:
                        bench.undisturbed(fault)
                    runs[fault.name].append(bench.run(fault, number))
            left = scene.end()
            stack.close()
            left += [f"temporary file {each.name}" for each in (scratch / "tmp").iterdir()]
        left += traces.look(mark).since(before)
    return result(runs, bench, left, scene.what, quick)


def result(runs: dict[str, list[Run]], bench: Bench, left: list[str], what: str, quick: bool) -> Result:
    cases = [case(fault, runs[fault.name], statistics.median(bench.undisturbed_s[fault.job])) for fault in FAULTS]
    every = [each for group in runs.values() for each in group]
    least = min(len(group) for group in runs.values())
    slowest = max(cases, key=lambda each: each["time_lost_s"])
    typical_s = statistics.median(bench.undisturbed_s["pictures"])
    return Result(
        name="faults",
        quick=quick,
        numbers={
            "num_faults": len(FAULTS),
            "runs": least,
            "rows_lost": sum(each.num_lost for each in every),
            "rows_doubled": sum(each.num_doubled for each in every),
            "max_loss_diff": max(each.loss_diff for each in every),
            "leftovers": len(left),
            "out_of_order": sum(not each.in_order for each in every),
            "wrong_stops": sum(each["stopped"] for each in cases if not each["may_stop"]),
        },
        goals={"runs": "2" if quick else "≥ 20", "rows_lost": "0", "rows_doubled": "0", "max_loss_diff": "≤ 1e-5",
               "leftovers": "0", "out_of_order": "0", "wrong_stops": "0"},
        cases=cases,
        bound=f"two undisturbed runs differ by up to {bench.noise:.1e} in the loss; an undisturbed epoch takes "
        f"{typical_s:.1f} s",
        limited_by=f"most time is lost with: {slowest['fault']} ({slowest['time_lost_s']:.1f} s)",
        notes=[
            f"{what}, 96 px, EfficientNet-lite0 with its real weights, a new head trained by SGD, rows as fp32; three "
            "nodes (TLS, tokens) share one core and a SeaweedFS behind a proxy that fails when told; trainer on the "
            "other core",
            f"{least} runs of each fault, each an epoch that is struck at a moment between {EARLIEST:.0%} and "
            f"{LATEST:.0%} of an undisturbed one; time lost: median of the epoch's time minus that of undisturbed ones",
            "stopped: runs in which the job stopped with its reason, was told to go on once all was mended, and did; "
            "wrong_stops: where it should have gone on by itself. An expired token and damaged shards stop a job: the "
            "first is for a person, and of the second no copy is known to be right",
            "bit flips in shards: each object that comes from the store has a flipped bit until the job stops; noticed "
            "by checksums, no wrong pixel reaches the model",
            "hits: answers of the store that were spoiled, kept rows that a node found damaged and made again, or runs "
            "in which its cache met the full disk",
            f"all nodes run the prefix on {ENGINE}; a planned job has them use one engine, too",
            "training on nodes: two nodes, in float64. Partitioned: a small network with a batch-norm on each side of "
            "the cut; hits are steps that were dropped everywhere and done again. An embedding table: its rows are "
            "steps, as each node counts them; hits are calls that found the node away. The last of the losses compared "
            "is what all weights, or all vectors, come to in the end",
            *(f"left over: {each}" for each in left),
        ],
        draw=lambda path: draw(cases, path),
    )  # fmt: skip


def case(fault: Fault, runs: list[Run], undisturbed_s: float) -> dict[str, Any]:
    lost = [each.seconds - undisturbed_s for each in runs]
    reasons = sorted({each.stops[0].partition(":")[0] for each in runs if each.stops})
    return {
        "fault": fault.name,
        "runs": len(runs),
        "rows_lost": sum(each.num_lost for each in runs),
        "rows_doubled": sum(each.num_doubled for each in runs),
        "loss_diff": max(each.loss_diff for each in runs),
        "stopped": sum(bool(each.stops) for each in runs),
        "may_stop": fault.stops,
        "reason": " ".join(reasons),
        "hits": sum(each.num_hits for each in runs),
        "undisturbed_s": undisturbed_s,
        "time_lost_s": statistics.median(lost),
        "most_time_lost_s": max(lost),
    }


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.5, 5), layout="constrained")
    names = [each["fault"] for each in reversed(cases)]
    axis.barh(names, [each["most_time_lost_s"] for each in reversed(cases)], color="#d5dbe1", height=0.6, label="most")
    axis.barh(names, [each["time_lost_s"] for each in reversed(cases)], color="#1f77b4", height=0.6, label="median")
    is_whole = not any(each["rows_lost"] + each["rows_doubled"] for each in cases)
    more = "; no row lost or doubled" if is_whole else ""
    figure.suptitle(f"Time lost to a fault in one epoch, s{more}", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)

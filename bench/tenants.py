"""Many jobs on a node with too little memory: do all finish, how fairly, and how fast?

Claim: eight jobs with different models, each of which asks for a node batch that the node's memory does not hold for
all, finish without a kill; each is slowed down as much as the others (Jain's index of slowdowns at least 0.9); and
their total throughput is at least 0.9 of the best fixed batch for all. Without adaptation the kernel kills the node.

The node has one core and a control group with a limit on memory; the jobs run on the other core, and take rows as a
trainer's loader does. How long a job takes alone is measured first, and its rows are chosen so that all take about as
long. Everything-on-the-trainer: the same jobs at once on the trainer's core, in eager PyTorch.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import pictures
from bench.result import Result
from bench.rig import Host, Link, Node, Rig, RigUp
from bench.rig.remote import Remote
from bench.tenancy import MODELS

LIMIT_BYTES = 1536 << 20
NUM_TENANTS = 8
WARM_ROWS = 4
ALONE_ROWS = 24  # of the first look at a job's speed
TRAINER_BATCH = 16


@dataclass
class Run:
    """What came of some tenants at once."""

    finished: list[bool]
    seconds: list[float]
    num_rows: int
    kills: int
    max_bytes: int
    why: str

    @property
    def per_s(self) -> float:
        return self.num_rows / max(self.seconds) if all(self.finished) else 0.0


class Bench:
    """The rig with its tenants; a node for each run, since it has other options each time."""

    def __init__(self, up: RigUp, folder: Path, tenants: dict[str, Remote], console: Console) -> None:
        self._up, self._folder, self._tenants, self._console = up, folder, tenants, console
        self.rows: dict[str, int] = {}

    def node(self, *options: str) -> Node:
        self._up.forget_max_memory("storage")
        return self._up.start_node("storage", [self._folder], options=("--threads", "1", *options))

    def alone(self, address: str, seconds: float) -> dict[str, float]:
        """Choose each tenant's rows, so that it takes about so long; then how long it really takes, by itself."""
        taken = {}
        for name, tenant in self._tenants.items():
            tenant.ask(address=address, rows=WARM_ROWS, batch=WARM_ROWS)
            first = tenant.ask(address=address, rows=ALONE_ROWS, batch=ALONE_ROWS)
            self.rows[name] = max(ALONE_ROWS, round(ALONE_ROWS * seconds / first["seconds"]))
            taken[name] = self._checked(name, tenant.ask(address=address, rows=self.rows[name], batch=32))["seconds"]
            self._console.print(f"{name} alone: {self.rows[name]} rows in {taken[name]:.1f} s", style="dim")
        return taken

    def together(self, names: list[str], batch: int, *options: str) -> Run:
        """Those tenants at once, on a new node, with engines loaded where it keeps them."""
        node = self.node(*options)
        before = self._up.usage("storage").num_memory_kills
        for name in names:
            self._tenants[name].ask(address=node.address, rows=WARM_ROWS, batch=WARM_ROWS)
        with ThreadPoolExecutor(len(names)) as pool:
            found = list(pool.map(lambda name: self._tenants[name].ask(
                address=node.address, rows=self.rows[name], batch=batch), names))  # fmt: skip
        used = self._up.usage("storage")
        node.process.kill()
        node.process.wait()
        run = Run([each["finished"] for each in found], [each["seconds"] for each in found],
                  sum(each["rows"] for each in found), used.num_memory_kills - before, used.max_memory_bytes,
                  next((each["why"] for each in found if each["why"]), ""))  # fmt: skip
        self._console.print(f"{len(names)} tenants, batch {batch} {' '.join(options)}: {sum(run.finished)} finished, "
                            f"{run.kills} kills, {run.per_s:.1f} rows/s", style="dim")  # fmt: skip
        return run

    def _checked(self, name: str, found: dict[str, Any]) -> dict[str, Any]:
        assert found["finished"], f"{name} alone did not finish: {found['why']}"
        return found


def run(*, quick: bool, console: Console) -> Result:
    # Asked for: what a trainer would like, and the node can't hold. The batches that a fixed setting could have.
    asked, seconds, rounds = (64, 2.5, 1) if quick else (128, 8.0, 3)
    statics = (4,) if quick else (1, 4, 16, 32)
    counts = (1, NUM_TENANTS) if quick else (1, 2, 4, 6, NUM_TENANTS, 10)
    names = list(MODELS)[: max(counts)]
    eight = names[:NUM_TENANTS]
    rig = Rig(
        storage=(Host("storage", cores=(0,), memory_bytes=LIMIT_BYTES),),
        trainers=(Host("trainer", cores=(1,)), Host("maker", cores=(0, 1), cpu=2.0)),
        links={"trainer": Link(1000)},
    )
    fair: list[Run] = []
    fixed: dict[int, list[Run]] = {batch: [] for batch in statics}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up, ExitStack() as stack:
        folder, what = pictures.folder(Path(scratch), 400)
        env = {"XDG_CACHE_HOME": f"{scratch}/cache"}
        with ThreadPoolExecutor(2) as pool:
            halves = list(pool.map(lambda half: up.call(
                "maker", "bench.tenancy:make_prefixes", env=env, folder=scratch, names=half
            ), (names[::2], names[1::2])))  # fmt: skip
        widths: dict[str, int] = halves[0] | halves[1]
        tenants = {name: stack.enter_context(up.open("trainer", "bench.tenancy:Tenant", env=env, folder=str(folder),
                                                     prefix=f"{scratch}/{name}.onnx", shape=[widths[name]], name=name))
                   for name in names}  # fmt: skip
        trainers = stack.enter_context(
            up.open("trainer", "bench.tenancy:Trainers", env=env, folder=str(folder), names=names)
        )
        trainers.wait()
        bench = Bench(up, folder, tenants, console)
        node = bench.node()
        alone = bench.alone(node.address, seconds)
        node.process.kill()
        node.process.wait()
        for _ in range(rounds):
            fair.append(bench.together(eight, asked))
            for batch in statics:
                fixed[batch].append(bench.together(eight, batch, "--no-adaptation"))
        without = bench.together(eight, asked, "--no-adaptation")
        first = Run([True], [alone[names[0]]], bench.rows[names[0]], 0, 0, "")  # one tenant at once is one alone
        near = {1: first, NUM_TENANTS: fair[0]}
        near |= {count: bench.together(names[:count], asked) for count in counts if count not in near}
        trained = {}
        for count in counts:
            trained[count] = trainers.ask(rows={name: bench.rows[name] for name in names[:count]}, batch=TRAINER_BATCH)
            console.print(f"{count} on the trainer: {statistics.mean(trained[count]):.1f} s", style="dim")
    return result(fair, fixed, without, near, trained, alone, bench.rows, eight, asked, what, rounds, quick)


def jain(values: list[float]) -> float:
    """1 if all are equal, 1/n if one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def result(
    fair: list[Run],
    fixed: dict[int, list[Run]],
    without: Run,
    near: dict[int, Run],
    trained: dict[int, list[float]],
    alone: dict[str, float],
    rows: dict[str, int],
    eight: list[str],
    asked: int,
    what: str,
    rounds: int,
    quick: bool,
) -> Result:
    slowdowns = [[taken / alone[name] for name, taken in zip(eight, run.seconds, strict=True)] for run in fair]
    rate = statistics.median(run.per_s for run in fair)
    rates = {batch: statistics.median(run.per_s for run in runs) for batch, runs in fixed.items()}
    best = max(rates, key=lambda batch: rates[batch])
    cases: list[dict[str, Any]] = [
        {"what": f"{NUM_TENANTS} tenants, adapted", "finished": min(sum(run.finished) for run in fair),
         "kills": sum(run.kills for run in fair), "rows_per_s": rate, "max_mb": fair[-1].max_bytes / 1e6}
    ]  # fmt: skip
    cases += [
        {"what": f"{NUM_TENANTS} tenants, batch {batch} for all", "finished": min(sum(run.finished) for run in runs),
         "kills": sum(run.kills for run in runs), "rows_per_s": rates[batch], "max_mb": runs[-1].max_bytes / 1e6}
        for batch, runs in fixed.items()
    ]  # fmt: skip
    cases.append({"what": f"{NUM_TENANTS} tenants, not adapted: batch {asked}, as asked for",
                  "finished": sum(without.finished), "kills": without.kills, "rows_per_s": without.per_s,
                  "max_mb": without.max_bytes / 1e6})  # fmt: skip
    for name, *taken in zip(eight, *slowdowns, strict=True):
        cases.append({"what": f"{name}: {rows[name]} rows", "alone_s": alone[name],
                      "slowdown": statistics.median(taken)})  # fmt: skip
    curves = []
    for count, run in sorted(near.items()):
        in_turn = statistics.mean(accumulate(list(alone.values())[:count]))
        curves.append({"what": f"{count} at once: mean completion", "tenants": count,
                       "together_s": statistics.mean(run.seconds), "one_at_a_time_s": in_turn,
                       "on_the_trainer_s": statistics.mean(trained[count])})  # fmt: skip
    cases += curves
    return Result(
        name="tenants",
        quick=quick,
        numbers={
            "num_tenants": NUM_TENANTS,
            "finished": min(sum(run.finished) for run in fair),
            "kills_with": sum(run.kills for run in fair) + sum(run.kills for run in near.values()),
            "kills_without": without.kills,
            "jain": statistics.median(map(jain, slowdowns)),
            "vs_best_static": rate / rates[best] if rates[best] else float(rate > 0),
            "mean_completion_vs_one_at_a_time": curves[-1]["together_s"] / curves[-1]["one_at_a_time_s"],
            "mean_completion_vs_trainer": curves[-1]["together_s"] / curves[-1]["on_the_trainer_s"],
        },
        goals={"num_tenants": "8", "finished": "8", "kills_with": "0", "kills_without": "≥ 1", "jain": "≥ 0.9",
               "vs_best_static": "≥ 0.9"},
        cases=cases,
        bound="jain 1: all are slowed down alike. vs_best_static about 1: the node's one core does the same work "
        "however large its groups are, once they are large enough",
        limited_by=f"the node's core; it took {fair[-1].max_bytes / 1e6:,.0f} MB at most, of {LIMIT_BYTES / 1e6:,.0f}",
        notes=[
            f"{what}, 224 px; each job asks for a node batch of {asked}; {rounds} rounds, medians; the best fixed "
            f"batch is {best}",
            "a job takes rows in order as a trainer's loader does; the step of its head, which costs next to nothing, "
            "is left out; all begin at the same moment, with their engines loaded",
            "slowdown: seconds at once ÷ seconds alone, with adaptation. one at a time: sums of what each took alone",
            "everything on the trainer: the same jobs at once on its one core, in eager PyTorch, with the pictures on "
            "its own disk",
            f"not adapted: {without.why or 'all finished'}",
        ],
        draw=lambda path: draw(curves, path),
    )  # fmt: skip


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    counts = [each["tenants"] for each in curves]
    lines = (("together_s", "at once, near the data", "#1f77b4"), ("one_at_a_time_s", "one at a time", "#9aa5b1"),
             ("on_the_trainer_s", "everything on the trainer", "#c0504d"))  # fmt: skip
    for key, label, colour in lines:
        axis.plot(counts, [each[key] for each in curves], "o-", color=colour, label=label)
    axis.set(title="Jobs that share a node", xlabel="jobs", ylabel="mean completion, s", xlim=(0, None), ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)

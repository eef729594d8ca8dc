"""Many short epochs on one node, with tenants that come and go: does memory stay flat?

Claim: over 200 epochs, the memory of node and trainer in the last quarter is within 3 % of that in the second one.

One job trains a head, epoch after epoch; part of its rows fit into the node's cache, the others are made each time.
Beside it, other jobs with models of their own come, take some rows a few times, and go; one in three is killed (kill
-9) while it waits for rows. Memory is what the node's own process, and the trainer's, hold after each epoch (resident);
children in which the node tries engines and uploads come and go, and stand beside it. Each of the tenants' models was
there once before the first epoch.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import pictures
from bench.result import Result
from bench.rig import Host, Rig, RigError, RigUp

MODELS = ("mobilenet", "shufflenet", "alexnet", "mnasnet")  # of the tenants: small ones of `bench.tenancy`
NUM_VISITORS = 2  # tenants at once
VISIT_ROWS, VISIT_BATCH = 16, 8
MAX_TIMES = 3  # that a tenant asks before it goes
KILLED = 3  # one in so many is killed
KILLED_BY = "exit code -9"
ROW_BYTES = 5148  # of EfficientNet-lite0's features in a cache
NUM_CLASSES = 10
FULL, QUICK = (200, 640), (24, 240)  # epochs, pictures
SEED = 0


class Visitors:
    """Tenants, one after the other, while the block runs."""

    def __init__(self, up: RigUp, address: str, arguments: dict[str, dict[str, Any]]) -> None:
        self._up, self._address, self._arguments = up, address, arguments
        self._over, self._lock = threading.Event(), threading.Lock()
        self.ends: Counter[str] = Counter()  # how they ended: went, killed, or what went wrong

    @property
    def num_so_far(self) -> int:
        with self._lock:
            return self.ends.total()

    def all_once(self) -> None:
        """Each model, so that what a node does only once is done."""
        for model in MODELS:
            with self._up.open("others", "bench.tenancy:Tenant", **self._arguments[model]) as tenant:
                tenant.ask(address=self._address, rows=VISIT_ROWS, batch=VISIT_BATCH)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._come_and_go, args=(number,)) for number in range(NUM_VISITORS)]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._over.set()
            for each in threads:
                each.join()

    def _come_and_go(self, number: int) -> None:
        drawn, visit = random.Random(SEED + number), number
        while not self._over.is_set():
            visit += 1
            try:
                end = self._visit(drawn, is_killed=visit % KILLED == 0)
            except Exception as error:  # it counts as one that failed, and another one comes
                end = f"{type(error).__name__}: {error}"[-200:]
            with self._lock:
                self.ends[end] += 1

    def _visit(self, drawn: random.Random, *, is_killed: bool) -> str:
        model, times = drawn.choice(MODELS), drawn.randint(1, MAX_TIMES)
        with self._lock:
            tenant = self._up.open("others", "bench.tenancy:Tenant", **self._arguments[model])
        with tenant:
            tenant.wait()
            if is_killed:
                late = threading.Timer(drawn.uniform(0.05, 1.0), tenant.kill)
                late.start()
            try:
                while is_killed or times:
                    found = tenant.ask(address=self._address, rows=VISIT_ROWS, batch=VISIT_BATCH)
                    if not found["finished"]:
                        return str(found["why"])
                    times -= 1
            except RigError as error:
                if not is_killed or KILLED_BY not in str(error):
                    raise
                late.join()
                return "killed"
        return "went"


def run(*, quick: bool, console: Console) -> Result:
    num_epochs, num_pictures = QUICK if quick else FULL
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)), Host("others", cores=(0, 1), cpu=2.0)),
    )
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up:
        folder, what = pictures.folder(Path(scratch), num_pictures, NUM_CLASSES)
        env = {"XDG_CACHE_HOME": f"{scratch}/cache"}
        with up.open("trainer", "bench.faulty:Trainer", env=env, num_classes=NUM_CLASSES) as trainer:
            widths = up.call("others", "bench.tenancy:make_prefixes", env=env, folder=scratch, names=list(MODELS))
            options = ("--threads", "1", "--cache-size", str(num_pictures // 2 * ROW_BYTES))
            node = up.start_node("storage", [folder], options=options)
            trainer.ask(do="open", name="main", url=str(folder), nodes=[node.address])
            arguments = {name: {"folder": str(folder), "prefix": f"{scratch}/{name}.onnx", "shape": [widths[name]],
                                "name": name} for name in MODELS}  # fmt: skip
            visitors = Visitors(up, node.address, arguments)
            visitors.all_once()
            (trainer_pid,) = up.processes("trainer")
            begin = time.monotonic()
            with visitors.around():
                for epoch in range(num_epochs):
                    found = trainer.ask(do="epoch", name="main", epoch=epoch)
                    if found["stopped"] or sorted(found["ids"]) != list(range(num_pictures)):
                        raise RigError(f"epoch {epoch} is not whole: {found['stopped'] or 'rows are missing'}")
                    cases.append({
                        "epoch": epoch,
                        "seconds": found["seconds"],
                        "at_s": time.monotonic() - begin,
                        "node_mb": resident_bytes(node.process.pid) / 1e6,
                        "trainer_mb": resident_bytes(trainer_pid) / 1e6,
                        "node_and_children_mb": sum(map(resident_bytes, up.processes("storage"))) / 1e6,
                        "tenants_so_far": visitors.num_so_far,
                    })  # fmt: skip
                    if epoch % 10 == 9:
                        console.print(tell(cases[-1]), style="dim")
    return result(cases, visitors.ends, what, quick)


def tell(case: dict[str, Any]) -> str:
    return (f"epoch {case['epoch']}: node {case['node_mb']:.0f} MB, trainer {case['trainer_mb']:.0f} MB, "
            f"{case['tenants_so_far']} tenants so far, {case['at_s']:.0f} s")  # fmt: skip


def resident_bytes(pid: int) -> int:
    """0 if it is gone."""
    try:
        said = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in said.splitlines() if line.startswith("VmRSS:")), 0)


def growth(values: list[float]) -> float:
    """Median of the last quarter against that of the second one."""
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) / statistics.median(values[quarter : 2 * quarter]) - 1


def result(cases: list[dict[str, Any]], ends: Counter[str], what: str, quick: bool) -> Result:
    keys = ("node_mb", "trainer_mb", "node_and_children_mb")
    node, trainer, together = ([each[key] for each in cases] for key in keys)
    failed = ends.total() - ends["went"] - ends["killed"]
    return Result(
        name="soak",
        quick=quick,
        numbers={
            "node_growth": growth(node),
            "trainer_growth": growth(trainer),
            "num_epochs": len(cases),
            "num_tenants": ends.total(),
            "num_tenants_killed": ends["killed"],
            "num_tenants_failed": failed,
        },
        goals={"node_growth": "≤ 0.03", "trainer_growth": "≤ 0.03", "num_epochs": str((QUICK if quick else FULL)[0]),
               "num_tenants": f"≥ {len(cases) // 4}", "num_tenants_killed": f"≥ {len(cases) // 16}",
               "num_tenants_failed": "0"},
        cases=cases,
        bound="0: nothing is kept from one epoch or tenant to the next",
        limited_by=f"node {min(node):,.0f} to {max(node):,.0f} MB, trainer {min(trainer):,.0f} to {max(trainer):,.0f} "
        f"MB over all epochs; the node with its children up to {max(together):,.0f} MB",
        notes=[
            f"{what}, 96 px, EfficientNet-lite0, a head trained by SGD; a node on one core, with a cache for about "
            "half of the rows; the trainer on the other core",
            f"{NUM_VISITORS} tenants at a time with {', '.join(MODELS)} at 224 px, each for up to {MAX_TIMES} times "
            f"{VISIT_ROWS} rows; {ends['went']} went by themselves, {ends['killed']} were killed"
            + "".join(f"; {count} failed: {why}" for why, count in ends.items() if why not in ("went", "killed")),
            "growth: the median after the epochs of the last quarter ÷ that of the second quarter, minus 1",
        ],
        draw=lambda path: draw(cases, path),
    )  # fmt: skip


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.8, 3.8), layout="constrained")
    epochs = [each["epoch"] for each in cases]
    for key, label, colour in (("node_mb", "node", "#1f77b4"), ("trainer_mb", "trainer", "#c0504d")):
        axis.plot(epochs, [each[key] for each in cases], color=colour, linewidth=1.2, label=label)
    quarter = len(cases) // 4
    for start in (quarter, len(cases) - quarter):
        axis.axvspan(start, start + quarter, color="#eef1f4", zorder=0)
    axis.set(title="Memory after each epoch; compared: the shaded quarters", xlabel="epoch", ylabel="MB",
             xlim=(0, len(cases)), ylim=(0, None))  # fmt: skip
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)

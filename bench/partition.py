"""A model whose first layers train on storage devices, against all of it on the trainer.

Claim: with four storage devices and a batch of 512, the cut that is planned takes at least 31 % less time for a step
than everything on the trainer with pictures read over the link, and nowhere more; and no cut that is pinned is much
faster.

Devices and the store are on one core, of which each device has a fifth; the trainer has the other core. Nothing is
frozen. All sides run in turns in one process of the trainer, each with one step that does not count before those that
do.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from bench import pictures
from bench.offload import settle
from bench.result import Result
from bench.rig import Host, Link, Rig, RigUp
from bench.rig.python import python_env
from bench.rig.upload import upload

NUM_DEVICES, SHARE, BATCH = 4, 0.2, 512
LARGE, SMALL = "large", "small"  # as they come, and not much larger than what the model takes
SMALL_SIDE = 72
NONE, AUTO = "everything on the trainer", "planned"
CLASSES = 10


@dataclass(frozen=True)
class Size:
    num_pictures: int
    cases: tuple[tuple[str, str, float], ...]  # model, pictures, Mbit/s of the trainer's link
    cuts: tuple[str, ...]
    rounds: int
    steps: int  # of a side in a round


FULL = Size(2400, (("vgg", LARGE, 20), ("vgg", LARGE, 100), ("vgg", LARGE, 1000), ("vgg", SMALL, 20),
                   ("vgg", SMALL, 100), ("vgg", SMALL, 1000), ("vgg_bn", SMALL, 1000)),
            ("input", "0", "1", "2", "3"), 3, 2)  # fmt: skip
QUICK = Size(1200, (("vgg", LARGE, 50), ("vgg", SMALL, 1000)), ("input", "1"), 1, 2)


def run(*, quick: bool, console: Console) -> Result:
    size = QUICK if quick else FULL
    devices = tuple(Host(f"device-{number}", cores=(0,), cpu=SHARE) for number in range(NUM_DEVICES))
    rig = Rig(storage=devices, trainers=(Host("trainer", cores=(1,)),), links={"trainer": Link(1000)},
              store=Host("store", cores=(0,)))  # fmt: skip
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up:
        folder, what = pictures.folder(Path(scratch), size.num_pictures, CLASSES)
        store = up.start_store()
        upload(up, store, folder, f"pictures/{LARGE}")
        upload(up, store, shrink(folder, Path(scratch) / "small"), f"pictures/{SMALL}")
        env = {**python_env(), **store.env, "XDG_CACHE_HOME": f"{scratch}/cache", "OMP_NUM_THREADS": "1"}
        for device in devices:
            up.set_cpu(device.name, 1.0)  # starting is not what is measured
        with ThreadPoolExecutor(NUM_DEVICES) as pool:
            nodes = list(
                pool.map(lambda device: up.start_node(device.name, ["s3://pictures"], env=env).address, devices)
            )
        for model, kind in dict.fromkeys(case[:2] for case in size.cases):
            with up.open("trainer", "bench.partitioning:Trainer", env=env, url=f"s3://pictures/{kind}", model=model,
                         num_classes=CLASSES, batch_size=BATCH) as trainer:  # fmt: skip
                for device in devices:
                    up.set_cpu(device.name, 1.0)
                up.set_rate("trainer", 1000)
                plans = {NONE: trainer.ask(do="open", side=NONE, nodes=None, cut="none")}
                for cut in size.cuts:
                    plans[cut] = trainer.ask(do="open", side=cut, nodes=nodes, cut=cut)
                for device in devices:
                    up.set_cpu(device.name, SHARE)
                for mbit in [case[2] for case in size.cases if case[:2] == (model, kind)]:
                    up.set_rate("trainer", mbit)
                    settle(up)
                    plans[AUTO] = trainer.ask(do="open", side=AUTO, nodes=nodes, cut="auto")
                    console.print(f"{model}, {kind} pictures, {mbit:g} Mbit/s: {plans[AUTO]['plan']}", style="dim")
                    for case in measure(up, trainer, size, plans):
                        cases.append({"model": model, "pictures": kind, "mbit_per_s": mbit, **case})
                        console.print(f"{case['side']}: {case['step_s']:.2f} s", style="dim")
                trainer.ask(do="close_all")
    return result(cases, what, size, quick)


def shrink(folder: Path, target: Path) -> Path:
    """The same pictures, hardly larger than what the model takes: there is little to decode."""
    for path in folder.rglob("*.jpg"):
        place = target / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.convert("RGB").resize((SMALL_SIDE, SMALL_SIDE)).save(place, quality=90)
    return target


def point_of(case: dict[str, Any]) -> tuple[str, str, float]:
    return case["model"], case["pictures"], case["mbit_per_s"]


def measure(up: RigUp, trainer: Any, size: Size, plans: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every side in turns; a case for each."""
    sides = list(plans)
    found: dict[str, list[float]] = {side: [] for side in sides}
    num_bytes = {}
    for number in range(size.rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            settle(up)
            trainer.ask(do="steps", side=side, count=1)  # what was made ahead meanwhile is used up
            before = up.usage("trainer")
            found[side] += trainer.ask(do="steps", side=side, count=size.steps)
            moved = up.usage("trainer").since(before)
            num_bytes[side] = moved.received_bytes / size.steps, moved.sent_bytes / size.steps
    none = statistics.median(found[NONE])
    return [
        {"side": side, "cut": plans[side]["cut"] if plans[side]["place"] == "nodes" else "-",
         "codec": plans[side]["codec"], "micro_batches": plans[side]["micro_batches"],
         "step_s": statistics.median(found[side]), "vs_none": statistics.median(found[side]) / none,
         "received_mb": num_bytes[side][0] / 1e6, "sent_mb": num_bytes[side][1] / 1e6,
         **({"estimate_s": plans[side]["estimate_s"]} if plans[side].get("estimate_s") else {})}
        for side in sides
    ]  # fmt: skip


def result(cases: list[dict[str, Any]], what: str, size: Size, quick: bool) -> Result:
    points = dict.fromkeys(map(point_of, cases))
    reductions, against_best = [], []
    for point in points:
        sides = {case["side"]: case for case in cases if point_of(case) == point}
        reductions.append(1 - sides[AUTO]["vs_none"])
        best = min(case["step_s"] for name, case in sides.items() if name != AUTO)
        against_best.append(sides[AUTO]["step_s"] / best)
    errors = [abs(case["estimate_s"] / case["step_s"] - 1) for case in cases if case.get("estimate_s")]
    cores = NUM_DEVICES * SHARE
    return Result(
        name="partition",
        quick=quick,
        numbers={
            "best_reduction": max(reductions),
            "worst_vs_none": 1 - min(reductions),
            "median_reduction": statistics.median(reductions),
            "worst_vs_best_static": max(against_best),
            "estimate_error": statistics.median(errors),
        },
        goals={"best_reduction": "≥ 0.31", "worst_vs_none": "≤ 1.0"},
        cases=cases,
        bound=f"where cores limit: {cores / (1 + cores):.2f}, if the trainer's core and the devices' {cores:g} "
        "were busy all the time; where the link limits, what is saved in bytes",
        limited_by="the trainer's link at low rates, the devices' share of a core at high ones; with batch-norms, that "
        "nodes and trainer take turns",
        notes=[
            f"{what} in an object store: large as they come, small of {SMALL_SIDE} px",
            f"the model takes 64 px; batches of {BATCH}; SGD with momentum; float32",
            f"{NUM_DEVICES} devices of {SHARE:g} core and the store share a core, the trainer has one; its link has "
            " the rate of the case, both ways",
            f"{size.rounds} rounds of {size.steps} steps a side, in turns, after one that does not count; medians",
            "rows and their gradients may travel as fp16; pinned cuts use it, the planner decides; weights and their "
            "gradients travel as they are",
            "vgg has no batch-norm, so batches go through in parts; vgg_bn has them with whole batches' statistics",
            "received and sent: by the trainer, in a step of the last round",
            "worst_vs_best_static: the planned cut's time ÷ that of the fastest of all pinned ones and of "
            "everything on the trainer",
        ],
        draw=lambda path: draw(cases, path),
    )


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = list(dict.fromkeys(map(point_of, cases)))
    sides = list(dict.fromkeys(case["side"] for case in cases))
    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    wide = 0.8 / len(sides)
    for place, side in enumerate(sides):
        heights = [next(case["step_s"] for case in cases if case["side"] == side and
                        point_of(case) == point) for point in points]  # fmt: skip
        color = {NONE: "#9aa5b1", AUTO: "#c0504d"}.get(side)
        label = side if side in (NONE, AUTO) else f"cut at {side}"
        axis.bar([number + place * wide for number in range(len(points))], heights, wide, label=label, color=color)
    axis.set_xticks([number + 0.4 - wide / 2 for number in range(len(points))],
                    [f"{model}, {kind}\n{mbit:g} Mbit/s" for model, kind, mbit in points])  # fmt: skip
    axis.set(title="A step of 512 pictures, nothing frozen", ylabel="seconds")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)

"""Two-ended preprocessing where nothing is frozen: nodes and the trainer's own core both decode and augment.

Claim: against the same job with all preprocessing on the trainer, each of the three strategies comes within 10 % of
what the stages allow when both sides work at once; with a whole core beside the storage it takes at least 37.6 % of the
preprocessing off the trainer's core; and nowhere is it more than 3 % slower.

The trainer has one core and no accelerator, so its step and its part of the preprocessing share that core. The store
and the node are on the other core, of which the node has a quarter to all. A measurement is a whole epoch.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from bench import pictures
from bench.offload import measure_link, settle
from bench.result import Result
from bench.rig import Host, Link, Rig, RigUp
from bench.rig.python import python_env
from bench.rig.remote import Remote
from headwater.core.prongs import STRATEGIES
from headwater.core.share import SHARES

CPU, PEERS = "cpu only", ("DataLoader", "webdataset")
MBIT = 1000.0
SMALL = 32  # pixels of the small pictures
# Stated, not measured, as in bench nodes: a small storage controller, a server core with its share of the machine.
DEVICE_W, CORE_W = 2.0, 15.0


@dataclass(frozen=True)
class Size:
    num_pictures: int
    cases: tuple[tuple[str, str], ...]  # pipeline, model
    devices: tuple[float, ...]  # cores
    rounds: int
    peers: tuple[str, ...]


FULL = Size(2640, tuple((pipeline, model) for pipeline in ("imagenet", "cifar") for model in ("resnet", "wrn", "vit")),
            (0.25, 1.0), 3, PEERS)  # fmt: skip
QUICK = Size(2640, (("imagenet", "resnet"), ("cifar", "vit")), (1.0,), 1, ())


def run(*, quick: bool, console: Console) -> Result:
    size = QUICK if quick else FULL
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(MBIT)},
        store=Host("store", cores=(0,)),
    )
    cases: list[dict[str, Any]] = []
    direct: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up:
        folder, what = pictures.folder(Path(scratch), size.num_pictures)
        small = shrink(folder, Path(scratch) / "small")
        store = up.start_store()
        env = {**python_env(), **store.env, "XDG_CACHE_HOME": f"{scratch}/cache", "TMPDIR": scratch}
        node = up.start_node("storage", ["s3://pictures"], env=env)
        # Strategies are measured over the link; files pass it by, since all hosts of the rig see one file system.
        beside = up.start_node("storage", ["s3://pictures"], port=8816, env=env,
                               options=("--hand-over", f"{scratch}/hand-over"))  # fmt: skip
        sides = ["plain", *(peer for peer in size.peers if peer == "webdataset")]
        for name, source in (("imagenet", folder), ("cifar", small)):
            with console.status(f"uploading the {name} pictures"):
                up.call("storage", "bench.peers.prepare:prepare", env=env, folder=str(source), sides=sides, under=name)
        link_bytes_per_s = measure_link(up, MBIT) * 1e6 / 8
        for pipeline, model in size.cases:
            up.set_cpu("storage", 1.0)
            with up.open("trainer", "bench.twoends:Trainer", env=env, scratch=scratch, node=node.address,
                         pipeline=pipeline, model=model, mbit_per_s=MBIT) as trainer:  # fmt: skip
                for cores in size.devices:
                    up.set_cpu("storage", cores)
                    about = {"pipeline": pipeline, "model": model, "device_cores": cores}
                    for case in measure(up, trainer, size, pipeline, link_bytes_per_s):
                        cases.append({**about, **case})
                    console.print(tell(cases, about), style="dim")
                if pipeline not in direct:
                    up.set_cpu("storage", 1.0)
                    direct[pipeline] = trainer.ask(do="direct", node=beside.address, rounds=size.rounds)
    return result(cases, direct, what, size, quick)


def shrink(folder: Path, target: Path) -> Path:
    """The same pictures as small as CIFAR's, lossless."""
    for path in folder.rglob("*.jpg"):
        place = target / path.relative_to(folder).with_suffix(".png")
        place.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            image.convert("RGB").resize((SMALL, SMALL), Image.Resampling.BOX).save(place)
    return target


def measure(up: RigUp, trainer: Remote, size: Size, pipeline: str, link_bytes_per_s: float) -> Iterator[dict[str, Any]]:
    """Every side's epochs in turns, and the stages alone around them; one case for each side."""
    sides = [CPU, *STRATEGIES, *size.peers]
    plans = trainer.ask(do="open", sides=sides)
    for side in sides[1:]:  # threads, processes and connections are warm then, and mte has measured its meeting point
        trainer.ask(do="epoch", side=side, number=0)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    stages = []
    for number in range(size.rounds):
        settle(up)
        stages.append(alone_stages(up, trainer, size.num_pictures))
        for side in sides if number % 2 == 0 else sides[::-1]:
            settle(up)
            before = up.usage("trainer"), up.usage("storage")
            each = trainer.ask(do="epoch", side=side, number=number + 1)
            here, there = (
                up.usage(host).since(then) for host, then in zip(("trainer", "storage"), before, strict=True)
            )
            images = each["images"]
            found[side].append({**each, "rate": images / each["seconds"], "cpu_s": here.cpu_s / images,
                                "device_s": there.cpu_s / images})  # fmt: skip
    memory = {side: trainer.ask(do="usage", side=side)["trainer"]["resident_bytes"] for side in plans}
    alone = {name: statistics.median(each[name] for each in stages) for name in stages[0]}
    row_bytes = PIXEL_BYTES[pipeline]
    for side in sides:
        yield {"side": side, **outcome(side, found, alone, row_bytes / link_bytes_per_s),
               **({"memory_bytes": memory[side]} if side in memory else {})}  # fmt: skip


def alone_stages(up: RigUp, trainer: Remote, num_pictures: int) -> dict[str, float]:
    """Each stage by itself, and what a picture takes of the storage core: of the node, and of the store, which is on
    that core, too, and serves every picture, whoever reads it."""
    hosts = ("storage", "store")
    before = [up.usage(host) for host in hosts]
    found: dict[str, float] = trainer.ask(do="alone")
    device_s, store_s = (up.usage(host).since(then).cpu_s for host, then in zip(hosts, before, strict=True))
    return {**found, "device_s": device_s / num_pictures, "store_s": store_s / (2 * num_pictures)}  # read by both sides


PIXEL_BYTES = {"imagenet": 224 * 224 * 3, "cifar": SMALL * SMALL * 3}


def bound(alone: dict[str, float], link_s: float) -> tuple[float, float]:
    """Pictures a second if everything overlaps, and the trainer's share at which that is so.

    The trainer's core does the step of every picture, the preprocessing of its share, and takes the others from the
    wire; the device does the others; they cross the link as pixels. The storage core does the device's work and serves
    every picture from the store.
    """
    loads = {
        share: max(
            alone["step_s"] + share * alone["cpu_s"] + (1 - share) * alone["receive_s"],
            (1 - share) * alone["node_s"],
            (1 - share) * alone["device_s"] + alone["store_s"],
            (1 - share) * link_s,
        )
        for share in (0.0, *SHARES, 1.0)
    }
    best = min(loads, key=loads.__getitem__)
    return 1 / loads[best], best


def outcome(
    side: str, found: dict[str, list[dict[str, float]]], alone: dict[str, float], link_s: float
) -> dict[str, Any]:
    def median(key: str, of: str = side) -> float:
        return statistics.median(each[key] for each in found[of])

    plain = statistics.median(a["rate"] / b["rate"] for a, b in zip(found[side], found[CPU], strict=True))
    most, share = bound(alone, link_s)
    about: dict[str, Any] = {
        "images_per_s": median("rate"),
        "vs_cpu_only": plain,
        "trainer_cpu_s": median("cpu_s"),
        "device_cpu_s": median("device_s"),
        "modelled_j": CORE_W * median("cpu_s") + DEVICE_W * median("device_s"),
    }
    if side in STRATEGIES:
        preprocessing = [max(median("cpu_s", of) - alone["step_s"], 0.0) for of in (side, CPU)]
        about |= {
            "bound": most,
            "bound_share": share,
            "of_bound": median("rate") / most,
            "share": median("share"),
            "trainer_cpu_saved": 1 - preprocessing[0] / preprocessing[1] if preprocessing[1] else 0.0,
        }
    if side == CPU:
        about |= {f"alone_{name}": value for name, value in alone.items()}
    return about


def tell(cases: list[dict[str, Any]], about: dict[str, Any]) -> str:
    here = [case for case in cases if about.items() <= case.items()]
    rates = ", ".join(f"{case['side']} {case['images_per_s']:.1f}" for case in here)
    most = next(case["bound"] for case in here if "bound" in case)
    return f"{about['pipeline']} {about['model']}, {about['device_cores']:g} core: {rates}; bound {most:.1f}"


def result(
    cases: list[dict[str, Any]], direct: dict[str, dict[str, float]], what: str, size: Size, quick: bool
) -> Result:
    ours = [case for case in cases if case["side"] in STRATEGIES]
    whole = [case for case in ours if case["device_cores"] == 1.0 and case["pipeline"] == "imagenet"]
    others = [case for case in cases if case["side"] in size.peers]
    best: dict[tuple[Any, ...], float] = {}
    for case in others:
        best[key_of(case)] = max(best.get(key_of(case), 0.0), case["images_per_s"])
    numbers = {
        "min_of_bound": min(case["of_bound"] for case in ours),
        "trainer_cpu_saved": min(case["trainer_cpu_saved"] for case in whole),
        "worst_vs_cpu_only": min(case["vs_cpu_only"] for case in ours),
        "best_vs_cpu_only": max(case["vs_cpu_only"] for case in ours),
        "direct_receive_cpu": direct["imagenet"]["file_cpu_s"] / direct["imagenet"]["wire_cpu_s"],
    }
    if best:
        numbers["min_vs_best_peer"] = min(case["images_per_s"] / best[key_of(case)] for case in ours)
    return Result(
        name="prongs",
        quick=quick,
        numbers=numbers,
        goals={"min_of_bound": "≥ 0.9", "trainer_cpu_saved": "≥ 0.376", "worst_vs_cpu_only": "≥ 0.97"},
        cases=cases,
        bound="pictures/s if everything overlaps: the trainer's core does every step, its share of the preprocessing "
        "and the receiving of the others, the device the others, and the storage core the device's work and the "
        "store's; with the share, in sixteenths, that gives most; each "
        "stage measured alone in the same minutes. An accelerator of its own would take the step off that core",
        limited_by="; ".join(sorted({f"{case['pipeline']}: {limit(case, cases)}" for case in ours})),
        notes=[
            f"{what}, and the same at {SMALL} px as PNG; imagenet: RandomResizedCrop 224, flip, jitter; cifar: "
            "pad-crop 32, flip; batch 32, SGD; all layers trained on one core",
            f"{size.rounds} rounds of whole epochs, sides in turns; medians; vs_cpu_only is within a round",
            "cpu only: the same job with everything on the trainer; DataLoader: torch's, one worker process, the same "
            "transforms; webdataset: tars of the same pictures by curl, the same transforms",
            "trainer_cpu_s, device_cpu_s: seconds a picture, measured; trainer_cpu_saved: of the trainer's CPU beyond "
            "the step, on imagenet with a whole core beside the storage, the worst of all strategies and models",
            "direct_receive_cpu: the trainer's CPU for taking pixels from a node as files (O_DIRECT) ÷ over the wire, "
            "224 px, in turns; seconds a picture: " + "; ".join(starmap(said, direct.items())),
            f"energy is modelled: a device draws {DEVICE_W:g} W while it works, a trainer's core {CORE_W:g} W; stated",
        ],
        draw=lambda path: draw(cases, path),
    )


def said(pipeline: str, taken: dict[str, float]) -> str:
    return f"{pipeline} " + ", ".join(f"{name} {value:.3g}" for name, value in taken.items())


def key_of(case: dict[str, Any]) -> tuple[Any, ...]:
    return case["pipeline"], case["model"], case["device_cores"]


def limit(case: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    """What the bound of this case is full with."""
    alone = next(each for each in cases if each["side"] == CPU and key_of(each) == key_of(case))
    return "the step" if alone["alone_step_s"] * case["bound"] > 0.5 else "preprocessing on both sides"


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    keys = list(dict.fromkeys(map(key_of, cases)))
    sides = list(dict.fromkeys(case["side"] for case in cases))
    of = {(key_of(case), case["side"]): case for case in cases}
    colours = ("#9aa5b1", "#1f77b4", "#2ca02c", "#7b3294", "#e08214", "#c51b7d")
    figure, axis = pyplot.subplots(figsize=(max(6.4, 0.8 * len(keys)), 4), layout="constrained")
    width = 0.8 / len(sides)
    for number, side in enumerate(sides):
        places = [index + (number - len(sides) / 2 + 0.5) * width for index in range(len(keys))]
        rates = [of[key, side]["vs_cpu_only"] for key in keys]
        axis.bar(places, rates, width, label=side, color=colours[number])
    for index, key in enumerate(keys):
        most = of[key, STRATEGIES[0]]["bound"] / of[key, CPU]["images_per_s"]
        axis.plot([index - 0.42, index + 0.42], [most, most], color="#c0504d", linewidth=1.5,
                  label="bound" if index == 0 else None)  # fmt: skip
    names = [f"{pipeline}\n{model}\n{cores:g} core" for pipeline, model, cores in keys]
    axis.set_xticks(range(len(keys)), names, fontsize=7)
    axis.set(title="pictures/s trained on, cpu only = 1", ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, ncols=4, loc="upper right")
    figure.savefig(path, dpi=130)

"""Many small devices: do they add up, and how many make a trainer's core?

Claim: six storage devices of 0.2 core each give at least 0.9 times six of one; one among them at a tenth of the others'
speed costs no more than its share; and a node does at least 0.9 of what Pillow and the engine alone do with its core.

Devices are hosts of the rig with a fifth of a core each, and read the same folder; the trainer has the rest of the
second core, and learns a head on the features that come. Energy is modelled from busy time and stated power: this
machine has no meter.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import pictures
from bench.devices import CLASSES, MODEL
from bench.result import Result
from bench.rig import Host, Link, Node, Rig, RigUp
from bench.rig.remote import Remote

SHARE, TENTH = 0.2, 0.02
COUNTS = (1, 2, 4, 6)
MOST = max(COUNTS)
GOES_ON = "all, in a job that goes on"
# Stated, not measured: a small ARM-class storage controller, and a server core with its share of the machine.
DEVICE_W = 2.0
CORE_W = 15.0


def run(*, quick: bool, console: Console) -> Result:
    seconds, rounds = (8.0, 1) if quick else (8.0, 3)
    counts = (1, MOST) if quick else COUNTS
    # Three devices on each core take 0.6 of it; the trainer needs little where features come.
    devices = tuple(Host(f"device-{number}", cores=(number % 2,), cpu=SHARE) for number in range(MOST))
    rig = Rig(storage=devices, trainers=(Host("trainer", cores=(1,)),), links={"trainer": Link(1000)})
    found: dict[str, list[dict[str, float]]] = {}

    def note(name: str, value: dict[str, float]) -> None:
        found.setdefault(name, []).append(value)
        console.print(f"{name}: {value['rate']:.1f} rows/s", style="dim")

    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up:
        folder, what = pictures.folder(Path(scratch), 1920)  # most turns end within one epoch
        env = {"XDG_CACHE_HOME": f"{scratch}/cache"}
        for device in devices:
            up.set_cpu(device.name, 1.0)  # starting is not what is measured
        nodes = [up.start_node(device.name, [str(folder)], env=env) for device in devices]
        with (
            up.open("trainer", "bench.devices:Trainer", env=env, folder=str(folder)) as trainer,
            ExitStack() as stack,
        ):
            prefix = _prefix(up, env)
            bares = [stack.enter_context(up.open(device.name, "bench.devices:Bare", env=env, folder=str(folder),
                                                 prefix=prefix)) for device in devices]  # fmt: skip
            about = trainer.ask(what="join", addresses=[node.address for node in nodes])
            trainer.ask(what="near", seconds=2.0)  # every node loads its engine
            for number in range(rounds):
                for count in counts if number % 2 == 0 else counts[::-1]:
                    if count == 1:  # the cores of one machine may differ: half of the devices are on each
                        each = [_devices(up, trainer, [node], seconds) for node in nodes[:2]]
                        note("1", {name: statistics.mean(one[name] for one in each) for name in each[0]})
                    else:
                        note(f"{count}", _devices(up, trainer, nodes[:count], seconds))
                    if count == MOST:
                        note(GOES_ON, trainer.ask(what="near", seconds=seconds))
                note("slow at first", _devices(up, trainer, nodes, seconds, slow="device-0"))
                note("slow", trainer.ask(what="near", seconds=seconds))  # the same job goes on, and knows it by now
                _set_shares(up)
                each = [bare.ask(seconds=seconds / 2, rows=about["chunk_rows"]) for bare in bares[:2]]
                note("one bare", {"rate": statistics.mean(one["rate"] for one in each)})
                with ThreadPoolExecutor(MOST) as pool:
                    each = list(pool.map(lambda bare: bare.ask(seconds=seconds, rows=about["chunk_rows"]), bares))
                note("all bare", {"rate": sum(one["rate"] for one in each)})
                up.set_cpu("device-0", 1.0)
                note("node", _near(trainer, nodes[:1], seconds))
                note("bare", bares[0].ask(seconds=seconds, rows=about["chunk_rows"]))
                note("alone", trainer.ask(what="alone", seconds=seconds))
    return result(found, counts, what, about, rounds, seconds, quick)


def _prefix(up: RigUp, env: dict[str, str]) -> str:
    return str(up.call("trainer", "bench.nodes:make_prefix", env=env))


def make_prefix() -> str:
    """The frozen part as a node would get it; runs in the trainer's host."""
    import torch

    from bench.peers.common import Learner
    from headwater.core.cut import smallest_cut
    from headwater.model.capture import capture
    from headwater.model.cuts import cuts
    from headwater.model.ship import ship

    learner = Learner(MODEL, CLASSES)
    captured = capture(learner.model, (torch.zeros(2, 3, 224, 224),))
    cut = smallest_cut(cuts(captured), "fp16", learner.transforms.pixel_spec.row_bytes)
    return str(ship(captured, cut).path)


def _devices(
    up: RigUp, trainer: Remote, nodes: list[Node], seconds: float, slow: str | None = None
) -> dict[str, float]:
    _set_shares(up, slow)
    return _near(trainer, nodes, seconds)


def _set_shares(up: RigUp, slow: str | None = None) -> None:
    for number in range(MOST):
        name = f"device-{number}"
        up.set_cpu(name, TENTH if name == slow else SHARE)


def _near(trainer: Remote, nodes: list[Node], seconds: float) -> dict[str, float]:
    trainer.ask(what="join", addresses=[node.address for node in nodes])
    found: dict[str, float] = trainer.ask(what="near", seconds=seconds)
    return found


def result(
    found: dict[str, list[dict[str, float]]],
    counts: tuple[int, ...],
    what: str,
    about: dict[str, Any],
    rounds: int,
    seconds: float,
    quick: bool,
) -> Result:
    def median(name: str, key: str = "rate") -> float:
        return statistics.median(each[key] for each in found[name])

    def ratio(name: str, other: str) -> float:
        """Of the same round each: the machine may be faster in the next."""
        return statistics.median(a["rate"] / b["rate"] for a, b in zip(found[name], found[other], strict=True))

    one, six = median("1"), median(str(MOST))
    share_lost = 1 - (MOST - 1 + TENTH / SHARE) / MOST
    per_device = six / MOST
    to_match = math.ceil(median("alone") / per_device)
    # A device is busy while it works; the trainer's core for what it does itself.
    device_j = DEVICE_W / per_device + median(str(MOST), "cpu_s_per_row") * CORE_W
    trainer_j = median("alone", "cpu_s_per_row") * CORE_W
    cases: list[dict[str, Any]] = [
        {"devices": count, "rows_per_s": median(f"{count}"), "efficiency": ratio(f"{count}", "1") / count}
        for count in counts
    ]
    cases.append({"devices": f"{MOST}, a job that goes on", "rows_per_s": median(GOES_ON),
                  "efficiency": ratio(GOES_ON, "1") / MOST})  # fmt: skip
    cases.append({"devices": f"{MOST}, one at a tenth", "rows_per_s": median("slow"),
                  "efficiency": ratio("slow", "1") / MOST})  # fmt: skip
    cases.append({"devices": f"{MOST}, one at a tenth, at first", "rows_per_s": median("slow at first"),
                  "efficiency": ratio("slow at first", "1") / MOST})  # fmt: skip
    cases.append({"devices": "1 node, a whole core", "rows_per_s": median("node")})
    cases.append({"devices": "bare loop, a whole core", "rows_per_s": median("bare")})
    cases.append({"devices": "trainer's core alone", "rows_per_s": median("alone")})
    return Result(
        name="nodes",
        quick=quick,
        numbers={
            f"efficiency_{MOST}": ratio(str(MOST), "1") / MOST,
            f"machine_efficiency_{MOST}": ratio("all bare", "one bare") / MOST,
            "slow_over_share": ratio("slow", GOES_ON) / (1 - share_lost),
            "slow_at_first_over_share": ratio("slow at first", str(MOST)) / (1 - share_lost),
            "node_over_bare": ratio("node", "bare"),
            "devices_to_match_trainer": to_match,
            "modelled_j_per_picture_devices": device_j,
            "modelled_j_per_picture_trainer": trainer_j,
        },
        goals={f"efficiency_{MOST}": "≥ 0.9", "slow_over_share": "about 1", "node_over_bare": "≥ 0.9"},
        cases=cases,
        bound=f"efficiency {ratio('all bare', 'one bare') / MOST:.3f}: what {MOST} bare loops of Pillow and the engine "
        f"get at once on this machine ÷ {MOST} times one of them, in the same round. With one at a "
        f"tenth, {1 - share_lost:.3f} of that. "
        "node_over_bare 1: Pillow and the engine with the same thread, and nothing else",
        limited_by="the devices' share of a core; the trainer was busy for "
        f"{100 * six * median(str(MOST), 'cpu_s_per_row'):.0f} % of a core where six devices worked for it",
        notes=[
            f"{what} in a folder that all devices read; MobileNetV3-small cut at {about['cut']}, rows as fp16",
            f"{rounds} rounds, {seconds:g} s for each row of the table, in turns; medians; ratios are within a round",
            "one device: the mean of one on each core, one after the other",
            "slow_over_share: with one device at a tenth of the others' speed, what is left ÷ what the devices' speeds "
            f"add up to, both in a job that has run for {seconds:g} s; slow_at_first: in those seconds, in which it is "
            "found out and others do again what it had been given",
            "devices_to_match_trainer: how many 0.2-core devices give as many rows as one core of the trainer that "
            "reads, decodes and runs the whole model by itself",
            f"energy is modelled: a device draws {DEVICE_W:g} W while it works, a trainer's core {CORE_W:g} W; stated, "
            "not measured",
        ],
        draw=lambda path: draw(cases, one, path),
    )


def draw(cases: list[dict[str, Any]], one: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    plain = [case for case in cases if isinstance(case["devices"], int)]
    counts = [case["devices"] for case in plain]
    axis.plot([0, MOST], [0, MOST * one], "--", color="#9aa5b1", label="as many times one device")
    axis.plot(counts, [case["rows_per_s"] for case in plain], "o-", color="#1f77b4", label="devices of 0.2 core")
    named = {case["devices"]: case["rows_per_s"] for case in cases}
    axis.plot([MOST], [named[f"{MOST}, one at a tenth"]], "s", color="#c0504d", label="one of them at a tenth")
    axis.axhline(named["trainer's core alone"], color="#444b54", linewidth=1, label="a trainer's core, all by itself")
    axis.set(title="Devices add up", xlabel="devices", ylabel="rows/s", xlim=(0, None), ylim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)

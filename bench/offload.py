"""Training over a thin link: Headwater, the best plain loop, and the loaders that a user might pick instead.

Claim: on a link of 2 Mbit/s a linear head on a frozen model trains at least 5 times (EfficientNet-lite0) and 12 times
(MobileNetV3-small) as fast as the best plain PyTorch loop; on no link from 2 to 1000 Mbit/s is Headwater slower than a
peer, or more than 3 % slower than the plain loop; and it comes within 15 % of what the stages, measured one by one,
allow.

The store and the node share one core, the trainer has the other, behind the link. Every side trains the same model with
the same step on the same JPEGs, from a process of its own that waits while others are measured. A measurement is the
start of a cold epoch.
"""

from __future__ import annotations

import math
import secrets
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import starmap
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import pictures
from bench.peers import raydata
from bench.peers.common import BATCH, BUCKET, MODELS, check_installed
from bench.peers.prepare import ITS_OWN
from bench.peers.stages import SHARE_PASSES, Bound, CutStages, Stages, bound
from bench.result import Result
from bench.rig import Host, Link, Rig, RigError, RigUp
from bench.rig.python import python_env
from bench.rig.remote import Remote
from bench.rig.traffic import cpu_s_per_byte, mbit_per_s

TITLES = {"lite0": "EfficientNet-lite0", "mobilenet": "MobileNetV3-small"}
COLOURS = {
    "headwater": "#1f77b4", "plain": "#444b54", "webdataset": "#e08214", "litdata": "#7b3294", "mosaic": "#1b9e77",
    "ray": "#c51b7d",
}  # fmt: skip
PEERS = ("webdataset", "litdata", "mosaic", "ray")
FAST = 1000.0
BUSY_S = 1.5  # how long a core is kept busy to see what it costs the other
READS = 256  # pictures that are read to measure reading alone
CLASSES = 100  # outputs of the head; the grocery pictures have 81 classes


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    num_pictures: int
    # Of each model, the fastest link first: a prefix crosses while it is fast, as it would have long ago.
    points: dict[str, tuple[float, ...]]
    sides: tuple[str, ...]
    repeats: int
    seconds: float  # of a measurement, or to the end of its epoch
    thin_seconds: float  # of one that ships JPEGs over less than 10 Mbit/s: three batches or more
    peers_with: tuple[str, ...] = MODELS  # models that peers are measured with
    peers_from: float = 0.0  # Mbit/s: the thinnest link that they are measured on
    thin_upload: bool = True  # whether a prefix is sent over the link as it is, or before it is thin
    stages_before: bool = True  # each of Headwater's turns, or only after it
    share_passes: int = SHARE_PASSES  # in which it is found out what of the frozen part is in front of each cut

    @property
    def rates(self) -> list[float]:
        return sorted({rate for rates in self.points.values() for rate in rates}, reverse=True)


FULL = Size(2640, dict.fromkeys(MODELS, (1000, 200, 50, 10, 2)), ("plain", *PEERS, "headwater"), 3, 8, 11)
# Four minutes: peers with one model on a fast link, and no minute in which a prefix crosses 2 Mbit/s.
QUICK = Size(320, {"mobilenet": (1000, 2), "lite0": (2,)}, ("plain", *PEERS[:-1], "headwater"), 1, 3, 5,
             peers_with=("mobilenet",), peers_from=1000, thin_upload=False, stages_before=False,
             share_passes=3)  # fmt: skip


def run(*, quick: bool, console: Console) -> Result:
    return sweep(QUICK if quick else FULL, quick, console)


def sweep(size: Size, quick: bool, console: Console) -> Result:
    check_installed(size.sides)
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(FAST)},
        store=Host("store", cores=(0,)),
    )
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up, ExitStack() as stack:
        folder, what = pictures.folder(Path(scratch), size.num_pictures)
        console.print(f"{what}; {', '.join(size.sides)}; {size.repeats} rounds of cold epochs")
        store = up.start_store()
        env = {**python_env(), **store.env, "XDG_CACHE_HOME": f"{scratch}/cache", "TMPDIR": scratch}
        about = {"scratch": scratch, "num_pictures": size.num_pictures, "num_classes": CLASSES}
        node = up.start_node("storage", [f"s3://{BUCKET}"], env=env)
        about["node"] = node.address
        # They import what they need on the trainer's core while the other one is busy with the upload.
        sides = [stack.enter_context(closing(_side(up, name, about, env))) for name in size.sides]
        with console.status("uploading the pictures in every side's format"):
            counts = up.call("storage", "bench.peers.prepare:prepare", env=env, folder=str(folder), sides=size.sides)
        console.print(f"objects: {', '.join(f'{side} {count}' for side, count in counts.items())}", style="dim")
        links = {rate: measure_link(up, rate) for rate in size.rates}
        settle(up)
        fetch = measure_fetch(up, env)
        fetch["send_s_per_byte"], fetch["receive_s_per_byte"] = cpu_s_per_byte(up, "storage", "trainer")
        points = []
        for model, rates in size.points.items():
            with closing(StagesOf(up, env, model, fetch, size.share_passes)) as stages:
                for rate in rates:
                    with_peers = model in size.peers_with and rate >= size.peers_from
                    there = [side for side in sides if side.name not in PEERS or with_peers]
                    about_it = (there, model, rate, links[rate], stages, size, console)
                    try:
                        points.append(measure_point(up, *about_it))
                    except RigError as error:  # a loader that does not end: an hour's work need not end with it
                        console.print(f"once more, with all sides' processes started anew: {error}")
                        for side in there:
                            side.restart()
                        points.append(replace(measure_point(up, *about_it), again=True))
    return result(points, links, what, size, quick)


# What is measured before the sweep


def measure_link(up: RigUp, rate: float) -> float:
    up.set_rate("trainer", rate)
    # Long at low rates: what the link lets through at once in the beginning should not count.
    found = mbit_per_s(up, "storage", "trainer", seconds=6.0 if rate < 10 else 2.0)
    up.set_rate("trainer", FAST)
    return found


def measure_fetch(up: RigUp, env: dict[str, str]) -> dict[str, float]:
    """What a read by the trainer costs it and the store."""
    before = up.usage("store").cpu_s
    found = up.call("trainer", "bench.peers.stages:fetch", env=env, count=READS)
    store_s = (up.usage("store").cpu_s - before) / found.pop("num_reads")
    return {**found, "store_s": store_s}


class StagesOf:
    """Every stage of one model, measured alone, as often as it is asked for."""

    def __init__(self, up: RigUp, env: dict[str, str], model: str, fetch: dict[str, float], passes: int) -> None:
        self._here = up.open("trainer", "bench.peers.stages:OnTrainer", env=env, model=model, num_classes=CLASSES)
        sizes = self._here.ask(do="sizes")
        self._there = up.open("storage", "bench.peers.stages:OnStorage", env=env, model=model, count=READS,
                              prefix=sizes["prefix"], outputs=sizes["outputs"])  # fmt: skip
        of_cuts = zip(
            sizes["names"],
            self._there.ask(do="shares", passes=passes),
            sizes["far_shares"],
            sizes["row_bytes"],
            strict=True,
        )
        self._fixed = {**fetch, "pixel_bytes": sizes["pixel_bytes"], "cuts": tuple(starmap(CutStages, of_cuts))}

    def measure(self) -> Stages:
        """Each stage alone; then both cores alone, and both at once."""
        taken = {**self._here.ask(do="time"), **self._there.ask(do="time")}
        alone = [each.ask(do="busy", seconds=BUSY_S) for each in (self._here, self._there)]
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda each: each.ask(do="busy", seconds=BUSY_S), (self._here, self._there)))
        here, there = (max(1.0, beside / by_itself) for beside, by_itself in zip(both, alone, strict=True))
        return Stages(**self._fixed, **taken, trainer_beside=here, storage_beside=there)

    def close(self) -> None:
        self._here.close()
        self._there.close()


def median(stages: list[Stages]) -> Stages:
    """Of each stage."""
    names = [name for name in Stages.__annotations__ if name.endswith(("_s", "_beside"))]
    return replace(stages[0], **{name: statistics.median(getattr(each, name) for each in stages) for name in names})


def alone(stages: Stages) -> str:
    names = (name for name in Stages.__annotations__ if name.endswith("_s"))
    rates = ", ".join(f"{name[:-2]} {1 / getattr(stages, name):,.0f}" for name in names)
    sent, received = (1e-6 / max(each, 1e-12) for each in (stages.send_s_per_byte, stages.receive_s_per_byte))
    return (f"{rates}; {sent:,.0f} MB/s sent, {received:,.0f} MB/s received; while the other core works, the storage "
            f"core takes {stages.storage_beside:.2f} times as long, the trainer's {stages.trainer_beside:.2f} times"
            )  # fmt: skip


# The sweep


class Side:
    """A side's process in the trainer's host."""

    def __init__(self, up: RigUp, name: str, about: dict[str, Any], env: dict[str, str]) -> None:
        self.name = name
        self._up = up
        self._about = {**about, "env": env}
        self._worker = self._start()

    def _start(self) -> Remote:
        return self._up.open("trainer", "bench.peers.worker:Worker", side=self.name, **self._about)

    def open(self, model: str, rate: float) -> dict[str, Any]:
        """Make ready for this model and link."""
        found: dict[str, Any] = self._worker.ask(do="open", model=model, mbit_per_s=rate)
        return found

    def restart(self) -> None:
        """Another process in place of this one."""
        self._worker.close()
        self._worker = self._start()

    def measure(self, rate: float, seconds: float, epoch: int) -> dict[str, float]:
        before = self._up.usage("trainer")
        found = self._worker.ask(do="measure", seconds=seconds, epoch=epoch)
        used = self._up.usage("trainer").since(before)
        self._worker.ask(do="rest")
        return {
            **found,
            "images_per_s": found["images"] / found["seconds"],
            "bytes_per_image": used.received_bytes / found["images"],
            "cpu_s_per_image": used.cpu_s / found["images"],
        }

    def let_go(self) -> None:
        """Of what was opened last."""
        self._worker.ask(do="close")

    def close(self) -> None:
        """End the process; killed with the rig, some loaders would leave named memory behind."""
        self._worker.close()


class RaySide(Side):
    """Ray's process, and its cluster: up for one measurement at a time, since it is never quite idle."""

    def __init__(self, up: RigUp, name: str, about: dict[str, Any], env: dict[str, str]) -> None:
        self._head = up.address("trainer")
        self._env = {**env, "RAY_HEAD": self._head, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
        self._scratch = Path(about["scratch"])
        self._log = up.folder / "ray.log"
        super().__init__(up, name, about, self._env)

    def open(self, model: str, rate: float) -> dict[str, Any]:
        self._model = model
        return {}

    def measure(self, rate: float, seconds: float, epoch: int) -> dict[str, float]:
        up = self._up
        up.set_rate("trainer", FAST)  # starting a cluster over a thin link is not what is measured
        cluster = []
        try:
            for host in ("trainer", "storage"):
                command = raydata.start_command(up.address(host), self._head, self._scratch)
                with self._log.open("ab") as log:
                    cluster.append(up.popen(host, command, env=self._env, stdout=log, stderr=log))
                time.sleep(5)
            super().open(self._model, rate)
            up.set_rate("trainer", rate)
            return super().measure(rate, seconds, epoch)
        finally:
            up.set_rate("trainer", FAST)
            super().let_go()
            for process in cluster[::-1]:
                process.terminate()
            for process in cluster:
                process.wait()
            up.set_rate("trainer", rate)

    def let_go(self) -> None:
        pass


def _side(up: RigUp, name: str, about: dict[str, Any], env: dict[str, str]) -> Side:
    return (RaySide if name == "ray" else Side)(up, name, about, env)


@dataclass
class Point:
    """All sides at one rate with one model."""

    model: str
    rate: float
    link_bytes_per_s: float
    measured: dict[str, dict[int, dict[str, float]]]  # side → round → what was found
    stages: dict[int, list[Stages]] = field(default_factory=dict)  # round → around Headwater's turn
    plan: dict[str, Any] = field(default_factory=dict)
    again: bool = False  # a side did not come to rest; all were started anew, and this is the second try

    @property
    def limit(self) -> Bound:
        return bound(median(self.all_stages), self.link_bytes_per_s)

    @property
    def all_stages(self) -> list[Stages]:
        return [each for some in self.stages.values() for each in some]

    def median(self, side: str, key: str) -> float:
        return statistics.median(each[key] for each in self.measured[side].values())

    def rate_of(self, side: str) -> float:
        return self.median(side, "images_per_s")

    def vs(self, side: str) -> float:
        """Headwater's rate ÷ this side's of the same round, in the median; for one that was measured in a single round,
        whose ratio would be that of one moment, Headwater's median ÷ its rate."""
        ours, theirs = self.measured["headwater"], self.measured[side]
        if len(theirs) == 1:
            return self.rate_of("headwater") / self.rate_of(side)
        return statistics.median(ours[number]["images_per_s"] / each["images_per_s"] for number, each in theirs.items())

    def vs_plain(self) -> float:
        return self.vs("plain")

    def has_peers(self) -> bool:
        return any(side in PEERS for side in self.measured)

    def vs_best_peer(self) -> float:
        return min(self.vs(side) for side in self.measured if side in PEERS)

    def of_bound(self) -> float:
        """Of what the stages allowed in the same round, in the median."""
        allowed = {number: bound(median(some), self.link_bytes_per_s).per_s for number, some in self.stages.items()}
        ours = self.measured["headwater"]
        return statistics.median(ours[number]["images_per_s"] / per_s for number, per_s in allowed.items())


def measure_point(
    up: RigUp,
    sides: list[Side],
    model: str,
    rate: float,
    link_mbit_per_s: float,
    stages: StagesOf,
    size: Size,
    console: Console,
) -> Point:
    point = Point(model, rate, link_mbit_per_s * 1e6 / 8, {side.name: {} for side in sides})
    for side in sides:
        up.set_rate("trainer", rate, None if size.thin_upload else FAST)
        opened = side.open(model, rate)
        if side.name == "headwater":
            point.plan = opened
    for number in range(size.repeats):
        for side in sides if number % 2 == 0 else sides[::-1]:
            if number not in rounds_of(side, size.repeats):
                continue
            ours = side.name == "headwater"
            around = [rested(up, stages)] if ours and size.stages_before else []
            point.measured[side.name][number] = measure(up, side, rate, number, size)
            if ours:
                point.stages[number] = [*around, rested(up, stages)]
    for side in sides:
        side.let_go()
    limit = point.limit
    said = ", ".join(f"{name} {point.rate_of(name):.1f}" for name in point.measured)
    console.print(
        f"{TITLES[model]} at {rate:g} Mbit/s, pictures/s: {said}; bound {limit.per_s:.1f} "
        f"({limit.placement}; {limit.limited_by})",
        style="dim",
    )
    return point


def rounds_of(side: Side, repeats: int) -> range:
    """Peers in every other round; Ray, whose cluster takes half a minute to come and go, in the middle one."""
    if isinstance(side, RaySide):
        return range(repeats // 2, repeats // 2 + 1)
    return range(0, repeats, 2 if side.name in PEERS else 1)


def rested(up: RigUp, stages: StagesOf) -> Stages:
    """The stages, with nothing of an earlier measurement beside them."""
    up.set_rate("trainer", FAST)
    settle(up)
    return stages.measure()


def measure(up: RigUp, side: Side, rate: float, epoch: int, size: Size) -> dict[str, float]:
    ships_jpegs = side.name in ITS_OWN
    seconds = size.thin_seconds if ships_jpegs and rate < 10 else size.seconds
    # Some loaders go on downloading after they were told to end: on a fast link that is over sooner.
    up.set_rate("trainer", FAST)
    settle(up)
    up.set_rate("trainer", rate)
    return side.measure(rate, seconds, epoch)


def settle(up: RigUp, quiet_s: float = 0.4, within_s: float = 60.0) -> None:
    """Wait until nothing of an earlier measurement still comes over the link or runs on the trainer."""
    deadline = time.monotonic() + within_s
    began = up.processes("trainer")
    earlier = passed = up.usage("trainer")
    while time.monotonic() < deadline:
        time.sleep(quiet_s)
        now = up.usage("trainer")
        passed = now.since(earlier)
        if passed.received_bytes < 2000 and passed.cpu_s < 0.1 * quiet_s:
            return
        earlier = now
    used = {pid: (cpu_s - began.get(pid, (0.0, ""))[0], what) for pid, (cpu_s, what) in up.processes("trainer").items()}
    busy = "; ".join(f"{cpu_s:.1f} {what[-80:]}" for cpu_s, what in sorted(used.values(), reverse=True)[:4])
    raise RigError(f"the trainer's host did not come to rest within {within_s:g} s: in the last {quiet_s:g} s "
                   f"{passed.received_bytes:,} bytes came and {passed.cpu_s:.2f} s of CPU went; in all (s): {busy}"
                   )  # fmt: skip


# What comes out


def result(
    points: list[Point],
    links: dict[float, float],
    what: str,
    size: Size,
    quick: bool,
) -> Result:
    def speedup(model: str) -> float:
        return next(point.vs_plain() for point in points if (point.model, point.rate) == (model, min(size.rates)))

    numbers = {f"speedup_{model}_2mbit": speedup(model) for model in size.points}
    numbers |= {
        "min_vs_plain": min(point.vs_plain() for point in points),
        "min_vs_best_peer": min((point.vs_best_peer() for point in points if point.has_peers()), default=math.nan),
        "min_of_bound": min(point.of_bound() for point in points),
    }
    ends = [point for point in points if point.rate in (size.rates[0], size.rates[-1])]
    notes = [
        f"{what}, batch {BATCH}; store and node on one core, trainer on the other; {size.repeats} rounds (peers in "
        f"every other one) of cold epochs, to their end or for {size.seconds:g} s ({size.thin_seconds:g} s below 10 "
        "Mbit/s where JPEGs cross); medians",
        "ratios are medians of those within a round (Ray's: of medians); rounds: images_per_s of each; the stages "
        f"are measured right {'before and right ' if size.stages_before else ''}after each of Headwater's turns",
        "images_per_s: whole steps ÷ the time from asking for the first batch to the end of the last step; "
        "steady_per_s: the same from the end of the first step on",
        "plan_s is not in the rate: a plan and its prefix are used for all epochs; the prefix was exported before, and "
        "crossed the link when it was fast: the first point of each model, or before",
        "plan: what crosses, where the model is cut, how rows travel; node batch/rows a chunk/chunks ahead",
        "every side runs the same model and head: no gradients in the frozen part, channels-last weights, batch-norms "
        "folded, one thread",
        "payload measured on the link: " + ", ".join(f"{rate:g} → {got:.4g} Mbit/s" for rate, got in links.items()),
    ]
    if repeated := [f"{TITLES[point.model]} at {point.rate:g} Mbit/s" for point in points if point.again]:
        notes.append("a side did not come to rest, and the point was measured once more: " + ", ".join(repeated))
    if "ray" in size.sides:
        notes.append(
            "Ray is measured in one round; its clock starts when its first batch is there: its actor starts anew with "
            "each epoch, for seconds"
        )
    for model in size.points:
        every = [each for point in points if point.model == model for each in point.all_stages]
        notes.append(f"{TITLES[model]}, each stage alone, pictures/s: {alone(median(every))}")
    return Result(
        name="offload",
        quick=quick,
        numbers=numbers,
        goals={
            "speedup_lite0_2mbit": "≥ 5",
            "speedup_mobilenet_2mbit": "≥ 12",
            "min_vs_plain": "≥ 0.97",
            "min_vs_best_peer": "≥ 1.0",
            "min_of_bound": "≥ 0.85",
        },
        cases=[case(point, side) for point in points for side in point.measured],
        bound="pictures/s that the stages, measured one by one, allow if they overlap fully: "
        + "; ".join(
            f"{TITLES[p.model]} at {p.rate:g} Mbit/s {p.limit.per_s:.1f} ({p.limit.placement})" for p in points
        ),
        limited_by="; ".join(f"{TITLES[p.model]} at {p.rate:g} Mbit/s: the {p.limit.limited_by}" for p in ends),
        notes=notes,
        draw=lambda path: draw(points, path),
    )


def case(point: Point, side: str) -> dict[str, Any]:
    found = {
        "model": point.model,
        "mbit_per_s": point.rate,
        "side": side,
        **{
            key: point.median(side, key)
            for key in ("images_per_s", "bytes_per_image", "cpu_s_per_image", "memory_bytes", "images", "first_s")
        },
    }
    if all("steady_per_s" in each for each in point.measured[side].values()):
        found["steady_per_s"] = point.median(side, "steady_per_s")
    found["rounds"] = ", ".join(f"{each['images_per_s']:.1f}" for each in point.measured[side].values())
    if side != "headwater":
        return found
    ratios = {"bound": point.limit.per_s, "of_bound": point.of_bound(), "vs_plain": point.vs_plain()}
    if point.has_peers():
        ratios["vs_best_peer"] = point.vs_best_peer()
    return {**found, **ratios, "plan_s": point.plan["plan_s"], "plan": point.plan["plan"]}


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    models = list(dict.fromkeys(point.model for point in points))
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(5.2 * len(models), 4), layout="constrained", sharey=True, squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        here = sorted((point for point in points if point.model == model), key=lambda point: point.rate)
        rates = [point.rate for point in here]
        axis.plot(rates, [point.limit.per_s for point in here], "--", color="#9aa5b1", label="bound", linewidth=1.5)
        for side in here[0].measured:
            ours = side == "headwater"
            axis.plot(
                rates, [point.rate_of(side) for point in here], "o-", color=COLOURS[side], label=side,
                linewidth=2.4 if ours else 1.3, markersize=6 if ours else 4, zorder=3 if ours else 2,
            )  # fmt: skip
        axis.set(title=TITLES[model], xlabel="link, Mbit/s", xscale="log", yscale="log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("pictures/s, cold epoch")
    axes[0][-1].legend(frameon=False, loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)

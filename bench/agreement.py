"""The simulator against live runs: the same plans on the same rigs.

Claim: over at least 30 points of plan × rig, the time that the simulator says is within 8 % of the time that a live run
takes in the mean, and nowhere 20 % off; and of two plans on the same rig that differ live by more than a tenth, the
simulator puts the same one first.

Costs are measured once for each model, over a link of 1 Gbit/s and with a whole core at the storage, what a step costs
beyond its parts among them, by one plan that is run there. Then links and cores are set to what each point says, and
the rig file says the same: the rate that was asked for times the part of it that TCP carries (`docs/rig.md`), and the
share of a core. Nothing is measured again. Live and simulated runs do the same: an epoch from its beginning until the
loop has done its steps for so many rows.

None of these points was looked at while the simulator was built; that was done on the points of `TUNING`, another
model.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import pictures
from bench.planned import BATCH
from bench.result import Result
from bench.rig import Host, Link, Rig, RigUp
from bench.rig.remote import Remote
from bench.rig.upload import upload
from headwater.core.plan import Plan
from headwater.core.profile import Profile
from headwater.core.rig import Link as Way
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import Network, Nodes, RigFile, Store, Trainers, Work
from headwater.sim.world import play

# model → the rigs its plans are played on: Mbit/s, and the storage's share of a core
POINTS = {
    "lite0": ((20, 0.5), (200, 1.0)),
    "mobilenet": ((10, 0.5), (200, 1.0)),
    "resnet18": ((20, 1.0), (500, 0.5)),
    "vit": ((50, 0.5), (1000, 1.0)),
    "resnet50": ((100, 1.0),),
}
QUICK = {"mobilenet": ((10, 0.5),), "resnet18": ((20, 1.0),)}
TUNING = {"shufflenet": ((10, 0.5), (200, 1.0)), "alexnet": ((50, 1.0),)}
NUM_PLANS = 4  # for each rig
PAYLOAD = 0.956  # of a link's bits that TCP carries (docs/rig.md)
QUEUE_S, QUEUE_BYTES = 0.05, 64e3  # of a link's buffer, whichever is more (docs/rig.md)
CODEC = "fp16"
LIVE_S = 5.0  # that a run should take; the simulator says how many rows that are
MOST_S = 4 * LIVE_S
REPEATS, QUICK_REPEATS = 3, 2  # of three, one that something else disturbed does not count
DIFFER = 0.1


def run(*, quick: bool, console: Console, points: dict[str, Any] | None = None) -> Result:
    wanted = points or (QUICK if quick else POINTS)
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(1000)},
        store=Host("store", cores=(0,)),
    )
    cases = []
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, RigUp(rig) as up:
        folder, what = pictures.folder(Path(scratch) / "data", 960)
        store = up.start_store()
        upload(up, store, folder, "photos/train")
        node = up.start_node("storage", ["s3://photos"], env=store.env)
        env = {**store.env, "XDG_CACHE_HOME": str(Path(scratch) / "cache")}
        for name, rigs in wanted.items():
            up.set_rate("trainer", 1000)
            up.set_cpu("storage", 1.0)
            with up.open("trainer", "bench.agreed:Trainer", env=env, name=name, url="s3://photos/train",
                         address=node.address, num_classes=100) as trainer:  # fmt: skip
                measured = trainer.ask(what="profile", codec=CODEC)
                for mbit, share in rigs:
                    cases += one_rig(up, trainer, measured, name, mbit, share, QUICK_REPEATS if quick else REPEATS,
                                     console)  # fmt: skip
    return result(cases, quick, what)


def one_rig(
    up: RigUp, trainer: Remote, measured: dict[str, Any], name: str, mbit: float, share: float, repeats: int,
    console: Console,
) -> list[dict[str, Any]]:  # fmt: skip
    """Some plans on one rig: simulated first, then live."""
    profile = Profile.from_json(measured["profile"])
    if share < 1:  # the store has what the node may not take of their core
        profile = replace(profile, node=replace(profile.node, serve_s=0.0))
    file = described(measured, mbit, share)
    offered = trainer.ask(what="plans", rig=file.priced().to_json(), codec=CODEC)
    plans = chosen([Plan.from_json(each) for each in offered])
    runs = []
    for plan in plans:
        rate = play(plan, profile.cuts, profile, file).samples_per_s
        rows = min(file.job.num_samples, max(6 * BATCH, BATCH * round(LIVE_S * rate / BATCH)))
        runs.append((plan, rows, seconds_until(play(plan, profile.cuts, profile, file, stop_after=rows), rows)))
    up.set_rate("trainer", 1000)
    up.set_cpu("storage", 1.0)
    for plan, _, _ in runs:  # both sides load what they run; a node tries engines when it first gets a cut
        trainer.ask(what="seconds", plan=plan.to_json(), num_rows=2 * BATCH, at_most_s=MOST_S)
    up.set_rate("trainer", mbit)
    up.set_cpu("storage", share)
    live: dict[int, list[dict[str, float]]] = {}
    for number in range(repeats):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for place in order:
            plan, rows, _ = runs[place]
            live.setdefault(place, []).append(
                trainer.ask(what="seconds", plan=plan.to_json(), num_rows=rows, at_most_s=MOST_S)
            )
    cases = []
    for place, (plan, _, _) in enumerate(runs):
        done = [each["rows"] for each in live[place]]
        reached = int(min(done))
        per_row = [each["seconds"] / each["rows"] for each in live[place]]
        live_s = statistics.median(per_row) * reached
        simulated_s = seconds_until(play(plan, profile.cuts, profile, file, stop_after=reached), reached)
        cases.append({
            "model": name, "mbit_per_s": mbit, "storage_cores": share, "plan": words(plan), "rows": reached,
            "live_s": live_s, "simulated_s": simulated_s, "error": simulated_s / live_s - 1,
            "spread": max(per_row) / min(per_row) - 1,
            "limited_by": play(plan, profile.cuts, profile, file, stop_after=reached).limited_by,
        })  # fmt: skip
        console.print(tell(cases[-1]), style="dim")
    return cases


def described(measured: dict[str, Any], mbit: float, share: float) -> RigFile:
    """The rig as it is set, not as it was measured; what only a measurement tells is as it was then."""
    rate = mbit * 1e6 / 8 * PAYLOAD
    link = measured["rig"]["links"][0]
    way = Way(rate, rate, link.get("latency_s", 0.0))
    trainer = measured["rig"]["trainer"]
    return RigFile(
        trainers=(Trainers(cores=trainer["cores"], port=way),),
        job=Work(measured["num_samples"], BATCH),
        # The trainer's link is the thin one; the storage's are what a machine's own network carries.
        nodes=(Nodes(Way(1e10, 1e10), "node", cores=share),),
        store=Store(Way(1e10, 1e10)),
        network=Network(queue_s=max(QUEUE_S, QUEUE_BYTES / rate)),
    )


def chosen(offered: list[Plan]) -> list[Plan]:
    """Plans of different kinds: the best, the best of the others near the data, a share, pixels, nothing."""
    kinds: dict[str, Plan] = {}
    for plan in offered:
        if plan.uses_storage and plan.has_prefix:
            kind = "shared" if plan.host_share else f"near at {plan.cut}"
        elif plan.uses_storage:
            kind = "shared pixels" if plan.host_share else "pixels"
        else:
            kind = "here" if plan.has_prefix else "nothing"
        kinds.setdefault(kind, plan)
    near = [plan for kind, plan in kinds.items() if kind.startswith("near")]
    wanted = [near[0], near[len(near) // 3]] if len(near) > 1 else near
    wanted += [kinds[kind] for kind in ("nothing", "shared", "pixels", "here") if kind in kinds]
    return wanted[:NUM_PLANS]


def seconds_until(outcome: Outcome, rows: int) -> float:
    """When the loop had done so many."""
    return next((when for when, count in outcome.steps if count >= rows), outcome.seconds)


def words(plan: Plan) -> str:
    share = f", {100 * plan.host_share:.3g} % here" if plan.host_share else ""
    codec = "" if plan.codec == "raw" else f" {plan.codec}"
    if not plan.uses_storage:
        return f"{plan.cut_name} here" if plan.has_prefix else "nothing moves"
    return (plan.cut_name + codec if plan.has_prefix else "pixels") + share + f" ({plan.chunk_rows}×{plan.prefetch})"


def tell(case: dict[str, Any]) -> str:
    return (f"{case['model']} {case['mbit_per_s']} Mbit/s {case['storage_cores']} core, {case['plan']}: live "
            f"{case['live_s']:.2f} s (spread {case['spread']:.2f}), simulated {case['simulated_s']:.2f} s: "
            f"{100 * case['error']:+.1f} %; {case['limited_by']}")  # fmt: skip


def agrees(cases: list[dict[str, Any]]) -> tuple[int, int]:
    """Pairs of plans on one rig that differ live by more than a tenth, and those of them that the simulator orders
    the same."""
    told = same = 0
    for _, some in itertools.groupby(cases, lambda each: (each["model"], each["mbit_per_s"], each["storage_cores"])):
        for one, other in itertools.combinations(list(some), 2):
            live = (one["live_s"] / one["rows"]) / (other["live_s"] / other["rows"])
            simulated = (one["simulated_s"] / one["rows"]) / (other["simulated_s"] / other["rows"])
            if live > 1 + DIFFER or live < 1 / (1 + DIFFER):
                told += 1
                same += (live > 1) == (simulated > 1)
    return told, same


def result(cases: list[dict[str, Any]], quick: bool, what: str) -> Result:
    errors = [abs(case["error"]) for case in cases]
    told, same = agrees(cases)
    worst = max(cases, key=lambda case: abs(case["error"]))
    numbers: dict[str, Any] = {
        "num_points": len(cases),
        "mean_error": statistics.fmean(errors),
        "worst_error": max(errors),
        "ranking_agrees": told == same,
        "num_pairs": told,
        "num_pairs_agree": same,
        "mean_spread": statistics.fmean(case["spread"] for case in cases),
    }
    return Result(
        name="agreement",
        quick=quick,
        numbers=numbers,
        goals={"num_points": "≥ 30", "mean_error": "≤ 0.08", "worst_error": "≤ 0.2", "ranking_agrees": "true"},
        cases=cases,
        bound=f"error 0; two live runs of the same plan differ by {100 * numbers['mean_spread']:.1f} % in the mean",
        limited_by=f"the farthest is {worst['model']} at {worst['mbit_per_s']:g} Mbit/s, {worst['plan']}",
        notes=[
            f"{what} in SeaweedFS; node and store on one core, trainer on the other behind the shaped link; batch 16",
            "costs were measured once for each model, at 1 Gbit/s and a whole core; the rig file says what was asked "
            f"of the rig: {PAYLOAD:g} of a link's bits, and the share of a core",
            "seconds: from the beginning of an epoch until the loop has done its steps for so many rows; live the "
            "median of the runs",
            "to a profile comes what a step costs beyond its parts, from one plan that is run on the profile's own "
            "rig, which is no point; and that the store, which runs on the node's core, takes of it for a trainer's "
            "read what it takes for a node's (where the node may use all of it; else the store has the rest)",
            "what a slow model takes on the trainer is the less of two measurements, as in profiles of faster ones",
            f"while the simulator was built, other points were looked at: {', '.join(TUNING)}",
        ],
        draw=lambda path: draw(cases, path),
    )


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 5.2), layout="constrained")
    ms = [(1e3 * case["live_s"] / case["rows"], 1e3 * case["simulated_s"] / case["rows"]) for case in cases]
    low, high = 0.8 * min(map(min, ms)), 1.25 * max(map(max, ms))
    axis.plot([low, high], [low, high], color="#9aa5b1", linewidth=1)
    axis.fill_between([low, high], [0.8 * low, 0.8 * high], [1.2 * low, 1.2 * high], color="#9aa5b1", alpha=0.2,
                      label="within 20 %")  # fmt: skip
    for name in dict.fromkeys(case["model"] for case in cases):
        points = [point for point, case in zip(ms, cases, strict=True) if case["model"] == name]
        axis.plot(*zip(*points, strict=True), "o", label=name, markersize=4)
    axis.set(title="ms a picture, live and simulated", xlabel="live", ylabel="simulated", xscale="log", yscale="log")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":  # the points that the simulator was built on
    run(quick=True, console=Console(), points=TUNING).show(Console())

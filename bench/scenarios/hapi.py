"""HAPI: AlexNet at batch 8000 over links of 50 Mbit/s to 12 Gbit/s, split by split, and ten tenants on one store."""

from __future__ import annotations

from typing import Any

from bench.scenarios.page import Page, layers, parameters
from headwater.core.plan import Plan, near_plan
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts
from headwater.core.rig import Link
from headwater.sim.layers import cuts_of
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import Nodes, RigFile, Store, Trainers, Work
from headwater.sim.world import play

NAME = "hapi"
MBIT = 1e6 / 8


def run() -> Page:
    given, page = parameters(NAME), Page(NAME)
    paper = given["paper"]
    rows, errors = [], []
    for mbit, base_s, hapi_s in zip(paper["mbit"], paper["baseline_s"], paper["hapi_s"], strict=True):
        base, split = baseline(given, mbit), near(given, mbit, last(given))
        is_input = mbit == paper["mbit"][-1]
        rows.append([mbit, base_s, base.seconds, hapi_s, split.seconds, base_s / hapi_s, base.seconds / split.seconds,
                     "the paper's own column, for comparison" if is_input else ""])  # fmt: skip
        if not is_input:
            errors += [abs(base.seconds / base_s - 1), abs(split.seconds / hapi_s - 1)]
    page.table("Seconds for 40,000 pictures", ["Mbit/s", "baseline, paper", "baseline, simulated", "HAPI, paper",
               "HAPI, simulated", "speed-up, paper", "speed-up, simulated", ""], rows)  # fmt: skip
    base, split = baseline(given, 50), near(given, 50, last(given))
    less = base.store_bytes / split.down_bytes
    cuts = cuts_of(layers(given["job"]["model"]), given["job"]["pixel_bytes"])
    sweep = [(cut, [near(given, mbit, cut.index) for mbit in (50, 1000, 12000)])
             for cut in cuts[1 : given["job"]["freeze_index"] + 1]]  # fmt: skip
    page.table("Split by split: seconds", ["split behind", "bytes a picture", "50 Mbit/s", "1 Gbit/s", "12 Gbit/s"],
               [[f"{cut.index} {cut.name}", cut.row_bytes, *(each.seconds for each in outcomes)]
                for cut, outcomes in sweep])  # fmt: skip
    near_s, store_s = tenants(given)
    page.table("Ten tenants on one store, 1 Gbit/s each", ["", "mean completion, s"], [
        ["all of it in the store", store_s], ["split", near_s]])  # fmt: skip
    page.table("The paper's figures", ["", "paper", "simulated"], [
        ["mean error over the five links that are not input", "", f"{100 * sum(errors) / len(errors):.1f} %"],
        ["speed-up at 50 Mbit/s", paper["baseline_s"][0] / paper["hapi_s"][0], base.seconds / split.seconds],
        ["less data", f"up to {paper['less_data']}", less],
        ["tenants: mean completion against all-in-storage", paper["tenants_better"], store_s / near_s],
    ])  # fmt: skip
    return page


def last(given: dict[str, Any]) -> int:
    """The frozen layer with the fewest bytes; of several the latest."""
    model = layers(given["job"]["model"])[: given["job"]["freeze_index"]]
    return min(range(1, len(model) + 1), key=lambda number: (model[number - 1].bytes_out, -number))


def profile(given: dict[str, Any]) -> Profile:
    """What both sides take for a picture, from what the paper measured where the link does not count. The store's part
    is spread over layers by their operations."""
    job, compute = given["job"], given["compute"]
    model = layers(job["model"])
    here_s, there_s = (compute[name] / job["num_samples"] for name in ("baseline_s", "hapi_s"))
    operations = [sum(each.flops for each in model[:count]) for count in range(len(model) + 1)]
    frozen = operations[job["freeze_index"]]
    prefix = tuple(there_s * min(1.0, each / frozen) for each in operations)
    suffix = tuple(here_s * (1 - each / operations[-1]) for each in operations)
    return Profile(
        Key("alexnet", "none", "imagenet", "store", "client", "0"), 0.0,
        NodeCosts(0.0, 0.0, {"fp32": prefix}), TrainerCosts(0.0, suffix),
        Sizes(job["pixel_bytes"], job["pixel_bytes"], 4 * job["pixel_bytes"]),
    )  # fmt: skip


def rig(given: dict[str, Any], mbit: float, count: int = 1) -> RigFile:
    job, link = given["job"], Link(mbit * MBIT, mbit * MBIT, 1e-4)
    return RigFile((Trainers(port=link, count=count),), Work(job["num_samples"] * count, job["batch_size"]),
                   (Nodes(Link(1e12, 1e12)),), store=Store(Link(1e12, 1e12)))  # fmt: skip


def baseline(given: dict[str, Any], mbit: float) -> Outcome:
    job = given["job"]
    return play(Plan(chunk_rows=500, node_batch=250, prefetch=16), cuts_of(layers(job["model"]), job["pixel_bytes"]),
                profile(given), rig(given, mbit))  # fmt: skip


def near(given: dict[str, Any], mbit: float, cut: int, count: int = 1) -> Outcome:
    job = given["job"]
    cuts = cuts_of(layers(job["model"]), job["pixel_bytes"])
    plan = near_plan(cuts[cut], chunk_rows=500, node_batch=250, prefetch=16)
    return play(plan, cuts, profile(given), rig(given, mbit, count))


def tenants(given: dict[str, Any]) -> tuple[float, float]:
    """Mean completion of ten jobs: split, and with all of their compute on the store's one machine, one turn each."""
    count, job = given["tenants"]["count"], given["job"]
    split = near(given, 1000, last(given), count)
    alone = profile(given)
    whole_s = alone.node.prefix_s["fp32"][job["freeze_index"]] or 0.0
    in_store_s = job["num_samples"] * whole_s / given["tenants"]["storage_share"]
    return split.seconds, in_store_s * count

"""DDLP: CPU and CSD preprocess from two ends, by MTE and WRR; speed, energy, CPU."""

from __future__ import annotations

from typing import Any

from bench.scenarios.page import Page, parameters
from headwater.core.cut import Cut
from headwater.core.plan import Plan, near_plan
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts
from headwater.core.rig import Link
from headwater.core.spec import TensorSpec
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import Chip, Nodes, RigFile, Store, Trainers, Work
from headwater.sim.world import play

NAME = "ddlp"
CUT = Cut(0, "input", (TensorSpec("input", (3, 224, 224), "float32"),), True, "", 0, 0)


def run() -> Page:
    given, page = parameters(NAME), Page(NAME)
    rows, best = [], {}
    for data in ("imagenet", "cifar10"):
        alone = played(given, data, None)
        rows.append(
            [data, "CPU alone", alone.samples_per_s, "", joules(alone), "", cpu_s(alone), "", bound(given, data)[1]]
        )
        for strategy in ("mte", "wrr"):
            both = played(given, data, strategy)
            gain = both.samples_per_s / alone.samples_per_s - 1
            saved, energy = 1 - cpu_s(both) / cpu_s(alone), 1 - joules(both) / joules(alone)
            rows.append([data, strategy, both.samples_per_s, f"{100 * gain:+.1f} %", joules(both),
                         f"{-100 * energy:+.1f} %", cpu_s(both), f"{-100 * saved:+.1f} %",
                         bound(given, data)[0]])  # fmt: skip
            best[data] = tuple(map(max, zip(best.get(data, (-1.0,) * 3), (gain, energy, saved), strict=True)))
    page.table("Both data sets, both strategies", ["data", "", "pictures/s", "", "J a picture", "", "CPU ms a picture",
               "", "bound, pictures/s"], rows)  # fmt: skip
    paper = given["paper"]
    page.table("The paper's figures (up to)", ["", "paper", "simulated"], [
        ["ImageNet, learning speed", f"+{100 * paper['imagenet_speed']:.1f} %", f"{100 * best['imagenet'][0]:+.1f} %"],
        ["CIFAR-10, learning speed", f"+{100 * paper['cifar10_speed']:.1f} %", f"{100 * best['cifar10'][0]:+.1f} %"],
        ["energy", f"-{100 * paper['energy']:.1f} %", f"{-100 * max(each[1] for each in best.values()):+.1f} %"],
        ["CPU and DRAM", f"-{100 * paper['cpu']:.1f} %", f"{-100 * max(each[2] for each in best.values()):+.1f} %"],
    ])  # fmt: skip
    return page


def joules(outcome: Outcome) -> float:
    return sum(outcome.energy_j.values()) / outcome.num_samples


def cpu_s(outcome: Outcome) -> float:
    """Of the host, in ms a picture."""
    return 1e3 * outcome.cpu_s["trainer"] / outcome.num_samples


def bound(given: dict[str, Any], data: str) -> tuple[float, float]:
    """min(accelerator, 1/t_cpu + 1/t_csd), and without the CSD."""
    part, host, csd = given[data], given["host"], given["csd"]
    cpu = host["cores"] / part["decode_s"]
    return min(1 / part["train_s"], cpu + csd["cores"] * csd["core_speed"] / part["decode_s"]), min(
        1 / part["train_s"], cpu)  # fmt: skip


def played(given: dict[str, Any], data: str, strategy: str | None) -> Outcome:
    part, job, host, csd = given[data], given["job"], given["host"], given["csd"]
    decode_s = part["decode_s"]
    profile = Profile(
        Key("a network", "none", data, "csd", "host", "0"), 0.0,
        NodeCosts(0.0, decode_s, {"fp32": (0.0,)}),
        TrainerCosts(decode_s, (part["train_s"],), suffix_on="accelerator"),
        Sizes(part["sample_bytes"], job["pixel_bytes"], 4 * job["pixel_bytes"]),
    )  # fmt: skip
    gpu = Chip(idle_w=host["gpu_idle_w"], busy_w=host["gpu_busy_w"])
    link = Link(csd["link_bytes_per_s"], csd["link_bytes_per_s"], 1e-5)
    file = RigFile(
        (Trainers(cores=host["cores"], idle_w=host["idle_w"], busy_w=host["busy_w"], accelerator=gpu),),
        Work(part["num_samples"], job["batch_size"]),
        (Nodes(link, "csd", 1, csd["cores"], csd["core_speed"], idle_w=csd["idle_w"], busy_w=csd["busy_w"]),)
        if strategy else (),
        store=Store(link),
    )  # fmt: skip
    if strategy is None:
        return play(Plan(chunk_rows=256, node_batch=64, prefetch=4), [CUT], profile, file)
    cpu, near = host["cores"] / decode_s, csd["cores"] * csd["core_speed"] / decode_s
    plan = near_plan(CUT, chunk_rows=256, node_batch=64, prefetch=4, prongs=strategy,
                     host_share=round(cpu / (cpu + near), 4))  # fmt: skip
    return play(plan, [CUT], profile, file)

"""SSD-Off: how many SSDs with a mobile GPU do what a GPU behind the chipset's link does, and what each part brings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench.scenarios.page import Page, layers, parameters
from headwater.core.plan import Plan, near_plan
from headwater.core.rig import Link
from headwater.sim.layers import Layer, cuts_of, profile_of
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import Chip, Nodes, RigFile, Store, Trainers, Work
from headwater.sim.world import play

NAME = "ssd-off"
STEPS = ("as a file system gives it", "+ serialized files", "+ fp16", "+ layer fusion", "+ kernels chosen",
         "+ prefetching")  # fmt: skip


def run() -> Page:
    given, page = parameters(NAME), Page(NAME)
    paper = given["paper"]["ssds_that_catch_up"]
    gpu = gpu_system(given)
    counts = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    fleets = {count: ssds(given, count, len(STEPS) - 1) for count in counts}
    enough = next((count for count in range(1, 65) if ssds(given, count, len(STEPS) - 1).samples_per_s
                   >= gpu.samples_per_s), None)  # fmt: skip
    columns = ["", "pictures/s", "of the GPU system", "J a picture", "limited by"]
    page.table("SSDs together, and the GPU system", columns, [
        ["GPU system", gpu.samples_per_s, 1.0, joules(gpu), gpu.limited_by],
        *[[f"{count} SSDs", each.samples_per_s, each.samples_per_s / gpu.samples_per_s, joules(each), each.limited_by]
          for count, each in fleets.items()],
    ])  # fmt: skip
    rows, before = [], 0.0
    for number, title in enumerate(STEPS):
        rate = ssds(given, 1, number).samples_per_s
        rows.append([title, rate, rate / before if before else ""])
        before = rate
    page.table("One SSD, part by part", ["", "pictures/s", "against the line above"], rows)
    page.table("A cluster: machines of six SSDs each", ["machines", "pictures/s", "of what as many single ones do"], [
        [machines, (rate := ssds(given, 6 * machines, len(STEPS) - 1).samples_per_s),
         rate / (machines * fleets[6].samples_per_s)] for machines in (1, 2, 4, 8)])  # fmt: skip
    less = joules(fleets[6]) / joules(gpu)
    page.table("The paper's figures", ["", "paper", "simulated"], [
        ["SSDs that catch up with the GPU system", paper, enough],
        ["energy of six SSDs, of the GPU system's", given["paper"]["power"], less],
    ])  # fmt: skip
    return page


def joules(outcome: Outcome) -> float:
    return sum(outcome.energy_j.values()) / outcome.num_samples


def gpu_system(given: dict[str, Any]) -> Outcome:
    """Serialized fp32 tensors come over the chipset's link, and the GPU does everything."""
    host, job = given["host"], given["job"]
    chip = chip_of(host["fp32_flops_per_s"] * given["efficiency"]["tuned"], host)
    profile = profile_of(layers(job["model"]), sample_bytes=2 * job["tensor_bytes"], pixel_bytes=150528,
                         batch=job["batch_size"], near=None, here=chip, costs={})  # fmt: skip
    file = RigFile(
        (Trainers(cores=host["cores"], accelerator=chip, idle_w=host["idle_w"], busy_w=host["busy_w"]),),
        Work(job["num_samples"], job["batch_size"]),
        store=Store(Link(host["link_bytes_per_s"], host["link_bytes_per_s"])),
    )
    return play(Plan(chunk_rows=128, node_batch=128, prefetch=4), cuts_of(layers(job["model"]), 150528), profile, file)


def ssds(given: dict[str, Any], count: int, step: int) -> Outcome:
    """So many SSDs with the first parts of the system, up to this step."""
    ssd, host, job = given["ssd"], given["host"], given["job"]
    serialized, half, fused, tuned, ahead = (step >= number for number in range(1, 6))
    rate = ssd["fp16_flops_per_s" if half else "fp32_flops_per_s"]
    chip = chip_of(rate * given["efficiency"]["tuned" if tuned else "plain"], ssd)
    model = [
        thinner(each, half)
        for each in layers(job["model"])
        if not (fused and each.kind == "elementwise" and each.name != job["cut"])
    ]
    cut = next(number for number, each in enumerate(model, start=1) if each.name == job["cut"])
    tensor = job["tensor_bytes"] * (1 if half else 2)
    costs = {} if serialized else {"node_decode_s": job["decode_s"], "node_finish_s": job["to_tensor_s"]}
    profile = profile_of(model, sample_bytes=tensor if serialized else job["jpeg_bytes"], pixel_bytes=150528,
                         batch=job["batch_size"], near=chip, here=Chip(speed=1.0), costs=costs)  # fmt: skip
    profile = replace(
        profile,
        node=replace(profile.node, num_slots=3 if ahead else 1),
        # What is behind the features, a head of one layer, is next to nothing for the host's own GPU.
        trainer=replace(profile.trainer, suffix_s=(0.0,) * (len(model) + 1)),
    )
    link = Link(ssd["read_bytes_per_s"], ssd["read_bytes_per_s"])
    port = Link(host["link_bytes_per_s"], host["link_bytes_per_s"])
    file = RigFile(
        (Trainers(cores=host["cores"], port=port, accelerator=Chip(), idle_w=host["idle_w"], busy_w=host["busy_w"]),),
        Work(job["num_samples"], job["batch_size"]),
        (Nodes(link, "ssd", count, ssd["cores"], ssd["core_speed"], disk_bytes_per_s=ssd["read_bytes_per_s"],
               accelerator=chip),),
    )  # fmt: skip
    cuts = cuts_of(model, 150528)
    plan = near_plan(cuts[cut], chunk_rows=128, node_batch=128,
                     prefetch=2 if ahead else 1)  # fmt: skip
    return play(plan, cuts, profile, file)


def chip_of(flops: float, part: dict[str, Any]) -> Chip:
    idle, busy = part.get("gpu_idle_w", part["idle_w"]), part.get("gpu_busy_w", part["busy_w"])
    return Chip(flops_per_s={"other": flops}, memory_bytes_per_s=part["memory_bytes_per_s"], idle_w=idle, busy_w=busy)


def thinner(layer: Layer, half: bool) -> Layer:
    """In fp16 a layer's bytes are half."""
    return replace(layer, bytes_out=layer.bytes_out / 2, weight_bytes=layer.weight_bytes / 2) if half else layer

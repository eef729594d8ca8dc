"""In-network reduction: what sums beside the backward pass cost it, and where a switch that adds helps."""

from __future__ import annotations

from typing import Any

from bench.scenarios.page import Page, layers, parameters
from headwater.sim.overlap import Overlapped, Sums, overlapped
from headwater.sim.reduction import ring_s, switch_s
from headwater.sim.rigfile import RING, SWITCH, Chip

NAME = "in-network"


def run() -> Page:
    given, page = parameters(NAME), Page(NAME)
    job, paper = given["job"], given["paper"]
    slow: list[float] = []
    rows = []
    for model in job["models"]:
        for gpus in job["num_gpus"]:
            none, ring, switch = (played(given, model, gpus, kind) for kind in (None, RING, SWITCH))
            slow.append(beside(ring))
            rows.append([model, gpus, 1e3 * none.step_s, 1e3 * ring.step_s, 1e3 * switch.step_s,
                         f"{100 * ring.slowdown:.1f} %", f"{100 * beside(ring):.1f} %",
                         f"{100 * switch.slowdown:.1f} %",
                         ring.step_s / switch.step_s])  # fmt: skip
    page.table("A step of 32 pictures on each GPU, buckets of 25 MB", [
        "model", "GPUs", "nothing summed, ms", "ring, ms", "switch, ms", "backward slowed by the ring",
        "while the ring runs", "backward slowed by the switch", "ring ÷ switch"], rows)  # fmt: skip
    sizes = []
    for megabytes in job["bucket_mb"]:
        num_bytes, gpus = 1e6 * megabytes, 8
        link = given["link"]
        one = ring_s(gpus, num_bytes, link["bytes_per_s"], link["latency_s"])
        other = switch_s(num_bytes, link["bytes_per_s"], link["latency_s"])
        ring, switch = (played(given, job["models_swept"], gpus, kind, num_bytes) for kind in (RING, SWITCH))
        sizes.append([megabytes, 1e3 * one, 1e3 * other, one / other, 1e3 * ring.step_s, 1e3 * switch.step_s,
                      ring.step_s / switch.step_s])  # fmt: skip
    title = f"By the size of an all-reduce, 8 GPUs; the step is of {job['models_swept']} with buckets of that size"
    page.table(title, [
        "MB", "a ring alone, ms", "a switch alone, ms", "ring ÷ switch", "step, ring, ms", "step, switch, ms",
        "ring ÷ switch"], sizes)  # fmt: skip
    page.table("The papers' figures", ["", "papers", "simulated"], [
        ["compute beside communication, slower by (mean)", f"{100 * paper['slowdown_mean']:.1f} %",
         f"{100 * sum(slow) / len(slow):.1f} %"],
        ["the same, at most", f"{100 * paper['slowdown_most']:.0f} %", f"{100 * max(slow):.1f} %"],
        ["in-switch sums, large messages on 16 GPUs", "up to 2", max(
            ring_s(16, 256e6, given["link"]["bytes_per_s"], given["link"]["latency_s"])
            / switch_s(256e6, given["link"]["bytes_per_s"], given["link"]["latency_s"]), 0.0)],
        ["the same, small ones", "up to 18", ring_s(16, 1e3, given["link"]["bytes_per_s"], given["link"]["latency_s"])
         / switch_s(1e3, given["link"]["bytes_per_s"], given["link"]["latency_s"])],
    ])  # fmt: skip
    return page


def beside(found: Overlapped) -> float:
    """How much slower the backward pass is while a sum runs beside it."""
    extra = found.backward_s - found.backward_alone_s
    within = min(found.sums_s, found.backward_s)
    return extra / max(within - extra, 1e-12) if extra > 0 else 0.0


def played(given: dict[str, Any], model: str, gpus: int, kind: str | None, bucket: float = 25e6) -> Overlapped:
    gpu, link = given["gpu"], given["link"]
    chip = Chip(flops_per_s={"other": gpu["flops_per_s"] * gpu["efficiency"]},
                memory_bytes_per_s=gpu["memory_bytes_per_s"])  # fmt: skip
    sums = None
    if kind is not None:
        part = given[kind]
        sums = Sums(kind, part["cores"] / gpu["num_cores"], part["touches"])
    return overlapped(layers(model), chip, given["job"]["batch_size"], gpus, link["bytes_per_s"], sums,
                      bucket_bytes=bucket, latency_s=link["latency_s"])  # fmt: skip

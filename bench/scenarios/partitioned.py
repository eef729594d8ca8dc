"""Deep partitioned training: where to cut a model between near-storage devices and an NPU, and what that brings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from bench.scenarios.page import Page, layers, parameters
from headwater.sim.layers import Layer
from headwater.sim.partition import Setting, best, clean_cuts, step
from headwater.sim.rigfile import Chip

NAME = "partitioned"


def run() -> Page:
    given, page = parameters(NAME), Page(NAME)
    paper, vision = given["paper"], given["vision"]
    rows, gains = [], []
    for name in vision["models"]:
        found, none = best(setting(given, name), [0, *clean_cuts(layers(name))])
        gains.append(1 - found.seconds / none.seconds)
        rows.append([name, none.seconds, found.name, found.seconds, f"{-100 * gains[-1]:.1f} %",
                     ", ".join(f"{part} {1e3 * s:.0f} ms" for part, s in found.parts.items())])  # fmt: skip
    page.table("Vision, batch 512, four devices: seconds a step",
               ["model", "nothing cut off", "best cut behind", "with it", "time", "its parts"], rows)  # fmt: skip
    model = vision["models"][0]
    page.table(f"Every cut of {model}", ["cut behind", "s a step"],
               [[(each := step(setting(given, model), cut)).name, each.seconds]
                for cut in [0, *clean_cuts(layers(model))]])  # fmt: skip
    cut, none = recommender(given)
    gain = 1 - cut.seconds / none.seconds
    page.table("Recommender, batch 64, one device: ms a step", ["", "ms"], [
        ["rows of tables travel", 1e3 * none.seconds], ["cut behind pooling", 1e3 * cut.seconds],
        *[[f"of which {part}", 1e3 * s] for part, s in cut.parts.items()]])  # fmt: skip
    page.table("The paper's figures", ["", "paper", "simulated"], [
        ["vision, least and most off a step", f"{100 * paper['vision_least']:.1f} … {100 * paper['vision_most']:.1f} %",
         f"{100 * min(gains):.1f} … {100 * max(gains):.1f} %"],
        ["recommender, off a step", f"{100 * paper['recommender_least']:.1f} … "
         f"{100 * paper['recommender_most']:.1f} %", f"{100 * gain:.1f} %"],
    ])  # fmt: skip
    return page


def setting(given: dict[str, Any], model: str) -> Setting:
    vision, npu, device = given["vision"], given["npu"], given["device"]
    return Setting(
        layers(model),
        [chip(device)] * vision["num_devices"],
        chip(npu),
        given["link"]["bytes_per_s"],
        vision["batch_size"],
        vision["sample_bytes"],
        given["link"]["latency_s"],
    )


def chip(part: dict[str, Any]) -> Chip:
    return Chip(flops_per_s={"other": part["flops_per_s"]}, memory_bytes_per_s=part["memory_bytes_per_s"])


def recommender(given: dict[str, Any]) -> tuple[Any, Any]:
    """Lookups are done where the tables are in both cases; what differs is whether rows or pooled vectors travel, and
    where they are pooled."""
    part = given["recommender"]
    values = part["num_tables"] * part["num_lookups"] * part["width"]
    look_s = 4 * values / given["device"]["lookup_bytes_per_s"]
    pooled = part["num_tables"] * part["width"]
    sizes = [pooled, *part["bottom"], *part["top"]]
    dense = [Layer(f"dense {number}", 0, 0, 4 * out, 4 * inner * out, "linear", 2.0 * inner * out)
             for number, (inner, out) in enumerate(pairwise(sizes), start=1)]  # fmt: skip
    lookup = Layer("lookup", look_s, look_s, 4 * values, 0)  # forward reads rows, backward writes them
    pooling = Layer("pooling", 0, 0, 4 * pooled, 0, "add", float(values))
    common = ([chip(given["device"])] * part["num_devices"], chip(given["npu"]), given["link"]["bytes_per_s"],
              part["batch_size"], 0.0, given["link"]["latency_s"])  # fmt: skip
    whole = Setting([lookup, pooling, *dense], *common)
    return step(whole, 2), step(whole, 1)

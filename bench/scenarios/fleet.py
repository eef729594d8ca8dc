"""A fleet of 10,000 nodes: how it grows, what breaks first, and what buying helps. For docs/scale.md."""

from __future__ import annotations

import time
from dataclasses import replace

from bench.scenarios.page import FOLDER, Page
from headwater.core.cut import Cut
from headwater.core.plan import near_plan
from headwater.sim.inputs import Inputs, read_inputs
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import DIES, RING, SLOWS, SWITCH, Fault
from headwater.sim.world import play

NAME = "fleet"


def run() -> Page:
    page = Page(NAME)
    given = read_inputs(FOLDER / "fleet-plan.json", FOLDER / "fleet.toml")
    alone = 1 / (0.0002 + 0.00556 + 0.091 + 0.004 / 32) * 16  # a node's cores, and nothing else
    rows = []
    for nodes, trainers in ((100, 1), (1000, 10), (3000, 30), (10000, 100)):
        outcome, taken_s = played(fleet(given, nodes, trainers))
        rows.append([nodes, trainers, outcome.samples_per_s, outcome.samples_per_s / (nodes * alone),
                     waiting(outcome), outcome.limited_by, taken_s])  # fmt: skip
    page.table("Nodes and trainers together, a ring", ["nodes", "trainers", "pictures/s", "of the nodes' cores",
               "trainers wait for rows", "busiest", "played in, s (measured)"], rows)  # fmt: skip
    rows = []
    for trainers in (25, 50, 100, 200, 500):
        for kind in (RING, SWITCH):
            at = fleet(given, 10000, trainers)
            outcome, _ = played(replace(at, rig=replace(at.rig, job=replace(at.rig.job, reduce=kind))))
            rows.append([trainers, 10000 // trainers, kind, outcome.samples_per_s,
                         outcome.samples_per_s / (10000 * alone), outcome.busy["trainer cores"][0],
                         waiting(outcome)])  # fmt: skip
    page.table("10,000 nodes: how many trainers, and how they sum", ["trainers", "nodes each", "sums", "pictures/s",
               "of the nodes' cores", "trainers' cores busy", "trainers wait for rows"], rows)  # fmt: skip
    rows = []
    for index in (1, 2, 3):
        for terabits in (0.4, 1.6, 6.4):
            at = cut_at(fleet(given, 10000, 100), given.cuts[index])
            network = replace(at.rig.network, bytes_per_s=terabits * 1.25e11)
            outcome, _ = played(replace(at, rig=replace(at.rig, network=network)))
            rows.append([given.cuts[index].name, terabits, outcome.samples_per_s,
                         outcome.down_bytes / outcome.num_samples, outcome.limited_by])  # fmt: skip
    page.table("10,000 nodes, 100 trainers: where it is cut, and what the network's middle carries",
               ["cut behind", "Tbit/s", "pictures/s", "bytes a picture", "busiest"], rows)  # fmt: skip
    whole = fleet(given, 10000, 100)
    healthy, _ = played(whole)
    rows = [["nothing", healthy.samples_per_s, 1.0, healthy.num_again]]
    for what, count, kind, factor in (("100 nodes die in the middle", 100, DIES, 1.0),
                                      ("100 nodes at a fifth of their speed", 100, SLOWS, 0.2),
                                      ("1,000 nodes die in the middle", 1000, DIES, 1.0)):  # fmt: skip
        at_s = healthy.seconds / 2 if kind == DIES else 0.0
        faults = tuple(Fault(at_s, f"store-{1 + number * (10000 // count)}", kind, factor) for number in range(count))
        outcome, _ = played(replace(whole, rig=replace(whole.rig, faults=faults)))
        rows.append([what, outcome.samples_per_s, outcome.samples_per_s / healthy.samples_per_s, outcome.num_again])
    page.table("10,000 nodes, 100 trainers: what goes wrong", ["what", "pictures/s", "of a healthy fleet",
               "chunks made again"], rows)  # fmt: skip
    rows = []
    bought = {"as it is": whole, "half the nodes": fleet(given, 5000, 100),
              "twice the cores a node": cores(whole, 32.0), "twice the trainers": fleet(given, 10000, 200)}  # fmt: skip
    for what, at in bought.items():
        outcome, _ = played(at)
        per_hour = sum(outcome.money.values()) / outcome.seconds * 3600
        rows.append([what, outcome.samples_per_s, per_hour, 1e6 * sum(outcome.money.values()) / outcome.num_samples,
                     sum(outcome.energy_j.values()) / outcome.num_samples])  # fmt: skip
    page.table(
        "What buying brings", ["", "pictures/s", "money an hour", "money a million pictures", "J a picture"], rows
    )
    return page


def fleet(given: Inputs, nodes: int, trainers: int) -> Inputs:
    """So many of each, a hundred pictures for each node at least."""
    (store,), (host,) = given.rig.nodes, given.rig.trainers
    samples = max(100 * nodes, 12 * trainers * given.rig.job.batch_size)
    rig = replace(
        given.rig,
        nodes=(replace(store, count=nodes),),
        trainers=(replace(host, count=trainers, nodes_each=nodes // trainers),),
        job=replace(
            given.rig.job, num_samples=samples, **({"reduce": "none", "gradient_bytes": 0.0} if trainers == 1 else {})
        ),
    )
    return replace(given, rig=rig)


def cores(given: Inputs, count: float) -> Inputs:
    (store,) = given.rig.nodes
    dearer = replace(store, cores=count, price_per_hour=store.price_per_hour * count / store.cores)
    return replace(given, rig=replace(given.rig, nodes=(dearer,)))


def cut_at(given: Inputs, cut: Cut) -> Inputs:
    knobs = {"codec": "fp16", "node_batch": 16, "chunk_rows": 32, "prefetch": 2}
    return replace(given, plan=near_plan(cut, **knobs))


def played(given: Inputs) -> tuple[Outcome, float]:
    begin = time.perf_counter()
    return play(given.plan, given.cuts, given.profile, given.rig), time.perf_counter() - begin


def waiting(outcome: Outcome) -> float:
    """The part of the time."""
    return outcome.waited_s / outcome.seconds

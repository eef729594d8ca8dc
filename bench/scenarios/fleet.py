"""A fleet of 10,000 nodes: how it grows, what breaks first, and what buying helps. For docs/scale.md."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from typing import Any

from bench.scenarios.page import FOLDER, Page
from headwater.core.cut import Cut
from headwater.core.dispatch import Assign, Decision, Deliver, Dispatch, window_of
from headwater.sim.inputs import Inputs, read_inputs
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import DIES, NONE, RING, SLOWS, SWITCH, Fault
from headwater.sim.world import play

NAME = "fleet"
SAMPLES_EACH = 96


def run() -> Page:
    page = Page(NAME)
    given = read_inputs(FOLDER / "fleet-plan.json", FOLDER / "fleet.toml")
    rows = [[nodes, 1e6 * each_s, 1 / each_s, 32 / each_s] for nodes in (10, 30, 100, 300, 1000)
            if (each_s := dispatch_s(nodes))]  # fmt: skip
    page.table("One trainer's dispatch by itself (measured, on one core)", ["nodes", "us a chunk", "chunks/s at most",
               "rows/s at most, chunks of 32"], rows)  # fmt: skip
    tenth = fleet(given, 1000, 10)
    rows = []
    for index in (1, 2, 3):
        for gigabits in (40, 640):
            at = with_rig(
                cut_at(tenth, given.cuts[index]), network=replace(given.rig.network, bytes_per_s=gigabits * 1.25e8)
            )
            outcome, _ = played(at)
            rows.append([given.cuts[index].name, gigabits, outcome.samples_per_s,
                         outcome.down_bytes / outcome.num_samples, outcome.limited_by])  # fmt: skip
    page.table("A tenth of it (1,000 nodes, 10 trainers): where it is cut, and what the network's middle carries",
               ["cut behind", "Gbit/s", "pictures/s", "bytes a picture", "busiest"], rows)  # fmt: skip
    healthy, _ = played(tenth)
    rows = [["nothing", healthy.samples_per_s, 1.0, healthy.num_again]]
    for what, count, kind, factor in (("1 % of the nodes die in the middle", 10, DIES, 1.0),
                                      ("10 % die in the middle", 100, DIES, 1.0),
                                      ("1 % have a fifth of their speed", 10, SLOWS, 0.2),
                                      ("10 % have a fifth of their speed", 100, SLOWS, 0.2)):  # fmt: skip
        at_s = healthy.seconds / 2 if kind == DIES else 0.0
        faults = tuple(Fault(at_s, f"store-{1 + number * (1000 // count)}", kind, factor) for number in range(count))
        outcome, _ = played(with_rig(tenth, faults=faults))
        rows.append([what, outcome.samples_per_s, outcome.samples_per_s / healthy.samples_per_s, outcome.num_again])
    page.table(
        "A tenth of it: what goes wrong", ["what", "pictures/s", "of a healthy fleet", "chunks made again"], rows
    )
    rows = []
    bought = {"as it is": tenth, "half the nodes": fleet(given, 500, 10), "twice the cores a node": cores(tenth, 8.0),
              "twice the trainers": fleet(given, 1000, 20)}  # fmt: skip
    for what, at in bought.items():
        outcome, _ = played(at)
        money = sum(outcome.money.values())
        rows.append([what, outcome.samples_per_s, money / outcome.seconds * 3600, 1e6 * money / outcome.num_samples,
                     sum(outcome.energy_j.values()) / outcome.num_samples])  # fmt: skip
    page.table("A tenth of it: what buying brings", ["", "pictures/s", "money an hour", "money a million pictures",
               "J a picture"], rows)  # fmt: skip
    rows = []
    for nodes, trainers in ((100, 1), (1000, 10), (10000, 100)):
        outcome, taken_s = played(fleet(given, nodes, trainers))
        rows.append([nodes, trainers, outcome.samples_per_s, of_cores(outcome, nodes), waiting(outcome),
                     outcome.limited_by, taken_s])  # fmt: skip
    page.table("Nodes and trainers together", ["nodes", "trainers", "pictures/s", "of the nodes' cores",
               "trainers wait for rows", "busiest", "played in, CPU-s (measured)"], rows)  # fmt: skip
    rows = []
    for trainers, kind in ((500, RING), (500, SWITCH)):
        at = fleet(given, 10000, trainers)
        outcome, _ = played(with_rig(at, job=replace(at.rig.job, reduce=kind)))
        rows.append([trainers, 10000 // trainers, kind, outcome.samples_per_s, of_cores(outcome, 10000),
                     outcome.busy["trainer cores"][0], waiting(outcome)])  # fmt: skip
    page.table("10,000 nodes: how many trainers, and how they sum", ["trainers", "nodes each", "sums", "pictures/s",
               "of the nodes' cores", "trainers' cores busy", "trainers wait for rows"], rows)  # fmt: skip
    return page


def dispatch_s(nodes: int, num_chunks: int = 2000) -> float:
    """Seconds for a chunk: its reply, what is handed out then, and its use, with this many nodes of one speed."""
    names = [f"store-{number}" for number in range(nodes)]
    machine = Dispatch(num_chunks + 6 * nodes, window=window_of(nodes, 3), per_node=3)
    under_way: deque[tuple[str, int]] = deque()

    def follow(decisions: list[Decision]) -> int:
        under_way.extend((each.node, each.chunk) for each in decisions if isinstance(each, Assign))
        return sum(isinstance(each, Deliver) for each in decisions)

    ready = follow(machine.node_up(*names))
    begin = time.process_time()
    for _ in range(num_chunks):
        ready += follow(machine.finished(*under_way.popleft()))
        while ready:
            ready += follow(machine.taken()) - 1
    return (time.process_time() - begin) / num_chunks


def of_cores(outcome: Outcome, nodes: int) -> float:
    """Of what the nodes' cores make if nothing ever waits."""
    alone = 4 / (0.0002 + 0.00556 + 0.091 + 0.004 / 32)
    return outcome.samples_per_s / (nodes * alone)


def with_rig(given: Inputs, **changes: Any) -> Inputs:
    return replace(given, rig=replace(given.rig, **changes))


def fleet(given: Inputs, nodes: int, trainers: int) -> Inputs:
    """So many of each, with three chunks for each node, and a network that grows with them."""
    (store,), (host,) = given.rig.nodes, given.rig.trainers
    job = replace(given.rig.job, num_samples=SAMPLES_EACH * nodes)
    if trainers == 1:
        job = replace(job, reduce=NONE, gradient_bytes=0.0)
    network = replace(given.rig.network, bytes_per_s=(given.rig.network.bytes_per_s or 0.0) * nodes / 10000)
    return with_rig(given, nodes=(replace(store, count=nodes),), job=job, network=network,
                    trainers=(replace(host, count=trainers, nodes_each=nodes // trainers),))  # fmt: skip


def cores(given: Inputs, count: float) -> Inputs:
    (store,) = given.rig.nodes
    dearer = replace(store, cores=count, price_per_hour=store.price_per_hour * count / store.cores)
    return with_rig(given, nodes=(dearer,))


def cut_at(given: Inputs, cut: Cut) -> Inputs:
    return replace(given, plan=replace(given.plan, cut=cut.index, cut_name=cut.name))


def played(given: Inputs) -> tuple[Outcome, float]:
    begin = time.process_time()
    return play(given.plan, given.cuts, given.profile, given.rig), time.process_time() - begin


def waiting(outcome: Outcome) -> float:
    """The part of the time."""
    return outcome.waited_s / outcome.seconds

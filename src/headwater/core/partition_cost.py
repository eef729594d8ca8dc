"""What a step costs when its first layers train on nodes, and which plan is the fastest.

Owns `StepCosts`, `step_s` and `fastest`. The model, for N nodes, a batch of B and a cut k:

    chain = forward on nodes + rows down + suffix + gradients up + backward on nodes
    step  = the largest of these + (chain - the largest) / micro-batches + weights' gradients down + weights up + rounds

and no less than a node takes for its part of everything, decoding included, which it does while it waits. Where nodes
add up among themselves, gradients go to an aggregator and back, and then down once. Every time is measured, but for
what is marked as estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwater.core.partition_plan import DEPTH, HERE, NETWORK, NODES, TRAINER, PartitionPlan

MICRO_BATCHES = (1, 2, 4, 8)
# Estimated: what the trainer's own core takes for a byte that it receives or sends, both ways of a codec included. One
# stream on loopback moved 0.33 GB/s with both ends on the same cores, so each end takes about half of 3 ns.
WIRE_S_PER_BYTE = 1.5e-9
# Estimated: a message there, one back, and the Python around them.
MESSAGE_S = 2e-3
# A plan with nodes has to be this much faster than none, in the estimate: estimates are off by some per cent.
MARGIN = 0.05


@dataclass(frozen=True)
class CutCosts:
    """A cut: seconds of a row in front of it on each node (forwards, backwards), of a row behind it on the trainer
    (both), and bytes."""

    index: int
    name: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    suffix_s: float
    down_bytes: Mapping[str, int]  # of a row, by codec
    up_bytes: Mapping[str, int]  # of its gradients
    weight_bytes: int  # trained, of the prefix
    rounds: int = 0  # batch-norms whose statistics are those of the whole batch


@dataclass(frozen=True)
class StepCosts:
    """All that was measured. `links` has bytes a second (from, to) each node; `port` those of all of them at once."""

    batch_size: int
    cuts: tuple[CutCosts, ...]  # the first is in front of the model
    node_pixels_s: tuple[float, ...]  # of a row, read and decoded there
    links: tuple[tuple[float, float], ...]
    port: tuple[float, float]
    latency_s: float
    here_read_s: float | None  # of a row, read to this machine; None if it can't
    here_pixels_s: float  # of a row, decoded here
    may_split: bool  # may a batch be computed in parts?


def shares_of(costs: StepCosts, cut: CutCosts) -> tuple[float, ...]:
    """Of each batch by node, as fast as each is in all that it does."""
    rates = [1 / max(1e-9, sum(each)) for each in zip(costs.node_pixels_s, cut.forward_s, cut.backward_s, strict=True)]
    return tuple(round(rate / sum(rates), 4) for rate in rates)


def step_s(costs: StepCosts, plan: PartitionPlan) -> float:
    """Seconds a step, estimated from what was measured."""
    batch = costs.batch_size
    cut = next(each for each in costs.cuts if each.index == plan.cut_index)
    if plan.place == TRAINER:
        if costs.here_read_s is None:
            return float("inf")
        return batch * max(costs.here_read_s, costs.here_pixels_s + cut.suffix_s)
    shares = plan.shares or tuple(1 / len(costs.links) for _ in costs.links)
    rows = [batch * share / sum(shares) for share in shares]
    codec = plan.codec if cut.index else "raw"
    down, up = cut.down_bytes[codec], cut.up_bytes[codec]
    trains = up > 0
    forward = max(row * each for row, each in zip(rows, cut.forward_s, strict=True))
    backward = max(row * each for row, each in zip(rows, cut.backward_s, strict=True)) if trains else 0.0
    down_s = max(
        batch * down / costs.port[0], *(row * down / link[0] for row, link in zip(rows, costs.links, strict=True))
    )
    up_s = max(batch * up / costs.port[1], *(row * up / link[1] for row, link in zip(rows, costs.links, strict=True)))
    suffix = batch * (cut.suffix_s + (down + up) * WIRE_S_PER_BYTE)
    if not cut.index:
        suffix += batch * cut.down_bytes["raw"] * WIRE_S_PER_BYTE  # pixels become floats here
    stages = (forward + backward, down_s, suffix, up_s)
    largest, micro = max(stages), plan.micro_batches if costs.may_split else 1
    body = largest + (sum(stages) - largest) / micro + micro * MESSAGE_S
    sync = 0.0
    if trains:
        num_nodes, weights = len(costs.links), cut.weight_bytes
        for way in (0, 1):
            if way == 0 and plan.sums == NETWORK:
                # Estimated: to the aggregator and back as fast as to the trainer and back, in the same time.
                sync += max(weights / min(link) for link in costs.links)
                sync += weights / min(costs.port[0], costs.links[0][0])
                continue
            sync += max(num_nodes * weights / costs.port[way], *(weights / link[way] for link in costs.links))
        if num_nodes > 1:
            sync += 2 * cut.rounds * (2 * costs.latency_s + MESSAGE_S)
    node = max(row * (pixels + there + back) for row, pixels, there, back in
               zip(rows, costs.node_pixels_s, cut.forward_s, cut.backward_s, strict=True))  # fmt: skip
    return max(body + sync, node)


def plans(costs: StepCosts, codecs: Sequence[str], micro: int | None = None, sums: str = HERE) -> list[PartitionPlan]:
    """Everything that could be done, "move nothing" first. `sums` counts where nodes train."""
    first = costs.cuts[0]
    found = [PartitionPlan(TRAINER, first.index, first.name)] if costs.here_read_s is not None else []
    counts = (1,) if not costs.may_split else MICRO_BATCHES if micro is None else (micro,)
    for cut in costs.cuts:
        for codec in codecs if cut.index else ("raw",):
            for count in counts:
                trains = cut.index > 0 and cut.up_bytes[codec] > 0
                found.append(PartitionPlan(NODES, cut.index, cut.name, codec, count, shares_of(costs, cut), DEPTH,
                                           sums if trains else HERE))  # fmt: skip
    return found


def fastest(
    costs: StepCosts, codecs: Sequence[str], micro: int | None = None, sums: str = HERE
) -> list[tuple[float, PartitionPlan]]:
    """All plans with their seconds a step, the one to take first: nodes only where they clearly help, a codec with an
    error only where it does, and the simpler one of two that are alike."""

    def rank(priced: tuple[float, PartitionPlan]) -> tuple[float, int, int]:
        seconds, plan = priced
        slower = 1.0 if plan.place == TRAINER else 1 + MARGIN
        slower += MARGIN / 2 if plan.codec != "raw" else 0.0
        return seconds * slower, plan.cut_index, plan.micro_batches

    return sorted(((step_s(costs, plan), plan) for plan in plans(costs, codecs, micro, sums)), key=rank)

"""A data-parallel step whose sums overlap with its backward pass, and what that costs the backward pass.

Owns the contention model (`slowdown`) and `overlapped`. Gradients get ready layer by layer, from the last to the first,
and are summed in buckets, one after the other, while the backward pass goes on. While a sum is under way it takes of
the accelerator what it needs:

    cores    the part of the accelerator's cores that its kernels hold
    memory   for each byte that crosses the wire, so many bytes of the accelerator's memory are read and written

A kernel of the backward pass is bound by its operations or by its memory traffic (`sim.layers.seconds_on`). Beside a
sum the former takes 1 ÷ (1 − cores) as long, the latter 1 ÷ (1 − memory ÷ bandwidth), and what is bound by one may
become bound by the other. A sum in the switch needs no kernels that add and reads and writes each byte once; a ring
adds on the accelerators, 2(n−1)/n times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import simpy

from headwater.sim.layers import BACKWARD, OTHER, Layer
from headwater.sim.reduction import ring_parts
from headwater.sim.rigfile import RING, Chip
from headwater.sim.sharing import after


@dataclass(frozen=True)
class Sums:
    """How gradients are summed: which part of the accelerator's cores it holds meanwhile, and how many bytes of its
    memory it touches for each byte on the wire."""

    kind: str
    cores: float
    touches: float


@dataclass(frozen=True)
class Overlapped:
    """One step. `backward_alone_s` is without any sums beside it; `exposed_s` what of the sums nothing hides."""

    forward_s: float
    backward_alone_s: float
    backward_s: float
    step_s: float
    sums_s: float

    @property
    def slowdown(self) -> float:
        """Of the backward pass, by what runs beside it."""
        return self.backward_s / self.backward_alone_s - 1

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.forward_s - self.backward_s


def demands(layer: Layer, chip: Chip, batch: int, backward: bool) -> tuple[float, float]:
    """Seconds of operations, and of memory traffic, of a layer for a batch."""
    factor = BACKWARD if backward else 1.0
    rate = chip.flops_per_s.get(layer.kind, chip.flops_per_s.get(OTHER, 0.0))
    by_flops = factor * batch * layer.flops / rate if rate else 0.0
    by_memory = 0.0
    if chip.memory_bytes_per_s:
        by_memory = factor * (2 * batch * layer.bytes_out + layer.weight_bytes) / chip.memory_bytes_per_s
    return by_flops, by_memory


def slowdown(by_flops: float, by_memory: float, cores: float, memory: float) -> float:
    """How much longer a kernel takes beside a sum that holds these parts of the accelerator."""
    assert 0 <= cores < 1
    memory = min(memory, 0.95)
    alone = max(by_flops, by_memory)
    return max(by_flops / (1 - cores), by_memory / (1 - memory)) / alone if alone else 1.0


def overlapped(
    layers: Sequence[Layer],
    chip: Chip,
    batch: int,
    num_workers: int,
    wire_bytes_per_s: float,
    sums: Sums | None,
    *,
    bucket_bytes: float = 25e6,
    latency_s: float = 0.0,
) -> Overlapped:
    """Play one step of one worker; all others do the same at the same time. `sums` None: nothing is summed."""
    env = simpy.Environment()
    forward_s = sum(max(demands(each, chip, batch, False)) for each in layers)
    work = [demands(each, chip, batch, True) for each in reversed(layers)]
    alone_s = sum(max(each) for each in work)
    part = 0.0 if sums is None else (ring_parts(num_workers) if sums.kind == RING else 1.0)
    turns = 0 if sums is None else (2 * (num_workers - 1) if sums.kind == RING else 2)
    memory = 0.0
    if sums is not None and chip.memory_bytes_per_s:
        memory = sums.touches * wire_bytes_per_s / chip.memory_bytes_per_s
    queue: list[float] = []
    state = {"summing": False, "sums_s": 0.0, "computed": False, "backward_s": 0.0, "end_s": 0.0}
    changed = [env.event()]

    def told() -> None:
        changed[0].succeed()
        changed[0] = env.event()

    def start() -> None:
        if state["summing"] or not queue or sums is None:
            return
        num_bytes = queue.pop(0)
        seconds = part * num_bytes / wire_bytes_per_s + turns * latency_s
        state["summing"] = True
        state["sums_s"] += seconds
        told()

        def end() -> None:
            state["summing"] = False
            state["end_s"] = env.now
            start()
            if not state["summing"]:
                told()

        after(env, seconds, end)

    def backward():  # type: ignore[no-untyped-def]
        waiting = 0.0
        for (by_flops, by_memory), layer in zip(work, reversed(layers), strict=True):
            left = max(by_flops, by_memory)
            slow = slowdown(by_flops, by_memory, sums.cores if sums else 0.0, memory)
            while True:
                factor = slow if state["summing"] else 1.0
                begun, change = env.now, changed[0]
                end = env.timeout(left * factor)
                yield env.any_of([end, change])
                if end.processed:  # not by what is left of it: late in a long step the clock has too few digits
                    break
                left = max(0.0, left - (env.now - begun) / factor)
            waiting += layer.weight_bytes
            if waiting >= bucket_bytes:
                queue.append(waiting)
                waiting = 0.0
                start()
        if waiting:
            queue.append(waiting)
        state["backward_s"] = env.now
        start()

    env.process(backward())
    env.run()
    backward_s = float(state["backward_s"])
    return Overlapped(forward_s, alone_s, backward_s, forward_s + max(backward_s, float(state["end_s"])),
                      float(state["sums_s"]))  # fmt: skip

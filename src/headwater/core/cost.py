"""What a plan would cost, and why: load on each resource, time, bytes, memory, energy.

Owns `estimate` and `Estimate`. A load is the seconds per sample of everything the plan puts on a resource; the steady
time per sample is the largest load, and what can't overlap (the first chunk, the last step, shipping the prefix) is
added once. All numbers are estimates made from a measured profile; `core.loads` has the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.core.cut import Cut
from headwater.core.loads import (
    ACCELERATOR,
    AHEAD,
    ENGINE,
    HELD_UP,
    LINK_DOWN,
    LINK_UP,
    LOOP,
    NODE,
    OWN,
    PORT_DOWN,
    PORT_UP,
    READS,
    SHARED,
    STORE_DOWN,
    STORE_UP,
    TRAINER,
    Alike,
    JobSize,
    Pricing,
)
from headwater.core.plan import Plan
from headwater.core.profile import Profile
from headwater.core.rig import Rig
from headwater.errors import PlanError

_MOVE_TOGETHER = (
    (NODE, ENGINE, AHEAD, HELD_UP),
    (TRAINER, LOOP, OWN),
    (SHARED, NODE, ENGINE, AHEAD, HELD_UP, TRAINER, LOOP),
)  # what lightens the first lightens the others


@dataclass(frozen=True)
class Load:
    """Seconds per sample of a resource: with what it does, not with what it waits for."""

    resource: str
    kind: str
    s: float


@dataclass(frozen=True)
class Memory:
    """What a device must hold at once, and what it has (None: not known)."""

    device: str
    need_bytes: int
    has_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.has_bytes is None or self.need_bytes <= self.has_bytes


@dataclass(frozen=True)
class Estimate:
    """What a plan would cost. Nothing here was measured with a clock running on this plan."""

    plan: Plan
    job: JobSize
    loads: tuple[Load, ...]
    fill_s: float  # from the start of an epoch until the first steps have their rows
    flow_s: float  # the epoch's steady part
    drain_s: float  # the last steps, once all rows are there
    setup_s: float  # once: export and upload of the prefix
    row_bytes: int  # of one row on the wire, or of one stored sample; in the mean, where some of both come
    down_bytes: float  # per sample, framing included
    up_bytes: float
    memory: tuple[Memory, ...]
    energy_j: Mapping[str, float]  # for the whole job, per device whose power is known; modelled

    @property
    def steady_s(self) -> float:
        """Seconds per sample once everything flows: the largest load."""
        return max(load.s for load in self.loads)

    @property
    def epoch_s(self) -> float:
        return self.fill_s + self.flow_s + self.drain_s

    @property
    def total_s(self) -> float:
        return self.setup_s + self.job.num_epochs * self.epoch_s

    @property
    def samples_per_s(self) -> float:
        """Over a whole epoch, its start and end included."""
        return self.job.num_samples / self.epoch_s

    @property
    def limiting(self) -> str:
        """The resource with the largest load."""
        return self._most().resource

    @property
    def node_bytes(self) -> int:
        """The most memory that any node needs."""
        return max((each.need_bytes for each in self.memory if each.device.startswith("node ")), default=0)

    @property
    def fits(self) -> bool:
        return all(each.fits for each in self.memory)

    @property
    def faults(self) -> tuple[str, ...]:
        """Why the plan can't be carried out, with the way out."""
        return tuple(_too_much(self.plan, each) for each in self.memory if not each.fits)

    def load(self, kind: str) -> float:
        """The largest load of a kind; 0 if the plan puts nothing there."""
        return max((each.s for each in self.loads if each.kind == kind), default=0.0)

    def explain(self) -> str:
        """One sentence: what limits, and what would help next."""
        most = self._most()
        alike = next((kinds for kinds in _MOVE_TOGETHER if most.kind in kinds), (most.kind,))
        if most.kind in (ENGINE, AHEAD, HELD_UP):
            alike = (most.kind,)
        # What is worked ahead shrinks with whatever limits now, so it is never what comes next.
        others = [each for each in self.loads if each.kind not in (*alike, AHEAD, HELD_UP)]
        after = max(others, key=lambda each: each.s, default=None)
        start = f"{most.resource} limits the run to an estimated {_rate(most.s)}"
        if after is None or after.s <= 0:
            return f"{start}; nothing else comes near."
        factor = most.s / after.s
        if factor < 1.02:
            return f"{start}, and {after.resource} is as busy: one alone would not help."
        way = _WAYS[most.kind].format(factor=f"{factor:.2g}" if factor < 100 else f"{factor:.0f}")
        return f"{start}; {way}, until {after.resource} limits at {_rate(after.s)}."

    def to_json(self) -> dict[str, Any]:
        """Plain data for tables and pictures."""
        return {
            "plan": self.plan.to_json(),
            "estimated": {
                "epoch_s": self.epoch_s,
                "total_s": self.total_s,
                "setup_s": self.setup_s,
                "fill_s": self.fill_s,
                "drain_s": self.drain_s,
                "steady_s": self.steady_s,
                "samples_per_s": self.samples_per_s,
                "down_bytes_per_sample": self.down_bytes,
                "up_bytes_per_sample": self.up_bytes,
                "loads": [{"resource": load.resource, "kind": load.kind, "s_per_sample": load.s}
                          for load in self.loads],
                "memory": [{"device": each.device, "need_bytes": each.need_bytes, "has_bytes": each.has_bytes}
                           for each in self.memory],
                "modelled_energy_j": dict(self.energy_j),
                "limiting": self.limiting,
                "explanation": self.explain(),
            },
        }  # fmt: skip

    def _most(self) -> Load:
        return max(self.loads, key=lambda load: load.s)


def estimate(plan: Plan, cuts: Sequence[Cut], profile: Profile, rig: Rig, job: JobSize) -> Estimate:
    """What `plan` would cost. The plan is taken as legal (`core.plan.check`); memory is in the result, not an error."""
    return estimate_with(Pricing(cuts, profile, rig, job), plan)


def check_fits(plan: Plan, cuts: Sequence[Cut], profile: Profile, rig: Rig, job: JobSize) -> None:
    """Raise one PlanError with every device that does not have the memory for this plan (any more)."""
    if faults := estimate(plan, cuts, profile, rig, job).faults:
        raise PlanError(faults)


def estimate_with(pricing: Pricing, plan: Plan) -> Estimate:
    """The same, for many plans in a row."""
    choice = pricing.choice(plan)
    priced = pricing.price(plan, choice)
    loads = tuple(Load(_title(kind, each), kind, float(s)) for kind, each, s in priced.loads if s > 0)
    result = Estimate(
        plan,
        pricing.job,
        loads or (Load(_TITLES[LOOP], LOOP, 0.0),),
        float(priced.fill_s),
        float(priced.flow_s),
        float(priced.drain_s),
        float(priced.setup_s),
        round(pricing.row_bytes(plan, choice)),
        float(priced.work.mean_down_bytes),
        float(priced.work.mean_up_bytes),
        tuple(Memory(f"node {_name(each)}" if each else where, round(need), has)
              for where, each, need, has in priced.memory),
        {},
    )  # fmt: skip
    return replace(result, energy_j=_energy(result, pricing.rig, priced.busy_s))


def _energy(result: Estimate, rig: Rig, node_busy_s: Mapping[str, float]) -> dict[str, float]:
    """Modelled: what a device draws when busy for as long as it is busy, what it draws idle for the rest."""
    devices = {device.name: (device, node_busy_s.get(device.name, 0.0)) for device in rig.nodes}
    devices["trainer"] = (rig.trainer, result.load(TRAINER))
    if rig.accelerator is not None:
        devices["accelerator"] = (rig.accelerator, result.load(ACCELERATOR))
    samples = result.job.num_samples * result.job.num_epochs
    return {
        name: device.idle_w * result.total_s + (device.busy_w - device.idle_w) * samples * busy_s
        for name, (device, busy_s) in devices.items()
        if device.busy_w is not None and device.idle_w is not None
    }


_NODE_TITLES: Mapping[str, str] = {
    NODE: "the CPU of {}",
    ENGINE: "the engine on {}",
    READS: "the wait for single reads on {}",
    AHEAD: "the work ahead on {}",
    LINK_DOWN: "the link from {}",
    LINK_UP: "the link to {}",
}
_TITLES: Mapping[str, str] = {
    NODE: "the store's CPU",
    READS: "the wait for single reads",
    AHEAD: "the work ahead",
    HELD_UP: "the wait of nodes while the trainer reads its share",
    PORT_DOWN: "the trainer's port, inwards",
    PORT_UP: "the trainer's port, outwards",
    STORE_DOWN: "the link from the store",
    STORE_UP: "the link to the store",
    TRAINER: "the trainer's CPU",
    LOOP: "the training loop's thread",
    ACCELERATOR: "the accelerator",
    SHARED: "the CPU that node and trainer share",
    OWN: "the engine beside the trainer",
}
_WAYS: Mapping[str, str] = {
    NODE: "more nodes, or {factor} times the node cores, would help",
    ENGINE: "a smaller node_batch or more prefetch would keep up to {factor} times as many cores busy",
    READS: "a store that answers up to {factor} times as soon would help",
    AHEAD: "more prefetch or larger chunks, up to {factor} times as many rows ahead, would help",
    HELD_UP: "more prefetch, or a link up to {factor} times as fast, would help",
    LINK_DOWN: "a link up to {factor} times as fast would help",
    LINK_UP: "a link up to {factor} times as fast towards the nodes would help",
    PORT_DOWN: "a port up to {factor} times as fast would help",
    PORT_UP: "a port up to {factor} times as fast outwards would help",
    STORE_DOWN: "a link up to {factor} times as fast would help",
    STORE_UP: "a link up to {factor} times as fast towards the store would help",
    TRAINER: "up to {factor} times the trainer's cores would help",
    LOOP: "faster trainer cores, up to {factor} times, would help",
    ACCELERATOR: "an accelerator up to {factor} times as fast would help",
    SHARED: "a node on a machine of its own, or up to {factor} times the cores, would help",
    OWN: "a smaller node_batch or more prefetch would keep up to {factor} times as many cores busy",
}


def _name(each: Alike) -> str:
    return each.names[0] if len(each.names) == 1 else f"{each.names[0]} (and {len(each.names) - 1} like it)"


def _title(kind: str, each: Alike | None) -> str:
    return _TITLES[kind] if each is None else _NODE_TITLES[kind].format(_name(each))


def _rate(s: float) -> str:
    rate = 1 / s if s > 0 else float("inf")
    return f"{rate:.3g} samples/s" if rate < 1000 else f"{rate:,.0f} samples/s"


def _too_much(plan: Plan, memory: Memory) -> str:
    assert memory.has_bytes is not None
    what = f"prefix[..{plan.cut_name}]" if plan.has_prefix else "the plan"
    if memory.device.startswith("node "):
        way = f"cut elsewhere, lower node_batch ({plan.node_batch}) or prefetch ({plan.prefetch})"
    elif memory.device == "trainer":
        way = f"lower chunk_rows ({plan.chunk_rows}) or prefetch ({plan.prefetch}), or train with a smaller batch"
    else:
        way = "cut later, or train with a smaller batch"
    return f"{what} needs {_gb(memory.need_bytes)} on {memory.device} (has {_gb(memory.has_bytes)}); {way}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"

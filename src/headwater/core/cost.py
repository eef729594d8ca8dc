"""What a plan would cost: the load on each resource, and from it time, bytes, memory and energy.

Owns `estimate`. A load is the seconds per sample of everything the plan puts on a resource; the steady time per sample
is the largest load, and what can't overlap (the first chunk, the last step, shipping the prefix) is added once. All
numbers are estimates made from a measured profile; docs/cost-model.md has the formulas and where they can be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.core import form
from headwater.core.codecs import wire_row_bytes
from headwater.core.cut import Cut
from headwater.core.form import Flag, Number, formed
from headwater.core.plan import Plan
from headwater.core.profile import Profile
from headwater.core.rig import Device, Link, Rig
from headwater.errors import ConfigError, PlanError

# What a load is on, in the order of the chain.
NODE, ENGINE, READS, AHEAD = "node", "engine", "reads", "ahead"
LINK_DOWN, LINK_UP, PORT_DOWN, PORT_UP, STORE_DOWN, STORE_UP = (
    "link down", "link up", "port down", "port up", "store link down", "store link up")  # fmt: skip
TRAINER, LOOP, ACCELERATOR = "trainer", "loop", "accelerator"
_MOVE_TOGETHER = ((NODE, ENGINE, AHEAD), (TRAINER, LOOP))  # what lightens the first lightens the others


@dataclass(frozen=True)
class JobSize:
    """How much there is to do. `counts_setup` is False where the prefix is already on the nodes."""

    num_samples: int = field(metadata=formed(Number(1, 1e15, whole=True)))
    batch_size: int = field(metadata=formed(Number(1, 1e9, whole=True)))
    num_epochs: int = field(default=1, metadata=formed(Number(1, 1e9, whole=True)))
    counts_setup: bool = field(default=True, metadata=formed(Flag()))

    def __post_init__(self) -> None:
        form.check_record(self, "job")


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
    fill_s: float  # from the start of an epoch until the first batch is there
    drain_s: float  # the last batch's step
    setup_s: float  # once: export and upload of the prefix
    row_bytes: int  # of one row on the wire, or of one stored sample
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
        behind_first = self.job.num_samples - min(self.job.batch_size, self.job.num_samples)
        return self.fill_s + behind_first * self.steady_s + self.drain_s

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
        if most.kind in (ENGINE, AHEAD):
            alike = (most.kind,)
        after = max((each for each in self.loads if each.kind not in alike), key=lambda each: each.s, default=None)
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
    return Pricing(cuts, profile, rig, job).estimate(plan)


@dataclass(frozen=True)
class Work:
    """What one sample costs under a plan, whatever the rig."""

    node_s: float  # CPU on the node
    engine_s: float  # the part of it that one group does in one thread
    receive_s: float  # CPU on the trainer before a batch is complete
    loop_s: float  # in the training loop's thread, beside the suffix
    suffix_s: float
    raw_bytes: int  # of a row once it is decoded on the trainer
    row_bytes: int  # of a row on the wire, or of a stored sample
    down_bytes: float
    up_bytes: float


@dataclass(frozen=True)
class _Alike:
    """Nodes that are the same but for their names, with their links."""

    names: tuple[str, ...]
    device: Device
    link: Link

    @property
    def title(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[0]} (and {len(self.names) - 1} like it)"


class Pricing:
    """Estimates many plans for the same model, profile, rig and job."""

    def __init__(self, cuts: Sequence[Cut], profile: Profile, rig: Rig, job: JobSize) -> None:
        if profile.trainer.suffix_on == "accelerator" and rig.accelerator is None:
            raise ConfigError("the profile's suffix was measured on an accelerator, and the rig has none")
        self.profile = profile
        self.rig = rig
        self.job = job
        self._cuts = {cut.index: cut for cut in cuts}
        groups: dict[tuple[Device, Link], list[str]] = {}
        for device, link in zip(rig.nodes, rig.links, strict=True):
            groups.setdefault((replace(device, name="node"), link), []).append(device.name)
        self._alike = [_Alike(tuple(names), device, link) for (device, link), names in groups.items()]
        self._wire: dict[tuple[int, str], int] = {}

    def cut_of(self, plan: Plan) -> Cut:
        cut = self._cuts.get(plan.cut)
        if cut is None:
            raise PlanError([f"cut {plan.cut} is not among the {len(self._cuts)} cuts to choose from"])
        return cut

    def estimate(self, plan: Plan) -> Estimate:
        if plan.uses_storage and not self._alike:
            raise PlanError(["the plan uses nodes, and the rig has none"])
        work = self.work(plan)
        if plan.uses_storage:
            loads, first_chunk_s, busy = self._near(plan, work)
        else:
            loads, first_chunk_s, busy = self._alone(plan, work)
        rows = self._chunk_rows(plan)
        trainer = self._trainer(work)
        feed_s = max(work.receive_s / self.rig.trainer.capacity, *(load.s for load in loads))
        first_batch = min(self.job.batch_size, self.job.num_samples)
        fill_s = max(first_chunk_s, rows * feed_s) + max(0, first_batch - rows) * feed_s
        drain_s = first_batch * max(load.s for load in trainer if load.kind != TRAINER)
        result = Estimate(
            plan,
            self.job,
            tuple(load for load in (*loads, *trainer) if load.s > 0) or tuple(trainer),
            fill_s,
            drain_s,
            self._setup_s(plan),
            work.row_bytes,
            work.down_bytes,
            work.up_bytes,
            self._memory(plan, work),
            {},
        )
        return replace(result, energy_j=self._energy(result, busy)) if self._has_power() else result

    def floor_s(self, plan: Plan) -> float:
        """No plan with this placement, cut, codec and precision takes less than this, whatever its knobs are.

        `plan` carries the largest node batch and chunk, which makes overheads the least; what else knobs change (groups
        in flight, chunks ahead, the first chunk) is left out.
        """
        work = self.work(plan)
        loads = [load.s for load in self._trainer(work)]
        port = self.rig.trainer_link
        if plan.uses_storage:
            loads.append(1 / sum(
                len(each.names) / max(work.node_s / each.device.capacity, work.down_bytes / each.link.down_bytes_per_s,
                                      work.up_bytes / each.link.up_bytes_per_s, 1e-12)
                for each in self._alike))  # fmt: skip
        else:
            port = self.rig.to_store
        if port is not None:
            loads += [work.down_bytes / port.down_bytes_per_s, work.up_bytes / port.up_bytes_per_s]
        return self._setup_s(plan) + self.job.num_epochs * self.job.num_samples * max(loads)

    def work(self, plan: Plan) -> Work:
        """What one sample costs under this plan."""
        cut, node, trainer, sizes = self.cut_of(plan), self.profile.node, self.profile.trainer, self.profile.sizes
        chunk_rows = self._chunk_rows(plan)
        near_prefix = plan.prefix == "storage"
        suffix_s = _measured(trainer.suffix_s, cut if near_prefix else self._cuts.get(0, cut), "the suffix")
        loop_s = trainer.step_s / min(self.job.batch_size, self.job.num_samples)
        if not plan.uses_storage:
            down_bytes = sizes.sample_bytes + sizes.fetch_down_bytes
            receive_s = trainer.fetch_s + trainer.fetch_s_per_byte * down_bytes + trainer.decode_s
            receive_s += trainer.receive_s_per_chunk / chunk_rows
            return Work(node.serve_s, 0.0, receive_s, loop_s + trainer.finish_s, suffix_s, sizes.pixel_row_bytes,
                        round(sizes.sample_bytes), down_bytes, sizes.fetch_up_bytes)  # fmt: skip
        group_rows = min(plan.node_batch, chunk_rows)
        engine_s = node.group_s / group_rows
        node_s = node.read_s + node.decode_s + node.chunk_s / chunk_rows
        raw_bytes = row_bytes = sizes.pixel_row_bytes
        encode_s = decode_s = 0.0
        if near_prefix:
            if plan.precision not in node.prefix_s:
                raise PlanError([f"precision {plan.precision} was not measured; the profile has "
                                 f"{', '.join(node.prefix_s) or 'none'}"])  # fmt: skip
            engine_s += _measured(node.prefix_s[plan.precision], cut, "the prefix")
            node_s += node.finish_s
            raw_bytes, row_bytes = cut.row_bytes, self._wire_row_bytes(cut, plan.codec)
            encode_s = _rate_of(node.encode_s_per_byte, plan.codec) * raw_bytes
            decode_s = _rate_of(trainer.decode_s_per_byte, plan.codec) * raw_bytes
        else:
            loop_s += trainer.finish_s
        down_bytes = row_bytes + sizes.row_extra_bytes + sizes.group_bytes / group_rows + sizes.chunk_bytes / chunk_rows
        up_bytes = sizes.request_row_bytes + sizes.request_chunk_bytes / chunk_rows
        node_s += engine_s + encode_s + node.send_s_per_byte * down_bytes
        receive_s = trainer.receive_s_per_byte * down_bytes + trainer.receive_s_per_row
        receive_s += trainer.receive_s_per_chunk / chunk_rows + decode_s
        return Work(node_s, engine_s, receive_s, loop_s, suffix_s, raw_bytes, row_bytes, down_bytes, up_bytes)

    def _chunk_rows(self, plan: Plan) -> int:
        return min(plan.chunk_rows, self.job.num_samples)

    def _wire_row_bytes(self, cut: Cut, codec: str) -> int:
        key = cut.index, codec
        if key not in self._wire:
            self._wire[key] = wire_row_bytes(codec, cut.boundary)
        return self._wire[key]

    def _groups(self, plan: Plan) -> int:
        """Groups that a node has under way at once."""
        in_chunk = -(-self._chunk_rows(plan) // plan.node_batch)
        return min(self.profile.node.num_slots, in_chunk) * min(plan.prefetch, self.profile.node.max_chunks)

    def _near(self, plan: Plan, work: Work) -> tuple[list[Load], float, dict[str, float]]:
        """Loads of nodes and links, the first chunk's way, and each node's busy seconds per sample."""
        node, port = self.profile.node, self.rig.trainer_link
        rows = self._chunk_rows(plan)
        groups = self._groups(plan)
        own: list[dict[str, float]] = []
        chunk_s = []
        for each in self._alike:
            chunk_s.append(self._chunk_s(plan, work, each))
            readers = min(node.num_readers, rows * plan.prefetch)
            own.append({
                NODE: work.node_s / each.device.capacity,
                ENGINE: work.engine_s / (min(each.device.cores, groups) * each.device.speed),
                READS: node.read_wait_s / readers,
                AHEAD: chunk_s[-1] / (plan.prefetch * rows),
                LINK_DOWN: work.down_bytes / each.link.down_bytes_per_s,
                LINK_UP: work.up_bytes / each.link.up_bytes_per_s,
            })  # fmt: skip
        slowest = [max(*times.values(), 1e-12) for times in own]
        # Nodes take chunks as they finish them, so each does as much of the work as its speed allows.
        together = sum(len(each.names) / own_s for each, own_s in zip(self._alike, slowest, strict=True))
        loads: list[Load] = []
        busy: dict[str, float] = {}
        for each, times, own_s in zip(self._alike, own, slowest, strict=True):
            share = 1 / own_s / together
            loads += [Load(_TITLES[kind].format(each.title), kind, share * s) for kind, s in times.items()]
            busy |= dict.fromkeys(each.names, share * times[NODE])
        if port is not None:
            loads.append(Load("the trainer's port, inwards", PORT_DOWN, work.down_bytes / port.down_bytes_per_s))
            loads.append(Load("the trainer's port, outwards", PORT_UP, work.up_bytes / port.up_bytes_per_s))
        return loads, min(chunk_s), busy

    def _chunk_s(self, plan: Plan, work: Work, each: _Alike) -> float:
        """From the request for a lone chunk until its rows are here: group after group, working while sending."""
        node, port, rows = self.profile.node, self.rig.trainer_link, self._chunk_rows(plan)
        num_groups = -(-rows // plan.node_batch)
        at_once = min(node.num_slots, num_groups)
        other_s = rows * (work.node_s - work.engine_s) / each.device.capacity
        work_s = other_s + rows * work.engine_s / (min(each.device.cores, at_once) * each.device.speed)
        down = each.link.down_bytes_per_s if port is None else min(each.link.down_bytes_per_s, port.down_bytes_per_s)
        up = each.link.up_bytes_per_s if port is None else min(each.link.up_bytes_per_s, port.up_bytes_per_s)
        send_s = rows * work.down_bytes / down
        latency_s = 2 * (each.link.latency_s + (port.latency_s if port else 0.0))
        waits_s = node.read_wait_s * max(1.0, rows / node.num_readers)
        overlapped_s = max(work_s, send_s) * (num_groups - 1) / num_groups
        return (latency_s + rows * work.up_bytes / up + waits_s + overlapped_s + (work_s + send_s) / num_groups
                + rows * work.receive_s / self.rig.trainer.capacity)  # fmt: skip

    def _alone(self, plan: Plan, work: Work) -> tuple[list[Load], float, dict[str, float]]:
        """The same for a trainer that reads and decodes by itself."""
        trainer, link, port, rows = (
            self.profile.trainer,
            self.rig.to_store,
            self.rig.trainer_link,
            self._chunk_rows(plan),
        )
        lone_s = trainer.fetch_wait_s + 2 * link.latency_s
        loads = [
            Load("the link from the store", STORE_DOWN, work.down_bytes / link.down_bytes_per_s),
            Load("the link to the store", STORE_UP, work.up_bytes / link.up_bytes_per_s),
            Load("waiting for single reads", READS, lone_s / min(trainer.num_readers, rows * plan.prefetch)),
        ]
        if port is not None and port is not link:
            loads.append(Load("the trainer's port, inwards", PORT_DOWN, work.down_bytes / port.down_bytes_per_s))
            loads.append(Load("the trainer's port, outwards", PORT_UP, work.up_bytes / port.up_bytes_per_s))
        busy: dict[str, float] = {}
        if self._alike:
            cores = sum(len(each.names) * each.device.capacity for each in self._alike)
            loads.append(Load("the store's CPU", NODE, work.node_s / cores))
            busy = {name: work.node_s / cores for each in self._alike for name in each.names}
        decode_s = work.receive_s / self.rig.trainer.capacity
        chunk_s = lone_s + rows * max(decode_s, *(load.s for load in loads)) + decode_s
        loads.append(Load("the chunks worked ahead", AHEAD, chunk_s / (plan.prefetch * rows)))
        return loads, chunk_s, busy

    def _trainer(self, work: Work) -> list[Load]:
        """What the trainer does: on a host without accelerator, all of it on the same cores."""
        host, accelerator = self.rig.trainer, self.rig.accelerator
        on_host_s = work.suffix_s
        loads = []
        if self.profile.trainer.suffix_on == "accelerator" and accelerator is not None:
            loads.append(Load("the accelerator", ACCELERATOR, work.suffix_s / accelerator.capacity))
            on_host_s = 0.0
        # The loop's own thread waits for no other core: what is not the suffix runs on one.
        loop_s = work.loop_s / host.thread_capacity + on_host_s / host.capacity
        loads.append(Load("the training loop's thread", LOOP, loop_s))
        loads.append(Load("the trainer's CPU", TRAINER, (work.receive_s + work.loop_s + on_host_s) / host.capacity))
        return loads

    def _setup_s(self, plan: Plan) -> float:
        if plan.prefix != "storage" or not self.job.counts_setup:
            return 0.0
        prefix_bytes, port = self.cut_of(plan).prefix_bytes, self.rig.trainer_link
        limit = port.up_bytes_per_s if port else float("inf")
        # One node after the other, as `near` does it.
        upload_s = sum(len(each.names) * prefix_bytes / min(each.link.up_bytes_per_s, limit) for each in self._alike)
        return self.profile.export_s + upload_s

    def _memory(self, plan: Plan, work: Work) -> tuple[Memory, ...]:
        node, sizes, cut = self.profile.node, self.profile.sizes, self.cut_of(plan)
        rows, groups = self._chunk_rows(plan), self._groups(plan)
        in_groups = groups * min(plan.node_batch, rows)
        found = []
        window = plan.prefetch + 2  # as the feed sets it: one more than it works ahead, and the one being used
        host_bytes = self.profile.trainer.base_bytes
        if plan.uses_storage:
            window = (plan.prefetch + 1) * len(self.rig.nodes) + 1
            fixed, each_row = 0, 0
            if plan.prefix == "storage":
                fixed = _at(node.fixed_bytes, cut, cut.prefix_bytes)
                each_row = _at(node.row_bytes, cut, cut.row_bytes + sizes.input_row_bytes)
            buffer = sizes.sample_bytes + (
                sizes.input_row_bytes + cut.row_bytes if fixed or each_row else work.raw_bytes
            )
            for each in self._alike:
                inferring = min(max(1, round(each.device.cores)), groups) * min(plan.node_batch, rows)
                need = node.base_bytes + fixed + inferring * each_row + in_groups * buffer
                found.append(Memory(f"node {each.title}", round(need), each.device.memory_bytes))
        else:
            host_bytes += round(in_groups * (sizes.sample_bytes + sizes.pixel_row_bytes))
        chunks = min(window, -(-self.job.num_samples // rows))
        batch = min(self.job.batch_size, self.job.num_samples)
        in_loop = work.raw_bytes if plan.prefix == "storage" else work.raw_bytes + sizes.input_row_bytes
        host_bytes += chunks * rows * work.raw_bytes + batch * in_loop
        suffix_cut = cut if plan.prefix == "storage" else self._cuts.get(0, cut)
        step_bytes = batch * _at(self.profile.trainer.suffix_row_bytes, suffix_cut, 0)
        if self.profile.trainer.suffix_on == "accelerator" and self.rig.accelerator is not None:
            found.append(Memory("accelerator", step_bytes, self.rig.accelerator.memory_bytes))
            step_bytes = 0
        found.append(Memory("trainer", host_bytes + step_bytes, self.rig.trainer.memory_bytes))
        return tuple(found)

    def _has_power(self) -> bool:
        devices = (*self.rig.nodes, self.rig.trainer, self.rig.accelerator)
        return any(device is not None and device.busy_w is not None for device in devices)

    def _energy(self, result: Estimate, node_busy: Mapping[str, float]) -> dict[str, float]:
        """Modelled: what a device draws when busy for as long as it is busy, what it draws idle for the rest."""
        busy = {device.name: (device, node_busy.get(device.name, 0.0)) for device in self.rig.nodes}
        busy["trainer"] = (self.rig.trainer, result.load(TRAINER))
        if self.rig.accelerator is not None:
            busy["accelerator"] = (self.rig.accelerator, result.load(ACCELERATOR))
        samples = self.job.num_samples * self.job.num_epochs
        return {
            name: device.idle_w * result.total_s + (device.busy_w - device.idle_w) * samples * busy_s
            for name, (device, busy_s) in busy.items()
            if device.busy_w is not None and device.idle_w is not None
        }


_TITLES: Mapping[str, str] = {
    NODE: "the CPU of {}",
    ENGINE: "the engine threads of {}",
    READS: "waiting for single reads on {}",
    AHEAD: "the chunks worked ahead on {}",
    LINK_DOWN: "the link from {}",
    LINK_UP: "the link to {}",
}
_WAYS: Mapping[str, str] = {
    NODE: "more nodes, or {factor} times the node cores, would help",
    ENGINE: "a smaller node_batch or more prefetch would keep up to {factor} times as many cores busy",
    READS: "a store that answers up to {factor} times as soon would help",
    AHEAD: "more prefetch or larger chunks, up to {factor} times as many rows ahead, would help",
    LINK_DOWN: "a link up to {factor} times as fast would help",
    LINK_UP: "a link up to {factor} times as fast towards the nodes would help",
    PORT_DOWN: "a port up to {factor} times as fast would help",
    PORT_UP: "a port up to {factor} times as fast outwards would help",
    STORE_DOWN: "a link up to {factor} times as fast would help",
    STORE_UP: "a link up to {factor} times as fast towards the store would help",
    TRAINER: "up to {factor} times the trainer's cores would help",
    LOOP: "faster trainer cores, up to {factor} times, would help",
    ACCELERATOR: "an accelerator up to {factor} times as fast would help",
}


def _measured(values: Sequence[float | None], cut: Cut, what: str) -> float:
    value = values[cut.index] if cut.index < len(values) else None
    if value is None:
        raise PlanError([f"{what} was not measured at {cut.name!r} (cut {cut.index})"])
    return value


def _at(values: Sequence[int | None], cut: Cut, otherwise: int) -> int:
    value = values[cut.index] if cut.index < len(values) else None
    return otherwise if value is None else value


def _rate_of(rates: Mapping[str, float], codec: str) -> float:
    if codec not in rates and codec != "raw":  # raw is a view of the same bytes
        raise PlanError([f"codec {codec} was not measured; the profile has {', '.join(rates) or 'none'}"])
    return rates.get(codec, 0.0)


def _rate(s: float) -> str:
    rate = 1 / s if s > 0 else float("inf")
    return f"{rate:.3g} samples/s" if rate < 1000 else f"{rate:,.0f} samples/s"


def _too_much(plan: Plan, memory: Memory) -> str:
    assert memory.has_bytes is not None
    what = f"prefix[..{plan.cut_name}]" if plan.prefix == "storage" else "the plan"
    if memory.device.startswith("node "):
        way = f"cut elsewhere, lower node_batch ({plan.node_batch}) or prefetch ({plan.prefetch})"
    elif memory.device == "trainer":
        way = f"lower chunk_rows ({plan.chunk_rows}) or prefetch ({plan.prefetch}), or train with a smaller batch"
    else:
        way = "cut later, or train with a smaller batch"
    return f"{what} needs {_gb(memory.need_bytes)} on {memory.device} (has {_gb(memory.has_bytes)}); {way}"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"

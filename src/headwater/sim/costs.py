"""What a plan has each side do, from a profile: seconds and bytes of every stage.

Owns `Making` (a worker's part) and `Taking` (the trainer's). They are the amounts of `core.loads.Pricing` stage by
stage; tests/sim/test_costs.py holds that they add up to the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.core.loads import Choice, Pricing
from headwater.core.plan import Plan


@dataclass(frozen=True)
class Making:
    """What a worker does for a chunk. Seconds are of one core of the profile's machine."""

    read_s: float  # CPU, for each row
    read_wait_s: float  # how long a lone read takes beyond that
    num_readers: int
    stored_bytes: float  # that come over a link for each row, where this worker reads far from the store
    asked_bytes: float  # that go there
    decode_s: float  # for each row, with what a process takes beyond the sum of its stages
    engine_s: float  # for each row, in one thread for a group
    group_s: float
    has_engine: bool
    finish_s: float  # for each row, on a core, before the engine
    encode_s: float  # for each row, before it is sent
    send_s_per_byte: float
    chunk_s: float
    row_bytes: float  # on the wire
    group_bytes: float
    chunk_bytes: float
    num_slots: int
    max_chunks: int
    is_far: bool = False  # reads over a link that others need
    serve_s: float = 0.0  # on a node's core, for each stored sample that comes from there

    def part_bytes(self, rows: int) -> float:
        """What a group takes on the wire."""
        return rows * self.row_bytes + self.group_bytes


@dataclass(frozen=True)
class Taking:
    """What a trainer does with rows, and what is held where."""

    request_row_bytes: float
    request_chunk_bytes: float
    receive_s_per_byte: float
    receive_row_s: float
    receive_chunk_s: float
    loop_row_s: float
    step_s: float
    suffix_s: float
    on_accelerator: bool
    num_threads: int
    raw_bytes: float
    node_base_bytes: float
    fixed_bytes: float
    infer_bytes: float
    buffer_bytes: float
    trainer_base_bytes: float
    step_bytes: float


@dataclass(frozen=True)
class Costs:
    """Both sides. `own` is the worker beside the trainer, where there is one; `near` the nodes', where they work."""

    near: Making | None
    own: Making | None
    taking: Taking


def costs_of(plan: Plan, pricing: Pricing) -> Costs:
    """What this plan costs; PlanError if it can't be carried out on this rig, or was not measured."""
    choice = pricing.choice(plan)
    near = _near(plan, choice, pricing) if choice.near else None
    own = _own(plan, choice, pricing) if not choice.near or plan.host_share else None
    return Costs(near, own, _taking(plan, choice, pricing))


def _near(plan: Plan, choice: Choice, pricing: Pricing) -> Making:
    node, sizes = pricing.profile.node, pricing.profile.sizes
    return Making(
        read_s=node.read_s,
        read_wait_s=node.read_wait_s,
        num_readers=node.num_readers,
        stored_bytes=0.0,
        asked_bytes=0.0,
        decode_s=node.decode_s + node.overhead_s,
        engine_s=choice.prefix_s,
        group_s=node.group_s,
        has_engine=choice.prefix,
        finish_s=node.finish_s if choice.prefix else 0.0,
        encode_s=choice.encode_s,
        send_s_per_byte=node.send_s_per_byte,
        chunk_s=node.chunk_s,
        row_bytes=choice.row_bytes + sizes.row_extra_bytes,
        group_bytes=sizes.group_bytes,
        chunk_bytes=sizes.chunk_bytes,
        num_slots=node.num_slots,
        max_chunks=node.max_chunks,
    )


def _own(plan: Plan, choice: Choice, pricing: Pricing) -> Making:
    """With a prefix a node beside the trainer; otherwise threads of the trainer's process, and no wire."""
    node, trainer, sizes = pricing.profile.node, pricing.profile.trainer, pricing.profile.sizes
    stored_bytes = sizes.sample_bytes + sizes.fetch_down_bytes
    plain = Making(
        read_s=trainer.fetch_s + trainer.fetch_s_per_byte * stored_bytes,
        read_wait_s=trainer.fetch_wait_s,
        num_readers=trainer.num_readers,  # fewer than a node has beside its store
        stored_bytes=stored_bytes,
        asked_bytes=sizes.fetch_up_bytes,
        decode_s=trainer.decode_s,
        engine_s=0.0,
        group_s=0.0,
        has_engine=False,
        finish_s=0.0,
        encode_s=0.0,
        send_s_per_byte=0.0,
        chunk_s=0.0,
        row_bytes=0.0,
        group_bytes=0.0,
        chunk_bytes=0.0,
        num_slots=node.num_slots,
        max_chunks=node.max_chunks,
        is_far=choice.near or choice.prefix,  # a node beside the trainer always is; its own threads, beside nodes
        serve_s=node.serve_s,
    )
    if not choice.prefix:
        return plain
    alike, engine = pricing.own_ratio, pricing.engine_ratio
    return replace(
        plain,
        decode_s=trainer.decode_s + alike * node.overhead_s,
        engine_s=engine * choice.prefix_s,
        group_s=engine * node.group_s,
        has_engine=True,
        finish_s=trainer.finish_s,
        encode_s=alike * choice.encode_s,
        send_s_per_byte=alike * node.send_s_per_byte,
        chunk_s=alike * node.chunk_s,
        row_bytes=(choice.row_bytes if choice.near else choice.raw_bytes) + sizes.row_extra_bytes,
        group_bytes=sizes.group_bytes,
        chunk_bytes=sizes.chunk_bytes,
    )


def _taking(plan: Plan, choice: Choice, pricing: Pricing) -> Taking:
    node, trainer, sizes = pricing.profile.node, pricing.profile.trainer, pricing.profile.sizes
    over_wire = choice.near or choice.prefix
    return Taking(
        request_row_bytes=sizes.request_row_bytes,
        request_chunk_bytes=sizes.request_chunk_bytes,
        receive_s_per_byte=trainer.receive_s_per_byte,
        receive_row_s=trainer.receive_s_per_row + choice.decode_s if over_wire else 0.0,
        receive_chunk_s=trainer.receive_s_per_chunk,
        loop_row_s=0.0 if choice.prefix else trainer.finish_s,
        step_s=trainer.step_s,
        suffix_s=choice.suffix_s,
        on_accelerator=trainer.suffix_on == "accelerator",
        num_threads=trainer.num_threads,
        raw_bytes=choice.raw_bytes,
        node_base_bytes=node.base_bytes,
        fixed_bytes=choice.fixed_bytes,
        infer_bytes=choice.infer_bytes,
        buffer_bytes=choice.buffer_bytes,
        trainer_base_bytes=trainer.base_bytes,
        step_bytes=choice.step_bytes,
    )

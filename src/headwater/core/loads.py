"""The formulas: what each resource has to do for one sample, how long that takes, and what must be held at once.

Owns `Pricing`. `core.cost` puts its numbers into words for one plan; `core.search` uses the same formulas for hundreds
of cuts at once, so every amount is a float or an array with one value a choice. docs/cost-model.md explains them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from headwater.core import form
from headwater.core.codecs import wire_row_bytes
from headwater.core.cut import Cut
from headwater.core.dispatch import window_of
from headwater.core.form import Flag, Number, formed
from headwater.core.plan import Plan
from headwater.core.profile import Profile
from headwater.core.prongs import ORDERED, WRR, tail_bytes
from headwater.core.rig import Device, Link, Rig
from headwater.core.share import more_ahead, own_out
from headwater.errors import ConfigError, PlanError

# What a load is on, in the order of the chain.
NODE, ENGINE, READS, AHEAD, HELD_UP = "node", "engine", "reads", "ahead", "held up"
LINK_DOWN, LINK_UP, PORT_DOWN, PORT_UP, STORE_DOWN, STORE_UP = (
    "link down", "link up", "port down", "port up", "store link down", "store link up")  # fmt: skip
TRAINER, LOOP, ACCELERATOR, SHARED, OWN = "trainer", "loop", "accelerator", "shared cores", "own engine"

Amount = Any  # a float, or an array with one value a choice
_TINY_S = 1e-12  # a node that had nothing at all to do would do it infinitely fast
OWN_START_S = 3.0  # until a node beside the trainer answers and has loaded an engine; assumed, not measured
_ALIKE = (0.2, 5.0)  # a trainer's core ÷ a node's: what decoding tells of them, within reason


@dataclass(frozen=True)
class JobSize:
    """How much there is to do.

    `setup_s` is what must be done once for a plan that has a prefix on nodes, whatever its cut, where one file serves
    all of them (`upload_s`). Without it, setup is an export and an upload of the cut's own weights to every node; or
    nothing, where `counts_setup` is False. `starts_own`: a node beside the trainer has yet to be started.
    """

    num_samples: int = field(metadata=formed(Number(1, 1e15, whole=True)))
    batch_size: int = field(metadata=formed(Number(1, 1e9, whole=True)))
    num_epochs: int = field(default=1, metadata=formed(Number(1, 1e9, whole=True)))
    counts_setup: bool = field(default=True, metadata=formed(Flag()))
    setup_s: float | None = field(default=None, metadata=formed(Number(0.0, 1e9, optional=True)))
    starts_own: bool = field(default=True, metadata=formed(Flag()))

    def __post_init__(self) -> None:
        form.check_record(self, "job")

    @property
    def first_batch(self) -> int:
        return min(self.batch_size, self.num_samples)


@dataclass(frozen=True)
class Choice:
    """What a placement, a cut, a codec and a precision fix, whatever the knobs (node batch, chunk, prefetch) are."""

    near: bool  # does anything run on nodes?
    prefix: bool  # does a prefix run there, or on the trainer's own node?
    prefix_s: Amount
    suffix_s: Amount
    encode_s: Amount
    decode_s: Amount
    raw_bytes: Amount  # of a row once it is decoded on the trainer
    row_bytes: Amount  # of a row on the wire, or of a stored sample
    upload_bytes: Amount
    fixed_bytes: Amount  # on a node
    infer_bytes: Amount  # on a node, for each row that is being inferred
    buffer_bytes: Amount  # on a node (or on a trainer that decodes), for each row under way
    step_bytes: Amount  # where the suffix runs, for each row of a batch


@dataclass(frozen=True)
class Work:
    """What one sample costs, whatever the rig. What nodes and their links have to do is for a sample that they make:
    `share` of all are made by the trainer's own node."""

    node_s: Amount  # CPU on the node
    engine_s: Amount  # the part of it that one group does in one thread
    receive_s: Amount  # CPU on the trainer before a batch is complete
    loop_s: Amount  # in the training loop's thread, beside the suffix
    suffix_s: Amount
    down_bytes: Amount
    up_bytes: Amount
    share: float = 0.0
    own_s: Amount = 0.0  # CPU of the trainer's own node for a sample that it makes; its share is in `receive_s`
    own_engine_s: Amount = 0.0
    own_bytes: Amount = 0.0  # from the store, for such a sample
    own_up_bytes: Amount = 0.0  # to the store: the request for it

    @property
    def mean_down_bytes(self) -> Amount:
        """Over all samples, whoever makes them."""
        return (1 - self.share) * self.down_bytes + self.share * self.own_bytes

    @property
    def mean_up_bytes(self) -> Amount:
        return (1 - self.share) * self.up_bytes + self.share * self.own_up_bytes


@dataclass(frozen=True)
class Alike:
    """Nodes that are the same but for their names, with their links."""

    names: tuple[str, ...]
    device: Device
    link: Link


_Loads = list[tuple[str, Alike | None, Amount]]


@dataclass(frozen=True)
class Priced:
    """The numbers of a plan. Loads and memory carry the group of nodes they belong to, or None."""

    work: Work
    loads: tuple[tuple[str, Alike | None, Amount], ...]
    fill_s: Amount
    flow_s: Amount
    drain_s: Amount
    setup_s: Amount
    total_s: Amount
    memory: tuple[tuple[str, Alike | None, Amount, int | None], ...]
    busy_s: Mapping[str, Amount]  # per node, seconds per sample

    @property
    def node_bytes(self) -> Amount:
        """The most that any node must hold."""
        return most(0, *(need for where, _, need, _ in self.memory if where == NODE))

    @property
    def fits(self) -> Any:
        checks = [need <= has for _, _, need, has in self.memory if has is not None]
        return np.logical_and.reduce(checks) if checks else True


def most(*amounts: Amount) -> Amount:
    """The largest, choice by choice."""
    largest = amounts[0]
    for each in amounts[1:]:
        if isinstance(each, np.ndarray) or isinstance(largest, np.ndarray):
            largest = np.maximum(largest, each)
        elif each > largest:
            largest = each
    return largest


def upload_s(rig: Rig, names: Collection[str], num_bytes: int) -> float:
    """Seconds to send a file to the nodes of these names, one after the other as `near` does it."""
    limit = rig.trainer_link.up_bytes_per_s if rig.trainer_link else float("inf")
    return sum(num_bytes / min(link.up_bytes_per_s, limit) for device, link in zip(rig.nodes, rig.links, strict=True)
               if device.name in names)  # fmt: skip


def stack(choices: Sequence[Choice]) -> Choice:
    """Many choices of one placement as one whose amounts are arrays."""
    first = choices[0]
    assert all((each.near, each.prefix) == (first.near, first.prefix) for each in choices)
    amounts = {each.name: np.array([getattr(choice, each.name) for choice in choices], np.float64)
               for each in fields(Choice) if each.name not in ("near", "prefix")}  # fmt: skip
    return Choice(near=first.near, prefix=first.prefix, **amounts)


class Pricing:
    """Prices plans for one model, profile, rig and job.

    Times are those of `ordered`; memory is that of `prongs` for plans with a share, unless they have one of their own.
    """

    def __init__(self, cuts: Sequence[Cut], profile: Profile, rig: Rig, job: JobSize, *, prongs: str = ORDERED) -> None:
        if profile.trainer.suffix_on == "accelerator" and rig.accelerator is None:
            raise ConfigError("the profile's suffix was measured on an accelerator, and the rig has none")
        self.profile = profile
        self.rig = rig
        self.job = job
        self._prongs = prongs
        self._cuts = {cut.index: cut for cut in cuts}
        groups: dict[tuple[Device, Link], list[str]] = {}
        for device, link in zip(rig.nodes, rig.links, strict=True):
            groups.setdefault((replace(device, name="node"), link), []).append(device.name)
        self._alike = [Alike(tuple(names), device, link) for (device, link), names in groups.items()]
        self._on_accelerator = profile.trainer.suffix_on == "accelerator"
        there_s, here_s = profile.node.decode_s, profile.trainer.decode_s
        self.own_ratio = min(max(here_s / there_s, _ALIKE[0]), _ALIKE[1]) if here_s > 0 and there_s > 0 else 1.0
        measured = profile.trainer.engine_ratio
        self.engine_ratio = self.own_ratio if measured is None else measured

    def choice(self, plan: Plan) -> Choice:
        """What this plan fixes; PlanError if it was not measured or can't be on this rig."""
        node, trainer, sizes = self.profile.node, self.profile.trainer, self.profile.sizes
        cut = self._cuts.get(plan.cut)
        if cut is None:
            raise PlanError([f"cut {plan.cut} is not among the {len(self._cuts)} cuts to choose from"])
        if plan.uses_storage and not self._alike:
            raise PlanError(["the plan uses nodes, and the rig has none"])
        if plan.sends_input:
            raise PlanError([f"codec is {plan.codec} in front of the model: nodes that make the model's input are not "
                             "measured, so such a plan has no price; set codec to raw to compare it"])  # fmt: skip
        suffix_s = _measured(trainer.suffix_s, cut, "the suffix")
        step_bytes = _at(trainer.suffix_row_bytes, cut, 0)
        if not plan.has_prefix:
            row_bytes = sizes.pixel_row_bytes if plan.uses_storage else sizes.sample_bytes
            return Choice(plan.uses_storage, False, 0.0, suffix_s, 0.0, 0.0, sizes.pixel_row_bytes, row_bytes, 0, 0, 0,
                          sizes.sample_bytes + sizes.pixel_row_bytes, step_bytes + sizes.input_row_bytes)  # fmt: skip
        if plan.precision not in node.prefix_s:
            raise PlanError([f"precision {plan.precision} was not measured; the profile has "
                             f"{', '.join(node.prefix_s) or 'none'}"])  # fmt: skip
        raw_bytes = cut.row_bytes
        return Choice(
            near=plan.uses_storage,
            prefix=True,
            prefix_s=_measured(node.prefix_s[plan.precision], cut, "the prefix"),
            suffix_s=suffix_s,
            encode_s=_rate_of(node.encode_s_per_byte, plan.codec) * raw_bytes,
            decode_s=_rate_of(trainer.decode_s_per_byte, plan.codec) * raw_bytes,
            raw_bytes=raw_bytes,
            row_bytes=wire_row_bytes(plan.codec, cut.boundary) if plan.uses_storage else sizes.sample_bytes,
            upload_bytes=cut.prefix_bytes,
            fixed_bytes=_at(node.fixed_bytes, cut, cut.prefix_bytes),
            infer_bytes=_at(node.row_bytes, cut, raw_bytes + sizes.input_row_bytes),
            buffer_bytes=sizes.sample_bytes + sizes.pixel_row_bytes + raw_bytes,
            step_bytes=step_bytes + raw_bytes,
        )

    def price(self, knobs: Plan, choice: Choice) -> Priced:
        """Time and memory of a choice (or of many) with the node batch, chunk and prefetch of `knobs`."""
        job, rows = self.job, self._chunk_rows(knobs)
        work = self.work(knobs, choice)
        loads, first_chunk_s, busy_s = self._near(knobs, work) if choice.near else self._alone(knobs, work)
        loads += self._own(knobs, work) if choice.near and work.share else []
        trainer = self._trainer(work)
        feed_s = most(work.receive_s / self.rig.trainer.capacity, *(s for _, _, s in loads))
        step_s = most(*(s for kind, _, s in trainer if kind != TRAINER))
        loads += trainer
        if self.rig.shared_cores and choice.near:
            on_trainer_s = next(s for kind, _, s in trainer if kind == TRAINER)
            loads.append((SHARED, None, on_trainer_s + (1 - work.share) * work.node_s / self.rig.trainer.capacity))
        # The feed works ahead by its window and then stands still until the step in progress ends. Of the window, the
        # chunk in use and the one about to be are no help.
        ahead = min(1.0, (self._window(knobs, choice) - 2) * rows / job.first_batch)
        if ahead < 1:
            loads.append((AHEAD, None, most(step_s, ahead * feed_s) + (1 - ahead) * feed_s))
        # Chunks come whole: the first steps wait for all rows of theirs, and the last ones have all of theirs to do.
        burst = self._burst(knobs)
        whole = min(job.num_samples, -(-job.first_batch // burst) * burst)
        fill_s = most(first_chunk_s, rows * feed_s) + (whole - rows) * feed_s
        flow_s = (job.num_samples - whole) * most(*(s for _, _, s in loads))
        drain_s = whole * step_s
        starts = work.share and choice.prefix and self.job.starts_own and self.job.counts_setup
        setup_s = self._setup_s(choice) + (OWN_START_S if starts else 0.0)
        total_s = setup_s + job.num_epochs * (fill_s + flow_s + drain_s)
        return Priced(work, tuple(loads), fill_s, flow_s, drain_s, setup_s, total_s, self._memory(knobs, choice),
                      busy_s)  # fmt: skip

    def work(self, knobs: Plan, choice: Choice) -> Work:
        """What one sample costs."""
        node, trainer, sizes = self.profile.node, self.profile.trainer, self.profile.sizes
        chunk_rows = self._chunk_rows(knobs)
        group_rows = min(knobs.node_batch, chunk_rows)
        loop_s = trainer.step_s / self.job.first_batch + (0.0 if choice.prefix else trainer.finish_s)
        receive_s = trainer.receive_s_per_chunk / chunk_rows
        stored_bytes = sizes.sample_bytes + sizes.fetch_down_bytes
        fetch_s = trainer.fetch_s + trainer.fetch_s_per_byte * stored_bytes + trainer.decode_s
        if not choice.near and not choice.prefix:
            return Work(node.serve_s, 0.0, receive_s + fetch_s, loop_s, choice.suffix_s, stored_bytes,
                        sizes.fetch_up_bytes)  # fmt: skip
        engine_s = choice.prefix_s + node.group_s / group_rows
        framing_bytes = sizes.row_extra_bytes + sizes.group_bytes / group_rows + sizes.chunk_bytes / chunk_rows
        receive_s = receive_s + trainer.receive_s_per_row + choice.decode_s
        # The trainer's own node does what others do, on the trainer's cores; what it sends never leaves the machine.
        here_bytes = (choice.row_bytes if choice.near else choice.raw_bytes) + framing_bytes
        # Pixels are made by its own threads, and cross no wire at all.
        like_node_s = choice.encode_s + node.chunk_s / chunk_rows + node.send_s_per_byte * here_bytes + node.overhead_s
        own_engine_s = self.engine_ratio * engine_s
        own_s = own_receive_s = fetch_s
        if choice.prefix:
            own_s = fetch_s + trainer.finish_s + own_engine_s + self.own_ratio * like_node_s
            own_receive_s = own_s + trainer.receive_s_per_byte * here_bytes
        own = {"own_s": own_s, "own_engine_s": own_engine_s, "own_bytes": stored_bytes,
               "own_up_bytes": sizes.fetch_up_bytes}  # fmt: skip
        if not choice.near:
            return Work(node.serve_s, 0.0, receive_s + own_receive_s, loop_s, choice.suffix_s, stored_bytes,
                        sizes.fetch_up_bytes, 1.0, **own)  # fmt: skip
        share, down_bytes = knobs.host_share, choice.row_bytes + framing_bytes
        up_bytes = sizes.request_row_bytes + sizes.request_chunk_bytes / chunk_rows
        node_s = node.read_s + node.decode_s + (node.finish_s if choice.prefix else 0.0) + node.chunk_s / chunk_rows
        node_s = node_s + engine_s + choice.encode_s + node.send_s_per_byte * down_bytes + node.overhead_s
        receive_s = receive_s + (1 - share) * trainer.receive_s_per_byte * down_bytes + share * own_receive_s
        return Work(node_s, engine_s, receive_s, loop_s, choice.suffix_s, down_bytes, up_bytes, share, **own)

    def row_bytes(self, knobs: Plan, choice: Choice) -> Amount:
        """Of a row on its way, or of a stored sample; the mean of both where the trainer makes some by itself."""
        return (1 - knobs.host_share) * choice.row_bytes + knobs.host_share * self.profile.sizes.sample_bytes

    def _chunk_rows(self, knobs: Plan) -> int:
        return min(knobs.chunk_rows, self.job.num_samples)

    def _groups(self, knobs: Plan, chunks: int | None = None) -> int:
        """Groups that a node has under way at once, in `chunks` or in as many as it works ahead."""
        in_chunk = -(-self._chunk_rows(knobs) // knobs.node_batch)
        return min(self.profile.node.num_slots, in_chunk) * min(chunks or knobs.prefetch, self.profile.node.max_chunks)

    def _own_chunks(self, knobs: Plan) -> int:
        """That the trainer's own node has at once beside others."""
        return min(knobs.prefetch, own_out(self.rig.trainer.cores))

    def _burst(self, knobs: Plan) -> int:
        """Rows that arrive together. Chunks with more groups than slots take turns, so that they end together, too."""
        rows = self._chunk_rows(knobs)
        in_turn = -(-rows // knobs.node_batch) > self.profile.node.num_slots
        return rows * min(knobs.prefetch, -(-self.job.num_samples // rows)) if in_turn else rows

    def _window(self, knobs: Plan, choice: Choice) -> int:
        """Chunks under way or kept, as the feed sets it."""
        workers = len(self.rig.nodes) + (knobs.host_share > 0) if choice.near else 1
        return window_of(workers, knobs.prefetch, more_ahead(knobs.host_share))

    def _under_way(self, knobs: Plan) -> int:
        """Rows that a node, or a trainer that decodes, has buffers for at once."""
        return self._groups(knobs) * min(knobs.node_batch, self._chunk_rows(knobs))

    def _near(self, knobs: Plan, work: Work) -> tuple[_Loads, Amount, dict[str, Amount]]:
        """Loads of nodes and links, how long the first chunk takes, and each node's busy seconds per sample."""
        node, port = self.profile.node, self.rig.trainer_link
        rows, groups = self._chunk_rows(knobs), self._groups(knobs)
        readers = min(node.num_readers, self._under_way(knobs))
        first_chunk_s, together, own = None, 0.0, []
        for each in self._alike:
            chunk_s = self._chunk_s(knobs, work, each)
            times = {
                NODE: work.node_s / each.device.capacity,
                ENGINE: work.engine_s / (min(each.device.cores, groups) * each.device.speed),
                READS: node.read_wait_s / readers,
                AHEAD: chunk_s / (knobs.prefetch * rows),
                LINK_DOWN: work.down_bytes / each.link.down_bytes_per_s,
                LINK_UP: work.up_bytes / each.link.up_bytes_per_s,
            }
            own_s = most(*times.values(), _TINY_S)
            own.append((each, times, own_s))
            together = together + len(each.names) / own_s
            first_chunk_s = chunk_s if first_chunk_s is None else -most(-first_chunk_s, -chunk_s)
        loads: _Loads = []
        busy_s: dict[str, Amount] = {}
        for each, times, own_s in own:
            # Nodes take chunks as they finish them, so each does as much of the work as its speed allows.
            share = (1 - work.share) / own_s / together
            loads += [(kind, each, share * s) for kind, s in times.items()]
            busy_s |= dict.fromkeys(each.names, share * times[NODE])
        if port is not None:
            loads.append((PORT_DOWN, None, work.mean_down_bytes / port.down_bytes_per_s))
            loads.append((PORT_UP, None, work.mean_up_bytes / port.up_bytes_per_s))
        elif work.share:  # nothing tells whether nodes and store come in by the same way, so they are taken to
            whole = sum(len(each.names) * each.link.down_bytes_per_s for each in self._alike)
            stored_s = work.share * work.own_bytes / self.rig.to_store.down_bytes_per_s
            loads.append((PORT_DOWN, None, (1 - work.share) * work.down_bytes / whole + stored_s))
        if work.share:
            # While the trainer's own node reads a chunk, by several connections, the link has next to no room for rows:
            # nodes work on until all they may have under way is made, and then wait.
            node_s, store = 1 / together, self.rig.to_store.down_bytes_per_s
            held_up_s = most(0.0, work.own_bytes / store - (knobs.prefetch - 1) * len(self.rig.nodes) * node_s)
            if port is not None:  # a store that is slower than the port leaves some of it to rows
                held_up_s = held_up_s * (port.down_bytes_per_s - store < work.down_bytes / node_s)
            loads.append((HELD_UP, None, (1 - work.share) * node_s + work.share * held_up_s))
        return loads, first_chunk_s, busy_s

    def _own(self, knobs: Plan, work: Work) -> _Loads:
        """Loads of the trainer's own node, beside its part of the trainer's CPU."""
        trainer, link, host = self.profile.trainer, self.rig.to_store, self.rig.trainer
        rows, share = self._chunk_rows(knobs), work.share
        lone_s = trainer.fetch_wait_s + 2 * link.latency_s
        stored_s = work.own_bytes / link.down_bytes_per_s
        chunk_s = lone_s + rows * (stored_s + work.own_s / host.capacity)
        return [
            (STORE_DOWN, None, share * stored_s),
            (STORE_UP, None, share * work.own_up_bytes / link.up_bytes_per_s),
            (READS, None, share * lone_s / min(trainer.num_readers, self._under_way(knobs))),
            self._own_engine(knobs, work, self._own_chunks(knobs)),
            (AHEAD, None, share * chunk_s / (self._own_chunks(knobs) * rows)),
        ]

    def _own_engine(self, knobs: Plan, work: Work, chunks: int | None = None) -> tuple[str, Alike | None, Amount]:
        host = self.rig.trainer
        return OWN, None, work.share * work.own_engine_s / (min(host.cores, self._groups(knobs, chunks)) * host.speed)

    def _chunk_s(self, knobs: Plan, work: Work, each: Alike) -> Amount:
        """From the request for a lone chunk until its rows are here: group after group, working while sending."""
        node, port, rows = self.profile.node, self.rig.trainer_link, self._chunk_rows(knobs)
        num_groups = -(-rows // knobs.node_batch)
        at_once = min(node.num_slots, num_groups)
        work_s = rows * (work.node_s - work.engine_s) / each.device.capacity
        work_s = work_s + rows * work.engine_s / (min(each.device.cores, at_once) * each.device.speed)
        down, up, latency_s = each.link.down_bytes_per_s, each.link.up_bytes_per_s, each.link.latency_s
        if port is not None:
            down, up = min(down, port.down_bytes_per_s), min(up, port.up_bytes_per_s)
            latency_s += port.latency_s
        send_s = rows * work.down_bytes / down
        waits_s = 2 * latency_s + rows * work.up_bytes / up + node.read_wait_s * max(1.0, rows / node.num_readers)
        overlapped_s = most(work_s, send_s) * (num_groups - 1) / num_groups
        # Without what the trainer's own node does meanwhile: that is no part of a node's chunk.
        receive_s = rows * (work.receive_s - work.share * work.own_s) / self.rig.trainer.capacity
        return waits_s + overlapped_s + (work_s + send_s) / num_groups + receive_s

    def _alone(self, knobs: Plan, work: Work) -> tuple[_Loads, Amount, dict[str, Amount]]:
        """The same for a trainer that reads and decodes by itself."""
        trainer, link, port = self.profile.trainer, self.rig.to_store, self.rig.trainer_link
        rows = self._chunk_rows(knobs)
        lone_s = trainer.fetch_wait_s + 2 * link.latency_s
        loads: _Loads = [
            (STORE_DOWN, None, work.down_bytes / link.down_bytes_per_s),
            (STORE_UP, None, work.up_bytes / link.up_bytes_per_s),
            (READS, None, lone_s / min(trainer.num_readers, self._under_way(knobs))),
        ]
        if port is not None and port is not link:
            loads.append((PORT_DOWN, None, work.down_bytes / port.down_bytes_per_s))
            loads.append((PORT_UP, None, work.up_bytes / port.up_bytes_per_s))
        busy_s: dict[str, Amount] = {}
        if self._alike:  # the store's own work, where it shares the nodes' cores
            serve_s = work.node_s / sum(len(each.names) * each.device.capacity for each in self._alike)
            loads.append((NODE, None, serve_s))
            busy_s = {name: serve_s for each in self._alike for name in each.names}
        decode_s = work.receive_s / self.rig.trainer.capacity
        if work.share:
            loads.append(self._own_engine(knobs, work))
        chunk_s = lone_s + rows * most(decode_s, *(s for _, _, s in loads)) + decode_s
        loads.append((AHEAD, None, chunk_s / (knobs.prefetch * rows)))
        return loads, chunk_s, busy_s

    def _trainer(self, work: Work) -> _Loads:
        """What the trainer does: on a host without accelerator, all of it on the same cores."""
        host, accelerator = self.rig.trainer, self.rig.accelerator
        loads: _Loads = []
        on_host_s = work.suffix_s
        if self._on_accelerator:
            assert accelerator is not None
            loads.append((ACCELERATOR, None, work.suffix_s / accelerator.capacity))
            on_host_s = 0.0
        # The suffix spreads over as many cores as torch has threads; the rest of the loop runs in its one thread.
        spread = min(host.cores, self.profile.trainer.num_threads) * host.speed
        loads.append((LOOP, None, work.loop_s / host.thread_capacity + on_host_s / spread))
        loads.append((TRAINER, None, (work.receive_s + work.loop_s + on_host_s) / host.capacity))
        return loads

    def _setup_s(self, choice: Choice) -> Amount:
        if not choice.prefix or not self.job.counts_setup:
            return 0.0
        if not choice.near:  # exported like any other, and sent nowhere
            return 0.0 if self.job.setup_s is not None else self.profile.export_s
        if self.job.setup_s is not None:
            return self.job.setup_s
        limit = self.rig.trainer_link.up_bytes_per_s if self.rig.trainer_link else float("inf")
        # One node after the other, as `near` does it.
        upload_s_per_byte = sum(len(each.names) / min(each.link.up_bytes_per_s, limit) for each in self._alike)
        return self.profile.export_s + choice.upload_bytes * upload_s_per_byte

    def _memory(self, knobs: Plan, choice: Choice) -> tuple[tuple[str, Alike | None, Amount, int | None], ...]:
        strategy = ORDERED
        if knobs.host_share > 0:
            strategy = knobs.prongs if knobs.prongs != ORDERED else self._prongs
        if strategy == WRR:
            knobs = replace(knobs, chunk_rows=self.job.batch_size)  # a chunk is a batch there
        groups, group_rows = self._groups(knobs), min(knobs.node_batch, self._chunk_rows(knobs))
        under_way_bytes = self._under_way(knobs) * choice.buffer_bytes
        found: list[tuple[str, Alike | None, Amount, int | None]] = []
        host_bytes: Amount = self.profile.trainer.base_bytes
        if choice.near:
            for each in self._alike:
                inferring = min(max(1, round(each.device.cores)), groups) * group_rows
                need = self.profile.node.base_bytes + choice.fixed_bytes + inferring * choice.infer_bytes
                found.append((NODE, each, need + under_way_bytes, each.device.memory_bytes))
        makes_rows = knobs.host_share > 0 or not choice.near
        if makes_rows and choice.prefix:  # on a node beside the trainer; pixels are made by its own threads
            inferring = min(max(1, round(self.rig.trainer.cores)), groups) * group_rows
            host_bytes = host_bytes + self.profile.node.base_bytes + choice.fixed_bytes + inferring * choice.infer_bytes
        if makes_rows:
            host_bytes = host_bytes + under_way_bytes
        step_bytes = self.job.first_batch * choice.step_bytes
        if self._on_accelerator and self.rig.accelerator is not None:
            found.append((ACCELERATOR, None, step_bytes, self.rig.accelerator.memory_bytes))
        else:
            host_bytes = host_bytes + step_bytes
        host_bytes = host_bytes + self._held_bytes(knobs, choice, strategy, host_bytes)
        found.append((TRAINER, None, host_bytes, self.rig.trainer.memory_bytes))
        return tuple(found)

    def _held_bytes(self, knobs: Plan, choice: Choice, strategy: str, rest_bytes: Amount) -> Amount:
        """Rows that are on their way to the loop or wait for it, beside the `rest_bytes` that the trainer holds."""
        rows, workers = self._chunk_rows(knobs), len(self.rig.nodes) + 1
        num_chunks, chunk_bytes = -(-self.job.num_samples // rows), rows * choice.raw_bytes
        if strategy == ORDERED:
            return min(self._window(knobs, choice), num_chunks) * chunk_bytes
        window_bytes = min(window_of(workers, knobs.prefetch), num_chunks) * chunk_bytes
        if strategy == WRR:
            return window_bytes
        tail: Amount = (1 - knobs.host_share) * self.job.num_samples * choice.raw_bytes
        if (has := self.rig.trainer.memory_bytes) is not None:  # what of the tail does not fit is made later
            room = tail_bytes(has, most(0.0, has - rest_bytes - window_bytes))
            tail = -most(-tail, -most((knobs.prefetch + 1) * chunk_bytes, room))
        return window_bytes + tail


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

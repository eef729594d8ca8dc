"""A rig and a plan, put together and played: machines, links, workers, trainers, faults.

Owns `play`. What comes out is an `Outcome` (`sim.outcome`). The same question gives the same answer: ties are broken by
the order of events, and what is drawn is drawn from the rig's seed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import simpy

from headwater.core.admission import Need
from headwater.core.cut import Cut
from headwater.core.loads import JobSize, Pricing
from headwater.core.order import Dealing, Order
from headwater.core.plan import Plan
from headwater.core.profile import Profile
from headwater.core.rig import Link
from headwater.core.trace import Span
from headwater.errors import ConfigError, PlanError
from headwater.sim.costs import Costs, Making, costs_of
from headwater.sim.machine import Build, Machine
from headwater.sim.node import Refused, Worker
from headwater.sim.outcome import Outcome, gather
from headwater.sim.reduction import Rounds
from headwater.sim.rigfile import DIES, LINK, NONE, RETURNS, SLOWS, Chip, Fault, Nodes, RigFile, Trainers
from headwater.sim.sharing import Done, Line, after
from headwater.sim.trainer import Trainer, Way

OWN = "own"
RETRY_EVERY_S = 1.0  # a node that was taken for dead is asked again
MOST_PARTS = 20_000_000  # chunks and steps of a run, which are kept until its end: some gigabytes
MOST_MACHINES = 100_000  # some kilobytes each


@dataclass
class Ends:
    """A machine's link: two lines."""

    down: Line
    up: Line

    def slow(self, factor: float) -> None:
        self.down.slow(factor)
        self.up.slow(factor)


@dataclass
class World:
    """Everything that is there."""

    env: simpy.Environment
    file: RigFile
    plan: Plan
    nodes: dict[str, Worker]
    links: dict[str, Ends]
    machines: dict[str, Machine]
    trainers: list[Trainer]
    ports: dict[str, Ends]
    network: tuple[Line, ...]
    stores: list[Line]
    spans: list[Span] | None
    sync: Rounds | None = None


def fit_faults(plan: Plan, cuts: Sequence[Cut], profile: Profile, file: RigFile) -> list[str]:
    """Why this plan can't be played on this rig; empty if it can."""
    faults: list[str] = []
    host = file.trainers[0]
    if file.num_nodes + file.num_trainers > MOST_MACHINES:
        faults.append(f"{file.num_nodes + file.num_trainers:,} machines are more than are played; the limit is "
                      f"{MOST_MACHINES:,}")  # fmt: skip
    num_parts = file.job.num_epochs * file.job.num_samples * (1 / plan.chunk_rows + 1 / file.job.batch_size)
    if num_parts > MOST_PARTS:
        faults.append(f"the run has about {num_parts:,.0f} chunks and steps, and at most {MOST_PARTS:,} are played; "
                      "lower num_samples or num_epochs, and multiply the time")  # fmt: skip
    if plan.uses_storage and not file.nodes:
        faults.append("the plan uses nodes, and the rig has none; add [[nodes]]")
    if (not plan.uses_storage or plan.host_share) and file.nodes and file.store.link is None:
        faults.append("the plan has the trainer read by itself, and the rig has no store.link; add [store.link]")
    if profile.trainer.suffix_on == "accelerator" and any(each.accelerator is None for each in file.trainers):
        faults.append("the profile's suffix was measured on an accelerator, and a trainer has none")
    if plan.reduce == "network" and file.job.reduce == NONE:
        faults.append("the plan reduces in the network; say reduce and gradient_bytes in [job]")
    if file.job.reduce != NONE and any(each.port is None for each in file.trainers):
        faults.append(f"reduce is {file.job.reduce}, and a trainer has no port; add trainers.port")
    if faults:
        return faults
    try:
        pricing = _pricing(plan, cuts, profile, file)
        priced = pricing.price(plan, pricing.choice(plan))
    except PlanError as error:
        return list(error.faults)
    except ConfigError as error:
        return [str(error)]
    for where, _, need, has in priced.memory:
        if has is not None and need > has and where != "node":
            faults.append(f"the {where} ({host.name}) needs {need / 1e9:.2f} GB (has {has / 1e9:.2f} GB); lower "
                          "batch_size, chunk_rows or prefetch")  # fmt: skip
    choice = pricing.choice(plan)
    for each in file.nodes if plan.uses_storage else ():
        least = profile.node.base_bytes + choice.fixed_bytes + choice.infer_bytes + choice.buffer_bytes
        has_bytes = each.memory_bytes
        if has_bytes is not None and least > has_bytes:
            faults.append(f"prefix[..{plan.cut_name}] needs {least / 1e9:.2f} GB on {each.name} for one row (has "
                          f"{has_bytes / 1e9:.2f} GB); cut earlier")  # fmt: skip
    return faults


def _pricing(plan: Plan, cuts: Sequence[Cut], profile: Profile, file: RigFile) -> Pricing:
    rig = file.priced(num_nodes=min(file.num_nodes, 4) or None)
    job = JobSize(file.job.num_samples, file.job.batch_size, file.job.num_epochs, counts_setup=False)
    return Pricing(cuts, profile, rig, job)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's search for cycles: what a run makes has none (peaks of memory are the same), and to look for
    them among all that waits took half of the time of a large fleet."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def play(
    plan: Plan,
    cuts: Sequence[Cut],
    profile: Profile,
    file: RigFile,
    *,
    trace: bool = False,
    stop_after: int | None = None,
    seconds: float | None = None,
    node_profiles: Mapping[str, Profile] | None = None,
) -> Outcome:
    """Carry the plan out in virtual time; PlanError if it does not fit the rig.

    `stop_after` so many rows of each trainer, or after so many `seconds`, a run is cut off.
    `node_profiles` has costs of their own for groups of nodes, where they are no multiple of the profile's.
    """
    if faults := fit_faults(plan, cuts, profile, file):
        raise PlanError(faults)
    env = simpy.Environment()
    costs = costs_of(plan, _pricing(plan, cuts, profile, file))
    others = {name: costs_of(plan, _pricing(plan, cuts, each, file)) for name, each in (node_profiles or {}).items()}
    world = _build(env, plan, file, costs, others, profile, trace, stop_after)
    for fault in file.faults:
        after(env, fault.at_s, partial(_strike, world, fault))
    everyone = env.all_of([each.done for each in world.trainers])
    try:
        with _no_collector():
            env.run(everyone if seconds is None else env.any_of([everyone, env.timeout(seconds)]))
    except Refused as error:
        raise PlanError([str(error)]) from error
    except RuntimeError:  # nothing happens any more: those that are left wait for a sum with one that has stopped
        if world.sync is None or not any(each.error for each in world.trainers):
            raise
        for each in world.trainers:
            if not each.done.triggered:
                each.error = "waits for a sum with a trainer that has stopped"
    stopped = [f"{each.name}: {each.error}" for each in world.trainers if each.error]
    return gather(world, costs, stopped)


def _build(
    env: simpy.Environment,
    plan: Plan,
    file: RigFile,
    costs: Costs,
    others: dict[str, Costs],
    profile: Profile,
    trace: bool,
    stop_after: int | None,
) -> World:
    spans: list[Span] | None = [] if trace else None
    limit = file.network.bytes_per_s
    network = (Line(env, limit),) if limit else ()
    world = World(env, file, plan, {}, {}, {}, [], {}, network, [], spans)
    note = None if spans is None else partial(_note, env, spans)
    random = np.random.default_rng(file.seed)
    all_store = (Line(env, file.store.all_bytes_per_s),) if file.store.all_bytes_per_s else ()
    world.stores.extend(all_store)
    making, serves = costs.near, costs.own is not None and costs.own.serve_s > 0
    for group in file.nodes if making is not None or serves else ():
        own_making = others[group.name].near if group.name in others else making
        for name in group.names:
            machine = world.machines[name] = Machine(env, _build_of(name, group))
            if own_making is None:  # the store runs there, and nothing else
                continue
            world.links[name] = _ends(world, group.link)
            machine.memory.add(costs.taking.node_base_bytes + costs.taking.fixed_bytes)
            disk = Line(env, group.disk_bytes_per_s) if group.disk_bytes_per_s else None
            budget = None if group.memory_bytes is None else group.memory_bytes - int(costs.taking.node_base_bytes)
            world.nodes[name] = Worker(
                env, name, machine, own_making, disk=disk, disk_row_bytes=profile.sizes.sample_bytes,
                budget_bytes=budget, kept_row_s=group.cache_row_s, jitter=file.jitter, random=random, spans=note,
                row_bytes=(costs.taking.buffer_bytes, costs.taking.infer_bytes),
            )  # fmt: skip
    _add_trainers(world, costs, all_store, random, note, stop_after)
    return world


def _add_trainers(
    world: World,
    costs: Costs,
    all_store: tuple[Line, ...],
    random: np.random.Generator,
    note: Callable[..., None] | None,
    stop_after: int | None,
) -> None:
    env, file, plan = world.env, world.file, world.plan
    taking = costs.taking
    dealing = Dealing(file.job.num_samples, file.job.batch_size, file.num_trainers, file.job.drop_last)
    sync = None
    if file.job.reduce != NONE and file.num_trainers > 1:
        sync = world.sync = Rounds(env, file.num_trainers, file.job.gradient_bytes, file.job.reduce)
    keeper = _Keeper(file, plan, taking.raw_bytes) if any(each.cache_bytes for each in file.nodes) else None
    names = list(world.nodes)
    need = None
    if any(each.memory_bytes for each in file.nodes):
        hold = int(taking.buffer_bytes)
        need = Need("prefix", int(taking.fixed_bytes), int(taking.infer_bytes), hold, plan.node_batch)
    number, stores = 0, cycle(list(world.machines.values())) if world.machines else None

    def serve(work: float, then: Done) -> None:
        """The store's machines are the nodes', and each reads as much as any other."""
        assert stores is not None
        next(stores).cores.use(work, then)

    for group in file.trainers:
        for name in group.names:
            if file.shared_cores and names:  # one machine does both
                machine = world.machines[names[0]]
            else:
                machine = world.machines[name] = Machine(env, _build_of(name, group))
            port = _ends(world, group.port) if group.port is not None else None
            if port is not None:
                world.ports[name] = port
            wanted = group.nodes_each or len(names)
            mine = [names[(number * wanted + offset) % len(names)] for offset in range(wanted)] if names else []
            workers: dict[str, tuple[Worker, Way]] = {}
            for each in mine:
                ends = world.links[each]
                down = (ends.down, *world.network, *((port.down,) if port else ()))
                up = (*((port.up,) if port else ()), *world.network, ends.up)
                workers[each] = world.nodes[each], Way(down, up)
            own = None
            if costs.own is not None:
                own = f"{name} itself"
                served = serve if stores is not None and costs.own.serve_s else None
                workers[own] = _own(world, name, machine, costs.own, port, all_store, served, note, random), Way((), ())
            kept: dict[str, Any] = {}
            if keeper is not None:
                kept = {"kept": partial(keeper.kept, number), "made": partial(keeper.made, number)}
            trainer = Trainer(
                env, name, machine, plan, costs, workers, own,
                partial(_batches, dealing, number), memory_bytes=group.memory_bytes,
                beside=file.num_trainers if file.shared_cores and names else 1,
                num_epochs=file.job.num_epochs, sync=sync, spans=note, need=need, stop_after=stop_after, **kept,
            )  # fmt: skip
            if sync is not None:
                assert port is not None
                sync.join(trainer, port.down, port.up)
            world.trainers.append(trainer)
            number += 1


def _own(
    world: World,
    name: str,
    machine: Machine,
    making: Making,
    port: Ends | None,
    all_store: tuple[Line, ...],
    serve: Callable[[float, Done], None] | None,
    note: Callable[..., None] | None,
    random: np.random.Generator,
) -> Worker:
    """What makes rows beside a trainer: it reads over the way to the store, and shares the trainer's port and cores."""
    env, file = world.env, world.file
    link = file.store.link
    shared: tuple[Line, ...] = (port.down,) if port is not None else ()
    asking: tuple[Line, ...] = (port.up,) if port is not None else ()
    if link is not None:
        ends = _ends(world, link)
        world.stores.append(ends.down)
        shared, asking = (ends.down, *all_store, *shared), (ends.up, *asking)
    return Worker(env, f"{name} itself", machine, making, store=shared, ask=asking, serve=serve, jitter=file.jitter,
                  random=random, spans=note)  # fmt: skip


def _batches(dealing: Dealing, rank: int, epoch: int) -> Iterator[int]:
    for step in dealing.steps():
        start, stop = step.slice(rank, dealing.world)
        yield stop - start


def _ends(world: World, link: Link) -> Ends:
    env, queue_s = world.env, world.file.network.queue_s
    return Ends(Line(env, link.down_bytes_per_s, link.latency_s, queue_s),
                Line(env, link.up_bytes_per_s, link.latency_s, queue_s))  # fmt: skip


def _build_of(name: str, group: Nodes | Trainers) -> Build:
    chip: Chip | None = group.accelerator
    return Build(
        name, group.name, group.cores, group.speed, 0.0 if chip is None else chip.speed, group.idle_w, group.busy_w,
        None if chip is None else chip.idle_w, None if chip is None else chip.busy_w, group.price_per_hour,
    )  # fmt: skip


def _note(
    env: simpy.Environment, spans: list[Span], place: str, lane: str, what: str, since: float, chunk: int | None
) -> None:
    spans.append(Span(place, lane, what, since, env.now - since, chunk))


def _strike(world: World, fault: Fault) -> None:
    """What the rig file says happens now."""
    node = world.nodes.get(fault.node)
    if node is None:  # the plan uses no nodes
        return
    if fault.what == SLOWS:
        node.machine.slow(fault.factor)
    elif fault.what == LINK:
        world.links[fault.node].slow(fault.factor)
    elif fault.what == DIES and node.is_up:
        node.die()
        for trainer in world.trainers:
            after(world.env, fault.seen_after_s, partial(trainer.lost, fault.node))
    elif fault.what == RETURNS and not node.is_up:
        node.come_back()
        for trainer in world.trainers:  # each asks again once in a while
            after(world.env, RETRY_EVERY_S, partial(trainer.found, fault.node))


class _Keeper:
    """Which rows each node has kept, by sample, as far as its cache goes; the oldest are not pushed out."""

    def __init__(self, file: RigFile, plan: Plan, row_bytes: float) -> None:
        self._order = Order(file.job.num_samples, "simulated", file.seed, True)
        self._world = file.num_trainers
        self._dealing = Dealing(file.job.num_samples, file.job.batch_size, file.num_trainers, file.job.drop_last)
        self._room = {name: int(each.cache_bytes / max(row_bytes, 1.0)) for each in file.nodes for name in each.names}
        self._has: dict[str, set[int]] = {name: set() for name in self._room}
        self._ids: dict[tuple[int, int], Any] = {}

    def _mine(self, rank: int, epoch: int) -> Any:
        """The samples of a trainer in an epoch, in its order."""
        if (rank, epoch) not in self._ids:
            whole = self._order.epoch(epoch)
            parts = [whole[slice(*step.slice(rank, self._world))] for step in self._dealing.steps()]
            self._ids = {key: ids for key, ids in self._ids.items() if key[1] == epoch}
            self._ids[rank, epoch] = np.concatenate(parts)
        return self._ids[rank, epoch]

    def kept(self, rank: int, worker: str, epoch: int, entries: range) -> int:
        has = self._has.get(worker)
        if not has:
            return 0
        return sum(sample in has for sample in self._mine(rank, epoch)[entries.start : entries.stop].tolist())

    def made(self, rank: int, worker: str, epoch: int, entries: range) -> None:
        has = self._has.get(worker)
        if has is not None and len(has) < self._room[worker]:
            samples = self._mine(rank, epoch)[entries.start : entries.stop].tolist()
            has.update(samples[: self._room[worker] - len(has)])

"""What a simulated run came to: time, bytes, memory, energy, money. All of it is estimated; no clock ran.

Owns `Outcome`, its JSON, and how it is gathered from a world that was played.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from headwater.core.trace import Span

if TYPE_CHECKING:
    from headwater.sim.costs import Costs
    from headwater.sim.world import World

FORMAT, VERSION = "headwater-simulated", 1


@dataclass(frozen=True)
class Outcome:
    """One run. `busy` is the part of the time that each kind of resource was used, the mean of a group and its most;
    `memory` the most bytes that one machine of a group held; `money` in the currency of the rig file's prices."""

    seconds: float
    num_samples: int
    epochs_s: tuple[float, ...]
    samples_per_s: float
    waited_s: float
    down_bytes: float
    up_bytes: float
    store_bytes: float
    sum_bytes: float
    busy: dict[str, tuple[float, float]]
    memory_bytes: dict[str, float]
    cpu_s: dict[str, float]
    energy_j: dict[str, float]
    money: dict[str, float]
    limited_by: str
    num_chunks: int
    num_again: int
    num_events: int  # of the clock, while it was played
    faults: tuple[str, ...] = ()
    steps: tuple[tuple[float, int], ...] = field(default=(), repr=False)  # of the first trainer: when, rows so far
    arrived: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    spans: tuple[Span, ...] = field(default=(), repr=False)
    places: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        data = {name: value for name, value in asdict(self).items() if name not in ("steps", "arrived", "spans")}
        return {"format": FORMAT, "version": VERSION, "estimated": True, **data}

    def dumps(self) -> str:
        return json.dumps(self.to_json(), indent=2) + "\n"


def gather(world: World, costs: Costs, stopped: list[str]) -> Outcome:
    """What there is to say once the clock stands still."""
    env, file = world.env, world.file
    ends = [each.progress.steps[-1][0] for each in world.trainers if each.progress.steps]
    seconds = max(ends, default=env.now) or env.now
    rows = sum(each.progress.steps[-1][1] for each in world.trainers if each.progress.steps)
    epochs = zip(*(each.progress.epochs for each in world.trainers), strict=False)
    busy, memory, cpu, energy, money = (
        {},
        dict[str, float](),
        dict[str, float](),
        dict[str, float](),
        dict[str, float](),
    )
    groups: dict[str, list[Any]] = {}
    for machine in world.machines.values():
        groups.setdefault(machine.build.group, []).append(machine)
    for name, machines in groups.items():
        worked = [each.worked() for each in machines]
        build = machines[0].build
        busy[f"{name} cores"] = _mean_and_most([cores / build.cores / seconds for cores, _ in worked])
        if build.chip_speed:
            busy[f"{name} accelerator"] = _mean_and_most([chip / seconds for _, chip in worked])
        memory[name] = max(each.memory.peak for each in machines)
        cpu[name] = sum(cores for cores, _ in worked)
        joules = [each.energy_j(seconds) for each in machines]
        if all(each is not None for each in joules):
            energy[name] = sum(joules)
        if build.price_per_hour:
            money[name] = build.price_per_hour * len(machines) * seconds / 3600
    lines = {"node links, down": [each.down for each in world.links.values()],
             "node links, up": [each.up for each in world.links.values()],
             "trainer ports, down": [each.down for each in world.ports.values()],
             "trainer ports, up": [each.up for each in world.ports.values()],
             "network": list(world.network), "store": world.stores,
             "disks": [each.disk for each in world.nodes.values() if each.disk is not None]}  # fmt: skip
    for title, some in lines.items():
        if some:
            busy[title] = _mean_and_most([each.full() / seconds for each in some])
    down = sum(each.down.num_bytes for each in world.links.values())
    up = sum(each.up.num_bytes for each in world.links.values())
    if file.network.price_per_gb:
        money["network"] = file.network.price_per_gb * (down + up) / 1e9
    first = world.trainers[0].progress
    spans = tuple(world.spans or ())
    return Outcome(
        seconds=seconds,
        num_samples=rows,
        epochs_s=tuple(max(end for _, end in each) - min(begin for begin, _ in each) for each in epochs),
        samples_per_s=rows / seconds if seconds else 0.0,
        waited_s=sum(each.progress.waited_s for each in world.trainers) / len(world.trainers),
        down_bytes=down,
        up_bytes=up,
        store_bytes=sum(each.num_bytes for each in world.stores),
        sum_bytes=world.sync.num_bytes if world.sync is not None else 0.0,
        busy=busy,
        memory_bytes=memory,
        cpu_s=cpu,
        energy_j=energy,
        money=money,
        limited_by=max(busy, key=lambda name: busy[name][0], default=""),
        num_chunks=sum(each.progress.num_chunks for each in world.trainers),
        num_again=sum(each.progress.num_again for each in world.trainers),
        num_events=next(env._eid),  # SimPy numbers its events; nothing public tells
        faults=tuple(stopped),
        steps=tuple(first.steps),
        arrived=tuple(first.arrived),
        spans=spans,
        places=tuple(each.name for each in world.trainers) + tuple(world.nodes),
    )


def _mean_and_most(values: list[float]) -> tuple[float, float]:
    return sum(values) / len(values), max(values)

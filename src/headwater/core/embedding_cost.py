"""What a step of an embedding table takes with the table on nodes, and with a copy of it here; and which is faster.

Owns `TableCosts`, `loads` and `fastest`. A step goes from the trainer to the nodes and back, and nothing of it is done
at the same time but what several nodes do:

    step = slowest node (its cores + its disk) + up + down + the trainer's cores + a message there and back

Every time is measured with a batch of the run, but for what is marked as estimated in `core.partition_cost`. The dense
part of a model takes the same wherever a table is, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.partition_cost import MESSAGE_S, WIRE_S_PER_BYTE
from headwater.core.travel import WAYS, Shape

HERE = "here"
NODES = "nodes"
PLACES = (NODES, HERE)
# A copy is fetched once, and written back. Assumed, since nobody says how long a run will be: it has so many steps.
STEPS = 1000
# A copy has to be this much faster, in the estimate: what was trained in it is lost with the process.
MARGIN = 0.1


@dataclass(frozen=True)
class Rates:
    """Of one machine's cores: seconds for an id (to be sorted, added up, and its gradient), and for a distinct vector
    (to be found, and its step)."""

    id_s: float
    vector_s: float

    def work_s(self, num_ids: float, num_distinct: float) -> float:
        return num_ids * self.id_s + num_distinct * self.vector_s


@dataclass(frozen=True)
class PartCosts:
    """A node: what it has of a batch, and what that takes there."""

    shape: Shape
    rates: Rates
    disk_s: float  # for a step: it is confirmed when the log is on the disk
    cold_s: float  # for a vector that is not in memory
    num_cold: float  # of those in a batch
    link: tuple[float, float]  # bytes a second from it and to it


@dataclass(frozen=True)
class TableCosts:
    shape: Shape  # of the whole batch
    parts: tuple[PartCosts, ...]
    here: Rates
    port: tuple[float, float]  # bytes a second from all nodes at once, and to all
    latency_s: float
    copy_bytes: int  # of vectors that were trained: others are computed
    fits: bool  # has this machine the memory for a copy?


@dataclass(frozen=True)
class Loads:
    """Seconds of one step, one after the other."""

    nodes_s: float = 0.0
    disk_s: float = 0.0
    up_s: float = 0.0
    down_s: float = 0.0
    here_s: float = 0.0
    messages_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.nodes_s + self.disk_s + self.up_s + self.down_s + self.here_s + self.messages_s

    @property
    def largest(self) -> str:
        """What most of it goes to."""
        named = {"the nodes' cores": self.nodes_s, "the nodes' disks": self.disk_s, "the link": self.up_s + self.down_s,
                 "this machine's cores": self.here_s, "messages": self.messages_s}  # fmt: skip
        return max(named, key=lambda name: named[name])


@dataclass(frozen=True)
class Priced:
    """One way to have a table: on nodes, with pooled or distinct vectors crossing; or here."""

    place: str
    way: str
    loads: Loads
    setup_s: float = 0.0

    @property
    def step_s(self) -> float:
        """With its part of what is done once."""
        return self.loads.step_s + self.setup_s / STEPS

    def describe(self) -> str:
        what = {"pooled": "on nodes, pooled vectors cross the link", "vectors": "on nodes, the distinct vectors of a "
                "batch cross the link", HERE: "a copy in this process's memory"}[self.way]  # fmt: skip
        return f"{what}: {1e3 * self.step_s:.3g} ms a step, most of it {self.loads.largest} (estimated)"


def loads(costs: TableCosts, way: str) -> Loads:
    """`way`: "pooled", "vectors" or "here"."""
    shape, here = costs.shape, costs.here
    if way == HERE:
        return Loads(here_s=here.work_s(shape.num_ids, shape.num_distinct))
    nodes = []
    for part in costs.parts:
        ids = part.shape.num_ids if way == "pooled" else part.shape.num_distinct
        nodes.append((part.rates.work_s(ids, part.shape.num_distinct) + part.num_cold * part.cold_s, part.disk_s))
    nodes_s, disk_s = max(nodes, key=sum, default=(0.0, 0.0))
    crossing = [(part.shape.crossing_bytes(way), part.link) for part in costs.parts]
    up = max(sum(up for (up, _), _ in crossing) / costs.port[1], *(up / link[1] for (up, _), link in crossing), 0.0)
    down = max(sum(down for (_, down), _ in crossing) / costs.port[0],
               *(down / link[0] for (_, down), link in crossing), 0.0)  # fmt: skip
    here_s = sum(up + down for (up, down), _ in crossing) * WIRE_S_PER_BYTE
    if way == "vectors":  # added up here, and their gradients
        here_s += shape.num_ids * here.id_s
    return Loads(nodes_s, disk_s, up, down, here_s, 2 * costs.latency_s + MESSAGE_S)


def fastest(costs: TableCosts, ways: Sequence[str] = WAYS) -> list[Priced]:
    """All that may be done, the one to take first: a copy only where it fits and clearly helps. `ways`: those that the
    user leaves open for nodes."""
    found = [Priced(NODES, way, loads(costs, way)) for way in ways]
    if costs.fits:
        setup_s = costs.copy_bytes / costs.port[0] + costs.copy_bytes / costs.port[1]
        found.append(Priced(HERE, HERE, loads(costs, HERE), setup_s))
    return sorted(found, key=lambda each: each.step_s * (1 + MARGIN if each.place == HERE else 1.0))

"""What there is to run on: nodes, links, the trainer.

Owns `Device`, `Link` and `Rig`, measured or described, and their JSON (and so TOML) format. A rig knows nothing of
models or data: `core.profile` has what work costs, and `core.cost` joins the two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from headwater.core import form
from headwater.core.form import Flag, Many, Number, Part, Text, formed
from headwater.errors import ConfigError

# Limits that only a mistaken unit or a failed measurement leaves: a byte a second to ten terabytes, a minute of
# latency, a thousandth of a core to a hundred thousand, a petabyte of memory, a megawatt.
_RATE = Number(1.0, 1e13, zero="a link measured as zero carries nothing; measure it again, or check that it is up")
_LATENCY = Number(0.0, 60.0)
_CORES = Number(1e-3, 1e5, zero="a device without cores does no work; leave it out")
_SPEED = Number(1e-4, 1e4, zero="a device that does no work; leave it out")
_MEMORY = Number(1 << 20, 1e15, whole=True, optional=True)
_POWER = Number(0.0, 1e6, optional=True)


@dataclass(frozen=True)
class Device:
    """Something that computes. `cores` may be a fraction: a share that a cgroup holds it to.

    `speed` is how fast one core is against the one the profile was measured on; a busy neighbour makes it less than 1.
    `busy_w` is what the whole device draws with all its cores busy, `idle_w` with none; without them no energy is told.
    """

    name: str = field(metadata=formed(Text()))
    cores: float = field(default=1.0, metadata=formed(_CORES))
    memory_bytes: int | None = field(default=None, metadata=formed(_MEMORY))
    speed: float = field(default=1.0, metadata=formed(_SPEED))
    busy_w: float | None = field(default=None, metadata=formed(_POWER))
    idle_w: float | None = field(default=None, metadata=formed(_POWER))

    def __post_init__(self) -> None:
        form.check_record(self, "device")
        if (self.busy_w is None) != (self.idle_w is None):
            raise ConfigError(f"{self.name}: give busy_w and idle_w together, or neither")
        if self.busy_w is not None and self.idle_w is not None and self.busy_w < self.idle_w:
            raise ConfigError(f"{self.name}: busy_w ({self.busy_w:g}) is less than idle_w ({self.idle_w:g})")

    @property
    def capacity(self) -> float:
        """Core-seconds of the profile's machine that this device does in a second."""
        return self.cores * self.speed

    @property
    def thread_capacity(self) -> float:
        """The same for work that only one thread can do."""
        return min(self.cores, 1.0) * self.speed


@dataclass(frozen=True)
class Link:
    """A way to the trainer. Down is from the node (or the store) to the trainer; `latency_s` is one way.

    Rates are of useful bytes, as a long transfer over the real wire gave them, not of bits on the cable.
    """

    down_bytes_per_s: float = field(metadata=formed(_RATE))
    up_bytes_per_s: float = field(metadata=formed(_RATE))
    latency_s: float = field(default=0.0, metadata=formed(_LATENCY))

    def __post_init__(self) -> None:
        form.check_record(self, "link")


@dataclass(frozen=True)
class Rig:
    """Nodes with a link each, one trainer.

    `trainer_link` is the trainer's own port, which all nodes share. `store_link` is the trainer's way to the store when
    it reads by itself; without one it is the trainer's port, else as good as the best of the nodes' links.
    `trainer_reads` is False where the trainer has no way to the store at all; `trainer_shares` is False where it shall
    not do what nodes do, though it could. `shared_cores` says that nodes and trainer are one machine (the embedded
    node): what one of them does, the other can't.
    """

    nodes: tuple[Device, ...] = field(metadata=formed(Many(Part(Device))))
    links: tuple[Link, ...] = field(metadata=formed(Many(Part(Link))))
    trainer: Device = field(metadata=formed(Part(Device)))
    accelerator: Device | None = field(default=None, metadata=formed(Part(Device, optional=True)))
    trainer_link: Link | None = field(default=None, metadata=formed(Part(Link, optional=True)))
    store_link: Link | None = field(default=None, metadata=formed(Part(Link, optional=True)))
    trainer_reads: bool = field(default=True, metadata=formed(Flag()))
    trainer_shares: bool = field(default=True, metadata=formed(Flag()))
    shared_cores: bool = field(default=False, metadata=formed(Flag()))

    def __post_init__(self) -> None:
        form.check_record(self, "rig")
        faults = []
        if len(self.nodes) != len(self.links):
            faults.append(f"{len(self.nodes)} nodes but {len(self.links)} links; each node has one")
        if twice := [name for name, count in Counter(node.name for node in self.nodes).items() if count > 1]:
            faults.append(f"more than one node is called {', '.join(twice)}")
        if not self.nodes and not self.trainer_reads:
            faults.append("there is no node, and the trainer can't read the store: nobody reaches the data")
        if not self.nodes and self.store_link is None and self.trainer_link is None:
            faults.append("there is neither a node nor a link to the store; give store_link")
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def to_store(self) -> Link:
        """The link the trainer reads over when it reads by itself."""
        link = self.store_link or self.trainer_link
        return link if link is not None else Link(
            max(each.down_bytes_per_s for each in self.links),
            max(each.up_bytes_per_s for each in self.links),
            min(each.latency_s for each in self.links),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Plain data; a field that is not set is left out."""
        data: dict[str, Any] = form.to_json(self)
        return data

    @classmethod
    def from_json(cls, data: object) -> Rig:
        """Read a rig; every fault is in the one ConfigError."""
        return form.from_json(cls, data, "rig")

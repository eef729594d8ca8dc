"""The rig file: what there is to run on, what goes wrong when, and what it costs, as TOML (docs/simulator.md).

Owns its records, its checks, and the way from a file. Every fault is in the one error. A rig file says more than
`core.rig.Rig`, which is what plans are priced on: disks, accelerators near the data, caches, prices, faults. Machines
come in groups, `count` of one kind.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headwater.core import form
from headwater.core.form import Flag, Many, Number, Part, Table, Text, formed
from headwater.core.profile import NodeCosts, TrainerCosts
from headwater.core.rig import Device, Link, Rig
from headwater.errors import ConfigError

FORMAT, VERSION = "headwater-rig", 1
MOST_NAMED = 1_000_000  # machines that a rig file may have, each with a name; fewer are played
DIES, RETURNS, SLOWS, LINK = "dies", "returns", "slows", "link"
NONE, RING, SWITCH = "none", "ring", "switch"

_RATE = Number(1.0, 1e15, zero="nothing would ever get through; leave it out for no limit", optional=True)
_CORES = Number(1e-3, 1e5, zero="a device without cores does no work; leave it out")
_SPEED = Number(1e-4, 1e6, zero="a device that does no work; leave it out")
_MEMORY = Number(1 << 20, 1e15, whole=True, optional=True)
_WATTS = Number(0.0, 1e6, optional=True)
_PRICE = Number(0.0, 1e6)


class _Maybe:
    """The form of a text that may be missing."""

    def read(self, value: object, where: str, faults: list[str]) -> str | None:
        return None if value is None else Text().read(value, where, faults)


_NAME = _Maybe()
_COUNT = Number(1, 1e6, whole=True, zero="a group of no machines; leave it out")
_SECONDS = Number(0.0, 1e7)
_PART = Number(0.0, 1.0)
_FACTOR = Number(1e-6, 1e3, zero="what stands still dies; say so")
_FLOPS = Number(1.0, 1e18, zero="a kind of layer that is never done; leave it out")


@dataclass(frozen=True)
class Chip:
    """An accelerator. `speed` is against one core of the profile's machine. With costs from layers that have `flops`,
    what a layer takes is the longer of its flops ÷ the rate of its kind and its bytes ÷ `memory_bytes_per_s`."""

    speed: float = field(default=1.0, metadata=formed(_SPEED))
    flops_per_s: Mapping[str, float] = field(default_factory=dict, metadata=formed(Table(_FLOPS)))
    memory_bytes_per_s: float | None = field(default=None, metadata=formed(_RATE))
    memory_bytes: int | None = field(default=None, metadata=formed(_MEMORY))
    idle_w: float | None = field(default=None, metadata=formed(_WATTS))
    busy_w: float | None = field(default=None, metadata=formed(_WATTS))

    def __post_init__(self) -> None:
        form.check_record(self, "accelerator")
        check_watts(self.idle_w, self.busy_w)


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of one kind: their cores, disks, caches and links."""

    link: Link = field(metadata=formed(Part(Link)))
    name: str = field(default="node", metadata=formed(Text()))
    count: int = field(default=1, metadata=formed(_COUNT))
    cores: float = field(default=1.0, metadata=formed(_CORES))
    speed: float = field(default=1.0, metadata=formed(_SPEED))
    memory_bytes: int | None = field(default=None, metadata=formed(_MEMORY))
    idle_w: float | None = field(default=None, metadata=formed(_WATTS))
    busy_w: float | None = field(default=None, metadata=formed(_WATTS))
    price_per_hour: float = field(default=0.0, metadata=formed(_PRICE))
    disk_bytes_per_s: float | None = field(default=None, metadata=formed(_RATE))
    cache_bytes: int = field(default=0, metadata=formed(Number(0, 1e18, whole=True)))
    cache_row_s: float = field(default=0.0, metadata=formed(_SECONDS))  # CPU of serving a row that is kept
    accelerator: Chip | None = field(default=None, metadata=formed(Part(Chip, optional=True)))

    def __post_init__(self) -> None:
        form.check_record(self, "nodes")
        check_watts(self.idle_w, self.busy_w)

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.name, self.count)


@dataclass(frozen=True)
class Trainers:
    """`count` trainers of one kind. Each uses `nodes_each` nodes, in turn; all of them, where that is 0."""

    name: str = field(default="trainer", metadata=formed(Text()))
    count: int = field(default=1, metadata=formed(_COUNT))
    cores: float = field(default=1.0, metadata=formed(_CORES))
    speed: float = field(default=1.0, metadata=formed(_SPEED))
    memory_bytes: int | None = field(default=None, metadata=formed(_MEMORY))
    idle_w: float | None = field(default=None, metadata=formed(_WATTS))
    busy_w: float | None = field(default=None, metadata=formed(_WATTS))
    price_per_hour: float = field(default=0.0, metadata=formed(_PRICE))
    port: Link | None = field(default=None, metadata=formed(Part(Link, optional=True)))
    accelerator: Chip | None = field(default=None, metadata=formed(Part(Chip, optional=True)))
    nodes_each: int = field(default=0, metadata=formed(Number(0, 1e6, whole=True)))

    def __post_init__(self) -> None:
        form.check_record(self, "trainers")
        check_watts(self.idle_w, self.busy_w)

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.name, self.count)


@dataclass(frozen=True)
class Store:
    """The trainers' own way to stored samples: `link` is each trainer's; `all_bytes_per_s` what the store can give to
    all of them."""

    link: Link | None = field(default=None, metadata=formed(Part(Link, optional=True)))
    all_bytes_per_s: float | None = field(default=None, metadata=formed(_RATE))

    def __post_init__(self) -> None:
        form.check_record(self, "store")


@dataclass(frozen=True)
class Network:
    """What all that goes between nodes and trainers shares, and what a gigabyte of it costs. `queue_s`: how long bytes
    are held up by a link's buffer that others have filled."""

    bytes_per_s: float | None = field(default=None, metadata=formed(_RATE))
    price_per_gb: float = field(default=0.0, metadata=formed(_PRICE))
    queue_s: float = field(default=0.0, metadata=formed(Number(0.0, 60.0)))

    def __post_init__(self) -> None:
        form.check_record(self, "network")


@dataclass(frozen=True)
class Work:
    """How much there is to do, and how trainers average gradients after each step."""

    num_samples: int = field(metadata=formed(Number(1, 1e12, whole=True)))
    batch_size: int = field(default=32, metadata=formed(Number(1, 1e9, whole=True)))
    num_epochs: int = field(default=1, metadata=formed(Number(1, 1e6, whole=True)))
    gradient_bytes: float = field(default=0.0, metadata=formed(Number(0.0, 1e13)))
    reduce: str = field(default=NONE, metadata=formed(Text((NONE, RING, SWITCH))))
    drop_last: bool = field(default=False, metadata=formed(Flag()))

    def __post_init__(self) -> None:
        form.check_record(self, "job")
        if (self.reduce == NONE) != (self.gradient_bytes == 0):
            raise ConfigError(f"reduce is {self.reduce} and gradient_bytes {self.gradient_bytes:g}; give both or none")


@dataclass(frozen=True)
class Fault:
    """Something that happens to a node, `at_s` after the beginning. `factor` is what is left of its speed, or of its
    link's; a death is noticed `seen_after_s` later."""

    at_s: float = field(metadata=formed(_SECONDS))
    node: str = field(metadata=formed(Text()))
    what: str = field(metadata=formed(Text((DIES, RETURNS, SLOWS, LINK))))
    factor: float = field(default=1.0, metadata=formed(_FACTOR))
    seen_after_s: float = field(default=0.0, metadata=formed(_SECONDS))

    def __post_init__(self) -> None:
        form.check_record(self, "faults")


@dataclass(frozen=True)
class Data:
    """Costs that come with `layers`: bytes of a stored sample and of its pixels; seconds that no layer tells, by the
    names of `core.profile` with the side in front, such as node_decode_s or trainer_step_s."""

    sample_bytes: float = field(metadata=formed(Number(1.0, 1e12)))
    pixel_bytes: float = field(metadata=formed(Number(1.0, 1e12)))
    costs: Mapping[str, float] = field(default_factory=dict, metadata=formed(Table(Number(0.0, 1e5))))

    def __post_init__(self) -> None:
        form.check_record(self, "data")
        known = {f"node_{each.name}" for each in fields(NodeCosts)} | {
            f"trainer_{each.name}" for each in fields(TrainerCosts)}  # fmt: skip
        if unknown := sorted(set(self.costs) - known):
            raise ConfigError(f"costs: {', '.join(unknown)} is no cost of a profile")


@dataclass(frozen=True)
class RigFile:
    """All of it. `profile` and `layers` name files with what work costs, beside this one."""

    trainers: tuple[Trainers, ...] = field(metadata=formed(Many(Part(Trainers))))
    job: Work = field(metadata=formed(Part(Work)))
    nodes: tuple[Nodes, ...] = field(default=(), metadata=formed(Many(Part(Nodes))))
    store: Store = field(default=Store(), metadata=formed(Part(Store)))
    network: Network = field(default=Network(), metadata=formed(Part(Network)))
    faults: tuple[Fault, ...] = field(default=(), metadata=formed(Many(Part(Fault))))
    seed: int = field(default=0, metadata=formed(Number(0, 1 << 62, whole=True)))
    jitter: float = field(default=0.0, metadata=formed(_PART))  # relative spread of what a group takes
    shared_cores: bool = field(default=False, metadata=formed(Flag()))
    profile: str | None = field(default=None, metadata=formed(_NAME))
    layers: str | None = field(default=None, metadata=formed(_NAME))
    data: Data | None = field(default=None, metadata=formed(Part(Data, optional=True)))

    def __post_init__(self) -> None:
        form.check_record(self, "rig")
        faults = rig_faults(self)
        if faults:
            raise ConfigError("; ".join(faults))

    @property
    def num_nodes(self) -> int:
        return sum(each.count for each in self.nodes)

    @property
    def num_trainers(self) -> int:
        return sum(each.count for each in self.trainers)

    def priced(self, num_nodes: int | None = None) -> Rig:
        """What `core` prices a plan on: the first trainer, with the nodes that it uses."""
        host = self.trainers[0]
        wanted = num_nodes or host.nodes_each or self.num_nodes
        pairs = [(name, each) for each in self.nodes for name in each.names][:wanted]
        nodes = tuple(Device(name, each.cores, each.memory_bytes, min(each.speed, 1e4)) for name, each in pairs)
        chip = host.accelerator
        return Rig(
            nodes,
            tuple(each.link for _, each in pairs),
            Device("trainer", host.cores, host.memory_bytes, min(host.speed, 1e4)),
            None if chip is None else Device("accelerator", 1.0, chip.memory_bytes, min(chip.speed, 1e4)),
            host.port,
            self.store.link,
            trainer_reads=self.store.link is not None or not pairs,
            shared_cores=self.shared_cores,
        )


def names_of(name: str, count: int) -> tuple[str, ...]:
    """Of a group's machines."""
    return (name,) if count == 1 else tuple(f"{name}-{number}" for number in range(1, count + 1))


def check_watts(idle_w: float | None, busy_w: float | None) -> None:
    if (idle_w is None) != (busy_w is None):
        raise ConfigError("give idle_w and busy_w together, or neither")
    if idle_w is not None and busy_w is not None and busy_w < idle_w:
        raise ConfigError(f"busy_w ({busy_w:g}) is less than idle_w ({idle_w:g})")


def rig_faults(file: RigFile) -> list[str]:
    """What is wrong with a rig as a whole."""
    faults = []
    if not file.trainers:
        faults.append("there is no trainer; give at least one [[trainers]]")
    if file.num_nodes + file.num_trainers > MOST_NAMED:
        return [*faults, f"there are {file.num_nodes + file.num_trainers:,} machines; the limit is {MOST_NAMED:,}"]
    groups: list[Nodes | Trainers] = [*file.nodes, *file.trainers]
    names = [name for each in groups for name in names_of(each.name, min(each.count, 2))]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        faults.append(f"more than one machine is called {', '.join(twice)}")
    known = {name for each in file.nodes for name in each.names} if file.faults else set()
    faults += [f"faults: no node is called {each.node!r}" for each in file.faults if each.node not in known]
    faults += [f"trainers {each.name}: nodes_each is {each.nodes_each}, and there are {file.num_nodes} nodes"
               for each in file.trainers if each.nodes_each > file.num_nodes]  # fmt: skip
    if file.num_trainers > file.job.num_samples:
        faults.append(f"{file.job.num_samples} samples can't be shared by {file.num_trainers} trainers")
    if not file.nodes and file.store.link is None:
        faults.append("there are no nodes and no store.link: nobody reaches the data")
    if file.layers is not None and file.data is None:
        faults.append("layers say nothing about samples: give [data] with sample_bytes and pixel_bytes")
    if file.profile is not None and file.layers is not None:
        faults.append("profile and layers both say what work costs; leave one out")
    if file.shared_cores and (file.num_nodes != 1 or file.num_trainers != 1):
        faults.append("shared_cores is for one node on one trainer's machine")
    return faults


def read_rig(path: Path, faults: list[str]) -> RigFile | None:
    """The rig in a file; None, with something in `faults`, if it can't be."""
    try:
        data: Any = tomllib.loads(path.read_text())
    except OSError as error:
        faults.append(f"{path} can't be read: {error.strerror}")
        return None
    except (ValueError, RecursionError) as error:
        faults.append(f"{path} is not TOML: {error}")
        return None
    return rig_of(data, faults)


def rig_of(data: Any, faults: list[str]) -> RigFile | None:
    """The same from what TOML holds."""
    rest = {name: value for name, value in data.items() if name not in ("format", "version")}
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        faults.append(f"format is {form.shown(data.get('format'))} and version {form.shown(data.get('version'))}; "
                      f"a rig file begins with format = {FORMAT!r} and version = {VERSION}")  # fmt: skip
    return form.read_record(RigFile, rest, "rig", faults)

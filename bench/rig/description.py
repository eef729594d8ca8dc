"""What a rig is made of, as plain data. Owns `Host`, `Link`, `Rig` and their checks; starts nothing.

Every host hangs on one switch by a link of its own. What goes from one host to another leaves through the link of the
first and arrives through the link of the second, so the thinner of the two decides. A host without a link in `links` is
joined without shaping, as fast as the machine copies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")
_LEAST_CPU = 0.001  # the kernel gives at least 1 ms of CPU, in a period of at most 1 s


class RigError(Exception):
    """The rig can't be as described, can't come up here, or something started in it failed."""


@dataclass(frozen=True)
class Host:
    """A machine: processes in it run on `cores`, share `cpu` cores' worth of time, and die above `memory_bytes`."""

    name: str
    cores: tuple[int, ...] = (0,)
    cpu: float = 1.0
    memory_bytes: int | None = None

    def faults(self) -> list[str]:
        found = []
        if not _NAME.fullmatch(self.name) or self.name == "switch":
            found.append(
                f"a host is named {self.name!r}; a name has up to 31 lower-case letters, digits and '-', and the "
                "name switch is taken"
            )
        if not self.cores or min(self.cores) < 0 or len(set(self.cores)) != len(self.cores):
            found.append(f"{self.name} has cores {self.cores}; it needs at least one, each once, none below 0")
        elif not _LEAST_CPU <= self.cpu <= len(self.cores):
            found.append(
                f"{self.name} has cpu {self.cpu:g} on {len(self.cores)} cores; the share is from {_LEAST_CPU} to the "
                "number of cores"
            )
        if self.memory_bytes is not None and self.memory_bytes < 1 << 20:
            found.append(f"{self.name} has memory_bytes {self.memory_bytes}; nothing starts in less than a MiB")
        return found


@dataclass(frozen=True)
class Link:
    """A host's link to the switch: towards the host, and away from it (as fast, if not given), in Mbit/s.

    These are bits on the wire, with Ethernet, IP and TCP headers: of 100, TCP carries about 95.6 as payload. A link has
    no latency to set: that would take netem, which many kernels lack; what delay there is comes from the queue.
    """

    down_mbit_per_s: float
    up_mbit_per_s: float | None = None

    @property
    def up(self) -> float:
        return self.down_mbit_per_s if self.up_mbit_per_s is None else self.up_mbit_per_s

    def faults(self, name: str) -> list[str]:
        return [
            f"the link of {name} has {rate:g} Mbit/s {way}; a rate is from 0.01 to 40,000 (to cut a link: link_down)"
            for way, rate in (("down", self.down_mbit_per_s), ("up", self.up))
            if not 0.01 <= rate <= 40_000
        ]


@dataclass(frozen=True)
class Rig:
    """Storage hosts, trainers, their links by host name, and, if wanted, a host for the store alone.

    The store is best given a host of its own: what it burns is then not taken from the share of a small storage host.
    With a link only at the trainers, the storage hosts read the store at full speed and the trainers see the thin link
    to both, which is the usual case of a benchmark.
    """

    storage: tuple[Host, ...]
    trainers: tuple[Host, ...]
    links: Mapping[str, Link] = field(default_factory=dict)
    store: Host | None = None

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (*self.storage, *self.trainers, *([self.store] if self.store else []))

    def check(self) -> None:
        """One RigError with everything that is wrong."""
        names = [host.name for host in self.hosts]
        faults = [fault for host in self.hosts for fault in host.faults()]
        faults += [
            f"{names.count(name)} hosts are named {name}" for name in sorted(set(names)) if names.count(name) > 1
        ]
        faults += [f"a link is for {name!r}, and there is no such host" for name in self.links if name not in names]
        faults += [fault for name, link in self.links.items() for fault in link.faults(name)]
        if not names or len(names) > 200:
            faults.append(f"the rig has {len(names)} hosts; it takes 1 to 200")
        if faults:
            raise RigError("\n".join([f"the rig has {len(faults)} faults:", *(f"  - {fault}" for fault in faults)]))

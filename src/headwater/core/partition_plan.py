"""What runs where when the first layers train on nodes, as plain data.

Owns `PartitionPlan` and its checks. Like every plan it changes speed and not numbers, but for the codec's stated error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from headwater.core import codecs
from headwater.core.form import shown
from headwater.core.partition import MAX_UNDER_WAY
from headwater.core.spec import Boundary
from headwater.errors import ConfigError, PlanError

NODES, TRAINER = "nodes", "trainer"
HERE, NETWORK = SUMS = ("trainer", "network")  # where nodes' gradients are added up
CODECS = ("raw", "fp16", "bf16")  # int8's error is too large for gradients
DEPTH = 3  # micro-batches under way: one on the nodes, one on the wire, one on the trainer
FORMAT = "headwater-partition"


@dataclass(frozen=True)
class PartitionPlan:
    """`place`: where rows are made; on nodes, up to the cut. `shares` of each batch by node; none: equal ones. `sums`:
    where nodes' gradients are added up, by the trainer or among nodes, on an aggregator."""

    place: str = NODES
    cut_index: int = 0
    cut_name: str = "input"
    codec: str = "raw"
    micro_batches: int = 1
    shares: tuple[float, ...] = ()
    depth: int = DEPTH
    sums: str = HERE

    def share(self, node: int) -> float:
        return self.shares[node] if self.shares else 1.0

    def check(self, num_nodes: int, num_cuts: int) -> None:
        """PlanError with everything that is wrong."""
        faults = []
        if self.place not in (NODES, TRAINER):
            faults.append(f"place is {self.place!r}; it must be {NODES!r} or {TRAINER!r}")
        if not 0 <= self.cut_index < num_cuts:
            faults.append(f"cut_index is {self.cut_index}; the model has the cuts 0 to {num_cuts - 1}")
        if self.place == TRAINER and self.cut_index:
            faults.append(f"the cut is {self.cut_name}, and nothing moves; use cut_index 0, or place {NODES!r}")
        if self.codec not in CODECS:
            faults.append(f"codec {self.codec!r} is not one of {', '.join(CODECS)}")
        if not 1 <= self.micro_batches <= 1024:
            faults.append(f"micro_batches is {self.micro_batches}; it must lie between 1 and 1024")
        if not 1 <= self.depth <= MAX_UNDER_WAY:
            faults.append(f"depth is {self.depth}; it must lie between 1 and {MAX_UNDER_WAY}")
        if self.sums not in SUMS:
            faults.append(f"sums is {self.sums!r}; it must be {HERE!r} or {NETWORK!r}")
        elif self.sums == NETWORK and (self.place == TRAINER or not self.cut_index):
            faults.append(f"sums is {NETWORK!r}, and no node trains anything with this cut; cut later, or use {HERE!r}")
        elif self.sums == NETWORK and num_nodes < 2:
            faults.append(f"sums is {NETWORK!r}, and one node has nobody to add up with; name more, or use {HERE!r}")
        if self.shares and len(self.shares) != num_nodes:
            faults.append(f"there are {len(self.shares)} shares for {num_nodes} nodes; give one for each")
        if self.shares and not (all(0 <= each < 1e9 for each in self.shares) and sum(self.shares) > 0):
            faults.append(f"shares are {list(self.shares)}; they must be 0 or more, and not all 0")
        if faults:
            raise PlanError(faults)

    def describe(self, boundary: Boundary, num_nodes: int, num_micro: int) -> str:
        """In one line."""
        if self.place == TRAINER:
            return "nothing moves; pictures are read as stored, and all of the model trains here"
        row = codecs.wire_row_bytes(self.codec if self.cut_index else "raw", boundary)
        nodes = f"{num_nodes} nodes" if num_nodes != 1 else "1 node"
        if not self.cut_index:
            return f"{nodes} decode the pictures ({row:,} bytes each); all of the model trains here"
        micro = f", in {num_micro} micro-batches" if num_micro > 1 else ""
        micro += "; weights' gradients are added up among nodes" if self.sums == NETWORK else ""
        return (f"{nodes} train the model up to {self.cut_name}; rows travel as {self.codec} ({row:,} bytes each, "
                f"and as many back as gradients){micro}")  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": 1, **asdict(self), "shares": list(self.shares)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PartitionPlan:
        names = {field.name for field in fields(cls)}
        given = {"sums": HERE, **{name: value for name, value in data.items() if name not in ("format", "version")}}
        if (data.get("format"), data.get("version")) != (FORMAT, 1) or set(given) != names:
            raise ConfigError(f"not a {FORMAT} of version 1 with {', '.join(sorted(names))}: {shown(data)}")
        return cls(**{**given, "shares": tuple(given["shares"])})

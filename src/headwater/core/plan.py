"""The plan: what runs where, and everything else that changes speed but not meaning.

Owns `Plan`, its JSON format (docs/plan-format.md) and its checks. A plan says nothing about seeds, batches or data:
those belong to the job, and every legal plan gives the job the same numbers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from headwater.core.codecs import CODECS
from headwater.core.cut import Cut
from headwater.core.form import shown
from headwater.core.prongs import ORDERED, STRATEGIES, WRR
from headwater.core.tuning import AUTO, ENGINE_CHOICES
from headwater.errors import PlanError

FORMAT = "headwater-plan"
VERSION = 1

STAGES = ("read", "decode", "augment", "prefix", "suffix", "loss", "gradients", "reduce")
TIERS_OF: Mapping[str, tuple[str, ...]] = {
    "read": ("storage", "host"),
    "decode": ("storage", "host"),
    "augment": ("storage", "host"),
    "prefix": ("storage", "host", "accelerator"),
    "suffix": ("host", "accelerator"),
    "loss": ("host", "accelerator"),
    "gradients": ("host", "accelerator"),
    "reduce": ("host", "accelerator", "network"),
}
PRECISIONS = ("fp32", "fp16", "bf16", "int8")
COMPRESSIONS = ("none", "lz4", "zstd")
LIMITS: Mapping[str, tuple[int, int]] = {"node_batch": (1, 65536), "chunk_rows": (1, 1 << 20), "prefetch": (1, 256)}
# A plan whose trainer does everything by itself says so by its stages. The smaller a share of either side, the more
# chunks have to wait for their turn (`core.share`).
LEAST_SHARE, MOST_SHARE = 0.01, 0.99
# How chunks are split between the trainer and the nodes where both make some: by their place in the order, so that how
# much crosses the link is known; or whoever is done takes the next one, so that neither side waits for the other.
WIRE, FILE = "wire", "file"  # how rows come from nodes: over the network, or left in a folder that both sides see
PLACE, PACE = "place", "pace"
SPLITS = (PLACE, PACE)
# Plans of 0.1.0 that were written before them.
_MAY_BE_MISSING = ("engine", "host_share", "split", "prongs", "hand_over")


@dataclass(frozen=True)
class Plan:
    """One way to carry out a job. The defaults keep everything on the trainer: "move nothing".

    docs/plan-format.md has every field and what is allowed. A plan is checked against itself when it is read
    (`from_json`, `loads`), and against the model, the nodes and the data before a job begins; PlanError has all faults
    at once.
    """

    read: str = "host"
    decode: str = "host"
    augment: str = "host"
    prefix: str = "host"
    suffix: str = "host"
    loss: str = "host"
    gradients: str = "host"
    reduce: str = "host"
    cut: int = 0
    cut_name: str = "input"
    precision: str = "fp32"
    codec: str = "raw"
    compression: str = "none"
    node_batch: int = 32
    chunk_rows: int = 64
    prefetch: int = 3
    engine: str = AUTO
    host_share: float = 0.0  # of the chunks: those that the trainer makes by itself, beside the nodes
    split: str = PLACE  # under `pace`, host_share is what was expected
    hand_over: str = WIRE
    prongs: str = ORDERED  # in which order both sides go through an epoch, where both make rows

    @property
    def stages(self) -> dict[str, str]:
        """Stage → tier, in the order of the chain."""
        return {stage: str(getattr(self, stage)) for stage in STAGES}

    @property
    def uses_storage(self) -> bool:
        """Does anything run on a node?"""
        return self.read == "storage"

    @property
    def has_prefix(self) -> bool:
        """Have rows passed a part of the model when the loop gets them?"""
        return self.cut > 0

    @property
    def sends_input(self) -> bool:
        """Do nodes make the model's input of the pixels, and send its floats as the codec has them?"""
        return self.uses_storage and not self.has_prefix and self.codec != "raw"

    @property
    def is_share_open(self) -> bool:
        """Does timing decide how much of the work is the trainer's? `host_share` is then what was expected."""
        return self.split == PACE or self.prongs == WRR

    @property
    def uses_own(self) -> bool:
        """Does a node beside the trainer do some or all of the work that others could do near the data?"""
        return self.host_share > 0 or (self.has_prefix and not self.uses_storage)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data."""
        rest = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in STAGES}
        cut = {"index": rest.pop("cut"), "name": rest.pop("cut_name")}
        return {"format": FORMAT, "version": VERSION, "stages": self.stages, "cut": cut, **rest}

    def dumps(self) -> str:
        """The plan as text, to be kept in a file."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    @classmethod
    def from_json(cls, data: object) -> Plan:
        """Read a plan from what JSON holds; every fault in its form and in itself is in the one PlanError."""
        plan, faults = _read(data)
        if plan is None or faults:
            raise PlanError(faults)
        return plan

    @classmethod
    def loads(cls, text: str | bytes) -> Plan:
        """Read a plan from the text of its file; PlanError with everything that is wrong with it."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError([f"not JSON: {error}"]) from error
        return cls.from_json(data)


def near_plan(cut: Cut, **changes: Any) -> Plan:
    """Read, decode, augment and prefix on the nodes, up to `cut`; the rest on the trainer."""
    tiers = dict.fromkeys(("read", "decode", "augment"), "storage")
    prefix = "storage" if cut.index else "host"
    return Plan(**{**tiers, "prefix": prefix, "cut": cut.index, "cut_name": cut.name, **changes})


def here_plan(cut: Cut, **changes: Any) -> Plan:
    """Everything on the trainer, with the part up to `cut` on an engine as nodes have one instead of in the loop."""
    return Plan(cut=cut.index, cut_name=cut.name, **changes)


def check(plan: Plan, cuts: Sequence[Cut], *, node_memory_bytes: int | None = None) -> None:
    """Raise one PlanError with everything that keeps this plan from being carried out on this model."""
    faults = _own_faults(asdict(plan))
    if plan.reduce == "network":
        faults.append(
            "reduce is on the network, where a plan can't put it yet: place it on host, and attach an "
            "aggregator to your DDP model (hw.reduce.attach)"
        )
    cut = next((cut for cut in cuts if cut.index == plan.cut), None)
    if cut is None:
        faults.append(f"cut {plan.cut} is not a position of this model; it has 0 to {len(cuts) - 1}")
    elif cut.name != plan.cut_name:
        faults.append(f"cut {plan.cut} is called {cut.name!r} in this model, {plan.cut_name!r} in the plan; "
                      "was the plan made for another model?")  # fmt: skip
    elif plan.has_prefix and not cut.legal:
        faults.append(f"cut {cut.name!r} can't be used: {cut.why_not}")
    elif plan.prefix == "storage" and node_memory_bytes is not None:
        need = cut.prefix_bytes + plan.node_batch * (cuts[0].row_bytes + cut.row_bytes)
        if need > node_memory_bytes:
            faults.append(
                f"prefix[..{cut.name}] needs at least {need / 1e9:.2f} GB on a node (has {node_memory_bytes / 1e9:.2f} "
                f"GB); cut earlier or lower node_batch ({plan.node_batch})"
            )
    if faults:
        raise PlanError(faults)


def _own_faults(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with a plan whatever the model; a check is left out where a field it needs could not be read."""
    faults = []
    for stage in STAGES:
        if stage in values and values[stage] not in TIERS_OF[stage]:
            faults.append(f"{stage} is placed on {values[stage]!r}; it can run on {', '.join(TIERS_OF[stage])}")
    for earlier, later in pairwise(STAGES[:4]):
        tier = values.get(earlier, "storage")
        if values.get(later) == "storage" and tier != "storage":
            faults.append(f"{later} is on storage but {earlier}, which comes before it, is on {tier}; "
                          f"move {earlier} to storage or {later} off it")  # fmt: skip
    if values.get("read") == "storage" and values.get("augment", "storage") != "storage":
        faults.append("read is on storage but augment is not; rows leave a node after augment or after the prefix, "
                      "so place read, decode and augment on the same side")  # fmt: skip
    cut, prefix = values.get("cut"), values.get("prefix")
    if cut is not None and cut < 0:
        faults.append(f"cut is {cut}; it must be 0 or more")
    if cut is not None and cut > 0 and prefix == "accelerator":
        faults.append(f"the cut at {cut} needs the prefix on storage, or on host (an engine there); it is on {prefix}")
    if cut is not None and cut > 0 and prefix == "host" and values.get("read") == "storage":
        faults.append(f"the cut at {cut} needs the prefix where read is, on storage; it is on host")
    share = values.get("host_share", 0.0)
    if share and not LEAST_SHARE <= share <= MOST_SHARE:
        faults.append(f"host_share is {share}; it must be 0, or {LEAST_SHARE} to {MOST_SHARE} (a trainer that does all "
                      "has read, decode, augment and prefix on host)")  # fmt: skip
    if share and values.get("read", "storage") != "storage":
        faults.append(f"host_share is {share}, but nothing is read on storage that it is a share of; leave it out")
    if values.get("split", PLACE) == PACE and not share:
        faults.append("split is pace, but host_share is 0: there is nobody to split with; leave it out")
    if values.get("hand_over", WIRE) == FILE and (values.get("codec", "raw") != "raw"
                                                  or values.get("read", "storage") != "storage"):  # fmt: skip
        faults.append("hand_over is file; rows in files come from nodes (read on storage), and as they are (codec raw)")
    if cut == 0 and values.get("codec") == "int8":
        faults.append("codec is int8 in front of the model, where pixels have 8 bits already: set it to raw")
    if cut == 0 and values.get("codec", "raw") != "raw" and values.get("read") == "host":
        faults.append(f"codec is {values['codec']}, but no row crosses a wire: everything is on host; set it to raw")
    prongs = values.get("prongs", ORDERED)
    if prongs in STRATEGIES[1:] and not share:
        faults.append(f"prongs is {prongs}, but host_share is 0: there is only one side; give the trainer a share")
    if prongs in STRATEGIES[1:] and values.get("split", PLACE) == PACE:
        faults.append(f"prongs is {prongs} and split is pace; chunks are split by {prongs} already: leave split out")
    if values.get("precision", "fp32") != "fp32" and (share or (cut and prefix == "host")):
        faults.append(f"precision is {values['precision']}, and what the trainer runs by itself is fp32; leave out "
                      "host_share, or use fp32")  # fmt: skip
    if cut == 0 and prefix == "storage":
        faults.append("the prefix is on storage but the cut is 0, in front of the first layer; choose a later cut")
    choices = {"precision": PRECISIONS, "codec": tuple(CODECS), "compression": COMPRESSIONS, "engine": ENGINE_CHOICES,
               "split": SPLITS, "prongs": STRATEGIES, "hand_over": (WIRE, FILE)}  # fmt: skip
    for name, allowed in choices.items():
        if name in values and values[name] not in allowed:
            faults.append(f"{name} is {values[name]!r}; it must be one of {', '.join(allowed)}")
    if values.get("engine") == "onnxruntime" and values.get("precision") in ("fp16", "bf16"):
        faults.append(f"engine onnxruntime does not compute in {values['precision']} on CPUs; set engine to "
                      "openvino or auto")  # fmt: skip
    for name, (low, high) in LIMITS.items():
        if name in values and not low <= values[name] <= high:
            faults.append(f"{name} is {values[name]}; it must lie between {low} and {high}")
    if {"node_batch", "chunk_rows"} <= set(values) and values["node_batch"] > values["chunk_rows"]:
        faults.append(f"node_batch ({values['node_batch']}) is larger than chunk_rows ({values['chunk_rows']}); "
                      "a node never gets that many rows at once")  # fmt: skip
    return faults


def _read(data: object) -> tuple[Plan | None, list[str]]:
    if not isinstance(data, Mapping):
        return None, [f"a plan is a JSON object, not {type(data).__name__}"]
    faults = []
    if data.get("format") != FORMAT:
        faults.append(f"format is {shown(data.get('format'))}; it must be {FORMAT!r}")
    if data.get("version") != VERSION:
        faults.append(f"version is {shown(data.get('version'))}; this Headwater reads {VERSION}")
    values: dict[str, Any] = {}
    parts: list[tuple[str, object, dict[str, str]]] = [
        ("stages", data.get("stages"), {stage: stage for stage in STAGES}),
        ("cut", data.get("cut"), {"index": "cut", "name": "cut_name"}),
        ("", data, {f.name: f.name for f in fields(Plan) if f.name not in STAGES and not f.name.startswith("cut")}),
    ]
    for title, part, names in parts:
        where = f"{title}." if title else ""
        if not isinstance(part, Mapping):
            faults.append(f"{title} is missing or not an object")
            continue
        known = set(names) | (set() if title else {"format", "version", "stages", "cut"})
        faults += [f"{where}{name} is not a field of a plan" for name in part if name not in known]
        for name, field in names.items():
            if name not in part and name in _MAY_BE_MISSING:
                continue
            if name not in part:
                faults.append(f"{where}{name} is missing")
            else:
                values[field] = part[name]
    for each in fields(Plan):
        wanted = {"int": int, "float": float}.get(str(each.type), str)
        if each.name in values and wanted is float and type(values[each.name]) is int:
            with contextlib.suppress(OverflowError):  # then it is no float, and told so
                values[each.name] = float(values[each.name])
        if each.name in values and type(values[each.name]) is not wanted:
            faults.append(f"{each.name} is {shown(values.pop(each.name))}; it must be {wanted.__name__}")
    faults += _own_faults(values)
    return (None if faults else Plan(**values)), faults

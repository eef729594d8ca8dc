"""A model as a CSV of its layers: costs for hardware that is not there, or that somebody else measured.

Owns the columns (docs/simulator.md) and the way from them to cuts and a profile.

    layer          its name; a cut is behind it
    forward_s      seconds of one sample on one core of the profile's machine, or on an accelerator of speed 1
    backward_s     the same, backward; 0 for a frozen layer
    bytes_out      of one row of what it puts out, in bytes
    weight_bytes   of its weights
    kind, flops    may be left out: the kind of layer and its floating-point operations a sample. With them, and rates
                   in the rig file (`flops_per_s` of an accelerator, by kind), seconds follow from the datasheet
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.cut import Cut
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts
from headwater.core.spec import TensorSpec
from headwater.sim.rigfile import Chip

COLUMNS = ("layer", "forward_s", "backward_s", "bytes_out", "weight_bytes")
MORE = ("kind", "flops")
OTHER = "other"  # the rate of kinds that have none of their own
BACKWARD = 2.0  # a backward pass has twice the operations of a forward one: gradients of inputs and of weights


@dataclass(frozen=True)
class Layer:
    """One row of the file."""

    name: str
    forward_s: float
    backward_s: float
    bytes_out: float
    weight_bytes: float
    kind: str = OTHER
    flops: float = 0.0


def read_layers(path: Path, faults: list[str]) -> tuple[Layer, ...]:
    """The layers in a file; what is wrong goes to `faults`."""
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        faults.append(f"{path} can't be read: {error}")
        return ()
    names = set(rows[0]) if rows else set()
    if missing := [name for name in COLUMNS if name not in names]:
        faults.append(f"{path} needs the columns {', '.join(COLUMNS)}; {', '.join(missing)} is missing")
        return ()
    layers = []
    for number, row in enumerate(rows, start=1):
        numbers = {}
        for name in (*COLUMNS[1:], "flops"):
            text = row.get(name) or "0"
            try:
                numbers[name] = float(text)
            except (TypeError, ValueError):
                faults.append(f"{path}, row {number}: {name} is {text!r:.40}; it must be a number")
                continue
            if not 0 <= numbers[name] < 1e18:
                faults.append(f"{path}, row {number}: {name} is {text:.40}; it must be 0 or more")
        if len(numbers) == len(COLUMNS):
            layers.append(Layer(row["layer"] or f"layer {number}", numbers["forward_s"], numbers["backward_s"],
                                numbers["bytes_out"], numbers["weight_bytes"], row.get("kind") or OTHER,
                                numbers["flops"]))  # fmt: skip
    return tuple(layers)


def seconds_on(layer: Layer, chip: Chip | None, batch: float = 1.0, backward: bool = False) -> float:
    """Of one sample: by the datasheet where there are rates, else what the file says.

    Bytes are those of the layer's output twice (written, and read by the next one) and, once for a batch, its weights.
    """
    factor = BACKWARD if backward else 1.0
    if chip is None or not chip.flops_per_s or not layer.flops:
        return layer.backward_s if backward else layer.forward_s
    rate = chip.flops_per_s.get(layer.kind, chip.flops_per_s.get(OTHER, 0.0))
    by_flops = factor * layer.flops / rate if rate else 0.0
    by_memory = 0.0
    if chip.memory_bytes_per_s:
        by_memory = factor * (2 * layer.bytes_out + layer.weight_bytes / batch) / chip.memory_bytes_per_s
    return max(by_flops, by_memory)


def cuts_of(layers: Sequence[Layer], input_bytes: float) -> tuple[Cut, ...]:
    """One in front of the first layer, and one behind each; those in front of a layer that learns are legal."""
    learns = [layer.backward_s > 0 for layer in layers]
    frozen = learns.index(True) if True in learns else len(layers)
    spec = TensorSpec("rows", (max(1, round(input_bytes)),), "uint8")
    cuts = [Cut(0, "input", (spec,), True, "", 0, 0)]
    weights = 0.0
    for index, layer in enumerate(layers, start=1):
        weights += layer.weight_bytes
        values = max(1, round(layer.bytes_out / 4))
        legal = index <= frozen
        cuts.append(Cut(index, layer.name, (TensorSpec(layer.name[:100], (values,), "float32"),), legal,
                        "" if legal else "a layer in front of it learns", 0, round(weights)))  # fmt: skip
    return tuple(cuts)


def profile_of(
    layers: Sequence[Layer],
    *,
    sample_bytes: float,
    pixel_bytes: float,
    batch: int,
    near: Chip | None,
    here: Chip | None,
    costs: Mapping[str, float],
) -> Profile:
    """A profile from layers. `near` and `here` are what runs them, by their datasheets; `costs` has seconds that no
    layer tells: node and trainer costs by the names of `core.profile`, such as node_decode_s, trainer_decode_s."""
    forward = [seconds_on(each, near, batch) for each in layers]
    prefix, so_far = [0.0], 0.0
    for each in forward:
        so_far += each
        prefix.append(so_far)
    suffix = [0.0]
    for layer in reversed(layers):
        back = seconds_on(layer, here, batch, backward=True) if layer.backward_s else 0.0
        suffix.append(suffix[-1] + seconds_on(layer, here, batch) + back)
    suffix.reverse()
    node: dict[str, Any] = {
        name.removeprefix("node_"): value for name, value in costs.items() if name.startswith("node_")
    }
    trainer: dict[str, Any] = {
        name.removeprefix("trainer_"): value for name, value in costs.items() if name.startswith("trainer_")
    }
    free = dict.fromkeys(("fp16", "bf16", "int8"), 0.0)
    return Profile(
        Key("layers", "none", "none", "none", "none", "0"),
        0.0,
        NodeCosts(**{"read_s": 0.0, "decode_s": 0.0, "prefix_s": {"fp32": tuple(prefix)},
                     "encode_s_per_byte": free, **node}),
        TrainerCosts(**{"decode_s": 0.0, "suffix_s": tuple(suffix), "decode_s_per_byte": free,
                        "suffix_on": "host" if here is None else "accelerator", **trainer}),
        Sizes(sample_bytes, round(pixel_bytes), round(4 * pixel_bytes)),
    )  # fmt: skip

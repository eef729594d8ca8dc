"""The job file: a whole training run as TOML (docs/job-file.md).

Owns its fields and checks. Every fault of a file is in the one error; a field that nobody knows is a fault, too.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from headwater.core.form import shown
from headwater.core.prongs import STRATEGIES
from headwater.errors import ConfigError


@dataclass(frozen=True)
class ModelPart:
    """Which model, and which part of it is frozen."""

    name: str
    arguments: dict[str, Any]
    freeze_until: str = ""
    weights: str = ""


@dataclass(frozen=True)
class DataPart:
    """Where the pictures are and what is done to them."""

    url: str
    transforms: list[Any] | str
    validation: str = ""
    validation_transforms: list[Any] | str | None = None
    layout: str = "auto"
    path_column: str | int | None = None
    label_column: str | int | None = None
    text_column: str | int | None = None
    on_bad_sample: str = "raise"
    views: int = 0


@dataclass(frozen=True)
class TrainPart:
    """How to train."""

    epochs: int = 1
    batch_size: int = 32
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    checkpoint_every: int = 0
    output: str = "run"


@dataclass(frozen=True)
class NodesPart:
    """Who runs the near part; without addresses a node is started beside the trainer."""

    addresses: list[str]
    patience_s: float = 60.0
    share: bool = True
    cache: str = ""
    threads: int = 0
    token: str = field(default="", repr=False)
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


@dataclass(frozen=True)
class PlanPart:
    """What to fix about the plan."""

    file: str = ""
    profile: str = ""
    cut: str | int | None = None
    codec: str = "raw"
    precision: str = "fp32"
    tolerance: float = 0.99
    prongs: str = "auto"


@dataclass(frozen=True)
class PowerPart:
    """What devices draw, in watts: stated, for modelled energy."""

    node_idle_w: float | None = None
    node_busy_w: float | None = None
    trainer_idle_w: float | None = None
    trainer_busy_w: float | None = None
    accelerator_idle_w: float | None = None
    accelerator_busy_w: float | None = None

    def known(self) -> dict[str, tuple[float, float]]:
        """Idle and busy, of the devices for which both are given."""
        found = {}
        for name in ("node", "trainer", "accelerator"):
            idle, busy = getattr(self, f"{name}_idle_w"), getattr(self, f"{name}_busy_w")
            if (idle is None) != (busy is None):
                raise ConfigError(f"[power] give both {name}_idle_w and {name}_busy_w, in watts, or neither")
            if idle is not None:
                if not 0 <= idle <= busy:
                    raise ConfigError(f"[power] {name}_idle_w is {idle:g} and {name}_busy_w {busy:g}; they are watts, "
                                      "0 or more, and busy is not less than idle")  # fmt: skip
                found[name] = idle, busy
        return found


@dataclass(frozen=True)
class JobFile:
    """A read and checked job file. Relative paths in it count from its own folder."""

    folder: Path
    model: ModelPart
    data: DataPart
    train: TrainPart
    nodes: NodesPart
    plan: PlanPart
    power: PowerPart

    def path(self, name: str) -> Path:
        if "\0" in name:
            raise ConfigError(f"{name[:80]!r} has a NUL in it, which no file's name has")
        return (self.folder / name).resolve()

    def url(self, name: str) -> str:
        return name if "://" in name else str(self.path(name))


_PARTS: Mapping[str, type] = {
    "model": ModelPart,
    "data": DataPart,
    "train": TrainPart,
    "nodes": NodesPart,
    "plan": PlanPart,
    "power": PowerPart,
}
_EMPTY = {"arguments": dict, "addresses": list}  # mutable defaults
_CHOICES = {"optimizer": ("adamw", "adam", "sgd"), "on_bad_sample": ("raise", "skip"), "prongs": ("auto", *STRATEGIES)}
_TOO_MUCH = 2**63
_AT_LEAST = {"epochs": 1, "batch_size": 1, "seed": 0, "lr": 0, "weight_decay": 0, "momentum": 0, "checkpoint_every": 0,
             "patience_s": 0, "views": 0, "threads": 0}  # fmt: skip


def read_job(path: Path) -> JobFile:
    """Read a job file; one ConfigError with everything that is wrong with it."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"the job file {path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # a number of many digits is a plain ValueError
        raise ConfigError(f"{path} is not TOML: {str(error)[:500]}") from error
    faults = [_unknown(name, _PARTS, "a part") for name in data if name not in _PARTS]
    parts = {}
    for name, kind in _PARTS.items():
        part = data.get(name, {})
        if not isinstance(part, dict):
            faults.append(f"[{name}] must be a table")
            continue
        values, found = _read_part(name, kind, part)
        faults += found
        if not found:
            parts[name] = kind(**values)
    if faults:
        raise ConfigError("\n".join([f"{path} has {len(faults)} faults:", *(f"  - {fault}" for fault in faults)]))
    return JobFile(path.resolve().parent, **parts)


def _read_part(title: str, kind: type, part: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    hints = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}
    faults = [_unknown(name, known, f"a field of [{title}]") for name in part if name not in known]
    values = {name: make() for name, make in _EMPTY.items() if name in known}
    for name, about in known.items():
        if name not in part:
            if name not in values and about.default is about.default_factory:  # both MISSING: no default
                faults.append(f"[{title}] {name} is missing")
            continue
        value = part[name]
        allowed = [get_origin(each) or each for each in (get_args(hints[name]) or [hints[name]])
                   if get_origin(hints[name]) not in (dict, list)] or [get_origin(hints[name])]  # fmt: skip
        if float in allowed and type(value) is int and abs(value) < 10**18:
            value = float(value)
        if type(value) not in allowed:
            wanted = " or ".join(each.__name__ for each in allowed if each is not type(None))
            found = "something else" if name == "token" else shown(value)
            faults.append(f"[{title}] {name} is {found}; it must be {wanted}")
        elif name == "addresses" and not all(isinstance(each, str) for each in value):
            faults.append(f"[{title}] {name} must be a list of texts, such as grpc://store-1:8815")
        elif name in _CHOICES and value not in _CHOICES[name]:
            faults.append(f"[{title}] {name} is {shown(value)}; it must be one of {', '.join(_CHOICES[name])}")
        elif name in _AT_LEAST and not _AT_LEAST[name] <= value < _TOO_MUCH:  # NaN fails, too
            faults.append(f"[{title}] {name} is {shown(value)}; it must be at least {_AT_LEAST[name]}, and no huge "
                          "number")  # fmt: skip
        else:
            values[name] = value
    return values, faults


def _unknown(name: str, known: Mapping[str, Any], what: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"{name} is not {what}; {hint}"

"""The form of plain data: which fields a record has, of which kind, within which limits.

Owns the kinds of fields and the way between dataclasses and JSON. Every fault of a whole tree is collected, so that a
file edited by hand is mended in one go. A field that is None is left out of the JSON, which makes it ready for TOML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Protocol, TypeVar

from headwater.errors import ConfigError

T = TypeVar("T")


class Form(Protocol):
    """What one field may hold."""

    def read(self, value: object, where: str, faults: list[str]) -> Any:
        """The value as the dataclass keeps it; what is wrong goes to `faults`, and then the result is of no use."""


@dataclass(frozen=True)
class Number:
    """A number from `low` to `high`; `zero` is what to say of a 0 where none is allowed."""

    low: float
    high: float
    zero: str = ""
    whole: bool = False
    optional: bool = False

    def read(self, value: object, where: str, faults: list[str]) -> float | None:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            faults.append(f"{where} is {shown(value)}; it must be a {'whole ' if self.whole else ''}number")
            return None
        if value == 0 and self.zero:
            faults.append(f"{where} is 0: {self.zero}")
            return None
        if not self.low <= value <= self.high:  # NaN fails, too
            faults.append(f"{where} is {shown(value)}; it must lie between {self.low:g} and {self.high:g}")
            return None
        return int(value) if self.whole else float(value)


@dataclass(frozen=True)
class Text:
    """A text; one of `choices` if there are any."""

    choices: tuple[str, ...] = ()

    def read(self, value: object, where: str, faults: list[str]) -> str | None:
        if not isinstance(value, str) or not value:
            faults.append(f"{where} is {shown(value)}; it must be a text")
            return None
        if self.choices and value not in self.choices:
            faults.append(f"{where} is {shown(value)}; it must be one of {', '.join(self.choices)}")
        return value


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def read(self, value: object, where: str, faults: list[str]) -> bool | None:
        if not isinstance(value, bool):
            faults.append(f"{where} is {shown(value)}; it must be true or false")
            return None
        return value


@dataclass(frozen=True)
class Part:
    """Another record."""

    kind: type[Any]
    optional: bool = False

    def read(self, value: object, where: str, faults: list[str]) -> Any:
        if (value is None and self.optional) or isinstance(value, self.kind):
            return value
        return read_record(self.kind, value, where, faults)


@dataclass(frozen=True)
class Many:
    """A list, all of one form."""

    of: Form

    def read(self, value: object, where: str, faults: list[str]) -> Any:
        if not isinstance(value, list | tuple):
            faults.append(f"{where} is {shown(value)}; it must be a list")
            return None
        return tuple(self.of.read(each, f"{where}[{index}]", faults) for index, each in enumerate(value))


@dataclass(frozen=True)
class Table:
    """Named values, all of one form."""

    of: Form

    def read(self, value: object, where: str, faults: list[str]) -> Any:
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            faults.append(f"{where} is {shown(value)}; it must be an object")
            return None
        return {name: self.of.read(each, f"{where}.{name}", faults) for name, each in value.items()}


def formed(form: Form) -> dict[str, Form]:
    """What `dataclasses.field` takes as the metadata of a field of this form."""
    return {"form": form}


def check_record(record: Any, where: str) -> None:
    """For a record's `__post_init__`: put every field into its form, or raise one ConfigError for all faults."""
    faults: list[str] = []
    for each in fields(record):
        value = each.metadata["form"].read(getattr(record, each.name), f"{where}.{each.name}", faults)
        object.__setattr__(record, each.name, value)
    if faults:
        raise ConfigError(_all(faults))


def read_record(kind: type[T], data: object, where: str, faults: list[str]) -> T | None:
    """A record from JSON; None, with something in `faults`, if it can't be."""
    if not isinstance(data, Mapping):
        faults.append(f"{where} is {shown(data)}; it must be an object")
        return None
    before = len(faults)
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    faults += [f"{where}.{_name(name)} is not a field; there are {', '.join(known)}" for name in data
               if name not in known]  # fmt: skip
    values: dict[str, Any] = {}
    for name, each in known.items():
        if name in data:
            values[name] = each.metadata["form"].read(data[name], f"{where}.{name}", faults)
        elif each.default is MISSING and each.default_factory is MISSING:
            faults.append(f"{where}.{name} is missing")
    if len(faults) > before:
        return None
    try:
        return kind(**values)
    except ConfigError as error:  # what only the whole record can know
        faults.append(f"{where}: {error}")
        return None


def from_json(kind: type[T], data: object, where: str) -> T:
    """A record from JSON, or one ConfigError with every fault."""
    faults: list[str] = []
    record = read_record(kind, data, where, faults)
    if record is None or faults:
        raise ConfigError(_all(faults))
    return record


def to_json(value: Any) -> Any:
    """A record, or a part of one, as JSON."""
    if hasattr(value, "__dataclass_fields__"):
        pairs = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: to_json(each) for name, each in pairs if each is not None}
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value


def _all(faults: list[str]) -> str:
    if len(faults) == 1:
        return faults[0]
    return "\n".join([f"{len(faults)} faults:", *(f"  - {fault}" for fault in faults)])


def _name(name: object) -> str:
    return str(name)[:40]


def shown(value: object) -> str:
    """A value in a few words, whatever it is: what is nested may be too deep to be written out."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a huge number"  # a number of many digits can't even be written out
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    return repr(value)[:60]

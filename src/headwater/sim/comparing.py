"""Two runs side by side: traces by stage, or outcomes by number.

Owns `compare`. Either side may be live or simulated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.trace import TRAINER
from headwater.errors import ConfigError
from headwater.sim.outcome import FORMAT
from headwater.sim.recorded import events_in

_TOO_MUCH = 1e300  # no number of a run


@dataclass(frozen=True)
class Line:
    """One thing that both have, or only one of them."""

    what: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        return self.second / self.first if self.first and self.second is not None else None


def compare(first: Path, second: Path) -> list[Line]:
    """What each of them says, line by line; ConfigError where they are not of one kind."""
    faults: list[str] = []
    one, other = _read(first, faults), _read(second, faults)
    if not faults and one[0] != other[0]:
        faults.append(f"{first} is {one[0]} and {second} is {other[0]}; compare two of a kind")
    if faults:
        raise ConfigError("; ".join(faults))
    names = list(dict.fromkeys([*one[1], *other[1]]))
    return [Line(name, one[1].get(name), other[1].get(name)) for name in names]


def _read(path: Path, faults: list[str]) -> tuple[str, dict[str, float]]:
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        faults.append(f"{path} can't be read: {error.strerror}")
        return "", {}
    except (ValueError, RecursionError) as error:
        faults.append(f"{path} is not JSON: {error}")
        return "", {}
    if isinstance(data, dict) and "traceEvents" in data:
        return "a trace", _of_trace(path, faults)
    if isinstance(data, dict) and data.get("format") == FORMAT:
        try:
            return "an outcome", dict(_numbers("", data))
        except RecursionError:
            faults.append(f"{path} is nested too deep for an outcome")
            return "", {}
    faults.append(f"{path} is neither a trace (`--trace`) nor a simulated outcome (`headwater simulate -o`)")
    return "", {}


def _of_trace(path: Path, faults: list[str]) -> dict[str, float]:
    """Seconds from the first span to the last, and of each stage, in all and each; nodes together."""
    events = events_in(path, faults)
    if not events:
        return {}
    found = {"seconds": max(each.start_s + each.seconds for each in events) - min(each.start_s for each in events)}
    totals: dict[str, list[float]] = {}
    for each in events:
        side = "trainer" if each.place.startswith(TRAINER) else "nodes"
        totals.setdefault(f"{side}: {each.name}", []).append(each.seconds)
    for name, some in sorted(totals.items()):
        found[f"{name}, s in all"] = sum(some)
        found[f"{name}, times"] = len(some)
    return found


def _numbers(start: str, data: Any) -> list[tuple[str, float]]:
    if isinstance(data, bool) or data is None or isinstance(data, str):
        return []
    if isinstance(data, int | float):
        return [(start, float(data))] if abs(data) < _TOO_MUCH else []
    if isinstance(data, dict):
        pairs = [(f"{start}: {name}" if start else str(name), each) for name, each in data.items()
                 if name not in ("format", "version")]  # fmt: skip
    else:
        pairs = [(f"{start} {number}", each) for number, each in enumerate(data, start=1)]
    return [line for name, each in pairs for line in _numbers(name, each)]

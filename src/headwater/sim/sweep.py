"""The same plan over and over, with parts of the rig or of the plan changed from point to point.

Owns what may be swept (`KNOBS`), how a sweep is written, and `play_all`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from headwater.core.rig import Link
from headwater.errors import ConfigError, HeadwaterError
from headwater.sim.inputs import Inputs
from headwater.sim.outcome import Outcome
from headwater.sim.rigfile import RigFile
from headwater.sim.world import play

MBIT = 1e6 / 8
MOST_POINTS = 10_000


@dataclass(frozen=True)
class Swept:
    """What came out at each point."""

    names: tuple[str, ...]
    points: tuple[tuple[tuple[float, ...], Outcome], ...]


def parse_sweeps(texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """`nodes=1..64` doubles from 1 to 64, `nodes=1..64:9` goes in steps of 9, `link=10,100` takes these."""
    found: dict[str, tuple[float, ...]] = {}
    faults = []
    for text in itertools.chain.from_iterable(each.split() for each in texts):
        name, _, values = text.partition("=")
        if name not in KNOBS:
            faults.append(f"{name!r} can't be swept; there are {', '.join(KNOBS)}")
            continue
        try:
            found[name] = _values(values)
        except ValueError as error:
            faults.append(f"--sweep {text}: {error}")
    points = 1
    for some in found.values():
        points *= len(some)
    if points > MOST_POINTS:
        faults.append(f"{points:,} points are too many; at most {MOST_POINTS:,}")
    if faults:
        raise ConfigError("; ".join(faults))
    return found


def _values(text: str) -> tuple[float, ...]:
    if ".." not in text:
        values = tuple(float(each) for each in text.split(",") if each)
    else:
        ends, _, step_text = text.partition(":")
        low, high = (float(each) for each in ends.split(".."))
        if not 0 < low <= high < 1e12:
            raise ValueError("a range goes up from more than 0")
        if step_text:
            step = float(step_text)
            if step <= 0 or (high - low) / step > MOST_POINTS:
                raise ValueError("the step must be more than 0, and not tiny")
            values = tuple(low + step * number for number in range(int((high - low) / step + 1e-9) + 1))
        else:
            doubled = [low]
            while doubled[-1] * 2 < high * (1 + 1e-9):
                doubled.append(doubled[-1] * 2)
            values = tuple(dict.fromkeys([*doubled, high]))
    if not values or not all(0 < each < 1e15 for each in values):
        raise ValueError("give numbers above 0: 1..64, 1..64:9, or 10,100,1000")
    return values


def _nodes(given: Inputs, value: float) -> Inputs:
    if len(given.rig.nodes) != 1:
        raise ConfigError("nodes can be swept where there is one group of [[nodes]]")
    (group,) = given.rig.nodes
    return _rig(given, nodes=(replace(group, count=round(value)),))


def _trainers(given: Inputs, value: float) -> Inputs:
    if len(given.rig.trainers) != 1:
        raise ConfigError("trainers can be swept where there is one group of [[trainers]]")
    return _rig(given, trainers=(replace(given.rig.trainers[0], count=round(value)),))


def _link(given: Inputs, value: float) -> Inputs:
    """All that has a rate on the way to a trainer: its port where it has one, else the nodes' links."""
    rate = value * MBIT
    file = given.rig
    if all(each.port is not None for each in file.trainers):
        trainers = tuple(replace(each, port=_at(each.port, rate)) for each in file.trainers)
        return _rig(given, trainers=trainers)
    changes = {"nodes": tuple(replace(each, link=_at(each.link, rate)) for each in file.nodes)}
    if file.store.link is not None:
        return _rig(given, store=replace(file.store, link=_at(file.store.link, rate)), **changes)
    return _rig(given, **changes)


def _at(link: Link | None, rate: float) -> Link:
    assert link is not None
    return Link(rate, rate, link.latency_s)


def _rig(given: Inputs, **changes: object) -> Inputs:
    file: RigFile = replace(given.rig, **changes)  # type: ignore[arg-type]
    return replace(given, rig=file)


def _cores(given: Inputs, value: float) -> Inputs:
    return _rig(given, nodes=tuple(replace(each, cores=value) for each in given.rig.nodes))


def _batch(given: Inputs, value: float) -> Inputs:
    return _rig(given, job=replace(given.rig.job, batch_size=round(value)))


def _samples(given: Inputs, value: float) -> Inputs:
    return _rig(given, job=replace(given.rig.job, num_samples=round(value)))


def _share(given: Inputs, value: float) -> Inputs:
    return replace(given, plan=replace(given.plan, host_share=value))


def _prefetch(given: Inputs, value: float) -> Inputs:
    return replace(given, plan=replace(given.plan, prefetch=round(value)))


def _cut(given: Inputs, value: float) -> Inputs:
    cut = next((each for each in given.cuts if each.index == round(value)), None)
    if cut is None:
        raise ConfigError(f"cut {value:g} is not among {', '.join(str(each.index) for each in given.cuts)}")
    prefix = "storage" if given.plan.uses_storage and cut.index else "host"
    return replace(given, plan=replace(given.plan, cut=cut.index, cut_name=cut.name, prefix=prefix))


KNOBS: Mapping[str, Callable[[Inputs, float], Inputs]] = {
    "nodes": _nodes,
    "trainers": _trainers,
    "link": _link,
    "cores": _cores,
    "batch": _batch,
    "samples": _samples,
    "share": _share,
    "prefetch": _prefetch,
    "cut": _cut,
}


def play_all(given: Inputs, told: Callable[[str], None] = lambda text: None) -> Swept:
    """Every point, in order; a point that can't be is an error that names it."""
    names = tuple(given.sweeps)
    points = list(itertools.product(*given.sweeps.values()))
    found = []
    for number, point in enumerate(points, start=1):
        words = ", ".join(f"{name} {value:g}" for name, value in zip(names, point, strict=True))
        try:
            at = given
            for name, value in zip(names, point, strict=True):
                at = KNOBS[name](at, value)
            found.append((point, play(at.plan, at.cuts, at.profile, at.rig, node_profiles=dict(at.node_profiles))))
        except HeadwaterError as error:
            raise ConfigError(f"at {words}: {error}") from error
        told(f"{number} of {len(points)}: {words}")
    return Swept(names, tuple(found))

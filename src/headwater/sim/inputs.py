"""From files to a simulation: the plan, the rig, what work costs. Every fault of all of them is in the one error.

Owns `Inputs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwater.core.cut import Cut
from headwater.core.plan import Plan
from headwater.core.profile import Profile
from headwater.errors import ConfigError, PlanError
from headwater.sim.layers import Layer, cuts_of, profile_of, read_layers
from headwater.sim.recorded import stages_in, with_stages
from headwater.sim.rigfile import RigFile, read_rig
from headwater.sim.world import fit_faults

Values = tuple[float, ...]


@dataclass(frozen=True)
class Inputs:
    """What is to be played: once, or for each point of `sweeps`."""

    plan: Plan
    rig: RigFile
    cuts: tuple[Cut, ...]
    profile: Profile
    node_profiles: Mapping[str, Profile] = field(default_factory=dict)
    sweeps: Mapping[str, Values] = field(default_factory=dict)


def read_inputs(
    plan: Path,
    rig: Path,
    *,
    profile: Path | None = None,
    layers: Path | None = None,
    stages: Path | None = None,
    sweeps: Mapping[str, Values] | None = None,
) -> Inputs:
    """Read all files; what is named here goes before what the rig file names. ConfigError with every fault."""
    faults: list[str] = []
    file = read_rig(rig, faults)
    found_plan = read_plan(plan, faults)
    if profile is not None and layers is not None:
        faults.append("profile and layers both say what work costs; leave one out")
    if file is not None and profile is None and layers is None:
        profile = rig.parent / file.profile if file.profile else None
        layers = rig.parent / file.layers if file.layers else None
        if profile is None and layers is None:
            faults.append("nothing says what work costs: give --profile or --layers, or name one in the rig file")
    known, cuts, others = None, tuple[Cut, ...](), dict[str, Profile]()
    if profile is not None and layers is None:
        known = _read_profile(profile, faults)
        cuts = known.cuts if known is not None else ()
    elif layers is not None:
        rows = read_layers(layers, faults)
        if file is not None and file.data is None:
            faults.append("layers say nothing about samples: give [data] with sample_bytes and pixel_bytes")
        elif file is not None and rows and not faults:
            known, cuts, others = from_layers(file, rows)
    if stages is not None and known is not None:
        known = with_stages(known, stages_in(stages, faults))
    if not faults and file is not None and found_plan is not None and known is not None:
        faults += fit_faults(found_plan, cuts, known, file)
    if faults or file is None or found_plan is None or known is None:
        raise ConfigError(in_one(faults))
    return Inputs(found_plan, file, cuts, known, others, dict(sweeps or {}))


def in_one(faults: list[str]) -> str:
    """All faults as one text."""
    flat = [line.removeprefix("  - ") for fault in faults for line in fault.splitlines()
            if not line.endswith("faults:")]  # fmt: skip
    return flat[0] if len(flat) == 1 else "\n".join([f"{len(flat)} faults:", *(f"  - {each}" for each in flat)])


def from_layers(file: RigFile, rows: tuple[Layer, ...]) -> tuple[Profile, tuple[Cut, ...], dict[str, Profile]]:
    """A profile for the first group of nodes and the trainers, and others for groups with another accelerator."""
    assert file.data is not None
    data, here = file.data, file.trainers[0].accelerator

    def made(group: int) -> Profile:
        near = file.nodes[group].accelerator if file.nodes else None
        return profile_of(rows, sample_bytes=data.sample_bytes, pixel_bytes=data.pixel_bytes,
                          batch=file.job.batch_size, near=near, here=here, costs=data.costs)  # fmt: skip

    first = made(0)
    others = {each.name: made(number) for number, each in enumerate(file.nodes)
              if each.accelerator != file.nodes[0].accelerator}  # fmt: skip
    cuts = cuts_of(rows, data.pixel_bytes)
    return replace(first, cuts=cuts), cuts, others


def read_plan(path: Path, faults: list[str]) -> Plan | None:
    try:
        return Plan.loads(path.read_bytes())
    except OSError as error:
        faults.append(f"{path} can't be read: {error.strerror}")
    except PlanError as error:
        faults += [f"plan: {each}" for each in error.faults]
    return None


def _read_profile(path: Path, faults: list[str]) -> Profile | None:
    try:
        profile = Profile.loads(path.read_bytes())
    except OSError as error:
        faults.append(f"{path} can't be read: {error.strerror}")
        return None
    except (ConfigError, json.JSONDecodeError) as error:
        faults.append(str(error))
        return None
    if not profile.cuts:
        faults.append(f"{path} doesn't say where its model can be cut, which profiles of earlier versions don't: write "
                      "it again with `headwater profile -o`")  # fmt: skip
    return profile

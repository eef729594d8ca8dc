"""A live run's timeline as an input: what stages really took there goes in place of what the profile says.

Owns the way from a trace file (`headwater train --trace`) to seconds of each stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from headwater.core.profile import Profile
from headwater.core.trace import TRAINER, Span, from_perfetto
from headwater.errors import ConfigError


def events_in(path: Path, faults: list[str]) -> list[Span]:
    """Every span of a trace file."""
    try:
        return from_perfetto(json.loads(path.read_bytes()))
    except OSError as error:
        faults.append(f"{path} can't be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        faults.append(f"{path} is no trace of a run: {type(error).__name__} {str(error)[:200]}")
    except ConfigError as error:
        faults.append(f"{path}: {error}")
    return []


def stages_in(path: Path, faults: list[str]) -> dict[str, float]:
    """Mean seconds a span of each stage on nodes (node_decode: decode and augment), and of the loop's steps."""
    found: dict[str, list[float]] = {}
    for each in events_in(path, faults):
        side = "trainer" if each.place == TRAINER else "node"
        found.setdefault(f"{side}_{each.name}", []).append(each.seconds)
    return {name: fmean(some) for name, some in found.items()}


def with_stages(profile: Profile, stages: Mapping[str, float]) -> Profile:
    """The profile with decoding and reading as they were recorded.

    A span on a busy machine also has the time in which another one ran, so it says at most what the stage costs; only
    stages with a span for each sample are taken, since groups and chunks differ from plan to plan.
    """
    node = profile.node
    decode_s = stages.get("node_decode", 0.0) + stages.get("node_augment", 0.0)
    if "node_decode" in stages:
        node = replace(node, decode_s=min(decode_s, 1e5))
    if "node_read" in stages:
        node = replace(node, read_wait_s=max(0.0, stages["node_read"] - node.read_s))
    return replace(profile, node=node)

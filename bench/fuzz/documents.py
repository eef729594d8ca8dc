"""Plans, profiles, rigs and transforms: plain data that anyone may have written."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from bench.fuzz.target import Harness, Room, Target
from headwater.core.draw import Draw
from headwater.core.plan import Plan, check
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts, check_profile
from headwater.core.rig import Device, Link, Rig
from headwater.data.transforms import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    HorizontalFlip,
    Normalize,
    Pad,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    ToFloat,
    Transforms,
    VerticalFlip,
)
from headwater.errors import ConfigError, DataError, PlanError

_SMALL = 64  # pixels a side: what is larger is allowed, and takes as long as it is large


def _plan(room: Room) -> Harness:
    def harness(data: bytes) -> None:
        plan = Plan.loads(data)
        assert Plan.loads(plan.dumps()) == plan
        check(plan, ())

    return harness


def _plan_seeds() -> Sequence[bytes]:
    near = Plan("storage", "storage", "storage", "storage", cut=3, cut_name="layer3", codec="fp16", node_batch=8)
    return [Plan().dumps().encode(), near.dumps().encode()]


def _profile(room: Room) -> Harness:
    def harness(data: bytes) -> None:
        profile = Profile.loads(data)
        assert Profile.loads(profile.dumps()) == profile
        check_profile(profile, (), age_s=1e9)

    return harness


def _profile_seeds() -> Sequence[bytes]:
    key = Key("m", "t", "d", "n", "h", "0")
    node = NodeCosts(0.1, 0.2, {"fp32": (0.0, 0.1, None)}, encode_s_per_byte={"raw": 1e-9}, fixed_bytes=(0, 5, None))
    trainer = TrainerCosts(0.1, (0.3, 0.2, None), decode_s_per_byte={"raw": 1e-9}, suffix_row_bytes=(1, 2, None))
    return [Profile(key, 1e9, node, trainer, Sizes(1e5, 100, 400)).dumps().encode()]


def _rig(room: Room) -> Harness:
    def harness(data: bytes) -> None:
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            return  # a rig is a part of a job's file, which is the user's own; what is read of it is checked
        rig = Rig.from_json(tree)
        assert Rig.from_json(rig.to_json()) == rig
        if rig.links:
            _ = rig.to_store

    return harness


def _rig_seeds() -> Sequence[bytes]:
    rig = Rig((Device("a", 2.0, 10**9), Device("b", 1.0, 10**9)), (Link(1e6, 1e6, 0.01), Link(1e5, 1e5)),
              Device("t", 4.0, 10**9), trainer_link=Link(1e7, 1e7))  # fmt: skip
    return [json.dumps(rig.to_json()).encode()]


def _transforms(room: Room) -> Harness:
    picture = io.BytesIO()
    Image.fromarray(np.arange(30 * 20 * 3, dtype=np.uint8).reshape(30, 20, 3)).save(picture, "png")

    def harness(data: bytes) -> None:
        try:
            tree = json.loads(data)
        except (ValueError, RecursionError):
            return  # transforms are a part of a request or a manifest, whose own targets have this
        chain = Transforms.from_json(tree)
        assert Transforms.from_json(json.loads(json.dumps(chain.to_json()))) == chain
        _ = chain.digest, chain.fixed_part().digest, repr(chain)
        if is_small(chain.to_json()):
            chain.apply(picture.getvalue(), "a.png", Draw(1, 2, 3))

    return harness


def is_small(tree: Any) -> bool:
    """Whether no whole number in there asks for a large picture."""
    if isinstance(tree, dict):
        return all(is_small(each) for key, each in tree.items() if key != "max_pixels")
    if isinstance(tree, list):
        return all(is_small(each) for each in tree)
    return not isinstance(tree, int) or tree <= _SMALL or tree == 255


def chains() -> Sequence[Transforms]:
    return [
        Transforms([Resize((8, 8)), ToFloat()]),
        Transforms([Resize(9, "bicubic", 12), CenterCrop(8), ToFloat(), Normalize((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))]),
        Transforms([RandomResizedCrop(8), HorizontalFlip(0.5), VerticalFlip(0.5), ColorJitter(0.4, 0.4, 0.4, 0.1)]),
        Transforms([Pad((1, 2), 7), RandomCrop(8, padding=3), Grayscale(), ToFloat()]),
    ]


def _transform_seeds() -> Sequence[bytes]:
    return [json.dumps(chain.to_json()).encode() for chain in chains()]


TARGETS = (
    Target("plan", "a plan's file", _plan, _plan_seeds, (PlanError,), 150, "json"),
    Target("profile", "a profile's file", _profile, _profile_seeds, (ConfigError,), 50, "json"),
    Target("rig", "a rig's description", _rig, _rig_seeds, (ConfigError,), 30, "json"),
    Target("transforms", "transforms as data, run on a small picture", _transforms, _transform_seeds,
           (DataError,), 100, "json"),
)  # fmt: skip

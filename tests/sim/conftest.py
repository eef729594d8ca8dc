"""Small worlds for the simulator: a network of six layers, a profile, a rig file's records."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from headwater.core.cut import Cut
from headwater.core.plan import near_plan
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts, spread
from headwater.core.rig import Link
from headwater.core.spec import TensorSpec
from headwater.sim.rigfile import Nodes, RigFile, Store, Trainers, Work
from headwater.sim.world import play

pytest.importorskip("simpy")

MBIT = 1e6 / 8
SIZES = [150528, 200704, 100352, 50176, 12544, 1280]
CUTS = tuple(
    Cut(index, "input" if index == 0 else f"layer{index}", (TensorSpec("t", (size,), "float32"),), True, "", 0, 4000)
    for index, size in enumerate(SIZES)
)
PROFILE = Profile(
    Key("m", "t", "d", "n", "t", "0"),
    0.0,
    NodeCosts(1e-4, 4e-3, {"fp32": spread(20e-3, [4e-3, 4e-3, 4e-3, 4e-3, 4e-3])}, finish_s=5e-4, chunk_s=1e-3,
              encode_s_per_byte={"fp16": 1e-9}, send_s_per_byte=1e-9, group_s=5e-4),
    TrainerCosts(4e-3, (20e-3, 16e-3, 12e-3, 8e-3, 4e-3, 5e-4), finish_s=5e-4, fetch_s=1e-4, fetch_s_per_byte=2e-9,
                 receive_s_per_byte=2e-9, receive_s_per_row=1e-6, step_s=1e-3, decode_s_per_byte={"fp16": 1e-9}),
    Sizes(110e3, 150528, 602112, request_row_bytes=100, request_chunk_bytes=2000, group_bytes=300, chunk_bytes=800),
    cuts=CUTS,
)  # fmt: skip


def rig(mbit=100.0, *, num_samples=2000, batch=32, num_nodes=1, num_trainers=1, node=None, trainer=None, **more):
    link = Link(mbit * MBIT, mbit * MBIT, 1e-4)
    return RigFile(
        **{
            "trainers": (Trainers(**{"count": num_trainers, "port": link, **(trainer or {})}),),
            "job": Work(num_samples, batch),
            "nodes": (Nodes(**{"link": Link(1e9, 1e9, 1e-4), "count": num_nodes, **(node or {})}),),
            "store": Store(Link(1e9, 1e9, 1e-4)),
            **more,
        }
    )


def played(plan, file, profile=PROFILE, **more):
    return play(plan, CUTS, profile, file, **more)


@pytest.fixture(scope="session")
def sim():
    """Everything above, for tests that import nothing from each other."""
    return SimpleNamespace(rig=rig, play=played, CUTS=CUTS, PROFILE=PROFILE, MBIT=MBIT, replace=replace,
                           near=lambda cut=5, **more: near_plan(CUTS[cut], **{"chunk_rows": 32, **more}))  # fmt: skip

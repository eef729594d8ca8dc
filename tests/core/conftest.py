"""Small worlds for the planner's tests: a model's cuts, a profile, a rig and a job, by hand or drawn."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st

from headwater.core.cut import Cut
from headwater.core.loads import JobSize
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts, spread
from headwater.core.rig import Device, Link, Rig
from headwater.core.spec import TensorSpec

settings.register_profile("core", deadline=None, max_examples=40)  # no test asserts a wall-clock time
settings.load_profile("core")

MBIT = 1e6 / 8
KEY = Key("model-1", "transforms-1", "data-1", "node-1", "trainer-1", "0.1.0")


def make_cuts(sizes, legal=None):
    """Cuts whose boundary is one float tensor of so many values; those from `legal` on are trainable."""
    legal = len(sizes) if legal is None else legal
    return tuple(
        Cut(index, "input" if index == 0 else f"layer{index}", (TensorSpec("t", (size,), "float32"),), index < legal,
            "" if index < legal else "trainable", 100 * index, 400 * index)
        for index, size in enumerate(sizes)
    )  # fmt: skip


def make_profile(place_s, suffix_s, *, node=None, trainer=None, sizes=None, **more):
    """Costs from the seconds of each place and of the suffix at each cut."""
    node = NodeCosts(**{"read_s": 1e-4, "decode_s": 4e-3, "finish_s": 5e-4, "group_s": 5e-4, "chunk_s": 1e-3,
                        "prefix_s": {"fp32": spread(sum(place_s), place_s)}, "send_s_per_byte": 1e-9,
                        "encode_s_per_byte": {"fp16": 1e-9, "bf16": 2e-9, "int8": 3e-9}, **(node or {})})  # fmt: skip
    trainer = TrainerCosts(**{"decode_s": 4e-3, "finish_s": 5e-4, "suffix_s": tuple(suffix_s), "step_s": 1e-3,
                              "fetch_s": 1e-4, "fetch_s_per_byte": 2e-9, "receive_s_per_byte": 2e-9,
                              "receive_s_per_row": 1e-6, "receive_s_per_chunk": 1e-4,
                              "decode_s_per_byte": {"fp16": 1e-9, "bf16": 1e-9, "int8": 1e-9},
                              **(trainer or {})})  # fmt: skip
    sizes = Sizes(**{"sample_bytes": 110e3, "pixel_row_bytes": 224 * 224 * 3, "input_row_bytes": 224 * 224 * 12,
                     "request_row_bytes": 100, "request_chunk_bytes": 2000, "group_bytes": 300, "chunk_bytes": 800,
                     "fetch_down_bytes": 300, "fetch_up_bytes": 300, **(sizes or {})})  # fmt: skip
    return Profile(**{"key": KEY, "measured_at": 1e9, "node": node, "trainer": trainer, "sizes": sizes, **more})


def make_rig(mbit=100.0, *, node_cores=1.0, trainer_cores=1.0, num_nodes=1, **more):
    nodes = tuple(Device(f"store-{number}", node_cores) for number in range(num_nodes))
    links = (Link(mbit * MBIT, mbit * MBIT, 1e-4),) * num_nodes
    return Rig(**{"nodes": nodes, "links": links, "trainer": Device("trainer", trainer_cores), **more})


# A small network, roughly: activations grow, then shrink; all but the last place is frozen; 20 ms in all.
CUTS = make_cuts([150528, 200704, 100352, 50176, 12544, 1280, 10], legal=6)
PLACE_S = [4e-3, 4e-3, 4e-3, 4e-3, 3.5e-3, 5e-4]
SUFFIX_S = [20e-3, 16e-3, 12e-3, 8e-3, 4e-3, 5e-4, 4e-4]
PROFILE = make_profile(PLACE_S, SUFFIX_S)
JOB = JobSize(5000, 32, counts_setup=False)

seconds = st.floats(0, 0.05)


@st.composite
def profiles(draw, num_places):
    place_s = draw(st.lists(seconds, min_size=num_places, max_size=num_places))
    behind = draw(st.lists(seconds, min_size=num_places + 1, max_size=num_places + 1))
    suffix_s = [sum(behind[index:]) for index in range(num_places + 1)]
    node = {"read_wait_s": draw(seconds), "decode_s": draw(seconds), "group_s": draw(seconds), "chunk_s": draw(seconds),
            "serve_s": draw(st.sampled_from([0.0, 1e-3])), "base_bytes": draw(st.integers(0, 10**8))}  # fmt: skip
    trainer = {"decode_s": draw(seconds), "finish_s": draw(seconds), "fetch_wait_s": draw(seconds),
               "receive_s_per_byte": draw(st.floats(0, 1e-7)), "step_s": draw(seconds),
               "suffix_on": draw(st.sampled_from(["host", "accelerator"]))}  # fmt: skip
    sizes = {"sample_bytes": draw(st.floats(1, 1e6))}
    return make_profile(place_s, suffix_s, node=node, trainer=trainer, sizes=sizes, export_s=draw(seconds))


rates = st.floats(1e4, 1e9)
links = st.builds(Link, rates, rates, st.floats(0, 0.2))
cores = st.sampled_from([0.25, 0.5, 1.0, 2.0, 7.0, 32.0])
speeds = st.sampled_from([0.1, 1.0, 2.0])
memories = st.none() | st.integers(1 << 20, 10**10)


@st.composite
def rigs(draw, max_nodes=3):
    count = draw(st.integers(1, max_nodes))
    nodes = tuple(Device(f"n{number}", draw(cores), draw(memories), draw(speeds), 30.0, 10.0)
                  for number in range(count))  # fmt: skip
    trainer = Device("t", draw(cores), draw(memories), 1.0, 90.0, 40.0)
    gpu = Device("gpu", 1.0, None, 1.0, 300.0, 30.0)
    own_links = tuple(draw(links) for _ in range(count))
    return Rig(nodes, own_links, trainer, gpu, draw(st.none() | links), draw(st.none() | links))


jobs = st.builds(JobSize, st.integers(1, 5000), st.integers(1, 256), st.integers(1, 3), st.booleans())


@st.composite
def worlds(draw, max_places=4):
    """(cuts, profile, rig, job) of any shape."""
    num_places = draw(st.integers(1, max_places))
    sizes = draw(st.lists(st.integers(1, 200_000), min_size=num_places + 1, max_size=num_places + 1))
    cuts = make_cuts(sizes, legal=draw(st.integers(1, num_places + 1)))
    return cuts, draw(profiles(num_places)), draw(rigs()), draw(jobs)


@pytest.fixture(scope="session")
def make():
    """Everything above, for tests that import nothing from each other."""
    return SimpleNamespace(
        cuts=make_cuts, profile=make_profile, rig=make_rig, worlds=worlds(), small_worlds=worlds(2),
        rigs=rigs(), replace=replace,
        CUTS=CUTS, PROFILE=PROFILE, JOB=JOB, KEY=KEY, MBIT=MBIT, PLACE_S=PLACE_S, SUFFIX_S=SUFFIX_S,
    )  # fmt: skip

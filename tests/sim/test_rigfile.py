"""A rig file's faults are all in one error."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sim.rigfile import RigFile, read_rig, rig_of

GOOD = """
format = "headwater-rig"
version = 1
[job]
num_samples = 1000
[[nodes]]
count = 3
cores = 4
link = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8, latency_s = 0.0002 }
[[trainers]]
port = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8 }
[store]
link = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8 }
[[faults]]
at_s = 5.0
node = "node-2"
what = "dies"
"""


def faults_of(text):
    faults = []
    rig_of(tomllib.loads(text), faults)
    return faults


def test_a_good_one_has_none_and_becomes_a_rig():
    faults = []
    file = rig_of(tomllib.loads(GOOD), faults)
    assert faults == []
    assert isinstance(file, RigFile)
    assert [node.name for node in file.priced().nodes] == ["node-1", "node-2", "node-3"]


def test_every_fault_is_told_at_once():
    text = GOOD.replace("num_samples = 1000", "num_samples = -5\nbatches = 3").replace("cores = 4", "cores = 0")
    text = text.replace("at_s = 5.0", 'at_s = "soon"').replace('"dies"', '"explodes"')
    found = "\n".join(faults_of(text))
    for word in ("num_samples", "batches", "cores", "at_s", "explodes"):
        assert word in found


@pytest.mark.parametrize(("old", "new", "word"), [
    ('format = "headwater-rig"', 'format = "headwater-plan"', "format"),
    ("version = 1", "version = 9", "version"),
    ('node = "node-2"', 'node = "node-9"', "no node is called"),
    ("count = 3", "count = 3\nidle_w = 5.0", "together"),
    ("count = 3", "count = 3\nidle_w = 50.0\nbusy_w = 5.0", "less than"),
    ("[[trainers]]", "[[trainers]]\nnodes_each = 4", "nodes_each"),
    ("[[trainers]]", '[[trainers]]\nname = "node"', ""),
    ("num_samples = 1000", "num_samples = 1000\nreduce = 'ring'", "gradient_bytes"),
    ("cores = 4", "cores = 4\nmemory_bytes = 12", "memory_bytes"),
    ("cores = 4", "cores = nan", "cores"),
    ("[store]", '[data]\nsample_bytes = 1\npixel_bytes = 1\ncosts = { node_luck_s = 1.0 }\n[store]', "node_luck_s"),
])  # fmt: skip
def test_what_makes_no_sense_is_said(old, new, word):
    assert old in GOOD
    found = faults_of(GOOD.replace(old, new, 1))
    assert word in "\n".join(found)
    assert bool(found) == bool(word)


def test_a_file_that_is_not_there_or_no_toml(tmp_path):
    faults = []
    assert read_rig(tmp_path / "none.toml", faults) is None
    (tmp_path / "bad.toml").write_text("= 3")
    assert read_rig(tmp_path / "bad.toml", faults) is None
    assert "can't be read" in faults[0]
    assert "not TOML" in faults[1]


def test_no_more_machines_are_named_than_memory_holds():
    (fault,) = faults_of(GOOD.replace("count = 3", "count = 1000000"))
    assert "1,000,001 machines" in fault


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["job", "nodes", "trainers", "store", "faults", "seed", "data", "network", "more"]), values)
def test_whatever_is_in_it_there_is_a_rig_or_a_fault(field, value):
    faults = []
    found = rig_of({**tomllib.loads(GOOD), field: value}, faults)
    assert (found is None) == bool(faults)

"""A rig survives its file, and everything wrong with one is said at once."""

import contextlib
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.rig import Device, Link, Rig
from headwater.errors import ConfigError

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_a_rig_survives_its_file(make, data):
    rig = data.draw(make.rigs)
    assert Rig.from_json(json.loads(json.dumps(rig.to_json()))) == rig


def test_a_rig_can_be_written_in_toml(make):
    text = """
        trainer = {name = "t", cores = 2}
        nodes = [{name = "store-0", cores = 0.25, memory_bytes = 1000000000}]
        links = [{down_bytes_per_s = 250000, up_bytes_per_s = 250000, latency_s = 0.001}]
    """
    rig = Rig.from_json(tomllib.loads(text))
    assert rig == Rig((Device("store-0", 0.25, 10**9),), (Link(250e3, 250e3, 1e-3),), Device("t", 2.0))
    assert None not in rig.to_json().values()


def test_every_fault_is_in_the_one_error(make):
    data = make.rig(num_nodes=2).to_json()
    data["nodes"][0]["cores"] = float("nan")
    data["nodes"][1]["memory_bytes"] = 1.5
    data["links"][0]["down_bytes_per_s"] = 0
    data["links"][1]["up_bytes_per_s"] = -5
    data["links"][1]["latency_s"] = 10**400
    data["trainer"] = {"cores": "two", "speed": True}
    data["colour"] = "blue"
    with pytest.raises(ConfigError) as caught:
        Rig.from_json(data)
    for part in ("nodes[0].cores is nan", "nodes[1].memory_bytes is 1.5; it must be a whole number",
                 "a link measured as zero", "up_bytes_per_s is -5", "latency_s is a huge number", "name is missing",
                 "cores is 'two'", "speed is True", "rig.colour is not a field"):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"links": ()}, "1 nodes but 0 links"),
        ({"nodes": (), "links": ()}, "neither a node nor a link to the store"),
        ({"nodes": (), "links": (), "trainer_reads": False}, "nobody reaches the data"),
        ({"nodes": (Device("a"), Device("a")), "links": (Link(1e6, 1e6),) * 2}, "more than one node is called a"),
    ],
)
def test_a_rig_that_makes_no_sense_is_refused(make, change, fault):
    with pytest.raises(ConfigError, match=fault):
        make.replace(make.rig(), **change)


def test_power_is_given_in_full_or_not_at_all():
    with pytest.raises(ConfigError, match="together"):
        Device("a", busy_w=10.0)
    with pytest.raises(ConfigError, match="less than idle_w"):
        Device("a", busy_w=10.0, idle_w=20.0)


@given(json_values)
def test_any_json_is_a_rig_or_a_config_error(value):
    with contextlib.suppress(ConfigError):
        Rig.from_json(value)


@given(st.data())
def test_any_field_replaced_by_anything_is_read_or_refused(make, data):
    tree = data.draw(make.rigs).to_json()
    part = data.draw(st.sampled_from([tree, tree["nodes"][0], tree["links"][0], tree["trainer"]]))
    part[data.draw(st.sampled_from(sorted(part)) | st.text(max_size=4))] = data.draw(json_values)
    with contextlib.suppress(ConfigError):
        assert isinstance(Rig.from_json(tree), Rig)


def test_a_trainer_reads_over_its_own_port_unless_told_otherwise(make):
    slow, fast = Link(1e6, 1e6, 1e-3), Link(1e8, 1e8, 1e-2)
    nodes = (Device("a"), Device("b"))
    assert Rig(nodes, (slow, fast), Device("t")).to_store == Link(1e8, 1e8, 1e-3)
    assert Rig(nodes, (fast, fast), Device("t"), trainer_link=slow).to_store == slow
    assert Rig(nodes, (fast, fast), Device("t"), trainer_link=fast, store_link=slow).to_store == slow

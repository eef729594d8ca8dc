"""Steps of training in virtual time: a partitioned model, and sums that overlap with the backward pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sim.layers import Layer
from headwater.sim.overlap import Sums, overlapped, slowdown
from headwater.sim.partition import Setting, best, clean_cuts, step
from headwater.sim.rigfile import RING, SWITCH, Chip

CHIP = Chip(flops_per_s={"other": 1e12})
LAYERS = [
    Layer("one", 0, 0, 4e5, 1e4, "conv", 1e9),
    Layer("two", 0, 0, 1e5, 1e5, "conv", 2e9),
    Layer("three", 0, 0, 1e4, 1e7, "conv", 1e9),
]


def test_a_step_is_the_sum_of_its_parts():
    """T(k): near, over, here, back, near, sum; nothing overlaps."""
    setting = Setting(LAYERS, [CHIP] * 4, CHIP, 1e9, 64, 6e5)
    found = step(setting, 2)
    near, here = 16 * 3 * 3e9 / 1e12, 64 * 3 * 1e9 / 1e12
    over = 2 * 64 * 1e5 / 1e9
    sums = 2 * 3 / 4 * 4 * (1e4 + 1e5) / 1e9
    assert found.seconds == pytest.approx(near + here + over + sums, rel=1e-6)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


def test_the_best_cut_is_no_worse_than_none():
    for rate in (1e7, 1e9, 1e11):
        found, none = best(Setting(LAYERS, [CHIP], CHIP, rate, 64, 6e5), [0, 1, 2, 3])
        assert found.seconds <= none.seconds


def test_a_residual_block_is_cut_at_its_end_alone():
    names = ["conv1", "layer1.0.conv1", "layer1.0.relu", "layer1.1.conv1", "fc"]
    assert clean_cuts([Layer(name, 0, 0, 1, 1) for name in names]) == [1, 3, 4, 5]


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.9), st.floats(0, 0.9))
def test_beside_a_sum_nothing_is_faster_and_what_it_takes_bounds_it(by_flops, by_memory, cores, memory):
    factor = slowdown(by_flops, by_memory, cores, memory)
    assert 1 <= factor <= 1 / (1 - max(cores, memory)) + 1e-9


def test_sums_beside_the_backward_pass_slow_it_and_a_switch_relieves_it():
    chip = Chip(flops_per_s={"other": 1e12}, memory_bytes_per_s=1e11)
    none = overlapped(LAYERS, chip, 32, 8, 1e9, None)
    ring = overlapped(LAYERS, chip, 32, 8, 1e9, Sums(RING, 0.2, 3.0), bucket_bytes=1e5)
    switch = overlapped(LAYERS, chip, 32, 8, 1e9, Sums(SWITCH, 0.02, 2.0), bucket_bytes=1e5)
    assert none.slowdown == pytest.approx(0)
    assert 0 < switch.slowdown < ring.slowdown <= 0.25
    assert ring.sums_s == pytest.approx(2 * 7 / 8 * switch.sums_s)
    assert none.step_s < switch.step_s < ring.step_s


def test_a_step_of_minutes_ends_as_well():
    """Where a clock of 64 bits can't tell the last bit of a layer's time."""
    layers = [Layer(str(number), 0, 0, 1e6, 1e7, "conv", 1e12 * (1 + 0.37 * number)) for number in range(30)]
    chip = Chip(flops_per_s={"other": 1e12}, memory_bytes_per_s=1e11)
    found = overlapped(layers, chip, 3, 4, 1e7, Sums(RING, 0.2, 3.0))
    assert found.backward_alone_s > 1000
    assert found.backward_alone_s <= found.backward_s <= 1.25 * found.backward_alone_s + 1e-6


def test_what_no_computation_hides_is_waited_for():
    found = overlapped(LAYERS, CHIP, 1, 2, 1e6, Sums(SWITCH, 0.0, 0.0), bucket_bytes=1e9)
    assert found.exposed_s == pytest.approx(sum(each.weight_bytes for each in LAYERS) / 1e6)

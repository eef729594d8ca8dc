"""The bound of `bench offload`: plain arithmetic on measured stages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench.peers.stages import CutStages, Stages, bound

STAGES = Stages(
    near_read_s=0.001,
    near_pixels_s=0.003,
    near_floats_s=0.0,
    near_prefix_s=0.012,
    store_s=0.001,
    fetch_s=0.001,
    pixels_s=0.003,
    forward_s=0.020,
    far_floats_s=0.0,
    far_prefix_s=10.0,  # the trainer has no engine worth the name; see the last test
    step_s=0.001,
    send_s_per_byte=0.0,
    receive_s_per_byte=0.0,
    jpeg_bytes=20_000,
    pixel_bytes=150_000,
    storage_beside=1.0,
    trainer_beside=1.0,
    cuts=(CutStages("middle", 0.5, 0.5, 60_000), CutStages("last", 1.0, 0.0, 2_500)),
)


def test_a_thin_link_is_the_limit_of_the_smallest_rows() -> None:
    found = bound(STAGES, 125_000)
    assert found.per_s == pytest.approx(125_000 / 2_500)
    assert (found.placement, found.limited_by) == ("features at last", "link")


def test_without_a_cut_in_the_middle_the_storage_core_is_the_limit_of_a_fast_link() -> None:
    found = bound(replace(STAGES, cuts=STAGES.cuts[1:]), 125e6)
    assert found.per_s == pytest.approx(1 / 0.016)
    assert (found.placement, found.limited_by) == ("features at last", "storage core")


def test_a_cut_in_the_middle_uses_both_cores_where_the_link_is_fast() -> None:
    found = bound(STAGES, 125e6)
    assert found.per_s == pytest.approx(1 / 0.011)
    assert (found.placement, found.limited_by) == ("features at middle", "trainer's core")


def test_a_slow_storage_core_leaves_the_work_on_the_trainer() -> None:
    found = bound(replace(STAGES, near_prefix_s=1.0, near_pixels_s=1.0), 125e6)
    assert found.per_s == pytest.approx(1 / 0.025)
    assert (found.placement, found.limited_by) == ("all on the trainer", "trainer's core")


def test_pixels_from_the_node_win_where_the_link_is_free_and_the_model_light() -> None:
    found = bound(replace(STAGES, forward_s=0.004, pixels_s=0.010, near_prefix_s=0.1), 125e6)
    assert found.per_s == pytest.approx(1 / 0.005)
    assert found.placement == "pixels from the node"


def test_what_crosses_costs_both_cores() -> None:
    dear = replace(STAGES, send_s_per_byte=1e-7, receive_s_per_byte=2e-7)
    found = bound(replace(dear, cuts=STAGES.cuts[1:], near_prefix_s=0.001), 125e6)
    assert found.per_s == pytest.approx(1 / (0.005 + 2_500 * 1e-7))
    assert bound(dear, 125e6).per_s < bound(STAGES, 125e6).per_s


def test_cores_that_slow_each_other_down_give_less_together_and_as_much_alone() -> None:
    slowed = replace(STAGES, storage_beside=1.5, trainer_beside=1.5)
    only_last = replace(slowed, cuts=STAGES.cuts[1:])
    assert bound(only_last, 125e6).per_s == pytest.approx(1 / (0.016 * (1 + 0.5 * 0.001 * 1.5 / 0.016)), rel=0.05)
    both, free = bound(slowed, 125e6), bound(STAGES, 125e6)
    assert free.per_s / 1.5 < both.per_s < free.per_s
    assert bound(slowed, 125_000).per_s == bound(STAGES, 125_000).per_s, "a thin link does not care"


def test_an_engine_on_the_trainer_takes_a_share_where_both_have_time() -> None:
    alike = replace(STAGES, far_prefix_s=0.012, cuts=STAGES.cuts[1:])
    found = bound(alike, 125e6)
    alone = bound(replace(STAGES, cuts=STAGES.cuts[1:]), 125e6)
    assert "made on the trainer" in found.placement
    assert 1.7 * alone.per_s < found.per_s < 2 * alone.per_s
    thin = bound(alike, 125_000)
    assert thin.per_s == pytest.approx(125_000 / 2_500), "JPEGs would only take from the rows"

"""Which cut is taken: the cost of a step, and that nodes are used only where they help."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.partition_cost import CutCosts, StepCosts, fastest, plans, shares_of, step_s
from headwater.core.partition_plan import NODES, TRAINER, PartitionPlan
from headwater.errors import ConfigError, PlanError


def costs(link=1e9, node=1.0, here_read_s=1e-4, **changes):
    """A model of two blocks of 1 ms a row on the trainer; a node takes `node` times as long."""
    cuts = (
        CutCosts(0, "input", (0.0, 0.0), (0.0, 0.0), 6e-3, {"raw": 12_000}, {"raw": 0}, 0),
        CutCosts(1, "half", (node * 1e-3,) * 2, (node * 2e-3,) * 2, 3e-3, {"raw": 8_000, "fp16": 4_000},
                 {"raw": 8_000, "fp16": 4_000}, 100_000, 2),
    )  # fmt: skip
    return StepCosts(**{"batch_size": 512, "cuts": cuts, "node_pixels_s": (1e-3, 1e-3), "links": ((link, link),) * 2,
                        "port": (link, link), "latency_s": 1e-4, "here_read_s": here_read_s, "here_pixels_s": 1e-3,
                        "may_split": True, **changes})  # fmt: skip


def best(found, codecs=("raw",)):
    return fastest(found, codecs)[0][1]


def test_nodes_take_what_they_can_where_links_are_fast():
    assert best(costs()).cut_name == "half"
    assert best(costs()).micro_batches > 1


def test_nothing_moves_where_nodes_are_slow_and_the_store_is_near():
    assert best(costs(node=50.0, node_pixels_s=(0.05, 0.05))).place == TRAINER


def test_a_slow_link_wants_the_fewest_bytes():
    slow = costs(link=1e5, here_read_s=0.5)
    assert best(slow, ("raw", "fp16")).codec == "fp16"


def test_a_codec_with_an_error_is_left_where_it_saves_nothing():
    assert best(costs(), ("raw", "fp16")).codec == "raw"


def test_micro_batches_cost_less_than_turns_and_whole_batches_allow_none():
    split, whole = costs(), costs(may_split=False)
    one, four = (PartitionPlan(NODES, 1, "half", "raw", count) for count in (1, 4))
    assert step_s(split, four) < step_s(split, one)
    assert step_s(whole, four) == step_s(whole, one)
    assert all(plan.micro_batches == 1 for plan in plans(whole, ("raw",)))


def test_shares_are_as_large_as_nodes_are_fast():
    uneven = costs(node_pixels_s=(1e-3, 5e-3))
    one, other = shares_of(uneven, uneven.cuts[1])
    assert one / other == pytest.approx(8 / 4, rel=0.01)


@given(st.floats(1e4, 1e10), st.floats(0.1, 100), st.floats(1e-6, 1), st.booleans())
def test_the_choice_is_never_estimated_slower_than_moving_nothing(link, node, read_s, may_split):
    found = costs(link, node, read_s, may_split=may_split)
    chosen = best(found, ("raw", "fp16"))
    assert step_s(found, chosen) <= step_s(found, PartitionPlan(TRAINER, 0, "input"))


def test_where_the_trainer_can_not_read_the_data_nodes_are_used():
    assert best(costs(node=1000.0, here_read_s=None)).place == NODES


def test_a_plan_survives_its_json_and_tells_all_its_faults_at_once():
    plan = PartitionPlan(NODES, 1, "half", "fp16", 4, (0.5, 0.5))
    assert PartitionPlan.from_json(plan.to_json()) == plan
    plan.check(2, 2)
    with pytest.raises(PlanError) as raised:
        PartitionPlan("moon", 9, "half", "int8", 0, (1.0,), 99).check(2, 2)
    assert len(raised.value.faults) == 6
    with pytest.raises(ConfigError):
        PartitionPlan.from_json({**plan.to_json(), "version": 2})

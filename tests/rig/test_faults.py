"""An epoch held against the undisturbed one: what is lost, doubled, out of order or off is seen."""

import pytest
from bench.faults import held as held_against
from bench.soak import growth

RIGHT = {"ids": [3, 1, 2, 0], "losses": [2.0, 1.0], "stopped": ""}


@pytest.fixture
def held():
    return lambda **changes: held_against("a fault", RIGHT, 0.0, 1.0, {**RIGHT, **changes}, [])


def test_the_same_epoch_is_right(held):
    run = held()
    assert run.is_right
    assert run.loss_diff == 0


def test_what_is_lost_and_what_comes_twice_are_counted_apart(held):
    run = held(ids=[3, 1, 1, 2])
    assert (run.num_lost, run.num_doubled, run.is_right) == (1, 1, False)


def test_another_order_is_not_right(held):
    run = held(ids=[1, 3, 2, 0])
    assert (run.num_lost, run.num_doubled, run.is_right) == (0, 0, False)


def test_the_largest_relative_difference_of_a_loss_counts(held):
    assert held(losses=[2.0, 1.001]).loss_diff == pytest.approx(1e-3)
    assert held(losses=[2.0]).loss_diff == float("inf")


def test_growth_is_of_the_last_quarter_against_the_second():
    assert growth([9.0] * 5 + [2.0] * 5 + [7.0] * 5 + [3.0] * 5) == pytest.approx(0.5)

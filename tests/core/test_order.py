"""The order visits each sample once, whatever the sizes, and can be left and taken up anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.order import Dealing, Order
from headwater.errors import ConfigError

dealings = st.builds(
    lambda world, extra, batch: Dealing(world + extra, batch, world),
    st.integers(1, 9),
    st.integers(0, 300),
    st.integers(1, 40),
)


@given(st.integers(0, 500), st.integers(0, 2**63 - 1), st.integers(0, 50), st.text(max_size=8))
def test_an_epoch_is_a_permutation(num_samples, seed, epoch, fingerprint):
    ids = Order(num_samples, fingerprint, seed).epoch(epoch)
    assert sorted(ids.tolist()) == list(range(num_samples))


def test_order_depends_on_fingerprint_seed_and_epoch_alone():
    base = Order(1000, "a", 1).epoch(0)
    assert np.array_equal(base, Order(1000, "a", 1).epoch(0))
    for other in (Order(1000, "b", 1).epoch(0), Order(1000, "a", 2).epoch(0), Order(1000, "a", 1).epoch(1)):
        assert not np.array_equal(base, other)


def test_order_is_the_one_written_down_here():
    """A change of NumPy, platform or code that moves one sample breaks every saved run."""
    assert Order(10, "headwater", 7).epoch(3).tolist() == [9, 6, 3, 7, 0, 4, 8, 1, 5, 2]


def test_without_shuffle_samples_come_as_listed():
    assert Order(5, "a", 0, shuffle=False).epoch(9).tolist() == [0, 1, 2, 3, 4]


@given(dealings)
def test_steps_cover_the_epoch_exactly_once(dealing):
    seen = [entry for step in dealing.steps() for entry in range(step.start, step.stop)]
    assert seen == list(range(dealing.num_samples))


@given(dealings)
def test_slices_cover_each_step_and_nobody_is_left_out(dealing):
    for step in dealing.steps():
        slices = [step.slice(rank, dealing.world) for rank in range(dealing.world)]
        assert [entry for start, stop in slices for entry in range(start, stop)] == list(range(step.start, step.stop))
        assert all(stop > start for start, stop in slices)
        limit = dealing.batch_size if dealing.batch_size > 1 else 2
        assert all(stop - start <= limit for start, stop in slices)


@given(dealings)
def test_num_steps_counts_what_steps_yields(dealing):
    steps = list(dealing.steps())
    assert dealing.num_steps() == len(steps)
    for done, step in enumerate(steps):
        assert dealing.num_steps(step.start) == len(steps) - done


@given(dealings, st.data())
def test_a_run_may_change_its_number_of_trainers_at_any_step(dealing, data):
    position, seen = 0, []
    while True:
        world = data.draw(st.integers(1, 9))
        if dealing.num_samples - position < world:
            world = 1
        step = Dealing(dealing.num_samples, dealing.batch_size, world).step_at(position)
        if step is None:
            break
        for rank in range(world):
            seen += range(*step.slice(rank, world))
        position = step.stop
    assert seen == list(range(dealing.num_samples))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 5))
def test_drop_last_gives_full_batches_only(num_samples, batch, world):
    if num_samples < world:
        return
    dealing = Dealing(num_samples, batch, world, drop_last=True)
    steps = list(dealing.steps())
    assert all(step.stop - step.start == batch * world for step in steps)
    assert len(steps) == dealing.num_steps() == num_samples // (batch * world)


@given(st.integers(1, 300), st.integers(1, 40))
def test_one_trainer_gets_the_batches_of_a_plain_loader(num_samples, batch):
    sizes = [step.stop - step.start for step in Dealing(num_samples, batch).steps()]
    plain = [min(batch, num_samples - start) for start in range(0, num_samples, batch)]
    assert sizes == plain


def test_more_trainers_than_samples_is_an_error_that_names_the_limit():
    with pytest.raises(ConfigError, match="at most 3 trainers"):
        Dealing(3, 8, 4)


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ConfigError, match="2\\*\\*63"):
        Order(3, "a", -1)


def test_resuming_with_more_trainers_than_samples_left_is_an_error_not_a_hang():
    with pytest.raises(ConfigError, match="at most 2 trainers"):
        Dealing(10, 2, 3).step_at(8)

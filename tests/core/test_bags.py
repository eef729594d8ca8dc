"""Bags: sums and gradients are those of the definition, and bits don't depend on the company."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.bags import Bags, Sorting, as_bags, gradients, pool, step
from headwater.core.table import TableSpec


@st.composite
def bags_of(draw, most=60, empty=False):
    lengths = draw(st.lists(st.integers(0 if empty else 1, 6), min_size=1, max_size=12))
    if draw(st.booleans()):
        lengths = [draw(st.integers(1, 6))] * len(lengths)
    ids = draw(st.lists(st.integers(0, most - 1), min_size=sum(lengths), max_size=sum(lengths)))
    weights = np.linspace(0.5, 2, len(ids)) if draw(st.booleans()) else None
    return Bags(np.array(ids, np.int64), np.array(lengths, np.int64), weights)


TABLE = np.random.default_rng(0).normal(size=(60, 5))


@given(bags_of())
def test_a_bag_is_the_sum_of_its_vectors(bags):
    weights = np.ones(len(bags.ids)) if bags.weights is None else bags.weights
    expected = [(TABLE[bags.ids[start : start + length]] * weights[start : start + length, None]).sum(0)
                for start, length in zip(bags.starts, bags.lengths, strict=True)]  # fmt: skip
    np.testing.assert_allclose(pool(TABLE[bags.ids], bags), expected, rtol=1e-12, atol=1e-12)


@given(bags_of())
def test_a_vectors_gradient_is_the_sum_of_those_of_the_bags_it_is_in(bags):
    pooled = np.random.default_rng(1).normal(size=(len(bags), 5))
    weights = np.ones(len(bags.ids)) if bags.weights is None else bags.weights
    expected = np.zeros_like(TABLE)
    np.add.at(expected, bags.ids, pooled[np.repeat(np.arange(len(bags)), bags.lengths)] * weights[:, None])
    sorting = Sorting.of(bags.ids)
    assert sorting.unique.tolist() == sorted(set(bags.ids.tolist()))
    np.testing.assert_array_equal(sorting.unique[sorting.inverse], bags.ids)
    np.testing.assert_allclose(gradients(bags, sorting, pooled), expected[sorting.unique], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [1, 5])
@given(bags=bags_of(), data=st.data())
def test_some_bags_have_the_bits_that_they_have_among_all(dim, bags, data):
    which = np.array(sorted(data.draw(st.sets(st.integers(0, len(bags) - 1)))), np.int64)
    table = TABLE[:, :dim].astype(np.float32)
    some = bags.some(which)
    np.testing.assert_array_equal(pool(table[some.ids], some), pool(table[bags.ids], bags)[which])


def test_long_runs_have_the_same_bits_in_any_company():
    generator = np.random.default_rng(0)
    lengths = np.array([300, 3, 1000, 1, 256, 257])
    bags = Bags(generator.integers(0, 60, lengths.sum()), lengths)
    table = TABLE.astype(np.float32)
    alone = [pool(table[some.ids], some)[0] for some in (bags.some(np.array([each])) for each in range(len(bags)))]
    np.testing.assert_array_equal(pool(table[bags.ids], bags), alone)


@given(bags_of(), st.integers(1, 5))
def test_parts_add_up_to_the_whole(bags, num_parts):
    total = np.zeros((len(bags), 5))
    for part in range(num_parts):
        own, which = bags.of_part(part, num_parts)
        assert (own.lengths > 0).all()
        total[which] += pool(TABLE[own.ids * num_parts + part], own)
    np.testing.assert_allclose(total, pool(TABLE[bags.ids], bags), rtol=1e-12, atol=1e-12)


@given(bags_of(empty=True), st.none() | st.integers(0, 59))
def test_empty_bags_and_the_skipped_id_are_left_out(given_, skip):
    bags, which, lengths = as_bags(given_.ids, given_.starts, given_.weights, skip)
    start, kept = 0, []
    for length in given_.lengths:
        kept.append([each for each in given_.ids[start : start + length].tolist() if each != skip])
        start += length
    assert lengths.tolist() == [len(each) for each in kept]
    assert which.tolist() == [place for place, each in enumerate(kept) if each]
    assert bags.ids.tolist() == [each for bag in kept for each in bag]
    assert bags.weights is None or len(bags.weights) == len(bags.ids)


def test_a_step_is_that_of_the_books():
    grads = np.array([[1.0, 2, 3, 4], [0, 0, 0, 2]])
    vectors, state = np.ones((2, 4)), np.array([0.0, 3])
    step(TableSpec(2, 4, "float64"), 0.1, vectors, None, grads.copy())
    np.testing.assert_allclose(vectors, 1 - 0.1 * grads)
    vectors = np.ones((2, 4))
    step(TableSpec(2, 4, "float64", "rowwise_adagrad", 0.0), 0.1, vectors, state, grads.copy())
    np.testing.assert_allclose(state, [7.5, 4])
    np.testing.assert_allclose(vectors, 1 - 0.1 * grads / np.sqrt(state)[:, None])


@given(bags_of())
def test_vectors_that_lie_elsewhere_are_added_as_if_there_was_one_for_each_id(bags):
    """Whether rows lie side by side or among others."""
    table = TABLE.astype(np.float32)
    wide = np.concatenate([table, table], axis=1)[:, :5]
    weights = None if bags.weights is None else bags.weights.astype(np.float32)
    bags = Bags(bags.ids, bags.lengths, weights)
    expected = pool(table[bags.ids], bags)
    np.testing.assert_array_equal(pool(table, bags, bags.ids), expected)
    np.testing.assert_array_equal(pool(wide, bags, bags.ids), expected)

"""Tables: who has which vector, and what it is before anybody trained it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.table import TableSpec, initial, part_of, place_of
from headwater.errors import ConfigError


@given(st.integers(1, 500), st.integers(1, 7))
def test_every_vector_is_in_one_part_at_one_place(num, num_parts):
    spec, ids = TableSpec(num, 4, num_parts=num_parts), np.arange(num)
    where = sorted(zip(part_of(ids, num_parts).tolist(), place_of(ids, num_parts).tolist(), strict=True))
    assert where == [(part, place) for part in range(num_parts) for place in range(spec.num_in(part))]
    for part in range(num_parts):
        own = spec.ids_of(part, np.arange(spec.num_in(part)))
        assert (part_of(own, num_parts) == part).all()
        assert (place_of(own, num_parts) == np.arange(len(own))).all()


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 5))
def test_a_table_that_grows_moves_no_vector(before, more, num_parts):
    small, large = TableSpec(before, 4, num_parts=num_parts), TableSpec(before + more, 4, num_parts=num_parts)
    assert all(small.num_in(part) <= large.num_in(part) for part in range(num_parts))
    np.testing.assert_array_equal(initial(small, np.arange(before)), initial(large, np.arange(before)))


@pytest.mark.parametrize("init", ["normal", "uniform", "zeros"])
@given(ids=st.lists(st.integers(0, 2**39), min_size=1, max_size=50))
def test_a_vector_begins_with_the_same_value_in_any_company(init, ids):
    spec = TableSpec(2**40, 6, init=init, seed=3)
    together = initial(spec, np.array(ids))
    for place, each in enumerate(ids):
        np.testing.assert_array_equal(initial(spec, np.array([each]))[0], together[place])


def test_initial_values_are_distributed_as_they_say():
    ids = np.arange(20_000)
    normal, uniform = (
        initial(TableSpec(20_000, 16, "float64", init=init, scale=0.5), ids) for init in ("normal", "uniform")
    )
    assert abs(normal.mean()) < 0.005
    assert abs(normal.std() - 0.5) < 0.005
    assert abs((np.abs(normal) < 0.5).mean() - 0.6827) < 0.005
    assert -0.5 <= uniform.min() < -0.499
    assert 0.499 < uniform.max() < 0.5
    assert abs(uniform.mean()) < 0.005
    assert abs(np.corrcoef(normal[:-1, 0], normal[1:, 0])[0, 1]) < 0.02


def test_another_seed_is_another_table():
    first, second = (initial(TableSpec(100, 8, seed=seed), np.arange(100)) for seed in (0, 1))
    assert not (first == second).any()


def test_what_padding_idx_names_begins_with_zeros():
    values = initial(TableSpec(10, 3, zero_id=4), np.arange(10))
    assert (values[4] == 0).all()
    assert (np.delete(values, 4, 0) != 0).all()


@pytest.mark.parametrize("wrong", [{"num_embeddings": 0}, {"dim": -1}, {"dtype": "int8"}, {"optimizer": "lion"},
                                   {"num_parts": 0}, {"rule": "hash"}, {"scale": float("nan")}])  # fmt: skip
def test_a_table_that_can_not_be_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        TableSpec(**{"num_embeddings": 10, "dim": 4, **wrong})

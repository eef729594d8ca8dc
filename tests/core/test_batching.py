"""Memory is divided fairly, within the budget, and nobody is overtaken."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.batching import STEADY, Demand, enough, level, most, share

RATES = st.lists(st.tuples(st.integers(1, 40), st.floats(0.5, 100)), max_size=4, unique_by=lambda each: each[0])
DEMANDS = st.lists(
    st.builds(
        Demand,
        name=st.just(""),
        fixed_bytes=st.integers(0, 60),
        row_bytes=st.integers(0, 12),
        wanted=st.integers(1, 24),
        weight=st.sampled_from([0.5, 1.0, 1.0, 2.0]),
        rates=RATES.map(tuple),
        engine=st.sampled_from(["", "", "a", "b"]),
        piece=st.sampled_from([None, 1, 4]),
        beyond_bytes=st.integers(0, 3),
    ),
    max_size=6,
).map(lambda found: [replace(each, name=f"job {place}") for place, each in enumerate(found)])


def total(demands, rows):
    """What these take with groups of so many rows; an engine that several use counts once."""
    engines = {each.engine or each.name: 0 for each in demands}
    for each in demands:
        engines[each.engine or each.name] = max(engines[each.engine or each.name], each.fixed_bytes)
    return sum(engines.values()) + sum(each.num_bytes(rows[each.name]) - each.fixed_bytes for each in demands)


@given(DEMANDS, st.integers(0, 400))
def test_the_sum_is_within_the_budget_and_everyone_is_somewhere(demands, budget):
    found = share(demands, budget)
    by_name = {each.name: each for each in demands}
    inside = [by_name[name] for name in found.rows]
    assert total(inside, found.rows) == found.used_bytes <= budget
    assert sorted([*found.rows, *found.waiting, *found.too_large]) == sorted(by_name)
    assert all(1 <= rows <= most(by_name[name]) <= by_name[name].wanted for name, rows in found.rows.items())


@given(DEMANDS, st.integers(0, 400))
def test_nobody_is_overtaken_and_only_what_never_fits_is_passed_by(demands, budget):
    found = share(demands, budget)
    assert all(demands[int(name.split()[1])].num_bytes(1) > budget for name in found.too_large)
    places = {name: place for place, name in enumerate(each.name for each in demands)}
    if found.waiting:
        assert max((places[name] for name in found.rows), default=-1) < min(places[name] for name in found.waiting)
        tried = [demands[places[name]] for name in (*found.rows, found.waiting[0])]
        assert total(tried, dict.fromkeys(places, 1)) > budget


@given(DEMANDS, st.integers(0, 400))
def test_nobody_can_be_raised_at_the_cost_of_those_who_are_better_off(demands, budget):
    found = share(demands, budget)
    inside = [each for each in demands if each.name in found.rows]
    for each in inside:
        rows = found.rows[each.name]
        if rows >= enough(each):
            continue
        own = level(each, rows)

        def fewest(other, own=own):
            """The fewest rows with which the other is still better off."""
            have = found.rows[other.name]
            return next((rows for rows in range(1, have + 1) if level(other, rows) > own), have)

        assert total(inside, {other.name: fewest(other) for other in inside} | {each.name: rows + 1}) > budget


@given(DEMANDS, st.integers(0, 400), st.integers(0, 100))
def test_more_memory_makes_the_worst_off_no_worse(demands, budget, more):
    before, after = share(demands, budget), share(demands, budget + more)
    if before.waiting != after.waiting or before.too_large != after.too_large:
        return  # somebody got in, who has to have something
    by_name = {each.name: each for each in demands}

    def worst(found):
        return min((level(by_name[name], rows) for name, rows in found.rows.items()), default=0.0)

    assert worst(after) >= worst(before)


def test_equal_tenants_get_equal_shares_where_a_greedy_one_leaves_the_last_with_crumbs():
    demands = [Demand(f"job {number}", 100, 1, 1000) for number in range(4)]
    found = share(demands, 400 + 3057)  # handed out in turn: 1000, 1000, 1000, 57
    assert sorted(found.rows.values()) == [764, 764, 764, 765]


def test_a_weight_of_two_gets_twice_as_near_to_its_best():
    demands = [Demand("light", 0, 1, 100), Demand("heavy", 0, 1, 100, weight=2.0)]
    assert share(demands, 90).rows == {"light": 30, "heavy": 60}


def test_a_group_stops_growing_where_more_rows_bring_nothing():
    demand = Demand("job", 10, 1, 512, rates=((1, 50.0), (48, 98.0), (64, 100.0), (512, 100.0)))
    assert share([demand], 10_000).rows == {"job": 48}


def test_groups_grow_to_a_steady_size_only_from_what_nobody_needs_for_speed():
    quick = Demand("quick", 10, 1, 64, rates=((1, 50.0), (8, 100.0)))
    hungry = Demand("hungry", 10, 1, 64, rates=((1, 1.0), (64, 64.0)))
    assert share([quick], 10_000).rows == {"quick": STEADY}
    assert share([quick, hungry], 20 + 8 + 63).rows == {"quick": 8, "hungry": 63}


def test_rows_beyond_those_that_go_through_the_engine_at_once_take_less():
    demand = Demand("job", 10, 20, 64, piece=4, beyond_bytes=1)
    assert share([demand], 10 + 4 * 20 + 8).rows == {"job": 12}


def test_tenants_of_one_engine_pay_for_it_once():
    demands = [Demand(f"job {number}", 100, 1, 8, engine="resnet") for number in range(3)]
    found = share(demands, 124)
    assert found.rows == {each.name: 8 for each in demands}
    assert found.used_bytes == 124


def test_who_gets_less_memory_a_row_does_not_get_less_speed():
    demands = [Demand("small", 0, 1, 10), Demand("large", 0, 9, 10)]
    assert share(demands, 50).rows == {"small": 5, "large": 5}


def test_a_tenant_that_could_not_run_alone_holds_nobody_up():
    found = share([Demand("huge", 1000, 1, 8), Demand("job", 10, 1, 8)], 100)
    assert found.too_large == ("huge",)
    assert found.rows == {"job": 8}


def test_those_inside_stay_inside_when_another_comes():
    first = [Demand(f"job {number}", 30, 2, 8) for number in range(3)]
    later = [*first, Demand("late", 30, 2, 8)]
    found = share(later, 3 * 32 + 20)
    assert found.waiting == ("late",)
    assert set(found.rows) == {each.name for each in first}


@pytest.mark.parametrize("wanted", [1, 7])
def test_without_measured_rates_all_that_is_wanted_is_enough(wanted):
    assert enough(Demand("job", 0, 1, wanted)) == wanted

"""One place that hangs leaves room for the others."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.places import Places


@given(st.integers(1, 5), st.booleans(), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_place_ever_has_more_than_its_part(most, are_several, events):
    places, inside = Places(most, are_several), dict.fromkeys("abc", 0)
    for place, comes in events:
        if comes:
            may = places.may(place)
            assert may == (inside[place] < most and sum(inside.values()) < places.total)
            if may:
                places.take(place)
            inside[place] += may
        elif inside[place]:
            places.give(place)
            inside[place] -= 1
    assert max(inside.values()) <= most
    assert sum(inside.values()) <= (2 * most if are_several else most)


@given(st.integers(1, 48), st.integers(0, 200))
def test_another_place_gets_in_however_many_of_one_never_leave(most, tries):
    places = Places(most, are_several=True)
    for _ in range(tries):
        if places.may("dead"):
            places.take("dead")
    for _ in range(most):
        places.take("another")

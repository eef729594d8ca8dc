"""Counts by tenant: as many names as there may be, and nothing lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.tally import OTHERS, Tally


@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from("abcdefg"), st.sampled_from("xy"), st.integers(0, 9))))
def test_names_are_bounded_and_everything_is_counted(most, happened):
    tally, by_kind = Tally(most), Counter()
    for tenant, kind, amount in happened:
        tally.add("rows", tenant, kind, amount=amount)
        by_kind[kind] += amount
    found = tally.items()
    names = {labels[0] for _, labels, _ in found}
    assert len(names - {OTHERS}) <= most
    for kind in "xy":
        assert sum(amount for _, labels, amount in found if labels[1] == kind) == by_kind[kind]


def test_the_first_keep_their_names():
    tally = Tally(2)
    for tenant in ("one", "two", "three", "one", "four"):
        tally.add("rows", tenant)
    assert tally.items() == [("rows", (OTHERS,), 2), ("rows", ("one",), 2), ("rows", ("two",), 1)]


def test_what_is_put_replaces_what_was_there():
    tally = Tally()
    tally.put("group", "one", amount=8)
    tally.put("group", "one", amount=2)
    assert tally.items() == [("group", ("one",), 2)]

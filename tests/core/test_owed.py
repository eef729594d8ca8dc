"""Nodes that live and get nothing done: told of, then given up; nobody else ever is."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.owed import GivenUp, Late, Owed


def times_of(owed, stop, start=0):
    """What is decided from second to second."""
    return [each for now in range(start, stop) for each in owed.overdue(float(now))]


def test_who_owes_an_answer_is_told_of_after_each_patience_and_given_up_after_ten():
    owed = Owed(60.0)
    owed.asked(1, 0.0)
    found = times_of(owed, 602)
    assert [each.silent_s for each in found if isinstance(each, Late)] == [61.0 * times for times in range(1, 10)]
    assert found[-1] == GivenUp(1, 601.0)
    assert sum(isinstance(each, GivenUp) for each in found) == 1


def test_who_has_answered_or_waits_for_others_is_not_late_however_long():
    owed = Owed(60.0)
    for node in (1, 2):
        owed.asked(node, 0.0)
    owed.answered(1)
    owed.holds(2)  # at a batch-norm, where the others have not come
    assert times_of(owed, 5000) == []
    owed.goes_on(2, 5000.0)
    assert times_of(owed, 5061, 5000) == []
    assert owed.overdue(5061.0) == [Late(2, 61.0)]


def test_a_word_other_than_a_sign_of_life_counts_as_going_on():
    """Such as that rows wait for a quota, or that a large message of ours was sent."""
    owed = Owed(60.0)
    owed.asked(1, 0.0)
    for now in range(0, 5000, 50):
        assert owed.overdue(float(now)) == []
        owed.heard(1, float(now))
    owed.heard(1, 3.0)  # news of long ago change nothing
    assert owed.overdue(5000.0) == []


@given(st.lists(st.tuples(st.sampled_from(["asked", "answered", "heard", "holds", "goes_on"]), st.integers(0, 2),
                          st.integers(0, 300))))  # fmt: skip
def test_only_who_owes_is_late_and_only_for_as_long_as_it_was_silent(events):
    owed, due, held, word, now = Owed(10.0), [0] * 3, set(), [0.0] * 3, 0.0
    for what, node, pause in events:
        now += pause
        for each in owed.overdue(now):
            assert due[each.node]
            assert each.node not in held
            assert each.silent_s <= now - word[each.node]
            assert isinstance(each, GivenUp) == (each.silent_s > 100.0)
        if what == "answered":
            due[node] = max(0, due[node] - 1)
            owed.answered(node)
        elif what == "holds":
            held.add(node)
            owed.holds(node)
        else:
            if what == "goes_on":
                held.discard(node)
            if what != "asked" or not due[node]:
                word[node] = now
            due[node] += what == "asked"
            getattr(owed, what)(node, now)

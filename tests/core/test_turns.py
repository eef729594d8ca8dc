"""Turns: as many at once as there may be, and a stalled stream holds nobody up."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.turns import MOST_STALLED, Turns

STALLED_S = 10.0
events = st.lists(st.tuples(st.sampled_from(["take", "wait", "go on", "give back"]), st.integers(0, 50),
                            st.floats(0.0, 15.0)), max_size=80)  # fmt: skip


@given(st.integers(1, 4), events)
def test_no_more_get_in_than_may_and_whoever_finds_room_does(most, happened):
    turns, now = Turns(most, STALLED_S), 0.0
    held = {}  # turn → since when it waits
    for what, which, passed in happened:
        now += passed
        if what == "take":
            working = sum(since is None or now - since <= STALLED_S for since in held.values())
            turn = turns.take(now)
            assert (turn is not None) == (working < most and len(held) < MOST_STALLED * most)
            if turn is not None:
                assert turn not in held
                held[turn] = None
        elif held:
            turn = sorted(held)[which % len(held)]
            if what == "wait":
                held[turn] = now
                turns.waits(turn, now)
            elif what == "go on":
                held[turn] = None
                turns.goes_on(turn)
            else:
                del held[turn]
                turns.give_back(turn)
        assert turns.num_working(now) == sum(since is None or now - since <= STALLED_S for since in held.values())


def test_a_stalled_stream_lends_its_turn_and_a_slow_one_does_not():
    turns = Turns(1, STALLED_S)
    first = turns.take(0.0)
    turns.waits(first, 0.0)
    assert turns.take(STALLED_S) is None
    second = turns.take(STALLED_S + 0.1)
    assert second is not None
    turns.goes_on(first)
    turns.give_back(second)
    assert turns.take(20.0) is None
    turns.give_back(first)
    assert turns.take(20.0) is not None


def test_a_job_with_many_chunks_holds_up_no_other_job():
    turns = Turns(2, STALLED_S)
    assert [turns.take(0.0, "greedy") for _ in range(3)][-1] is None
    assert turns.take(0.0, "other") is not None

"""Every way a node can stop, six events long: nothing new begins, nothing is waited for too long."""

import itertools

from headwater.core.drain import Drain, State

WITHIN_S = 2.0
EVENTS = ("begin", "finish", "told", "a second", "two seconds", "end")


def play(events):
    """What holds is looked at after every event."""
    drain, under_way, told_at, now = Drain(WITHIN_S), 0, None, 0.0
    for event in events:
        before = drain.state
        match event:
            case "begin":
                began = drain.begin()
                assert began == (before is State.SERVING)
                under_way += began
            case "finish" if under_way:
                drain.finish()
                under_way -= 1
            case "told":
                told_at = now if told_at is None else told_at
                drain.told(now)
                assert drain.state is not State.SERVING
                assert before is State.SERVING or drain.state is State.ENDED, "told twice"
            case "a second" | "two seconds":
                now += 1.0 if event == "a second" else 2.0
                drain.passed(now)
            case "end":
                drain.end("gone")
        assert list(State).index(drain.state) >= list(State).index(before), "a way back"
        assert drain.num_under_way == under_way
        assert bool(drain.why) == (drain.state is State.ENDED)
        if drain.state is State.DRAINING:
            assert under_way > 0
            assert drain.left_s(now) == told_at + WITHIN_S - now > 0
        else:
            assert drain.left_s(now) is None
    return drain


def test_whatever_happens_nothing_new_begins_and_a_drain_has_an_end():
    for events in itertools.product(EVENTS, repeat=6):
        play(events)


def test_an_idle_node_ends_at_once():
    assert play(["told"]).why == "nothing was under way"


def test_a_node_ends_with_the_last_request_and_not_before():
    events = ["begin", "begin", "told", "finish"]
    assert play(events).state is State.DRAINING
    assert play([*events, "finish"]).why == "everything under way was finished"


def test_what_takes_too_long_is_cut_off_and_counted():
    assert play(["begin", "told", "a second"]).state is State.DRAINING
    assert "1 request took longer than 2 s" in play(["begin", "told", "two seconds"]).why


def test_no_time_to_drain_is_no_drain():
    drain = Drain(0.0)
    assert drain.begin()
    drain.told(5.0)
    assert drain.state is State.ENDED

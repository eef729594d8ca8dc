"""A session's place among nodes that add up: whom it meets, what it is told of, and that it never waits for ever."""

import threading

import numpy as np
import pytest

from headwater.data.parcel import Parcel
from headwater.errors import DamagedError
from headwater.node.circle import MAX_MEETING, ApartError, Circle
from headwater.node.exchange import GoneError
from headwater.reduce.aggregator import Aggregator
from headwater.reduce.named import NamedAggregator

NAME = "0" * 32


class Call:
    """An exchange whose other side says what `waiting` has, and may go."""

    def __init__(self):
        self.heard, self.waiting, self.is_gone, self._said = [], set(), False, threading.Condition()

    def has_come(self, *kinds):
        return bool(self.waiting & set(kinds))

    def send(self, parcel):
        with self._said:
            self.heard.append(parcel)
            self._said.notify_all()

    def said(self, count=1):
        """What the session has said, once it is so much."""
        with self._said:
            assert self._said.wait_for(lambda: len(self.heard) >= count, 60)
        return [(each.kind, each.about.get("number")) for each in self.heard]


@pytest.fixture
def where():
    """The address of an aggregator."""
    made = Aggregator(("127.0.0.1", 0))
    thread = threading.Thread(target=made.run)
    thread.start()
    yield f"127.0.0.1:{made.port}"
    made.stop()
    thread.join()


@pytest.fixture
def circles(where):
    """Makes a session's side of it, for a tenant."""
    made = []

    def make(tenant="a"):
        call = Call()
        made.append(Circle(call, NamedAggregator(where, None), tenant))
        return call, made[-1]

    yield make
    for each in made:
        each.leave()


def gather(rank, number=1, nodes=2, name=NAME):
    return Parcel("gather", {"circle": name, "number": number, "rank": rank, "nodes": nodes})


def met(circles, number=1):
    pair = [circles() for _ in range(2)]
    for rank, (_, circle) in enumerate(pair):
        circle.gather(gather(rank, number))
    for call, _ in pair:
        assert call.said() == [("met", number)]
    return pair


def add(circle, values, step=7, number=1):
    """In a thread, as each node's session has one; what it ended with."""
    ends = []

    def work():
        try:
            circle.add(number, step, [values])
        except (ApartError, GoneError) as error:
            ends.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, ends


def test_two_that_meet_add_up(circles):
    (_, one), (_, other) = met(circles)
    for step in range(3):
        values = [np.array([1.5, -0.0]), np.array([2.0, -0.0])]
        threads = [add(circle, each, step)[0] for circle, each in zip((one, other), values, strict=True)]
        for thread in threads:
            thread.join()
        for each in values:
            assert each.tobytes() == np.array([3.5, -0.0]).tobytes()


def test_tenants_never_meet_whatever_they_call_themselves(circles):
    """The other one's place stays free for whom it is meant for."""
    (call, circle), (stranger, other), (late, third) = circles("a"), circles("b"), circles("a")
    circle.gather(gather(0))
    other.gather(gather(1))
    third.gather(gather(1))
    assert call.said() == late.said() == [("met", 1)]
    assert stranger.heard == []


def test_who_is_told_to_meet_others_leaves_those_it_was_with_and_they_hear_of_it(circles):
    (call, one), (_, other) = met(circles)
    thread, ends = add(other, np.ones(2))
    one.gather(gather(0, number=2))
    thread.join()
    assert "is gone" in str(ends[0])
    one.gather(gather(0, number=3))  # nobody came to the second one
    other.gather(gather(1, number=3))
    assert call.said(2)[-1] == ("met", 3)


@pytest.mark.parametrize("kind", ["drop", "collect", "gather"])
def test_a_sum_that_is_not_wanted_any_more_is_given_up(kind, circles):
    (call, circle), _ = met(circles)
    thread, ends = add(circle, np.ones(2))
    call.waiting.add(kind)
    thread.join()
    assert "given it up" in str(ends[0])
    with pytest.raises(ApartError, match="is not there"):
        circle.add(1, 8, [np.ones(2)])


def test_a_trainer_that_hangs_up_ends_it(circles):
    (call, circle), (_, other) = met(circles)
    thread, ends = add(circle, np.ones(2))
    call.is_gone = True
    thread.join()
    assert isinstance(ends[0], GoneError)
    with pytest.raises(ApartError, match="is gone"):
        other.add(1, 7, [np.ones(2)])


def test_sums_of_two_steps_are_no_sum(circles):
    (_, one), (_, other) = met(circles)
    work = [add(one, np.ones(2), step=7), add(other, np.ones(2), step=8)]
    for thread, ends in work:
        thread.join()
        assert "not of step" in str(ends[0]) or "is gone" in str(ends[0])


def test_a_node_whose_operator_named_no_aggregator_says_so():
    call = Call()
    Circle(call, None, "a").gather(gather(0))
    (said,) = call.heard
    assert said.kind == "apart"
    assert "--reduce HOST:PORT" in said.about["why"]


def test_a_trainer_that_sends_a_node_from_one_meeting_to_the_next_has_a_few_threads_there_at_most(circles):
    call, circle = circles()
    for number in range(MAX_MEETING + 3):
        circle.gather(gather(0, number, name=f"{number:032x}"))
    assert [kind for kind, _ in call.said()] == ["apart"] * 3
    assert "still waits" in call.heard[0].about["why"]


@pytest.mark.parametrize("about", [
    {"circle": "../../etc"}, {"circle": 5}, {"rank": 2}, {"rank": -1}, {"nodes": 1}, {"nodes": 10**6}, {"number": "1"},
])  # fmt: skip
def test_what_is_no_meeting_is_refused(about, circles):
    _, circle = circles()
    good = gather(0)
    with pytest.raises(DamagedError):
        circle.gather(Parcel("gather", {**good.about, **about}))

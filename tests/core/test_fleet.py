"""How many nodes a fleet has: within its bounds whatever is seen, more when it hurries, fewer when it is calm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.core.fleet import Add, Drain, Load, Scaler, Scaling, Starts
from headwater.errors import ConfigError

HURRY, CALM = Load(queue=3, busy=1.0), Load(queue=0, busy=0.0)


def looks(scaler, loads, times):
    """What is decided at each of these times, with the same loads."""
    return [scaler.look(at, loads) for at in times]


def test_an_empty_fleet_gets_the_least_number_of_nodes_at_once():
    assert Scaler(Scaling(3, 5)).look(0, {}) == [Add(3)]
    assert Scaler(Scaling(3, 5)).look(0, {"a": HURRY}) == [Add(2)]


def test_hurry_that_lasts_doubles_the_nodes_up_to_the_bound():
    scaler = Scaler(Scaling(1, 5, up_after_s=5))
    assert looks(scaler, {"a": HURRY}, [0, 3, 5]) == [[], [], [Add(1)]]
    two = dict.fromkeys("ab", HURRY)
    assert looks(scaler, two, [6, 10, 11]) == [[], [], [Add(2)]]
    four = dict.fromkeys("abcd", HURRY)
    assert looks(scaler, four, [12, 17]) == [[], [Add(1)]]
    five = dict.fromkeys("abcde", HURRY)
    assert looks(scaler, five, [18, 23, 1000]) == [[], [], []]


@pytest.mark.parametrize("load", [Load(queue=9, busy=0.3), Load(queue=0.5, busy=1.0), None])
def test_chunks_behind_a_slow_link_busy_threads_without_a_queue_and_silence_are_no_hurry(load):
    assert looks(Scaler(Scaling(1, 4, up_after_s=1)), {"a": load}, range(20)) == [[]] * 20


def test_one_look_that_is_no_hurry_begins_the_count_anew():
    scaler = Scaler(Scaling(1, 4, up_after_s=5))
    assert looks(scaler, {"a": HURRY}, [0, 4]) == [[], []]
    assert scaler.look(4.5, {"a": CALM}) == []
    assert looks(scaler, {"a": HURRY}, [5, 9, 10]) == [[], [], [Add(1)]]


def test_nobody_is_added_while_somebody_starts():
    scaler = Scaler(Scaling(1, 4, up_after_s=1))
    assert looks(scaler, {"a": HURRY, "b": None}, range(10)) == [[]] * 10


def test_calm_that_lasts_drains_one_at_a_time_down_to_the_bound_and_the_least_busy_first():
    scaler = Scaler(Scaling(1, 4, down_after_s=60))
    loads = {"a": Load(0, 0.1), "b": Load(1, 0.4), "c": CALM}
    assert looks(scaler, loads, [0, 59, 60]) == [[], [], [Drain("c")]]
    del loads["c"]
    assert looks(scaler, loads, [61, 121]) == [[], [Drain("a")]]
    assert looks(scaler, {"b": CALM}, [122, 1000]) == [[], []]


def test_what_one_node_fewer_could_not_do_is_no_calm():
    busy = dict.fromkeys("ab", Load(1, 0.3))  # 0.6 of one node: above what is left alone
    assert looks(Scaler(Scaling(1, 4, down_after_s=1)), busy, range(10)) == [[]] * 10


def test_a_node_that_never_came_is_the_first_to_go():
    scaler = Scaler(Scaling(1, 4, down_after_s=5))
    assert looks(scaler, {"a": Load(0, 0.2), "b": None}, [0, 5]) == [[], [Drain("b")]]


def test_a_fleet_with_more_nodes_than_allowed_loses_them_at_once():
    loads = {"a": HURRY, "b": Load(5, 1), "c": None, "d": CALM}
    assert Scaler(Scaling(1, 2)).look(0, loads) == [Drain("c"), Drain("d")]


@pytest.mark.parametrize(
    "given",
    [{"least": 0}, {"least": 3, "most": 2}, {"most": 5000}, {"up_after_s": -1}, {"down_after_s": float("inf")},
     {"busy": 0}, {"queue": -1}],
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(given):
    with pytest.raises(ConfigError):
        Scaling(**given)


def simulated(work, scaling, looks, starts_in=3, begin=1):
    """The sizes of a fleet for whose nodes there is so much work, in nodes' worth; each takes some looks to start."""
    scaler, ready, sizes = Scaler(scaling), {f"n{number}": 0 for number in range(begin)}, []
    for now in range(looks):
        there = [name for name, at in ready.items() if at <= now]
        busy = min(1.0, work / max(len(there), 1))
        loads = {name: Load(3 * busy, busy) if name in there else None for name in ready}
        for decision in scaler.look(now, loads):
            match decision:
                case Add(num):
                    free = (f"n{number}" for number in range(len(ready) + num) if f"n{number}" not in ready)
                    ready |= dict.fromkeys([next(free) for _ in range(num)], now + starts_in)
                case Drain(name):
                    del ready[name]
        sizes.append(len(ready))
    return sizes


@given(st.floats(0, 12), st.integers(1, 4), st.integers(0, 8), st.integers(1, 12))
def test_where_the_work_stays_the_same_a_fleet_comes_to_rest_with_enough_nodes(work, least, more, begin):
    scaling = Scaling(least, least + more, up_after_s=2, down_after_s=10)
    sizes = simulated(work, scaling, 600, begin=begin)
    assert len(set(sizes[-100:])) == 1, "it goes to and fro"
    rest = sizes[-1]
    assert least <= rest <= least + more
    assert rest == least + more or work <= rest, "there is more to do than it can"
    assert rest == least or work > 0.499 * (rest - 1), "one could go"


def test_a_fleet_of_one_is_four_two_decisions_later():
    sizes = simulated(10, Scaling(1, 4, up_after_s=5), 40)
    assert list(dict.fromkeys(sizes)) == [1, 2, 4]


def test_what_can_not_be_started_is_tried_more_and_more_seldom_until_one_answers():
    starts, now, tried = Starts(), 0.0, []
    assert starts.may(now)
    while now < 300:
        if starts.may(now):
            tried.append(now)
            starts.failed(now)
        now += 1
    assert tried == [0, 2, 6, 14, 30, 62, 122, 182, 242]
    starts.came()
    assert not starts.may(now), "the pause that has begun is kept"
    starts.failed(now)
    assert [starts.may(now + later) for later in (1, 2)] == [False, True]


class AnyHistory(RuleBasedStateMachine):
    """Whatever nodes say, and whichever of them come and go by themselves."""

    def __init__(self):
        super().__init__()
        self.scaling = Scaling(2, 5, up_after_s=2, down_after_s=3)
        self.scaler, self.now, self.made = Scaler(self.scaling), 0.0, 0
        self.loads = {}

    @rule(
        wait=st.floats(0, 4),
        said=st.lists(st.sampled_from([None, HURRY, CALM, Load(3, 0.6), Load(0, 0.4)]), min_size=8, max_size=8),
        lost=st.integers(0, 20),
    )
    def look(self, wait, said, lost):
        self.now += wait
        if lost < len(self.loads):
            del self.loads[sorted(self.loads)[lost]]
        self.loads = dict(zip(sorted(self.loads), said, strict=False))
        before = dict(self.loads)
        for decision in self.scaler.look(self.now, before):
            match decision:
                case Add(num):
                    assert len(before) < self.scaling.least or None not in before.values(), "one was starting"
                    for _ in range(num):
                        self.made += 1
                        self.loads[f"n{self.made:04d}"] = None
                case Drain(name):
                    assert before[name] is None or None not in before.values(), "one was not there"
                    del self.loads[name]

    @invariant()
    def it_keeps_to_its_bounds(self):
        if self.loads:
            assert self.scaling.least <= len(self.loads) <= self.scaling.most


TestAnyHistory = AnyHistory.TestCase

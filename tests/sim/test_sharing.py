"""Resources that are shared: work is conserved, shares are even, a path carries what its narrowest line does."""

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from headwater.sim.sharing import Line, Shared, after, carry

jobs = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), min_size=1, max_size=12)


def ends(jobs, capacity, each=float("inf")):
    """When each job of (arrival, amount) is done, and the resource."""
    env, found = simpy.Environment(), {}
    shared = Shared(env, capacity, each)
    for number, (at_s, amount) in enumerate(jobs):
        after(env, at_s, lambda number=number, amount=amount: shared.use(
            amount, lambda: found.setdefault(number, env.now)))  # fmt: skip
    env.run()
    return [found[number] for number in range(len(jobs))], shared


@given(jobs, st.floats(0.1, 10))
def test_it_is_never_idle_while_there_is_work(jobs, capacity):
    """The end of each busy period is that of any work-conserving queue."""
    done, shared = ends(jobs, capacity)
    free = busy = 0.0
    for at_s, amount in sorted(jobs):
        busy += amount / capacity
        free = max(free, at_s) + amount / capacity
    assert max(done) == pytest.approx(free, rel=1e-6)
    assert shared.usage()[1] == pytest.approx(busy, rel=1e-6)


@given(jobs, st.floats(0.1, 10))
def test_nobody_is_faster_than_alone_and_equals_end_together(jobs, capacity):
    done, _ = ends(jobs, capacity)
    for (at_s, amount), end_s in zip(jobs, done, strict=True):
        assert end_s >= at_s + amount / capacity - 1e-9
    twins, _ = ends([jobs[0]] * 3, capacity)
    assert twins[0] == pytest.approx(twins[2])


def test_a_task_gets_no_more_than_one_core():
    assert ends([(0, 3.0)], capacity=4, each=1)[0] == [3.0]
    assert ends([(0, 3.0)] * 8, capacity=4, each=1)[0] == [6.0] * 8


def test_a_task_more_costs_one_event_of_the_clock():
    """Beside the one that brings it: no timer for each of those that it comes to."""
    env, done = simpy.Environment(), []
    shared = Shared(env, 8.0, 1.0)
    for number in range(100):
        after(env, 0.125 * number, lambda: shared.use(0.5, lambda: done.append(env.now)))
    env.run()
    assert done == [0.5 + 0.125 * number for number in range(100)]
    assert next(env._eid) <= 2 * 100 + 1


def test_half_the_speed_from_half_time_on():
    env, done = simpy.Environment(), []
    shared = Shared(env, 1.0)
    shared.use(2.0, lambda: done.append(env.now))
    after(env, 1.0, lambda: shared.slow(0.5))
    env.run()
    assert done == [3.0]


def test_a_path_takes_as_long_as_its_narrowest_line_and_the_latency_of_all():
    env, done = simpy.Environment(), []
    path = [Line(env, 100.0, 0.5), Line(env, 10.0, 0.25), Line(env, 1000.0)]
    carry(env, path, 50.0, lambda: done.append(env.now), lambda: done.append(env.now))
    env.run()
    assert done == [5.0, 5.75]


def test_two_flows_that_meet_on_one_line_share_it():
    env, done = simpy.Environment(), []
    port, own = Line(env, 10.0), [Line(env, 10.0), Line(env, 10.0)]
    for line in own:
        carry(env, [line, port], 50.0, lambda: None, lambda: done.append(env.now))
    env.run()
    assert done == [10.0, 10.0]


def test_a_full_links_buffer_holds_up_what_comes_last():
    env, done = simpy.Environment(), []
    line = Line(env, 10.0, 0.5, queue_s=2.0)
    carry(env, [line], 50.0, lambda: None, lambda: done.append(env.now))
    carry(env, [line], 20.0, lambda: None, lambda: done.append(env.now))
    env.run()
    assert done == [4.0 + 2.5, 7.0 + 0.5]

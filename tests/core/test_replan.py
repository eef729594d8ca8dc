"""Replanning: not on noise, once on a lasting change, and never for what is nobody's fault."""

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.cost import estimate
from headwater.core.loads import JobSize, Pricing
from headwater.core.plan import PACE, Plan, here_plan, near_plan
from headwater.core.prongs import WRR
from headwater.core.replan import Replanner, Window, worth_switching
from headwater.core.rig import Device, Link
from headwater.core.search import search
from headwater.errors import ConfigError

DOWN = 25e6  # 200 Mbit/s


class Run:
    """A plan under way, told in multiples of what is believed at the start. Only links limit it: nodes could fill them
    many times, and the trainer could take all of it."""

    def __init__(self, make, *, min_chunks=4, plan=None, node_cores=1000.0, **rig):
        self.plan = plan or near_plan(make.CUTS[4], prefetch=24)
        self.rig = make.rig(200, node_cores=node_cores, **{"trainer": Device("t", 1000.0), **rig})
        pricing = Pricing(make.CUTS, make.PROFILE, self.rig, JobSize(10**9, 1000))
        self.work = work = pricing.work(self.plan, pricing.choice(self.plan))
        self.row_bytes = work.down_bytes
        self.rows_per_s = node_cores / work.node_s if work.node_s else 1.0
        self.machine = Replanner(self.plan, make.CUTS, make.PROFILE, self.rig, min_chunks=min_chunks)

    def window(self, link=None, node=None, wait=0.5, chunks=4):
        names = [device.name for device in self.rig.nodes]
        return self.machine.window(Window(
            chunks, wait,
            {} if link is None else dict.fromkeys(names, link * DOWN),
            {} if node is None else dict.fromkeys(names, node * self.rows_per_s),
        ))  # fmt: skip


@given(st.lists(st.tuples(st.floats(0.76, 1.24), st.floats(0.76, 1.24), st.floats(0, 1)), max_size=20))
def test_noise_within_a_quarter_changes_nothing(make, windows):
    run = Run(make)
    assert all(run.window(link, node, wait) == [] for link, node, wait in windows)
    assert run.machine.rig == run.rig


def test_a_lasting_drop_of_the_link_is_one_decision(make):
    run = Run(make)
    assert run.window(link=0.025) == []
    (decision,) = run.window(link=0.025)
    assert decision.rig.links[0].down_bytes_per_s == pytest.approx(0.025 * DOWN)
    assert decision.rig.links[0].up_bytes_per_s == pytest.approx(0.025 * DOWN)
    assert "0.025 times what was planned for" in decision.why[0]
    assert decision.of_links
    assert all(run.window(link=0.025) == [] for _ in range(10))


def test_a_busy_node_is_believed_and_its_idle_link_is_not_blamed(make):
    # The link carries what the node makes, and no more is there to carry.
    run = Run(make, node_cores=1.0)
    carried = 0.5 * run.rows_per_s * run.row_bytes / DOWN
    assert carried < 0.75
    run.window(link=carried, node=0.5)
    (decision,) = run.window(link=carried, node=0.5)
    assert decision.rig.nodes[0].speed == pytest.approx(0.5)
    assert decision.rig.links == run.rig.links
    assert len(decision.why) == 1
    assert not decision.of_links


@given(st.lists(st.tuples(st.floats(0, 1.2), st.floats(0, 1)), max_size=20))
def test_rows_from_a_nodes_cache_are_no_reason_to_plan_again(make, windows):
    """The node makes nothing, and its link carries more than a cold epoch would give it."""
    run = Run(make, node_cores=0.01)
    cold = run.rows_per_s * run.row_bytes / DOWN
    assert cold < 0.1
    assert all(run.window(link=max(link, cold), wait=wait) == [] for link, wait in windows)
    assert run.machine.rig == run.rig


@pytest.mark.parametrize(("cores", "num_threads"), [(1.0, 1), (4.0, 4), (0.25, 1)])
def test_threads_that_share_their_cores_with_the_rest_of_a_row_are_not_slow(make, cores, num_threads):
    run = Run(make, node_cores=cores)
    (name,) = [device.name for device in run.rig.nodes]
    node = make.PROFILE.node
    alone_s = node.decode_s + node.finish_s + run.work.engine_s
    all_s = num_threads / run.rows_per_s  # every thread is busy all the time, and so are the cores
    assert alone_s < all_s
    for thread_s in (alone_s, (alone_s + all_s) / 2, all_s):
        assert run.machine.node_rows_per_s(name, thread_s, num_threads) == pytest.approx(run.rows_per_s)
    assert run.machine.node_rows_per_s(name, alone_s / 2, num_threads) == pytest.approx(run.rows_per_s * 2)
    assert run.machine.node_rows_per_s(name, all_s * 2, num_threads) == pytest.approx(run.rows_per_s / 2)


def test_a_decision_that_could_not_be_carried_out_comes_again_each_time_later(make):
    run = Run(make)
    run.window(link=0.1)
    (first,) = run.window(link=0.1)
    waited = []
    for _ in range(4):
        run.machine.withdraw()
        assert run.machine.rig == run.rig
        windows = 0
        while not (again := run.window(link=0.1, chunks=1)):
            windows += 1
        assert again == [first]
        waited.append(windows)
    assert all(later >= 1.9 * earlier for earlier, later in pairwise(waited))


def test_a_trainer_that_does_not_wait_is_not_held_up_by_anything(make):
    run = Run(make)
    assert all(run.window(link=0.1, node=0.3, wait=0.01) == [] for _ in range(10))


def test_a_rate_above_what_was_believed_counts_even_if_nobody_waits(make):
    run = Run(make)
    run.window(link=4.0, wait=0.0)
    (decision,) = run.window(link=4.0, wait=0.0)
    assert decision.rig.links[0] == Link(4 * DOWN, DOWN, run.rig.links[0].latency_s)


def loop(run, factor, wait=0.0, at=1):
    """A window whose loop took so many times what it should: `at` 0 by itself, 1 beside all that its cores do."""
    return run.machine.window(Window(4, wait, loop_s=factor * run.machine._loop_s[at]))


def test_a_loop_that_takes_longer_is_a_slow_trainer_until_it_is_as_before(make):
    run = Run(make, trainer=Device("t", 1.0))
    least, most = run.machine._loop_s
    assert least < most
    assert loop(run, 1.5) == []
    (decision,) = loop(run, 1.5)
    assert decision.rig.trainer.speed == pytest.approx(1 / 1.5)
    assert replace(decision.rig, trainer=run.rig.trainer) == run.rig
    assert decision.why == ("the trainer works at 0.67 times the speed it was planned for",)
    assert not decision.of_links
    # What was seen is what is believed now.
    assert all(run.machine.window(Window(4, 0.0, loop_s=s)) == [] for s in run.machine._loop_s for _ in range(5))
    again = [each for _ in range(2) for each in run.machine.window(Window(4, 0.0, loop_s=least))]
    assert [each.rig for each in again] == [run.rig]


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(0, 1)), max_size=12))
def test_no_loop_makes_a_trainer_faster_than_it_was_or_slower_than_half(make, windows):
    """A loop may do nothing with its rows, or much else beside."""
    run = Run(make, trainer=Device("t", 1.0))
    for factor, wait in windows:
        loop(run, factor, wait=wait)
        assert 0.5 <= run.machine.rig.trainer.speed <= 1.0


def test_to_and_fro_between_two_plans_it_slows_down(make):
    run = Run(make, min_chunks=4)
    one, other = run.plan, near_plan(make.CUTS[3], prefetch=24)
    gaps = []
    for number in range(5):
        count = 0
        while count < 1000 and not run.window(link=0.5, chunks=1):
            count += 1
        gaps.append(count)
        run.machine.believe(run.rig)
        run.machine.adopted(other if number % 2 == 0 else one)
    assert all(later >= 1.8 * earlier for earlier, later in pairwise(gaps[1:])), gaps


@given(st.floats(0, 1), st.floats(0.81, 1.3), st.floats(0, 1))
def test_a_loop_may_take_anything_between_its_own_work_and_all_that_its_cores_do(make, part, noise, wait):
    run = Run(make, trainer=Device("t", 1.0))
    least, most = run.machine._loop_s
    seen = Window(4, wait, loop_s=(least + part * (most - least)) * noise)
    assert all(run.machine.window(seen) == [] for _ in range(4))


def test_a_loop_that_mostly_waits_is_not_slow(make):
    run = Run(make, trainer=Device("t", 1.0))
    assert all(loop(run, 3.0, wait=0.6) == [] for _ in range(5))


def test_a_node_beside_its_trainer_is_not_slow(make):
    """Its threads have their cores in turn with the training loop."""
    run = Run(make, node_cores=1.0, trainer=Device("t", 1.0), shared_cores=True)
    (name,) = [device.name for device in run.rig.nodes]
    shared_s = run.machine._shared_s
    assert shared_s > run.work.node_s
    assert run.machine.node_rows_per_s(name, shared_s, 1) == pytest.approx(run.rows_per_s)


def test_a_loop_that_leaves_its_work_to_an_accelerator_says_nothing(make):
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, trainer={"suffix_on": "accelerator"})
    rig = make.rig(200, accelerator=Device("gpu"))
    machine = Replanner(near_plan(make.CUTS[4]), make.CUTS, profile, rig)
    assert all(machine.window(Window(4, 0.0, loop_s=10.0)) == [] for _ in range(5))


def test_one_window_or_two_with_another_between_are_not_enough(make):
    run = Run(make)
    assert all(run.window(link=rate) == [] for rate in [0.1, 1.0, 0.1, 1.0, 0.1, 4.0, 0.1, None, 0.1])


def test_a_link_that_comes_and_goes_is_followed_no_faster_than_allowed(make):
    run = Run(make, min_chunks=40)
    decided = [bool(run.window(link=rate, chunks=4)) for rate in ([0.1] * 4 + [1.0] * 4) * 10]
    places = [index for index, each in enumerate(decided) if each]
    assert places[0] == 1
    assert all(later - earlier >= 10 for earlier, later in pairwise(places))


def test_a_link_that_got_slow_is_tried_and_believed_once_it_is_fast_again(make):
    run = Run(make)
    assert run.machine.lowered() == {}
    run.window(link=0.025)
    run.window(link=0.025)
    (name,) = run.machine.lowered()
    assert run.machine.lowered() == {name: pytest.approx(0.025 * DOWN)}
    assert run.machine.tried({name: 0.03 * DOWN}) == []
    assert run.machine.tried({name: 0.8 * DOWN}) == [], "so soon after a decision"
    run.window(link=0.025)
    (decision,) = run.machine.tried({name: 0.8 * DOWN})
    assert decision.rig.links[0].down_bytes_per_s == pytest.approx(0.8 * DOWN)
    assert run.machine.lowered() == {}


@given(st.floats(0, 10), st.floats(0.01, 10))
def test_a_try_never_makes_a_link_slower(make, tried, link):
    run = Run(make)
    run.window(link=link)
    run.window(link=link)
    before = run.machine.rig.links[0].down_bytes_per_s
    run.machine.tried({run.rig.nodes[0].name: tried * DOWN})
    assert run.machine.rig.links[0].down_bytes_per_s >= before


def test_what_slows_every_link_slows_the_port_and_the_way_to_the_store(make):
    fast = Link(DOWN * 10, DOWN * 10)
    run = Run(make, num_nodes=2, trainer_link=fast, store_link=fast)
    run.window(link=0.1)
    (decision,) = run.window(link=0.1)
    assert decision.rig.store_link.down_bytes_per_s == pytest.approx(DOWN)
    assert decision.rig.trainer_link.down_bytes_per_s == pytest.approx(DOWN)


def test_a_nodes_part_of_a_shared_port_is_no_drop(make):
    run = Run(make, num_nodes=4, trainer_link=Link(DOWN, DOWN))
    assert all(run.window(link=rate) == [] for rate in [0.25, 0.25, 0.4, 1.0, 0.25])
    run.window(link=0.1)
    assert len(run.window(link=0.1)) == 1
    assert all(run.window(link=0.1) == [] for _ in range(5))


def test_a_stalled_link_is_believed_as_nearly_none_and_gives_a_legal_rig(make):
    run = Run(make)
    run.window(link=0.0, node=1.0)
    (decision,) = run.window(link=0.0, node=1.0)
    assert decision.rig.links[0].down_bytes_per_s == 1.0


def test_moving_nothing_leaves_nothing_to_watch(make):
    run = Run(make, plan=Plan())
    assert all(run.window(link=0.1, node=0.1) == [] for _ in range(5))


def test_a_trainer_that_reads_by_itself_is_watched_by_what_it_reads(make):
    run = Run(make, plan=Plan())
    expected = run.machine._bytes_per_s
    assert all(run.machine.window(Window(4, 0.5, store_bytes_per_s=0.8 * expected)) == [] for _ in range(4))
    low = Window(4, 0.5, store_bytes_per_s=0.1 * expected)
    assert run.machine.window(low) == []
    (decision,) = run.machine.window(low)
    assert decision.rig.to_store.down_bytes_per_s == pytest.approx(0.1 * expected)
    assert "0.1 times what was planned for" in decision.why[0]
    assert all(run.machine.window(low) == [] for _ in range(4))


def test_a_decision_for_nothing_is_not_repeated_so_soon(make):
    run = Run(make, min_chunks=4)
    gaps = []
    for _ in range(4):
        count = 0
        while count < 100 and not run.window(link=0.5, chunks=1):
            count += 1
        run.machine.believe(run.rig)  # measured anew, the link is as it was
        run.machine.adopted(run.plan)
        gaps.append(count)
    assert gaps == [1, 7, 15, 31]
    run.machine.adopted(near_plan(make.CUTS[3]))
    assert sum(not run.window(link=0.5, chunks=1) for _ in range(8)) == 7


def test_a_link_that_was_never_meant_to_be_full_is_not_blamed(make):
    """The trainer's own work limits the run, and it waits for rows now and then all the same."""
    run = Run(make, trainer=Device("t", 0.05))
    carried = run.machine._bytes_per_s / DOWN
    assert carried < 0.5
    assert all(run.window(link=carried) == [] for _ in range(5))


def test_every_short_history_keeps_the_promises(make):
    for rates in product([0.5, 1.0, 1.5], repeat=6):
        run = Run(make, min_chunks=8)
        believed, last, streak = 1.0, -100, []
        for index, rate in enumerate(rates):
            before = run.machine.rig
            decisions = run.window(link=rate)
            off = rate / believed
            streak.append(1 if off > 1.25 else -1 if off < 0.75 else 0)
            due = len(streak) > 1 and streak[-1] == streak[-2] != 0 and index - last >= 2
            assert len(decisions) == due, (rates, index)
            if decisions:
                assert decisions[0].rig == run.machine.rig != before
                believed, last, streak = rate, index, []
            else:
                assert run.machine.rig == before


@pytest.mark.parametrize(
    ("num_chunks", "wait", "rates"),
    [(-1, 0.5, {}), (1, 1.5, {}), (1, float("nan"), {}), (1, 0.5, {"a": -1.0}), (1, 0.5, {"a": float("nan")})],
)
def test_a_window_that_makes_no_sense_is_refused(num_chunks, wait, rates):
    with pytest.raises(ConfigError):
        Window(num_chunks, wait, rates)
    with pytest.raises(ConfigError, match="loop_s is 0"):
        Window(1, 0.5, loop_s=0.0)


def test_after_a_drop_the_planner_cuts_later_and_the_change_is_worth_it(make):
    job, rig = JobSize(50_000, 32), make.rig(200, trainer_shares=False)  # with a share, features alone would do
    before = search(make.CUTS, make.PROFILE, rig, job).best.plan
    machine = Replanner(before, make.CUTS, make.PROFILE, rig)
    seen = Window(4, 0.9, {"store-0": 5 * make.MBIT}, {})
    (decision,) = [each for _ in range(2) for each in machine.window(seen)]
    after = search(make.CUTS, make.PROFILE, decision.rig, job).best
    assert after.plan.cut > before.cut
    now = estimate(before, make.CUTS, make.PROFILE, decision.rig, job)
    assert worth_switching(now, after)
    assert not worth_switching(after, after)
    machine.adopted(after.plan)
    assert machine.window(seen) == []


def own_run(make, share=0.5, **how):
    """A plan whose own node is what limits it; and the machine that watches it."""
    plan = replace(near_plan(make.CUTS[4], prefetch=24), host_share=share, **how)
    return Run(make, plan=plan, trainer=Device("t", 1.0))


def test_an_engine_beside_the_trainer_that_takes_longer_is_a_slow_trainer(make):
    run = own_run(make)
    _, most_s = run.machine._own_s
    assert run.machine.window(Window(4, 0.9, own_s=1.6 * most_s)) == []
    (decision,) = run.machine.window(Window(4, 0.9, own_s=1.6 * most_s))
    assert decision.rig.trainer.speed == pytest.approx(1 / 1.6)
    assert not decision.of_links
    assert "the trainer works at" in decision.why[0]


@given(st.floats(0, 1), st.floats(0.8, 1.24))
def test_it_may_take_anything_between_its_own_work_and_all_that_its_cores_do(make, part, noise):
    run = own_run(make)
    least_s, most_s = run.machine._own_s
    assert 0 < least_s <= most_s
    own_s = (least_s + part * (most_s - least_s)) * noise
    assert all(run.machine.window(Window(4, 0.9, own_s=own_s)) == [] for _ in range(6))


@pytest.mark.parametrize("how", [{"split": PACE}, {"prongs": WRR}])
@pytest.mark.parametrize("real", [0.25, 0.5, 0.9])
def test_where_timing_decides_a_trainer_that_does_more_or_less_than_planned_is_not_slow(make, real, how):
    run = own_run(make, **how)
    as_it_is = own_run(make, share=real)
    (_, loop_s), (_, own_s) = as_it_is.machine._loop_s, as_it_is.machine._own_s
    seen = Window(4, 0.0, loop_s=loop_s, own_s=own_s, own_share=real)
    assert all(run.machine.window(seen) == [] for _ in range(6))


def test_where_it_does_all_the_work_and_is_slow_the_store_is_not_blamed(make):
    plan = here_plan(make.CUTS[4], prefetch=24)
    run = Run(make, plan=plan, trainer=Device("t", 1.0))
    _, most_s = run.machine._own_s
    slow = Window(4, 0.9, store_bytes_per_s=0.5 * run.machine._bytes_per_s, own_s=2 * most_s)
    assert run.machine.window(slow) == []
    (decision,) = run.machine.window(slow)
    assert decision.rig.trainer.speed == pytest.approx(0.5)
    assert decision.rig.to_store == run.rig.to_store


def test_a_trainer_that_was_slow_is_tried_and_believed_once_it_is_as_before(make):
    run = own_run(make)
    assert not run.machine.is_trainer_lowered
    _, most_s = run.machine._own_s
    for _ in range(2):
        decisions = run.machine.window(Window(4, 0.9, own_s=2 * most_s))
    assert len(decisions) == 1
    assert run.machine.is_trainer_lowered
    run.machine.adopted(replace(run.plan, host_share=0.0))
    run.machine.window(Window(40, 0.9))  # nothing tells of the trainer any more
    assert run.machine.tried({}, 0.5) == []
    (decision,) = run.machine.tried({}, 3.0)
    assert decision.rig.trainer.speed == pytest.approx(run.rig.trainer.speed), "never faster than it was"
    assert not run.machine.is_trainer_lowered

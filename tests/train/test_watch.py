"""What a watched job does once it is decided that the rig has changed; tests/rig has the whole of it on a real link."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.cut import smallest_cut
from headwater.core.plan import PACE, PLACE, Plan, near_plan
from headwater.core.prongs import MTE, WRR
from headwater.core.replan import Replan, Replanner, worth_switching
from headwater.core.rig import Link
from headwater.data.transforms import Normalize, Resize, ToFloat, Transforms
from headwater.errors import UnreachableError
from headwater.train import job as job_module
from headwater.train import source, watch
from headwater.train.client import NodeClient
from headwater.train.measure import measure

SLOW, FAST = Link(2e3, 2e3), Link(1e9, 1e9)
NOTHING = Plan(chunk_rows=8, node_batch=8)
TRANSFORMS = Transforms([Resize((32, 32)), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])


def network():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 4, 3), nn.ReLU()]
    return hw.freeze(nn.Sequential(nn.Sequential(*body), nn.Sequential(nn.Flatten(), nn.Linear(144, 3))), until="1.1")


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    return start_node_once(pictures)


@pytest.fixture(scope="module")
def measure_once():
    """As `measure`, but what the first job of this file found holds for the others, too; and what is best does
    not hang on the moment: chunks of any size cost alike, and decoding takes five times as long here as on a node."""
    found = []

    def measure_or_remember(*args, **options):
        if not found:
            measured = measure(*args, **options)
            costs = measured.profile
            node, here = replace(costs.node, chunk_s=0.0), replace(costs.trainer, receive_s_per_chunk=0.0)
            costs = replace(costs, node=node, trainer=replace(here, decode_s=5 * node.decode_s))
            found.append(replace(measured, profile=costs))
        return found[0]

    return measure_or_remember


@pytest.fixture
def job(pictures, node, measure_once, monkeypatch):
    """One that moves nothing, and would measure whatever rig `job.now` holds; its own thread sleeps."""
    monkeypatch.setattr(watch, "POLL_S", 3600.0)
    monkeypatch.setattr(job_module, "measure", measure_once)
    with hw.near(network(), pictures, transforms=TRANSFORMS, nodes=[node.address], batch_size=4) as job:
        job._source.adopt(NOTHING)
        known = job._watch._replanner.rig
        job._watch._replanner = Replanner(NOTHING, job.measured.offered, job.measured.profile, known, batch_size=4)
        monkeypatch.setattr(watch.Watch, "_measure", lambda self, rig, there: job.now)
        yield job


def rig(job, link):
    """A node that is too slow to be of use, unless the link is slower."""
    (node,) = job.measured.rig.nodes
    return replace(job.measured.rig, nodes=(replace(node, speed=0.02),), links=(link,), store_link=link)


def slow(job):
    return rig(job, SLOW)


def decide(job, rig, why="because"):
    job.now = rig
    job._watch._decide(Replan(rig, (why,)))


def test_a_slow_link_makes_it_cut_where_less_crosses(job):
    batches = iter(job.loader)
    next(batches)
    decide(job, slow(job))
    (switch,) = job.switches
    assert (switch.before, switch.after, switch.why) == (NOTHING, job.plan, ("because",))
    assert job.plan.prefix == "storage"
    assert len(list(batches)) == len(job.loader) - 1


@pytest.fixture
def holds(job, monkeypatch):
    """How often the run was held."""
    found, held = [], job._source.held
    monkeypatch.setattr(job._source, "held", lambda: found.append(1) or held())
    return found


def test_a_run_is_held_only_if_another_plan_may_pay(job, holds):
    known = job._watch._believed
    decide(job, replace(known, nodes=(replace(known.nodes[0], speed=0.02),)))
    assert (holds, job.switches) == ([], ())
    decide(job, slow(job))
    assert (len(holds), len(job.switches)) == (1, 1)


def test_a_slow_way_to_a_node_need_not_be_one_to_the_store(job, holds):
    """With one node it seems so; only measuring can tell."""
    decide(job, slow(job))
    near = job.plan
    assert near.uses_storage
    job._watch._believed = replace(rig(job, FAST), nodes=job.measured.rig.nodes)
    job.now = replace(job._watch._believed, links=(Link(2.0, 2.0),))  # the store's is as fast as ever
    job._watch._decide(Replan(replace(job.now, store_link=Link(2.0, 2.0)), ("because",)))
    assert len(holds) == 2
    assert not job.plan.uses_storage


def test_a_plan_that_can_not_be_adopted_is_as_if_nothing_was_decided(job, monkeypatch):
    def refuse(plan, **options):
        raise UnreachableError("away")

    withdrawn = []
    monkeypatch.setattr(job._source, "adopt", refuse)
    monkeypatch.setattr(job._watch._replanner, "withdraw", lambda: withdrawn.append(1))
    before = job._watch._believed
    with pytest.raises(UnreachableError):
        decide(job, slow(job))
    assert withdrawn
    assert job._watch._believed == before
    assert len(list(job.loader)) == len(job.loader)


def test_a_layer_that_learns_by_now_is_not_moved(job):
    job.model.original[0][3].weight.requires_grad_(True)
    decide(job, slow(job))
    fourth = next(cut.index for cut in job.cuts if cut.name == "0.3")
    assert job.plan.cut < fourth, "what is in front of the cut may not learn"
    for x, _ in job.loader:
        job.model(x)


def test_a_link_that_is_fast_again_is_found_and_used(job):
    decide(job, slow(job))
    assert job.plan.uses_storage
    job.now = rig(job, FAST)
    job._watch._try_at = 0.0
    (decision,) = job._watch._try()  # over loopback, which is as fast as ever
    assert "times what was planned for" in decision.why[0]
    job._watch._decide(decision)
    assert not job.plan.uses_storage
    assert len(job.switches) == 2


def test_in_vain_it_tries_less_and_less_often(job, monkeypatch):
    decide(job, slow(job))
    tried = []
    monkeypatch.setattr(watch.NodeClient, "download", lambda self, num_bytes: tried.append(num_bytes))
    monkeypatch.setattr(job._watch._replanner, "tried", lambda rates, speed: [])
    job._watch._try_at = 0.0
    assert job._watch._try() == []
    assert job._watch._try() == []  # not yet
    assert tried == [int(SLOW.down_bytes_per_s * watch.TRY_S) + 1]
    assert job._watch._try_every_s == 2 * watch.TRY_AFTER_S


def test_a_trainer_that_got_slow_is_tried_too(job, monkeypatch):
    rig = job._watch._replanner.rig
    assert job._watch._try() == []
    job._watch._replanner.believe(replace(rig, trainer=replace(rig.trainer, speed=0.5)))
    monkeypatch.setattr(job._watch, "_measure_here", lambda: (None, 1.0))
    (decision,) = job._watch._try()
    assert decision.rig.trainer.speed == pytest.approx(rig.trainer.speed)


def test_a_node_is_judged_by_what_it_makes_and_not_by_what_it_kept(job):
    (name,) = job._watch._threads
    job._watch._replanner.adopted(near_plan(smallest_cut(job.cuts)))

    def made(busy_s, rows, kept):
        readings = [watch._Reading(at, 0, 0.0, {}, 0, 0, {name: busy}) for at, busy in
                    ((0.0, (1.0, 10.0, 5.0)), (2.0, (1.0 + busy_s, 10.0 + rows, 5.0 + kept)))]  # fmt: skip
        return job._watch._made(name, *readings)

    assert made(1.0, 50, 0) > 0
    assert made(0.0, 0, 500) is None
    assert made(1.0, 50, 500) is None


def test_where_no_link_changed_the_run_is_not_held(job, holds):
    """A trainer that is slow has its work moved; what crosses the links is measured as it was."""
    known = job._watch._believed
    slow = replace(known, trainer=replace(known.trainer, speed=1e-3), links=(FAST,))
    job._watch._decide(Replan(slow, ("because",), of_links=False))
    assert not holds
    assert job.plan.uses_storage
    assert job._watch._believed.trainer.speed == 1e-3
    assert len(list(job.loader)) == len(job.loader)


def test_what_the_loop_takes_for_a_row_is_without_waiting_and_without_a_rare_pause(job, monkeypatch):
    now, counts = [0.0], job._source._setting.counts
    monkeypatch.setattr(source.time, "perf_counter", lambda: now[0])
    clock = job._source.step_clock()
    for took, waited in [(0.0, 0.0), (0.4, 0.0), (5.4, 5.0), (0.4, 0.0), (60.0, 0.0)]:
        now[0] += took
        counts.waited_s += waited
        clock(4)
    assert job._source.loop_s(0.0) == pytest.approx(0.1)
    assert job._source.loop_s(now[0] - 1.0) is None  # a single step says little


def test_rows_that_a_node_makes_for_others_say_nothing_about_it(job):
    (name,) = job._watch._threads
    plan = near_plan(smallest_cut(job.cuts))
    job._source.adopt(plan)
    job._watch._replanner.adopted(plan)

    def seen(made, arrived):
        before, now = (watch._Reading(at, 0, 0.0, {name: 0}, 0, rows, {name: (at, own, 0.0)})
                       for at, rows, own in ((0.0, 0, 0.0), (2.0, arrived, made)))  # fmt: skip
        return job._watch._window(before, now).node_rows_per_s

    assert seen(1000.0, 1000)
    assert not seen(1000.0, 300)


def test_a_store_that_fails_while_it_is_measured_is_not_given_up(job, monkeypatch):
    monkeypatch.undo()
    job._watch._measure_here = lambda: (None, None)
    known = job._watch._believed
    assert known.trainer_reads
    found = job._watch._measure(known, set())
    assert (found.store_link, found.trainer_reads, found.links) == (known.store_link, True, known.links)


def test_a_plan_that_needs_more_memory_than_a_node_has_left_is_given_up_however_fast_it_is(job, monkeypatch):
    plan = near_plan(smallest_cut(job.cuts), chunk_rows=8, node_batch=8)
    job._source.adopt(plan)
    known = job._watch._believed
    fast = replace(known, nodes=(replace(known.nodes[0], speed=100.0),), store_link=SLOW)
    small = replace(fast, nodes=(replace(fast.nodes[0], memory_bytes=2 << 20),))
    monkeypatch.setattr(watch.Watch, "_ask_nodes", lambda self, rig: (small, set()))
    now, best = job._watch._compare(plan, small)
    assert not worth_switching(now, best)
    job._watch._decide(Replan(fast, ("because",), of_links=False))
    assert not job.plan.uses_storage
    assert "on node" in job.switches[0].why[1]
    assert len(list(job.loader)) == len(job.loader)


@pytest.mark.parametrize("how", [{"split": PACE}, {"prongs": WRR}])
def test_where_timing_decides_the_share_that_was_expected_makes_no_other_plan(job, how):
    one, other = (near_plan(job.cuts[0], host_share=share, **how) for share in (0.25, 0.5))
    assert watch.alike(one, other)
    assert not watch.alike(replace(one, split=PLACE, prongs=MTE), replace(other, split=PLACE, prongs=MTE))


def test_nodes_that_join_and_leave_are_part_of_the_rig_from_then_on(job, pictures, start_node):
    second = NodeClient(start_node(pictures).address)
    (first,) = job.measured.rig.nodes
    assert job._source.welcome(second)
    assert job._watch.look(None) is None
    assert job._watch.look(None) is None, "nobody takes rows: nothing was looked at"
    batches = iter(job.loader)
    next(batches)
    job._watch.look(None)
    rig = job._watch._replanner.rig
    assert rig.nodes == (first, replace(first, name=second.name))
    assert rig.links[1] == rig.links[0]
    assert [each.why for each in job.switches] == [(f"{second.name} joined",)], "what moves nothing is not best for two"
    assert rig.trainer_link == (job.measured.rig.trainer_link or rig.links[0])
    assert job._source.leave(second)
    while not job._source.is_open:  # batches that came under the plan before are used up first
        next(batches)
    job._watch.look(None)
    assert job._watch._replanner.rig.nodes == (first,)
    second.close()


def test_what_could_not_be_decided_when_a_node_joined_is_decided_later(job, pictures, start_node, monkeypatch):
    second = NodeClient(start_node(pictures).address)
    assert job._source.welcome(second)
    batches = iter(job.loader)
    next(batches)
    adopt = job._source.adopt

    def refuse(plan, **options):
        monkeypatch.setattr(job._source, "adopt", adopt)
        raise UnreachableError("one of the others is away")

    monkeypatch.setattr(job._source, "adopt", refuse)
    with pytest.raises(UnreachableError):
        job._watch.look(None)
    job._watch.look(None)
    assert not job.switches, "not at once"
    job._watch._news_at = 0.0
    assert job._watch.look(None) is None
    assert [each.why for each in job.switches] == [(f"{second.name} joined",)]
    assert len(job._watch._replanner.rig.nodes) == 2
    second.close()

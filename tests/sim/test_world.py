"""A plan played on a rig: all rows, the same each time, whatever fails."""

import json

import pytest

from headwater.core.plan import Plan
from headwater.core.rig import Link
from headwater.core.trace import STAGES, perfetto
from headwater.errors import PlanError
from headwater.sim.rigfile import DIES, LINK, RETURNS, SLOWS, Chip, Fault


@pytest.mark.parametrize("more", [
    {}, {"host_share": 0.25}, {"host_share": 0.25, "split": "pace"}, {"host_share": 0.25, "prongs": "mte"},
    {"host_share": 0.25, "prongs": "wrr"}, {"chunk_rows": 96, "node_batch": 16}, {"prefetch": 1},
])  # fmt: skip
def test_every_row_is_used_once_in_every_epoch(sim, more):
    file = sim.rig(num_nodes=3, num_trainers=2, num_samples=1001)
    file = sim.replace(file, job=sim.replace(file.job, num_epochs=2))
    outcome = sim.play(sim.near(4, **more), file)
    assert outcome.is_complete
    assert outcome.num_samples == 2 * 1001
    assert len(outcome.epochs_s) == 2


def test_the_same_question_has_the_same_answer_and_another_seed_another_one(sim):
    file = sim.rig(num_nodes=3, jitter=0.3)
    one, again = (sim.play(sim.near(4, host_share=0.2), file) for _ in range(2))
    assert one == again
    assert sim.play(sim.near(4, host_share=0.2), sim.replace(file, seed=1)).seconds != one.seconds


def test_jitter_keeps_the_mean(sim):
    calm, wild = (sim.play(sim.near(5), sim.rig(1000, jitter=each)).seconds for each in (0.0, 0.5))
    assert wild == pytest.approx(calm, rel=0.1)


def test_a_node_that_dies_costs_its_part_and_no_row(sim):
    whole = sim.play(sim.near(5), sim.rig(1000, num_nodes=4, num_samples=4000))
    half_s = whole.seconds / 2
    faults = (Fault(half_s, "node-1", DIES), Fault(half_s, "node-2", DIES))
    broken = sim.play(sim.near(5), sim.rig(1000, num_nodes=4, num_samples=4000, faults=faults))
    assert broken.num_samples == 4000
    assert broken.seconds == pytest.approx(half_s + 2 * half_s, rel=0.15)
    assert broken.num_again >= 2
    back = (*faults, Fault(half_s + 1, "node-1", RETURNS), Fault(half_s + 1, "node-2", RETURNS))
    mended = sim.play(sim.near(5), sim.rig(1000, num_nodes=4, num_samples=4000, faults=back))
    assert whole.seconds < mended.seconds < broken.seconds


def test_when_all_nodes_are_gone_the_run_stops_and_says_so(sim):
    outcome = sim.play(sim.near(5), sim.rig(faults=(Fault(1.0, "node", DIES),)))
    assert not outcome.is_complete
    assert "no node has answered" in outcome.faults[0]


def test_a_trainer_that_stops_stops_all_that_sum_with_it(sim):
    work = sim.replace(sim.rig().job, gradient_bytes=1e6, reduce="ring")
    file = sim.rig(num_nodes=2, num_trainers=2, trainer={"nodes_each": 1}, job=work,
                   faults=(Fault(1.0, "node-2", DIES),))  # fmt: skip
    outcome = sim.play(sim.near(5), file)
    assert sorted(outcome.faults) == ["trainer-1: waits for a sum with a trainer that has stopped",
                                      "trainer-2: no node has answered for 60 s"]  # fmt: skip


def test_nothing_is_busier_than_all_the_time_whatever_gets_slower_at_the_end(sim):
    whole = sim.play(sim.near(5), sim.rig(20))
    late = (Fault(0.9 * whole.seconds, "node", LINK, 0.5), Fault(0.9 * whole.seconds, "node", SLOWS, 0.5))
    outcome = sim.play(sim.near(5), sim.rig(20, faults=late))
    assert max(most for _, most in outcome.busy.values()) <= 1 + 1e-9
    assert outcome.cpu_s["node"] > 1.05 * whole.cpu_s["node"]  # it was busy for as long as its work took


def test_a_run_that_no_memory_would_hold_is_refused_in_advance(sim):
    file = sim.rig(num_samples=10**12, num_nodes=2 * 10**5)
    with pytest.raises(PlanError, match=r"(?s)machines.*chunks and steps.*lower num_samples") as caught:
        sim.play(sim.near(5), file)
    assert len(caught.value.faults) == 2


def test_a_straggler_costs_about_what_it_does_not_do(sim):
    whole = sim.play(sim.near(5), sim.rig(1000, num_nodes=4, num_samples=8000))
    faults = (Fault(0.0, "node-1", SLOWS, 0.1),)
    slow = sim.play(sim.near(5), sim.rig(1000, num_nodes=4, num_samples=8000, faults=faults))
    assert slow.seconds == pytest.approx(whole.seconds * 4 / 3.1, rel=0.12)


def test_a_link_that_gets_slower_shows(sim):
    faults = (Fault(0.0, "node", LINK, 1e-4),)
    whole, thin = (sim.play(sim.near(5), sim.rig(1000, faults=each)) for each in ((), faults))
    assert thin.seconds > 1.5 * whole.seconds
    assert thin.limited_by == "node links, down"


def test_a_plan_that_does_not_fit_is_one_error_with_every_fault(sim):
    file = sim.replace(sim.rig(), nodes=(), store=sim.replace(sim.rig().store, link=Link(1e6, 1e6)))
    with pytest.raises(PlanError, match="the rig has none"):
        sim.play(sim.near(5), file)
    tiny = sim.rig(node={"memory_bytes": 1 << 20}, trainer={"memory_bytes": 1 << 20})
    with pytest.raises(PlanError) as caught:
        sim.play(sim.near(1, prefetch=8), tiny)
    assert len(caught.value.faults) == 2


def test_groups_shrink_to_the_memory_of_a_node(sim):
    profile = sim.replace(sim.PROFILE, node=sim.replace(sim.PROFILE.node, row_bytes=(20_000_000,) * 6))
    wide = sim.play(sim.near(5), sim.rig(1000, num_samples=320), profile)
    small = sim.play(sim.near(5), sim.rig(1000, num_samples=320, node={"memory_bytes": 200_000_000}), profile)
    assert small.num_samples == 320
    assert small.memory_bytes["node"] <= 200_000_000 < wide.memory_bytes["node"]


def test_kept_rows_make_later_epochs_faster(sim):
    file = sim.rig(1000, node={"cache_bytes": 10**9}, num_samples=640)
    file = sim.replace(file, job=sim.replace(file.job, num_epochs=3))
    first, *later = sim.play(sim.near(5), file).epochs_s
    assert all(each < 0.2 * first for each in later)


def test_the_accelerator_takes_the_prefix_and_the_suffix(sim):
    slow = sim.play(sim.near(5), sim.rig(1000))
    fast = sim.play(sim.near(5), sim.rig(1000, node={"accelerator": Chip(speed=100.0)}))
    assert fast.seconds < 0.4 * slow.seconds
    assert fast.busy["node accelerator"][0] < fast.busy["node cores"][0]


def test_energy_is_idle_watts_and_what_work_adds(sim):
    file = sim.rig(1000, node={"idle_w": 5.0, "busy_w": 25.0, "price_per_hour": 3.6})
    outcome = sim.play(sim.near(5), file)
    busy, _ = outcome.busy["node cores"]
    assert outcome.energy_j["node"] == pytest.approx(outcome.seconds * (5 + 20 * busy), rel=1e-6)
    assert outcome.money["node"] == pytest.approx(outcome.seconds * 1e-3)
    assert "trainer" not in outcome.energy_j


def test_its_trace_has_the_stages_of_a_live_one(sim):
    outcome = sim.play(sim.near(5), sim.rig(num_samples=200), trace=True)
    names = {span.name for span in outcome.spans}
    assert names <= set(STAGES)
    assert {"read", "decode", "infer", "send", "step", "wait"} <= names
    assert json.loads(perfetto(outcome.spans, outcome.places))["traceEvents"]
    assert all(span.seconds >= 0 for span in outcome.spans)


def test_moving_nothing_asks_no_node(sim):
    outcome = sim.play(Plan(), sim.rig())
    assert outcome.down_bytes == 0
    assert outcome.store_bytes == pytest.approx(2000 * 110e3)


def test_a_node_on_the_trainers_machine_takes_of_its_cores(sim):
    plan = sim.near(3)
    apart, shared = (sim.play(plan, sim.rig(1000, shared_cores=each)) for each in (False, True))
    node_s, trainer_s = apart.cpu_s["node"], apart.cpu_s["trainer"]
    assert shared.seconds == pytest.approx(node_s + trainer_s, rel=0.05)
    assert apart.seconds < 0.8 * shared.seconds


def test_a_trainer_with_many_nodes_uses_its_part_of_them(sim):
    file = sim.rig(1000, num_nodes=6, num_trainers=3, trainer={"nodes_each": 2}, num_samples=960)
    outcome = sim.play(sim.near(5), file)
    assert outcome.num_samples == 960
    assert outcome.busy["node cores"][1] < 1.5 * outcome.busy["node cores"][0]


def test_a_tail_under_mte_takes_no_more_than_half_of_the_memory_that_is_free(sim):
    costs = sim.replace(sim.PROFILE.trainer, base_bytes=8 * 10**8)
    file = sim.rig(10_000, num_samples=4000, trainer={"memory_bytes": 10**9})
    plan = sim.near(0, host_share=0.25, prongs="mte")
    outcome = sim.play(plan, file, sim.replace(sim.PROFILE, trainer=costs))
    assert outcome.is_complete
    assert 8.9 * 10**8 < max(outcome.memory_bytes.values()) < 10**9

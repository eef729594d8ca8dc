"""The planner takes the best plan, and never one worse than moving nothing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core import search as module
from headwater.core.cost import estimate
from headwater.core.loads import JobSize, Pricing
from headwater.core.plan import FILE, PACE, PLACE, Plan, check, near_plan
from headwater.core.rig import Device, Link
from headwater.core.search import NOTHING, can_share, carried, choices, pick, placement, search, suited_split, sweep
from headwater.core.search import settings as knob_settings
from headwater.errors import ConfigError, PlanError

CODECS = ("raw", "fp16", "int8")


@pytest.fixture(autouse=True, scope="module")
def few_shares():
    """Every plan is priced one by one here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHARES", (0.25, 0.75))
        yield


def brute_force(cuts, profile, rig, job, codecs):
    """Every plan of the grid that fits, priced one by one; of each choice those with the steadiest knobs."""
    found = []
    for choice in choices(cuts, rig, profile, codecs=codecs):
        every = [estimate(plan, cuts, profile, rig, job) for plan in knob_settings(choice, can_share(rig))]
        fitting = [each for each in every if each.fits]
        steadiest = min((unsteady(each.plan) for each in fitting), default=0)
        found += [each for each in fitting if unsteady(each.plan) == steadiest]
    return found


def kept_to(estimate):
    """What was chosen, but for how a share is split: that is decided afterwards."""
    return replace(estimate, plan=replace(estimate.plan, split=PLACE))


def unsteady(plan):
    return (plan.node_batch < 16) + (plan.prefetch < 3)


@settings(max_examples=30)
@given(st.data())
def test_the_winner_is_the_one_of_the_whole_grid(make, data):
    cuts, profile, rig, job = data.draw(make.small_worlds)
    codecs = data.draw(st.sampled_from([("raw",), CODECS]))
    every = brute_force(cuts, profile, rig, job, codecs)
    if not every:
        with pytest.raises(PlanError, match="no plan can be carried out"):
            search(cuts, profile, rig, job, codecs=codecs)
        return
    ranking = search(cuts, profile, rig, job, codecs=codecs, keep=data.draw(st.integers(1, 4)))
    assert kept_to(ranking.best) == pick(every)
    check(ranking.best.plan, cuts)
    if ranking.nothing is not None:
        assert ranking.best.total_s <= ranking.nothing.total_s * (1 + 1e-12)


@settings(max_examples=12)
@given(st.data())
def test_the_ranking_is_the_rule_applied_again_and_again(make, data):
    cuts, profile, rig, job = data.draw(make.small_worlds)
    rest = brute_force(cuts, profile, rig, job, CODECS)
    if rest:
        for best in search(cuts, profile, rig, job, codecs=CODECS, keep=3).plans:
            assert kept_to(best) == pick(rest)
            same = (placement(best.plan), best.plan.cut, best.plan.codec)
            rest = [each for each in rest if (placement(each.plan), each.plan.cut, each.plan.codec) != same]


def chosen(make, rig, **more):
    return search(make.CUTS, make.PROFILE, rig, make.JOB, **more).best.plan


def test_the_slower_the_link_the_later_the_cut(make):
    cuts = [chosen(make, make.rig(mbit, node_cores=1.0)).cut for mbit in (1000, 100, 10, 2)]
    assert cuts == sorted(cuts)
    assert cuts[-1] == 5  # the smallest boundary
    assert cuts[0] < 5


def test_a_trainer_shares_the_work_where_that_pays_unless_it_shall_not(make):
    cuts = make.CUTS[:1] + make.CUTS[5:]  # nothing between pixels and features, so that only shares use both sides
    slow_suffix = [60e-3, *make.SUFFIX_S[1:]]
    profile = make.profile(make.PLACE_S, slow_suffix)
    shared = search(cuts, profile, make.rig(100), make.JOB).best
    alone = search(cuts, profile, make.rig(100, trainer_shares=False), make.JOB).best
    assert shared.plan.host_share > 0.2
    assert alone.plan.host_share == 0
    assert shared.total_s < 0.8 * alone.total_s  # of the two shares that are tried here, a quarter


def test_of_the_shares_of_a_plan_the_fastest_is_taken(make, monkeypatch):
    monkeypatch.setattr(module, "SHARES", tuple(step / 16 for step in range(1, 16)))
    monkeypatch.setattr(module, "EQUAL", 0.15)
    cuts = make.CUTS[:1] + make.CUTS[5:]
    profile = make.profile(make.PLACE_S, [60e-3, *make.SUFFIX_S[1:]])
    best = search(cuts, profile, make.rig(100), make.JOB).best
    shares = [replace(best.plan, host_share=step / 16) for step in range(1, 16)]
    every = [estimate(plan, cuts, profile, make.rig(100), make.JOB) for plan in shares]
    equal = [each for each in every if each.total_s <= 1.15 * best.total_s]
    assert best.total_s == min(each.total_s for each in every)
    assert min(each.plan.host_share for each in equal) < best.plan.host_share, "here a smaller one counts as equal"


def test_a_share_is_kept_to_where_pixels_fill_the_link_though_more_of_it_would_relieve_it(make):
    pricing = Pricing(make.CUTS, make.PROFILE, make.rig(20), make.JOB)
    pixels = replace(near_plan(make.CUTS[0], node_batch=16, chunk_rows=16), host_share=0.25)
    assert suited_split(pricing, pixels) == PLACE


@pytest.mark.parametrize(("mbit", "split"), [(10_000, PACE), (30, PLACE)])
def test_a_share_is_kept_to_where_bytes_are_scarce_and_follows_the_pace_where_not(make, mbit, split):
    cuts = make.CUTS[:1] + make.CUTS[5:]
    profile = make.profile(make.PLACE_S, [60e-3, *make.SUFFIX_S[1:]])
    best = search(cuts, profile, make.rig(mbit), make.JOB).best.plan
    assert best.host_share > 0
    assert best.split == split


def test_a_weak_node_on_a_fast_link_moves_nothing(make):
    assert placement(chosen(make, make.rig(10_000, node_cores=0.01))) == NOTHING


def test_the_stronger_the_node_the_later_the_cut(make):
    cuts = [chosen(make, make.rig(1000, node_cores=cores)).cut for cores in (0.05, 1.0, 16.0)]
    assert cuts == sorted(cuts)
    assert cuts[0] < cuts[-1] == 5


def test_where_all_is_equal_nothing_is_moved(make):
    profile = make.profile(make.PLACE_S, [1.0] * 7)
    assert placement(search(make.CUTS, profile, make.rig(10_000), make.JOB).best.plan) == NOTHING


def test_both_extremes_are_there_to_compare_with(make):
    ranking = search(make.CUTS, make.PROFILE, make.rig(2), make.JOB, keep=1)
    assert placement(ranking.nothing.plan) == NOTHING
    assert (ranking.pixels.plan.cut, ranking.pixels.plan.prefix) == (0, "host")
    assert "times as fast as moving nothing" in ranking.explain()
    assert "limits" in ranking.explain()


def test_only_exact_codecs_unless_others_are_allowed(make):
    rig = make.rig(2)
    assert {each.plan.codec for each in search(make.CUTS, make.PROFILE, rig, make.JOB).plans} == {"raw"}
    assert chosen(make, rig, codecs=CODECS).codec == "int8"


@pytest.mark.parametrize("wrong", [{"codecs": ("gzip",)}, {"precisions": ("fp3",)}, {"keep": 0}, {"codecs": ()}])
def test_what_nobody_can_do_is_refused(make, wrong):
    with pytest.raises(ConfigError):
        search(make.CUTS, make.PROFILE, make.rig(), make.JOB, **wrong)


def test_a_trainer_that_cannot_read_the_store_has_no_way_to_move_nothing(make):
    ranking = search(make.CUTS, make.PROFILE, make.rig(10_000, node_cores=0.05, trainer_reads=False), make.JOB)
    assert ranking.nothing is None
    assert all(each.plan.uses_storage for each in ranking.plans)


def test_without_nodes_only_moving_nothing_is_left(make):
    ranking = search(make.CUTS, make.PROFILE, make.rig(nodes=(), links=(), store_link=Link(1e6, 1e6)), make.JOB)
    assert [placement(each.plan) for each in ranking.plans] == [NOTHING]


def test_what_does_not_fit_is_dropped_with_its_reason(make):
    heavy = make.profile(make.PLACE_S, make.SUFFIX_S, node={"fixed_bytes": (0, 0, 10**9, 10**10, 10**10, 10**10, 0)})
    rig = make.rig(2, nodes=(Device("store-0", 1.0, 10**9),))
    ranking = search(make.CUTS, heavy, rig, make.JOB)
    assert {each.plan.cut for each in ranking.dropped} == {2, 3, 4, 5}
    assert any("needs 10.00 GB on node store-0 (has 1.00 GB)" in each.reason for each in ranking.dropped)
    assert all(each.fits for each in ranking.plans)


def test_tight_memory_makes_groups_smaller_before_it_changes_the_cut(make):
    costs = {"row_bytes": (0, *[10**7] * 6)}
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, node=costs)
    roomy = search(make.CUTS, profile, make.rig(2), make.JOB).best
    tight = search(make.CUTS, profile, make.rig(2, nodes=(Device("store-0", 1.0, 10**8),)), make.JOB).best
    assert tight.plan.cut == roomy.plan.cut
    assert tight.fits
    assert tight.plan.node_batch < 16


def test_if_nothing_fits_every_reason_is_in_the_error(make):
    rig = make.rig(nodes=(Device("store-0", 1.0, 1 << 20),), trainer=Device("t", 1.0, 1 << 20))
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, node={"base_bytes": 2 << 20})
    with pytest.raises(PlanError) as caught:
        search(make.CUTS, profile, rig, make.JOB)
    assert "no plan can be carried out (12 tried)" in str(caught.value)
    assert "on trainer (has 1 MB)" in str(caught.value)
    assert "on node store-0 (has 1 MB)" in str(caught.value)


def test_a_cut_that_was_not_measured_is_left_out_and_said(make):
    profile = make.profile(make.PLACE_S, [20e-3, 16e-3, 12e-3, 8e-3, 4e-3, None, None])
    ranking = search(make.CUTS, profile, make.rig(2), make.JOB)
    assert ranking.best.plan.cut == 4
    assert any("not measured at 'layer5'" in each.reason for each in ranking.dropped)


def test_a_short_job_does_not_pay_for_shipping_a_prefix(make):
    profile = make.replace(make.PROFILE, export_s=60.0)
    short, long = (search(make.CUTS, profile, make.rig(20), JobSize(200, 32, epochs)).best for epochs in (1, 100))
    assert short.plan.prefix == "host"
    assert long.plan.prefix == "storage"


def test_at_least_three_chunks_are_worked_ahead_where_memory_allows(make):
    for mbit in (2, 50, 1000):
        assert chosen(make, make.rig(mbit, node_cores=4.0)).prefetch >= 3


def test_an_accelerator_of_the_profile_is_in_the_plan(make):
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, trainer={"suffix_on": "accelerator"})
    plan = search(make.CUTS, profile, make.rig(accelerator=Device("gpu")), make.JOB).best.plan
    assert (plan.suffix, plan.loss, plan.gradients) == ("accelerator",) * 3


def test_a_sweep_prices_every_legal_cut_with_the_same_knobs(make):
    like = near_plan(make.CUTS[3], node_batch=8, chunk_rows=24, prefetch=5)
    found = sweep(make.CUTS, make.PROFILE, make.rig(), make.JOB, like=like)
    assert [each.plan.cut for each in found] == [0, 1, 2, 3, 4, 5]
    assert {(each.plan.node_batch, each.plan.chunk_rows, each.plan.prefetch) for each in found} == {(8, 24, 5)}


def test_a_sweep_has_the_chosen_plans_load_at_its_cut_with_a_share_too(make):
    best = estimate(replace(near_plan(make.CUTS[4]), host_share=0.25, split=PACE, engine="onnxruntime or auto"),
                    make.CUTS, make.PROFILE, make.rig(), make.JOB)  # fmt: skip
    found = sweep(make.CUTS, make.PROFILE, make.rig(), make.JOB, like=best.plan)
    assert best in found


@pytest.mark.parametrize("strategy", ["mte", "wrr"])
def test_a_ranking_has_the_plans_as_they_are_carried_out(make, strategy):
    ranking = search(make.CUTS, make.PROFILE, make.rig(100), make.JOB, shared=True, prongs=strategy)
    ranking = ranking.map(lambda each: carried(each, strategy, FILE))
    assert {(each.plan.prongs, each.plan.split) for each in ranking.plans} == {(strategy, PLACE)}
    assert (ranking.nothing.plan.prongs, ranking.pixels.plan.hand_over) == ("ordered", FILE)
    assert f"({strategy}; times are estimated as for ordered)" in ranking.explain()
    for each in ranking.plans:
        check(each.plan, make.CUTS)


@pytest.mark.parametrize("flat", [False, True])
def test_hundreds_of_cuts_are_searched_with_few_calls_of_the_formulas(make, flat, monkeypatch):
    count = 432  # as many as DenseNet121 has
    sizes = [150_528, *(1000 if flat else 200_000 - 450 * index for index in range(1, count))]
    suffix_s = [0.1 if flat else 2e-4 * (count - index) for index in range(count)]
    profile = make.profile([1e-4] * (count - 1), suffix_s)
    calls, price = [], module.Pricing.price
    monkeypatch.setattr(module.Pricing, "price", lambda *args: calls.append(1) or price(*args))
    ranking = search(make.cuts(sizes), profile, make.rig(50), make.JOB, codecs=CODECS)
    assert len(calls) < 200
    assert ranking.best.total_s <= ranking.nothing.total_s


def test_the_rule_prefers_fewer_bytes_only_among_equals(make):
    rig = make.rig(10_000, trainer_cores=100.0)
    every = brute_force(make.CUTS, make.PROFILE, rig, make.JOB, ("raw",))
    fastest = min(each.total_s for each in every)
    assert pick(every).total_s <= fastest * 1.02
    assert pick([each for each in every if each.plan != Plan()]).total_s <= fastest * 1.02


@pytest.mark.parametrize(("num_nodes", "shares", "wanted"), [(1, False, "auto"), (2, False, "openvino or auto")])
def test_several_nodes_shall_run_the_prefix_on_one_engine(make, num_nodes, shares, wanted):
    profile = make.replace(make.PROFILE, node=make.replace(make.PROFILE.node, engine="openvino"))
    rig = make.rig(10, num_nodes=num_nodes, trainer_shares=shares)
    ranking = search(make.CUTS, profile, rig, make.JOB, precisions=("fp32",))
    assert ranking.best.plan.has_prefix
    assert {each.plan.engine for each in ranking.plans if each.plan.has_prefix} == {wanted}
    assert {each.plan.engine for each in ranking.plans if not each.plan.has_prefix} <= {"auto"}


def test_a_share_is_made_on_the_engine_of_the_nodes(make):
    profile = make.replace(make.PROFILE, node=make.replace(make.PROFILE.node, engine="openvino"))
    plans = [
        each.plan
        for each in search(make.CUTS, profile, make.rig(1000), make.JOB, keep=50).plans
        if each.plan.has_prefix
    ]
    assert any(plan.host_share for plan in plans)
    assert all((plan.engine == "openvino or auto") == (plan.host_share > 0) for plan in plans if plan.uses_storage)

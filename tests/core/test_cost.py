"""What the cost model promises: loads add up, more of anything never hurts, and it says what limits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.cost import check_fits, estimate
from headwater.core.loads import HELD_UP, LOOP, NODE, OWN, TRAINER, JobSize
from headwater.core.plan import Plan, here_plan, near_plan
from headwater.core.prongs import TAIL_MEMORY
from headwater.core.rig import Device, Link
from headwater.errors import ConfigError, PlanError

CLOSE = 1 + 1e-9  # additions in another order differ in their last bits


@st.composite
def planned(draw, worlds):
    """A world and any legal plan for it."""
    cuts, profile, rig, job = draw(worlds)
    batch = draw(st.sampled_from([1, 4, 32]))
    knobs = {"node_batch": batch, "chunk_rows": batch * draw(st.integers(1, 8)), "prefetch": draw(st.integers(1, 24))}
    cut = draw(st.sampled_from([cut for cut in cuts if cut.legal]))
    codec = (
        draw(st.sampled_from(["raw", "fp16", "int8"])) if cut.index else "raw"
    )  # input made near the data has no price
    plan = Plan(**knobs) if draw(st.booleans()) else near_plan(cut, codec=codec, **knobs)
    return plan, cuts, profile, rig, job


@given(st.data())
def test_an_epoch_takes_at_least_as_long_as_every_single_resource_is_busy(make, data):
    plan, cuts, profile, rig, job = data.draw(planned(make.worlds))
    result = estimate(plan, cuts, profile, rig, job)
    assert all(result.epoch_s * CLOSE >= job.num_samples * load.s for load in result.loads)
    assert all(math.isfinite(each) for each in (result.epoch_s, result.total_s, result.down_bytes, result.fill_s))
    assert result.total_s * CLOSE >= job.num_epochs * result.epoch_s
    assert result.limiting in result.explain()


def improved(rig, how, replace):
    if how == "node":
        return replace(rig, nodes=(*rig.nodes, Device("new", 0.25, None, 0.1)), links=(*rig.links, Link(1e4, 1e4, 0.2)))
    if how == "cores":
        nodes = tuple(replace(node, cores=node.cores * 1.5) for node in rig.nodes)
        return replace(rig, nodes=nodes, trainer=replace(rig.trainer, cores=rig.trainer.cores * 2))
    faster = {name: link and Link(link.down_bytes_per_s * 2, link.up_bytes_per_s * 2, link.latency_s / 2)
              for name, link in (("trainer_link", rig.trainer_link), ("store_link", rig.store_link))}  # fmt: skip
    links = tuple(Link(each.down_bytes_per_s * 2, each.up_bytes_per_s, each.latency_s) for each in rig.links)
    return replace(rig, links=links, **faster)


@pytest.mark.parametrize("how", ["node", "cores", "bandwidth"])
@given(data=st.data())
def test_more_to_run_on_never_makes_an_epoch_slower(make, how, data):
    plan, cuts, profile, rig, job = data.draw(planned(make.worlds))
    before = estimate(plan, cuts, profile, rig, job)
    after = estimate(plan, cuts, profile, improved(rig, how, make.replace), job)
    assert after.epoch_s <= before.epoch_s * CLOSE


@given(st.data(), st.integers(1, 100_000))
def test_more_bytes_are_never_faster(make, data, more):
    plan, cuts, profile, rig, job = data.draw(planned(make.worlds))
    sizes = make.replace(profile.sizes, sample_bytes=profile.sizes.sample_bytes + more,
                         row_extra_bytes=profile.sizes.row_extra_bytes + more)  # fmt: skip
    heavier = estimate(plan, cuts, make.replace(profile, sizes=sizes), rig, job)
    assert heavier.epoch_s * CLOSE >= estimate(plan, cuts, profile, rig, job).epoch_s


@given(st.data())
def test_energy_adds_up_over_devices_and_lies_between_idle_and_busy(make, data):
    plan, cuts, profile, rig, job = data.draw(planned(make.worlds))
    result = estimate(plan, cuts, profile, rig, job)
    devices = {**{node.name: node for node in rig.nodes}, "trainer": rig.trainer, "accelerator": rig.accelerator}
    assert set(result.energy_j) == set(devices)
    for name, device in devices.items():
        assert device.idle_w * result.total_s <= result.energy_j[name] * CLOSE
        assert result.energy_j[name] <= device.busy_w * result.total_s * CLOSE
    alone = make.replace(rig, nodes=tuple(Device(node.name, node.cores, None, node.speed) for node in rig.nodes))
    rest = estimate(plan, cuts, profile, alone, job).energy_j
    assert all(rest[name] == pytest.approx(result.energy_j[name]) for name in ("trainer", "accelerator"))


def test_a_trainer_without_accelerator_decodes_and_trains_on_the_same_cores(make):
    rig = make.rig(1000, trainer_cores=1.0)
    result = estimate(Plan(), make.CUTS, make.PROFILE, rig, make.JOB)
    costs, sizes = make.PROFILE.trainer, make.PROFILE.sizes
    fetch_s = costs.fetch_s + costs.fetch_s_per_byte * (sizes.sample_bytes + sizes.fetch_down_bytes)
    all_s = fetch_s + costs.decode_s + costs.finish_s + costs.suffix_s[0] + costs.step_s / 32
    assert result.load("trainer") == pytest.approx(all_s + costs.receive_s_per_chunk / 64)
    assert result.limiting == "the trainer's CPU"
    assert estimate(Plan(), make.CUTS, make.PROFILE, make.rig(1000, trainer_cores=2.0), make.JOB).load(
        "trainer") == pytest.approx(result.load("trainer") / 2)  # fmt: skip


def test_with_an_accelerator_the_suffix_leaves_the_host(make):
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, trainer={"suffix_on": "accelerator"})
    with pytest.raises(ConfigError, match="the rig has none"):
        estimate(Plan(), make.CUTS, profile, make.rig(), make.JOB)
    rig = make.rig(accelerator=Device("gpu"))
    host, both = (estimate(Plan(), make.CUTS, each, rig, make.JOB) for each in (make.PROFILE, profile))
    assert both.load("accelerator") == pytest.approx(make.SUFFIX_S[0])
    assert both.load("trainer") == pytest.approx(host.load("trainer") - make.SUFFIX_S[0])


def test_nodes_share_the_work_by_their_speed(make):
    one, two = Device("one", 1.0), Device("two", 2.0)
    rig = make.rig(10_000, nodes=(one, two), links=(Link(1e10, 1e10),) * 2, trainer_cores=1000.0)
    result = estimate(near_plan(make.CUTS[4]), make.CUTS, make.PROFILE, rig, make.JOB)
    alone = estimate(near_plan(make.CUTS[4]), make.CUTS, make.PROFILE,
                     make.rig(10_000, trainer_cores=1000.0), make.JOB)  # fmt: skip
    assert [load.s for load in result.loads if load.kind == "node"] == pytest.approx([alone.load("node") / 3] * 2)


def test_a_thousand_nodes_alike_are_priced_as_one_kind(make):
    rig = make.rig(num_nodes=1000)
    result = estimate(near_plan(make.CUTS[4]), make.CUTS, make.PROFILE, rig, make.JOB)
    assert "and 999 like it" in next(load.resource for load in result.loads if load.kind == "node")
    assert len(result.loads) < 12


def test_all_nodes_share_the_trainers_port(make):
    port = Link(1e6, 1e6)
    for num_nodes in (1, 4):
        rig = make.rig(1000, num_nodes=num_nodes, trainer_link=port)
        result = estimate(near_plan(make.CUTS[1]), make.CUTS, make.PROFILE, rig, make.JOB)
        assert result.limiting == "the trainer's port, inwards"
        assert result.steady_s == pytest.approx(result.down_bytes / 1e6)


def test_too_few_rows_ahead_on_a_long_way_limit_the_run_and_more_of_them_help(make):
    rig = make.rig(1000, links=(Link(1e8, 1e8, 2.0),))
    short, deep = (estimate(near_plan(make.CUTS[5], node_batch=16, chunk_rows=16, prefetch=prefetch), make.CUTS,
                            make.PROFILE, rig, make.JOB) for prefetch in (1, 24))  # fmt: skip
    assert short.limiting == "the work ahead on store-0"
    assert short.steady_s > 4.0 / 16
    assert "prefetch" in short.explain()
    assert deep.limiting != short.limiting


def test_groups_as_large_as_chunks_leave_cores_idle(make):
    rig = make.rig(10_000, node_cores=32.0, trainer_cores=100.0)
    few, many = (estimate(near_plan(make.CUTS[5], node_batch=batch, chunk_rows=64, prefetch=3), make.CUTS,
                          make.PROFILE, rig, make.JOB) for batch in (64, 16))  # fmt: skip
    assert few.load("engine") == pytest.approx(32 / 3 * few.load("node"), rel=0.5)
    assert few.limiting in ("the engine on store-0", "the work ahead on store-0")
    assert many.steady_s < few.steady_s / 2


@pytest.mark.parametrize(
    ("mbit", "cores", "word"), [(2, 1.0, "a link up to"), (1000, 0.25, "more nodes"), (1000, 64.0, "trainer's cores")]
)
def test_the_explanation_names_the_limit_and_a_way_on(make, mbit, cores, word):
    plan = near_plan(make.CUTS[4], node_batch=16, prefetch=24)
    text = estimate(plan, make.CUTS, make.PROFILE, make.rig(mbit, node_cores=cores), make.JOB).explain()
    assert word in text
    assert "samples/s" in text
    assert "estimated" in text


def test_the_way_on_is_as_large_as_it_says(make):
    rig, plan = make.rig(2), near_plan(make.CUTS[4])
    result = estimate(plan, make.CUTS, make.PROFILE, rig, make.JOB)
    kinds = sorted({load.kind: load.s for load in result.loads}.items(), key=lambda each: -each[1])
    factor = kinds[0][1] / max(s for kind, s in kinds[1:] if kind != "ahead")
    faster = make.rig(2 * factor)
    after = estimate(plan, make.CUTS, make.PROFILE, faster, make.JOB)
    assert after.load("link down") == pytest.approx(after.steady_s, rel=0.01)


def test_memory_that_does_not_suffice_is_told_with_the_way_out(make):
    rig = make.rig(nodes=(Device("store-0", 1.0, 50 << 20),))
    result = estimate(near_plan(make.CUTS[2]), make.CUTS, make.PROFILE, rig, make.JOB)
    assert not result.fits
    assert "needs" in result.faults[0]
    assert "on node store-0 (has 52 MB); cut elsewhere, lower node_batch (32) or prefetch (3)" in result.faults[0]
    with pytest.raises(PlanError, match="on node store-0"):
        check_fits(result.plan, make.CUTS, make.PROFILE, rig, make.JOB)
    check_fits(
        make.replace(result.plan, node_batch=1, chunk_rows=1, prefetch=1), make.CUTS, make.PROFILE, rig, make.JOB
    )


def trainer_bytes(make, **changes):
    """That a trainer needs for a plan, and has."""
    memory_bytes, samples = changes.pop("memory_bytes", None), changes.pop("samples", 5000)
    plan = make.replace(near_plan(make.CUTS[changes.pop("cut", 0)], node_batch=8, chunk_rows=8, prefetch=3), **changes)
    node = make.replace(make.PROFILE.node, base_bytes=10**9)
    rig = make.rig(trainer=Device("t", 1.0, memory_bytes))
    result = estimate(plan, make.CUTS, make.replace(make.PROFILE, node=node), rig, JobSize(samples, 128))
    return next(each.need_bytes for each in result.memory if each.device == "trainer")


def test_a_share_of_pixels_needs_no_node_beside_the_trainer(make):
    assert trainer_bytes(make, host_share=0.5) < 10**9
    assert trainer_bytes(make, host_share=0.5, cut=4) > 10**9


def test_under_wrr_whole_batches_wait_on_both_sides(make):
    pixels = make.PROFILE.sizes.pixel_row_bytes
    more = trainer_bytes(make, host_share=0.5, prongs="wrr") - trainer_bytes(make, host_share=0.0)
    assert more > ((3 + 1) * 2 + 1 - 1) * 128 * pixels / 2


def test_under_mte_a_tail_waits_as_far_as_there_is_room_for_it(make):
    pixels = make.PROFILE.sizes.pixel_row_bytes
    whole, has = 0.75 * 5000 * pixels, 10**9
    plain, mte = (trainer_bytes(make, host_share=0.25, prongs=prongs) for prongs in ("ordered", "mte"))
    assert mte > whole
    held = trainer_bytes(make, host_share=0.25, prongs="mte", memory_bytes=int(has)) - plain
    assert held <= TAIL_MEMORY * has < whole
    assert trainer_bytes(make, host_share=0.25, prongs="mte", memory_bytes=10**12) == mte


def test_what_a_share_asks_of_the_store_goes_up_its_link_and_the_port(make):
    port, store = Link(1e9, 1e3), Link(1e8, 1e4)
    rig = make.rig(trainer_link=port, store_link=store)
    plan = make.replace(near_plan(make.CUTS[4]), host_share=0.25)
    result, none = (estimate(each, make.CUTS, make.PROFILE, rig, make.JOB) for each in (plan, near_plan(make.CUTS[4])))
    asked = make.PROFILE.sizes.fetch_up_bytes
    assert result.load("store link up") == pytest.approx(0.25 * asked / 1e4)
    assert result.up_bytes == pytest.approx(0.75 * none.up_bytes + 0.25 * asked)
    assert result.load("port up") == pytest.approx(result.up_bytes / 1e3)


def test_shipping_the_prefix_is_paid_once_however_many_epochs(make):
    profile = make.replace(make.PROFILE, export_s=10.0)
    few, many = (estimate(near_plan(make.CUTS[4]), make.CUTS, profile, make.rig(), JobSize(1000, 32, epochs))
                 for epochs in (1, 5))  # fmt: skip
    assert few.setup_s == many.setup_s > 10.0
    assert many.total_s == pytest.approx(few.setup_s + 5 * few.epoch_s)
    assert estimate(Plan(), make.CUTS, profile, make.rig(), JobSize(1000, 32)).setup_s == 0


@pytest.mark.parametrize("change", [{"codec": "fp16"}, {"precision": "int8"}, {"cut": 99}, {"cut": 6}])
def test_what_was_not_measured_has_no_estimate(make, change):
    profile = make.profile(make.PLACE_S, [*make.SUFFIX_S[:6], None], node={"encode_s_per_byte": {}})
    with pytest.raises(PlanError, match=r"not measured|not among"):
        estimate(make.replace(near_plan(make.CUTS[4]), **change), make.CUTS, profile, make.rig(), make.JOB)


def test_an_estimate_says_in_its_json_that_it_is_one(make):
    data = estimate(near_plan(make.CUTS[4]), make.CUTS, make.PROFILE, make.rig(), make.JOB).to_json()
    assert set(data) == {"plan", "estimated"}
    assert "modelled_energy_j" in data["estimated"]


@pytest.mark.parametrize("change", [{"num_samples": 0}, {"batch_size": -1}, {"num_epochs": 1.5}])
def test_a_job_of_no_size_is_refused(make, change):
    with pytest.raises(ConfigError):
        make.replace(make.JOB, **change)


def test_setup_that_is_known_is_that_of_every_cut(make):
    job = JobSize(1000, 32, setup_s=7.0)
    early, late = (estimate(near_plan(make.CUTS[cut]), make.CUTS, make.PROFILE, make.rig(), job) for cut in (1, 4))
    assert early.setup_s == late.setup_s == 7.0
    assert estimate(Plan(), make.CUTS, make.PROFILE, make.rig(), job).setup_s == 0


def test_a_suffix_spreads_over_as_many_cores_as_it_has_threads(make):
    rig = make.rig()
    rig = make.replace(rig, trainer=make.replace(rig.trainer, cores=8.0))
    one, eight = (make.replace(make.PROFILE, trainer=make.replace(make.PROFILE.trainer, num_threads=threads))
                  for threads in (1, 8))  # fmt: skip
    loads = [estimate(Plan(), make.CUTS, profile, rig, make.JOB).load(LOOP) for profile in (one, eight)]
    suffix_s = make.PROFILE.trainer.suffix_s[0]
    assert loads[0] - loads[1] == pytest.approx(suffix_s * (1 - 1 / 8) / rig.trainer.speed)


def test_an_engine_here_costs_what_was_measured_of_it_or_as_much_more_as_decoding(make):
    plan = make.replace(near_plan(make.CUTS[4], node_batch=32, chunk_rows=32), host_share=0.5)

    def engine_s(**trainer):
        profile = make.replace(make.PROFILE, trainer=make.replace(make.PROFILE.trainer, **trainer))
        return estimate(plan, make.CUTS, profile, make.rig(), make.JOB).load(OWN)

    assert engine_s(decode_s=8e-3) == pytest.approx(2 * engine_s(decode_s=4e-3))
    assert engine_s(decode_s=8e-3, engine_ratio=3.0) == pytest.approx(3 * engine_s(engine_ratio=1.0))


def test_what_all_stages_take_beyond_their_sum_is_taken_on_either_side(make):
    profile = make.replace(make.PROFILE, node=make.replace(make.PROFILE.node, overhead_s=1e-3))
    near = near_plan(make.CUTS[4])
    more = [estimate(plan, make.CUTS, known, make.rig(), make.JOB).load(kind)
            for plan, kind in ((near, NODE), (here_plan(make.CUTS[4]), TRAINER))
            for known in (make.PROFILE, profile)]  # fmt: skip
    assert more[1] - more[0] == pytest.approx(1e-3)
    assert more[3] - more[2] == pytest.approx(1e-3)


def test_reading_a_share_holds_rows_up_on_a_thin_link_unless_enough_is_ahead(make):
    def held_up(mbit, prefetch, share=1 / 16):
        """Beyond what the same plan costs where reading takes no time."""
        plan = make.replace(near_plan(make.CUTS[5], node_batch=16, chunk_rows=16, prefetch=prefetch), host_share=share)
        thin, wide = (make.rig(mbit, store_link=Link(rate * make.MBIT, rate * make.MBIT, 1e-4)) for rate in (mbit, 1e6))
        return [estimate(plan, make.CUTS, make.PROFILE, rig, make.JOB).load(HELD_UP) for rig in (thin, wide)]

    thin, wide = held_up(2, 3)
    assert thin > 1.2 * wide
    assert held_up(2, 24)[0] == pytest.approx(held_up(2, 24)[1])
    assert held_up(1000, 3)[0] == pytest.approx(held_up(1000, 3)[1])

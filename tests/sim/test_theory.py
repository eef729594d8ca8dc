"""What is known without a simulator comes out of it, too."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.cost import estimate
from headwater.core.loads import JobSize
from headwater.core.plan import Plan
from headwater.core.rig import Link
from headwater.sim.packets import summed_s
from headwater.sim.reduction import ring_parts, ring_s, switch_s
from headwater.sim.rigfile import RING, SWITCH, Work


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(0, 5), mbit=st.sampled_from([5, 20, 100, 1000]), cores=st.sampled_from([0.25, 0.5, 1.0, 4.0]))
def test_a_pipeline_is_as_fast_as_its_slowest_part(sim, cut, mbit, cores):
    """Never faster than the largest load allows, and once it flows hardly slower."""
    file, plan = sim.rig(mbit, node={"cores": cores}), sim.near(cut, prefetch=8)
    outcome = sim.play(plan, file)
    bound = estimate(plan, sim.CUTS, sim.PROFILE, file.priced(), JobSize(2000, 32, counts_setup=False))
    slowest = max(load.s for load in bound.loads if load.kind not in ("ahead",))
    assert outcome.seconds >= 0.999 * 2000 * slowest
    assert outcome.seconds <= 1.1 * bound.epoch_s


def test_nodes_add_up_until_a_link_is_full(sim):
    """Each node makes 1/s; their sum counts while the trainer's port and its cores can take it."""
    plan, trainer = sim.near(5, prefetch=4), {"cores": 16.0}
    alone = sim.play(plan, sim.rig(1000, trainer=trainer)).samples_per_s
    four = sim.play(plan, sim.rig(1000, num_nodes=4, num_samples=8000, trainer=trainer)).samples_per_s
    assert four == pytest.approx(4 * alone, rel=0.03)
    thin = sim.play(plan, sim.rig(2, num_nodes=4, trainer=trainer))
    row_bytes = thin.down_bytes / 2000
    assert thin.samples_per_s == pytest.approx(2 * sim.MBIT / row_bytes, rel=0.05)


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_a_ring_moves_twice_n_minus_one_over_n_and_a_switch_once(workers):
    assert ring_parts(workers) == pytest.approx(2 * (workers - 1) / workers)
    assert ring_s(workers, 1e8, 1e9) == pytest.approx(0.1 * 2 * (workers - 1) / workers)
    assert switch_s(1e8, 1e9) == pytest.approx(0.1)
    assert 1 <= ring_s(workers, 1e8, 1e9) / switch_s(1e8, 1e9) < 2


def test_sums_that_are_waited_for_take_that_long_in_each_step(sim):
    """Four trainers whose steps take nothing else: ring and switch differ by 2(n−1)/n."""
    times = {}
    for kind in (RING, SWITCH):
        job = Work(3200, 32, gradient_bytes=1.25e7, reduce=kind)
        file = sim.rig(100, num_trainers=4, num_nodes=128, job=job, trainer={"cores": 64.0, "nodes_each": 32})
        times[kind] = sim.play(sim.near(5), file).seconds
    steps = 25
    assert times[RING] - times[SWITCH] == pytest.approx(steps * 0.5 * 1.0, rel=0.05)
    assert times[SWITCH] == pytest.approx(steps * 1.0, rel=0.1)  # and the first rows


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_slots_of_the_switch_sum_in_s_over_b(workers):
    """The state machines of core.slots, packet by packet: bytes ÷ bandwidth once the window covers the way."""
    num_bytes, rate = 16e6, 1.25e9
    taken_s = summed_s(workers, num_bytes, rate, latency_s=1e-5, num_slots=64)
    assert taken_s == pytest.approx(num_bytes / rate, rel=0.05)


def test_too_few_slots_wait_for_each_other():
    """One slot's block goes there and back before the next: a window over a round trip."""
    slow = summed_s(2, 4e6, 1.25e9, latency_s=1e-3, num_slots=1)
    blocks = 4e6 / 44800
    assert slow == pytest.approx(blocks * (2e-3 + 2 * 44800 / 1.25e9), rel=0.05)


@pytest.mark.parametrize("prongs", ["mte", "wrr"])
def test_two_ends_are_bounded_by_the_step_and_by_both_sides_together(sim, prongs):
    """min(step rate, 1/t_cpu + 1/t_csd), of which the rest at the ends is all that is lost."""
    node = {"cores": 0.5}
    profile = sim.replace(
        sim.PROFILE,
        trainer=sim.replace(sim.PROFILE.trainer, suffix_s=(1e-4,) * 6, suffix_on="accelerator", finish_s=0.0),
    )
    from headwater.sim.rigfile import Chip

    file = sim.rig(10_000, node=node, num_samples=4096, trainer={"accelerator": Chip(), "cores": 1.0})
    near_s = (1e-4 + 4e-3 + 1e-3 / 32 + 1e-9 * 150536) / 0.5
    here_s = 1e-4 + 2e-9 * 110e3 + 4e-3
    receive_s = 2e-9 * 150536 + 1e-6
    share = (1 / here_s) / (1 / here_s + 1 / near_s)
    plan = sim.near(0, prefetch=3, host_share=round(share, 3), prongs=prongs)
    rate = sim.play(plan, file, profile).samples_per_s
    # Taking rows from the wire takes of the trainer's core as well.
    bound = 1 / near_s + (1 - receive_s / near_s) / here_s
    assert 0.93 * bound <= rate <= 1.01 * bound


def test_moving_nothing_is_bounded_by_the_trainers_core_or_the_store(sim):
    outcome = sim.play(Plan(), sim.rig(1000))
    per_row = 1e-4 + 2e-9 * 110e3 + 4e-3 + 5e-4 + 20e-3 + 1e-3 / 32
    assert outcome.samples_per_s == pytest.approx(1 / per_row, rel=0.02)
    thin = sim.play(Plan(), sim.rig(5))
    assert thin.samples_per_s == pytest.approx(5 * sim.MBIT / 110e3, rel=0.02)


def test_latency_alone_is_hidden_by_working_ahead(sim):
    file = sim.rig(1000)
    far = sim.replace(file, nodes=(sim.replace(file.nodes[0], link=Link(1e9, 1e9, 0.1)),))
    plan = sim.near(5, prefetch=4)
    assert sim.play(plan, far).seconds <= 1.02 * sim.play(plan, file).seconds + 0.5


@pytest.mark.parametrize("share", [1 / 8, 1 / 4])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_rows_from_nodes_get_through_while_a_share_is_read_over_the_same_thin_link(sim, share, rows):
    """The link has room for both, so the node is what there is to wait for: reads must not push its rows aside."""
    node_s = 1e-4 + 4e-3 + 5e-4 + 20e-3 + 5e-4 / 16 + 1e-3 / rows + 1e-9 * (1280 * 4 + 2560)
    plan = sim.near(5, host_share=share, codec="fp16", chunk_rows=rows, node_batch=16)
    link_s = share * 110e3 + (1 - share) * 2568
    file = sim.rig(link_s / (0.8 * (1 - share) * node_s) / sim.MBIT, num_samples=1024)
    took_s = sim.play(plan, file).seconds
    assert took_s == pytest.approx(1024 * (1 - share) * node_s, rel=0.05)


def test_a_sample_from_far_is_decoded_while_others_come(sim):
    """All but the last sixteen, which share the link to its end and so come together."""
    plan = Plan(chunk_rows=64, node_batch=64, prefetch=1)
    took_s = sim.play(plan, sim.rig(5, num_samples=64)).seconds
    link_s, read_s, step_s = 64 * 110e3 / (5 * sim.MBIT), 1e-4 + 2e-9 * 110e3, 2 * 1e-3 + 64 * (5e-4 + 20e-3)
    assert link_s + step_s <= took_s <= link_s + 16 * (read_s + 4e-3) + step_s + 0.03


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_store_on_the_nodes_machines_takes_of_their_cores_what_a_trainers_reads_take(sim, nodes):
    """As plans are priced: alone it is what there is to wait for; beside nodes they have the rest."""
    profile = sim.replace(sim.PROFILE, node=sim.replace(sim.PROFILE.node, serve_s=0.1))
    file = sim.rig(10_000, num_nodes=nodes)
    alone = sim.play(Plan(), file, profile)
    assert alone.samples_per_s == pytest.approx(nodes / 0.1, rel=0.03)
    assert alone.cpu_s["node"] == pytest.approx(2000 * 0.1)
    plan = sim.near(5, host_share=0.25, chunk_rows=32)
    shared, apart = sim.play(plan, file, profile), sim.play(plan, file)
    assert shared.cpu_s["node"] - apart.cpu_s["node"] == pytest.approx(500 * 0.1, rel=0.05)
    assert shared.seconds == pytest.approx(shared.cpu_s["node"] / nodes, rel=0.05)

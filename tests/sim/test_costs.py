"""What the simulator has each side do adds up to what plans are priced with."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.loads import JobSize, Pricing
from headwater.core.plan import Plan, here_plan
from headwater.sim.costs import costs_of


@settings(deadline=None, max_examples=60)
@given(
    cut=st.integers(0, 5), codec=st.sampled_from(["raw", "fp16"]), rows=st.sampled_from([16, 32, 64]),
    group=st.sampled_from([8, 16]), share=st.sampled_from([0.0, 0.25]), decode_s=st.floats(0, 0.02),
    overhead_s=st.floats(0, 0.01), chunk_s=st.floats(0, 0.01), ratio=st.sampled_from([None, 0.5, 2.0]),
)  # fmt: skip
def test_every_second_of_the_pricing_is_somewhere(
    sim, cut, codec, rows, group, share, decode_s, overhead_s, chunk_s, ratio
):
    node = sim.replace(sim.PROFILE.node, decode_s=decode_s, overhead_s=overhead_s, chunk_s=chunk_s)
    trainer = sim.replace(sim.PROFILE.trainer, engine_ratio=ratio, receive_s_per_chunk=1e-3)
    profile = sim.replace(sim.PROFILE, node=node, trainer=trainer)
    plan = sim.near(cut, codec=codec if cut else "raw", chunk_rows=rows, node_batch=group, host_share=share)
    pricing = Pricing(sim.CUTS, profile, sim.rig().priced(), JobSize(2000, 32))
    work, costs = pricing.work(plan, pricing.choice(plan)), costs_of(plan, pricing)
    made, taken = costs.near, costs.taking
    wire_bytes = made.row_bytes + made.group_bytes / group + made.chunk_bytes / rows
    assert wire_bytes == pytest.approx(work.down_bytes)
    node_s = made.read_s + made.decode_s + made.finish_s + made.engine_s + made.encode_s
    node_s += made.send_s_per_byte * wire_bytes + made.chunk_s / rows + made.has_engine * made.group_s / group
    assert node_s == pytest.approx(work.node_s if cut else work.node_s - pricing.profile.node.group_s / group)
    receive_s = taken.receive_row_s + taken.receive_chunk_s / rows
    receive_s += (1 - share) * taken.receive_s_per_byte * wire_bytes
    if share:
        own = costs.own
        own_bytes = own.row_bytes + own.group_bytes / group + own.chunk_bytes / rows
        own_s = own.read_s + own.decode_s + own.finish_s + own.engine_s + own.encode_s
        own_s += own.has_engine * own.group_s / group + own.chunk_s / rows + own.send_s_per_byte * own_bytes
        assert own_s == pytest.approx(work.own_s)
        receive_s += share * (own_s + taken.receive_s_per_byte * own_bytes)
    assert receive_s == pytest.approx(work.receive_s)
    assert taken.loop_row_s + taken.step_s / 32 == pytest.approx(work.loop_s)


@pytest.mark.parametrize(("where", "is_far"), [
    ("beside nodes", True), ("pixels, beside nodes", True), ("a prefix here", True), ("nothing moves", False),
])  # fmt: skip
def test_who_reads_beside_a_trainer_has_a_trainers_readers_and_crowds_out_nobody(sim, where, is_far):
    """As `train.host` and `train.own` have it: a node beside the trainer always holds itself back."""
    plan = {"beside nodes": sim.near(5, host_share=0.25), "pixels, beside nodes": sim.near(0, host_share=0.25),
            "a prefix here": here_plan(sim.CUTS[5]), "nothing moves": Plan()}[where]  # fmt: skip
    own = costs_of(plan, Pricing(sim.CUTS, sim.PROFILE, sim.rig().priced(), JobSize(2000, 32))).own
    assert own.num_readers == sim.PROFILE.trainer.num_readers < sim.PROFILE.node.num_readers
    assert own.is_far == is_far

"""The formulas against a run played chunk by chunk, row group by row group."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.cost import estimate
from headwater.core.loads import JobSize, Pricing
from headwater.core.plan import near_plan
from headwater.core.rig import Link


def play(plan, cuts, profile, rig, job):
    """Seconds of an epoch through one node: requests, node, link and steps in turn, with the feed's own window."""
    pricing = Pricing(cuts, profile, rig, job)
    work = pricing.work(plan, pricing.choice(plan))
    link, rows, batch = rig.links[0], plan.chunk_rows, job.batch_size
    node_s, down_s = work.node_s / rig.nodes[0].capacity, work.down_bytes / link.down_bytes_per_s
    step_s = work.loop_s + work.suffix_s / rig.trainer.capacity
    window = plan.prefetch + 2
    node_free = link_free = 0.0
    here, pulled, ends = [], [], []  # when chunks were complete, when the loop took them, when steps ended

    def pull():
        """The loop takes the next chunk, after the steps that the ones before it were enough for."""
        while (len(ends) + 1) * batch <= len(pulled) * rows:
            ends.append(max(pulled[-1], ends[-1] if ends else 0.0) + batch * step_s)
        pulled.append(max(here[len(pulled)], ends[-1] if ends else 0.0))

    for chunk in range(-(-job.num_samples // rows)):
        asked = here[chunk - plan.prefetch] if chunk >= plan.prefetch else 0.0
        while len(pulled) <= chunk - window + 1:
            pull()
        if chunk >= window:
            asked = max(asked, pulled[chunk - window + 1])
        count = min(rows, job.num_samples - chunk * rows)
        node_free = max(node_free, asked + link.latency_s + count * work.up_bytes / link.up_bytes_per_s)
        for start in range(0, count, plan.node_batch):
            size = min(plan.node_batch, count - start)
            node_free += size * node_s
            link_free = max(link_free, node_free) + size * down_s
        here.append(link_free + link.latency_s)
    while len(pulled) < len(here):
        pull()
    now = max(pulled[-1], ends[-1] if ends else 0.0)
    return now + (job.num_samples - len(ends) * batch) * step_s


@given(
    cut=st.integers(1, 5),
    chunk_rows=st.sampled_from([16, 64, 256]),
    prefetch=st.sampled_from([1, 3, 8, 24]),
    mbit=st.sampled_from([2, 10, 50, 200, 1000]),
    latency_s=st.sampled_from([0.0, 0.001, 0.05]),
    node_cores=st.sampled_from([0.25, 0.5, 1.0]),
    samples=st.integers(500, 5000),
    batch=st.sampled_from([16, 32, 128]),
)
def test_estimates_are_close_to_a_run_played_step_by_step(
    make, cut, chunk_rows, prefetch, mbit, latency_s, node_cores, samples, batch
):
    free = {"receive_s_per_byte": 0.0, "receive_s_per_row": 0.0, "receive_s_per_chunk": 0.0}
    profile = make.profile(make.PLACE_S, make.SUFFIX_S, trainer=free)
    rate = mbit * make.MBIT
    rig = make.rig(node_cores=node_cores, links=(Link(rate, rate, latency_s),))
    plan = near_plan(make.CUTS[cut], node_batch=-(-chunk_rows // 3), chunk_rows=chunk_rows, prefetch=prefetch)
    job = JobSize(samples, batch, counts_setup=False)
    played_s = play(plan, make.CUTS, profile, rig, job)
    estimated_s = estimate(plan, make.CUTS, profile, rig, job).epoch_s
    assert estimated_s >= 0.95 * played_s
    if prefetch >= 3:  # with less ahead the two sides wait for each other in ways that averages only bound
        assert estimated_s <= 1.13 * played_s

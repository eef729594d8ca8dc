"""Both sides go through an epoch from its ends, with real nodes: the same pixels, each once, whoever dies."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from tests.train.test_switching import TRANSFORMS, network

import headwater as hw
from headwater.core import prongs
from headwater.core.plan import PACE, near_plan
from headwater.core.prongs import MTE, WRR, meeting_point, visits
from headwater.errors import ConfigError, PlanError

BATCH = 4


def start(pictures, nodes, **options):
    model = network().requires_grad_(True)
    return hw.near(model, pictures, transforms=TRANSFORMS, nodes=nodes, batch_size=BATCH, seed=3,
                   **{"plan": None, "cut": "input", **options})  # fmt: skip


def two_ended(job, **options):
    return near_plan(job.cuts[0], chunk_rows=BATCH, node_batch=BATCH, **{"host_share": 0.5, **options})


def batches(job):
    """An epoch's pixels and labels."""
    return [(x.clone(), y) for x, y in job.loader]


def rows(found):
    """As a multiset: what was seen, whatever the order."""
    return sorted(
        (int(label), x.numpy().tobytes()) for xs, labels in found for x, label in zip(xs, labels, strict=True)
    )


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    """For those who leave it alive."""
    return start_node_once(pictures)


@pytest.fixture(scope="module")
def expected(pictures):
    with start(pictures, "inline") as job:
        return [batches(job) for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"split": PACE}, {"prongs": MTE}, {"prongs": WRR}], ids=str)
def test_every_strategy_gives_the_same_pixels_once_each(pictures, node, expected, options):
    with start(pictures, [node.address]) as job:
        job.adopt(two_ended(job, **options))
        for wanted in expected:
            found = batches(job)
            assert rows(found) == rows(wanted)
            if "prongs" not in options:
                assert all(torch.equal(x, other) for (x, _), (other, _) in zip(found, wanted, strict=True))


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
@pytest.mark.parametrize("options", [{"host_share": 0.0}, {}, {"prongs": MTE}, {"prongs": WRR}], ids=str)
def test_floats_that_nodes_make_are_those_that_the_trainer_makes_rounded(pictures, node, expected, codec, options):
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[codec]
    wanted = [(x.to(kind).float(), y) for x, y in expected[0]]
    with start(pictures, [node.address]) as job:
        job.adopt(two_ended(job, codec=codec, **options))
        found = batches(job)
        assert rows(found) == rows(wanted)
        assert f"as the model's input in {codec}" in job.describe()


def test_the_yardstick_makes_the_same_floats(pictures, expected):
    with start(pictures, "inline") as job:
        job.adopt(near_plan(job.cuts[0], codec="fp16"))
        assert rows(batches(job)) == rows([(x.half().float(), y) for x, y in expected[0]])


def test_transforms_that_stay_on_the_trainer_come_before_the_models_input(pictures):
    from torchvision import transforms as theirs

    steps = theirs.Compose([theirs.Resize((32, 32)), theirs.ToTensor(), theirs.RandomErasing()])
    with pytest.warns(UserWarning, match="RandomErasing"):
        job = hw.near(network(), pictures, transforms=steps, nodes="inline")
    with pytest.raises(PlanError, match="set codec to raw"):
        job.adopt(near_plan(job.cuts[0], codec="fp16"))


def test_mte_has_the_order_that_its_plan_says_and_measures_the_next_meeting_point(pictures, node, expected):
    with start(pictures, [node.address]) as job:
        job.adopt(two_ended(job, prongs=MTE, host_share=0.5))
        job._source.rebalances = True  # as for a job that was planned
        found = batches(job)
        samples = job.samples
        order = job.loader._order.epoch(0)
        meeting = meeting_point(len(samples), 0.5, BATCH)
        wanted = torch.from_numpy(samples.labels[visits(order, meeting)])
        assert torch.equal(torch.cat([y for _, y in found]), wanted)
        share = job.plan.host_share
        assert share != 0.5, "what an epoch took gives the next one's meeting point"
        assert 1 / 16 <= share <= 15 / 16
        assert job.plan.prongs == MTE
        begun = iter(job.loader)
        for _ in range(len(job.loader) - 1):
            next(begun)
        begun.close()
        assert job.plan.host_share == share, "an epoch that was broken off says nothing"


def test_an_mte_run_repeats_from_the_meeting_points_that_were_recorded(pictures, node):
    with start(pictures, [node.address]) as job:
        plan = two_ended(job, prongs=MTE, host_share=0.5)
        job.adopt(plan)
        job._source.rebalances = True
        seen = [(torch.cat([x for x, _ in batches(job)]), job.loader.visit.meeting) for _ in range(3)]
    with start(pictures, [node.address], plan=replace(plan, host_share=0.75), cut=None) as job:
        for epoch, (pixels, meeting) in enumerate(seen):
            at = {"epoch": epoch, "position": 0, "meeting": meeting}
            job.loader.load_state_dict({**job.loader.state_dict(), **at})
            assert torch.equal(torch.cat([x for x, _ in batches(job)]), pixels)


def test_mte_with_a_plan_that_was_adopted_meets_where_it_says(pictures, node):
    with start(pictures, [node.address]) as job:
        job._source.rebalances = True
        job.adopt(two_ended(job, prongs=MTE))
        batches(job)
        assert job.plan.host_share == 0.5


def test_a_node_that_is_away_says_nothing_of_the_next_epoch(pictures, start_node, expected):
    node = start_node(pictures)
    with start(pictures, [node.address]) as job:
        job.adopt(two_ended(job, prongs=MTE, prefetch=1, host_share=0.25))
        job._source.rebalances = True
        os.kill(node.process.pid, signal.SIGKILL)
        assert rows(batches(job)) == rows(expected[0])
        assert job.plan.host_share == 0.25


def test_a_tail_that_does_not_fit_is_made_when_its_turn_comes(pictures, node, expected, monkeypatch, caplog):
    monkeypatch.setattr(prongs, "TAIL_MEMORY", 0.0)
    with start(pictures, [node.address]) as job:
        job.adopt(two_ended(job, prongs=MTE, host_share=0.25, prefetch=1))
        assert rows(batches(job)) == rows(expected[0])
    assert "once the head is used up" in caplog.text


@pytest.mark.parametrize("strategy", [MTE, WRR])
def test_a_run_from_both_ends_resumes_in_the_middle(pictures, node, expected, strategy):
    with start(pictures, [node.address]) as job:
        plan = two_ended(job, prongs=strategy)
        job.adopt(plan)
        begun = iter(job.loader)
        found = [next(begun) for _ in range(2)]
        state = job.loader.state_dict()
        begun.close()
    with start(pictures, [node.address], plan=plan, cut=None) as job:
        job.loader.load_state_dict(state)
        assert rows(found + batches(job)) == rows(expected[0])


@pytest.mark.parametrize("strategy", [MTE, WRR])
def test_a_node_that_dies_hands_its_end_back(pictures, start_node, expected, strategy):
    node = start_node(pictures)
    with start(pictures, [node.address]) as job:
        job.adopt(two_ended(job, prongs=strategy, prefetch=1, host_share=0.25))
        found = []
        for number, batch in enumerate(job.loader):
            found.append(batch)
            if number == 0:
                os.kill(node.process.pid, signal.SIGKILL)
        assert rows(found) == rows(expected[0])


def test_prongs_are_refused_where_there_is_one_side_only(pictures):
    with pytest.raises(ConfigError, match="with nodes elsewhere"):
        start(pictures, None, plan="auto", cut=None, prongs="wrr")
    with pytest.raises(ConfigError, match="it must be one of auto, ordered, mte, wrr"):
        start(pictures, None, prongs="three")

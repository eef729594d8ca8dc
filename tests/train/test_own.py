"""The trainer does a share of the work by itself: the same batches, whoever makes which, and whoever dies."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from tests.train.test_switching import network, outputs, start

import headwater as hw
from headwater.core.plan import PACE, PLACE, here_plan, near_plan
from headwater.errors import PlanError, UnreachableError
from headwater.train.own import OwnNode


def cut_of(job, name):
    return next(cut for cut in job.cuts if cut.name == name)


def own_of(job):
    """The process beside the trainer."""
    return job._source._carrier.own._node._process


def assert_same(found, expected):
    assert len(found) == len(expected)
    for (output, labels), (wanted, wanted_labels) in zip(found, expected, strict=True):
        assert torch.equal(labels, wanted_labels)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    """For those who leave it alive."""
    return start_node_once(pictures)


@pytest.fixture(scope="module")
def expected(pictures):
    with start(pictures, "inline") as job:
        return outputs(job)


@pytest.mark.parametrize(
    ("share", "cut", "split"),
    [(1 / 16, "0.3", PLACE), (0.5, "0.1", PLACE), (15 / 16, "0.3", PLACE), (0.5, "0.3", PACE)],
)
def test_batches_are_the_same_whatever_the_share(pictures, node, expected, share, cut, split):
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(cut_of(job, cut), chunk_rows=2, node_batch=2, host_share=share, split=split))
        for thread in job._source._warm(job._source._carried):  # or the node would do all before it has begun
            thread.join()
        assert_same(outputs(job), expected)
        assert job._source._carrier.own.read_bytes > 0 or share < 0.1, "the trainer's own node made nothing"
        process = own_of(job)
    assert process.returncode is not None, "it outlives its job"


def test_batches_are_the_same_where_the_trainer_does_all_of_it(pictures, node, expected):
    with start(pictures, [node.address]) as job:
        job.adopt(here_plan(cut_of(job, "0.3"), chunk_rows=3, node_batch=3))
        before = job.counts.num_bytes
        assert_same(outputs(job), expected)
        stored = sum(path.stat().st_size for path in Path(pictures).rglob("*.jpg"))
        assert job.counts.num_bytes - before == 2 * stored, "what is counted is what was read"
        assert "an engine beside the trainer" in job.describe()


@pytest.mark.parametrize("split", [PLACE, PACE])
@pytest.mark.parametrize("victim", ["own", "node"])
def test_whoever_is_killed_the_batches_are_the_same(pictures, start_node, expected, victim, split):
    node = start_node(pictures)
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(cut_of(job, "0.3"), chunk_rows=2, node_batch=2, prefetch=1, host_share=0.5, split=split))
        first, found = own_of(job), []
        with torch.no_grad():
            for epoch in range(2):
                for number, (x, y) in enumerate(job.loader):
                    found.append((job.model(x), y))
                    if (epoch, number) == (0, 1):
                        os.kill(first.pid if victim == "own" else node.process.pid, signal.SIGKILL)
        assert_same(found, expected)
        job._source._carrier.own.prepare()  # as the feed does every second for those that are away
        assert own_of(job).poll() is None
        assert (own_of(job) is not first) == (victim == "own"), "it is started anew, or never ended"


def test_a_closed_one_does_not_come_back(pictures, node):
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(cut_of(job, "0.3"), host_share=0.5))
        own, process = job._source._carrier.own, own_of(job)
    with pytest.raises(UnreachableError, match="closed with its job"):
        own.prepare()
    assert own._node._process is process


def test_closing_does_not_wait_for_one_that_is_being_started(pictures, monkeypatch):
    own = OwnNode(str(pictures), 1)
    own._node._process.kill()
    own._node._process.wait()
    begun, go_on, start = Event(), Event(), OwnNode._start
    started = []

    def slowly(self):
        begun.set()
        assert go_on.wait(60)
        started.append(start(self))
        return started[0]

    monkeypatch.setattr(OwnNode, "_start", slowly)
    with ThreadPoolExecutor(1) as pool:
        coming_back = pool.submit(own.prepare)
        assert begun.wait(60)
        own.close()
        go_on.set()
        with pytest.raises(UnreachableError, match="closed with its job"):
            coming_back.result(60)
    assert not started[0][0].is_alive


def test_an_engine_that_is_missing_beside_the_trainer_is_said_before_any_work(pictures, node, monkeypatch):
    with start(pictures, [node.address]) as job:
        monkeypatch.setattr(OwnNode, "hello", lambda self: {"precisions": ["fp32"], "engines": ["onnxruntime"]})
        with pytest.raises(PlanError, match="here has no engine openvino"):
            job.adopt(near_plan(cut_of(job, "0.3"), host_share=0.5, engine="openvino"))


def test_a_job_says_what_is_done_here(pictures, node):
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(cut_of(job, "0.3"), host_share=0.25))
        assert "25 % of the pictures are read and done here" in job.describe()


def test_a_share_is_refused_where_the_node_is_beside_the_trainer_anyway_or_none_is_wanted(pictures, node):
    for nodes, options in ((None, {}), ([node.address], {"share": False})):
        with start(pictures, nodes, **options) as job, pytest.raises(PlanError, match="beside it anyway"):
            job.adopt(near_plan(cut_of(job, "0.3"), host_share=0.5))


def test_a_share_can_be_resumed_in_the_middle(pictures, node, expected):
    address = node.address
    with start(pictures, [address]) as job:
        plan = near_plan(cut_of(job, "0.3"), chunk_rows=2, node_batch=2, host_share=0.5)
        job.adopt(plan)
        batches = iter(job.loader)
        found = []
        with torch.no_grad():
            for _ in range(2):
                x, y = next(batches)
                found.append((job.model(x), y))
        state = job.loader.state_dict()
        batches.close()
    with hw.near(network(), pictures, transforms=job._source._setting.pipeline, nodes=[address], batch_size=4, seed=3,
                 plan=plan) as job:  # fmt: skip
        job.loader.load_state_dict(state)
        assert_same(found + outputs(job), expected)

"""Plans that take over in the middle of an epoch, through a real node: the same outputs, and nothing left behind."""

import threading
import time

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.plan import Plan, near_plan
from headwater.data.transforms import HorizontalFlip, Normalize, RandomResizedCrop, ToFloat, Transforms
from headwater.errors import ConfigError, PlanError, UnreachableError
from headwater.node.cache import Cache
from headwater.node.prefixes import Prefixes, Wanted, _Loaded
from headwater.node.service import Node
from headwater.train.client import NodeClient

TRANSFORMS = Transforms([RandomResizedCrop(32), HorizontalFlip(), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])


def network():
    torch.manual_seed(0)
    body = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 3),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    return hw.freeze(nn.Sequential(nn.Sequential(*body), nn.Sequential(*head)), until="1.2")


def start(pictures, nodes, **options):
    options = {"batch_size": 4, "seed": 3, "plan": None, **options}
    return hw.near(network(), pictures, transforms=TRANSFORMS, nodes=nodes, **options)


def plans_of(job):
    cuts = {cut.name: cut for cut in job.cuts}
    return [
        near_plan(cuts["0.3"], chunk_rows=3, node_batch=3),
        Plan(chunk_rows=5, node_batch=5),
        near_plan(cuts["input"], chunk_rows=7, node_batch=4),
        near_plan(cuts["0.1"], chunk_rows=16, node_batch=16, prefetch=1),
        near_plan(cuts["1.1"], chunk_rows=2, node_batch=2),
    ]


def fetching():
    return [thread for thread in threading.enumerate() if thread.name.startswith("fetch-")]


def outputs(job, epochs=2):
    with torch.no_grad():
        return [(job.model(x), y) for _ in range(epochs) for x, y in job.loader]


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    """For those who leave it alive."""
    return start_node_once(pictures)


def test_outputs_are_those_of_one_plan_however_often_it_changes(pictures, node):
    with start(pictures, "inline") as job:
        expected = outputs(job)
    found = []
    with start(pictures, [node.address]) as job, torch.no_grad():
        plans = plans_of(job)
        for _ in range(2):
            for number, (x, y) in enumerate(job.loader):
                found.append((job.model(x), y))
                if number % 3 == 0:
                    job.adopt(plans[number // 3 % len(plans)])
    assert len(found) == len(expected)
    for (output, labels), (wanted, wanted_labels) in zip(found, expected, strict=True):
        assert torch.equal(labels, wanted_labels)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)
    assert not fetching()


def test_plans_that_change_from_another_thread_all_the_time(pictures, node):
    with start(pictures, "inline") as job:
        expected = [y.tolist() for _, y in outputs(job, epochs=3)]
    with start(pictures, [node.address]) as job:
        plans, ended, faults = plans_of(job), threading.Event(), []

        def change():
            number = 0
            while not ended.is_set():
                try:
                    if number % 4 == 3:
                        with job._source.held():
                            time.sleep(0.01)
                    else:
                        job.adopt(plans[number % len(plans)])
                except Exception as error:
                    faults.append(error)
                number += 1
                time.sleep(0.02)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            found = [y.tolist() for _, y in outputs(job, epochs=3)]
        finally:
            ended.set()
            thread.join()
    assert not faults
    assert found == expected
    assert not fetching()


def test_a_plan_that_cannot_be_carried_out_leaves_the_one_in_use(pictures, node):
    with start(pictures, [node.address]) as job:
        before, rows = job.plan, iter(job.loader)
        next(rows)
        with pytest.raises(PlanError):
            job.adopt(near_plan(job.cuts[1], cut_name="elsewhere"))
        assert job.plan == before
        assert sum(len(y) for _, y in rows) == 46
    with pytest.raises(ConfigError, match="closed"):
        job.adopt(before)


def test_an_epoch_that_drop_last_leaves_empty_leaves_no_thread(pictures, node):
    with start(pictures, [node.address], batch_size=64, drop_last=True, on_bad_sample="skip") as job:
        assert list(job.loader) == []
        assert not fetching()


def test_requests_for_a_new_cut_that_come_together_load_it_once(tmp_path, monkeypatch):
    loaded, held = [], Prefixes(tmp_path, 1 << 20)

    def load(key, limit_bytes):
        loaded.append(key)
        time.sleep(0.05)
        return held._remember(key, _Loaded(object(), None))

    monkeypatch.setattr(held, "_load", load)
    found = []
    threads = [threading.Thread(target=lambda: found.append(held.engine(Wanted("d", ("a",))))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 1
    assert len(set(map(id, found))) == 1
    assert not held._doors


def test_rows_of_the_plan_before_make_room_in_a_cache_for_those_of_the_next(pictures, tmp_path):
    cache = Cache(tmp_path / "rows", 60_000)  # 28 rows of the first plan's
    node = Node("grpc://127.0.0.1:0", (str(pictures),), state=tmp_path / "state", num_threads=2, cache=cache)
    hits = []
    try:
        with start(pictures, [f"grpc://127.0.0.1:{node.port}"], views=1) as job:
            cuts = {cut.name: cut for cut in job.cuts}
            for name in ("0.3", "0.3", "1.1", "1.1", "0.3", "0.3"):
                job.adopt(near_plan(cuts[name], chunk_rows=16, node_batch=16))
                before = cache.to_json()["num_cache_hits"]
                outputs(job, epochs=1)
                cache.wait(20)
                hits.append(cache.to_json()["num_cache_hits"] - before)
    finally:
        node.stop(5)
    assert hits[3] == 50, "all of the second plan's, which are small"
    assert hits[1] == hits[5] == 28, "and back to the first"


@pytest.mark.parametrize("engine", ["auto", "onnxruntime or auto"])
def test_one_dead_node_of_two_does_not_keep_a_plan_from_taking_over(pictures, start_node, engine):
    """Its prefix waits until it is back."""
    alive, other = start_node(pictures), start_node(pictures)
    with start(pictures, [alive.address, other.address]) as job, torch.no_grad():
        batches = iter(job.loader)
        found = [next(batches)]
        other.kill()
        cuts = {cut.name: cut for cut in job.cuts}
        job.adopt(near_plan(cuts["0.1"], chunk_rows=4, node_batch=4, engine=engine))
        found += list(batches)
        assert job.plan.cut_name == "0.1"
    with start(pictures, "inline") as job:
        assert [y.tolist() for _, y in found] == [y.tolist() for _, y in outputs(job, epochs=1)]


def test_with_every_node_dead_a_plan_is_refused(pictures, start_node):
    node = start_node(pictures)
    with start(pictures, [node.address], patience_s=1) as job:
        cuts = {cut.name: cut for cut in job.cuts}
        node.kill()
        with pytest.raises(UnreachableError):
            job.adopt(near_plan(cuts["0.1"]))


def test_nodes_load_what_they_run_before_rows_are_wanted(pictures, start_node, monkeypatch):
    node, asked, rows = start_node(pictures), [], NodeClient.rows

    def ask(self, chunk, stopped):
        asked.append(chunk)
        return rows(self, chunk, stopped)

    def warmed(job):
        for thread in job._source._warm(job._source._carried):
            thread.join(30)
            assert not thread.is_alive()

    monkeypatch.setattr(NodeClient, "rows", ask)
    with start(pictures, [node.address], cut="0.3") as job:
        warmed(job)
        (chunk,) = asked
        assert (chunk.extraction.prefix is not None, len(chunk.samples), chunk.reuse) == (True, 1, False)
        other = plans_of(job)[-1]
        assert job._source.adopt(other, warm_s=30)
        assert asked[-1].extraction == job._source._carried.extraction != chunk.extraction
        node.kill()
        warmed(job)  # what is wrong is said once rows are wanted
        assert len(asked) == 3
        job._source.adopt(Plan())
        warmed(job)
        assert len(asked) == 3, "nothing runs there"

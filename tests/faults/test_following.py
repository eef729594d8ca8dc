"""Jobs whose nodes come and go while they run: each sample once, in the same order, with the same losses."""

import logging
import threading
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from headwater.core.plan import here_plan
from headwater.errors import ConfigError, UnreachableError
from headwater.node import service
from headwater.train import following
from headwater.train.client import NodeClient
from headwater.train.directory import Named, directory_of
from headwater.train.feed import Feed
from headwater.train.reply import Reply


class Listed:
    """A fleet whose nodes a test names."""

    may_change = True

    def __init__(self):
        self.nodes, self.fault, self.is_closed = [], None, False

    def addresses(self):
        if self.fault is not None:
            raise self.fault
        return list(self.nodes)

    def close(self):
        self.is_closed = True


@pytest.fixture
def fleet(monkeypatch):
    """The nodes of every job whose nodes are "ray://any"."""
    listed = Listed()
    monkeypatch.setattr(following, "LOOK_S", 0.02)
    monkeypatch.setattr("headwater.train.job.directory_of",
                        lambda nodes: listed if nodes == "ray://any" else directory_of(nodes))  # fmt: skip
    return listed


@pytest.fixture
def start(near, pictures):
    """start(nodes): a job with small chunks."""
    return lambda nodes, **options: near(pictures, nodes, chunk_rows=2, prefetch=1, **options)


def names(job):
    return [client.name for client in job._source.clients]


def epoch(job, at_step=None, do=lambda: None):
    """(samples, losses) of an epoch; at that step something is done."""
    samples, losses = [], []
    with torch.no_grad():
        for step, (x, y) in enumerate(job.loader):
            if step == at_step:
                do()
            samples += x.samples.tolist()
            losses.append(cross_entropy(job.model(x), y).item())
    return samples, losses


def same(found, expected):
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-5)


def test_a_node_that_comes_in_the_middle_of_an_epoch_is_sent_the_prefix_and_used(
    start, pictures, start_node, fleet, eventually, tmp_path
):
    first = start_node(pictures)
    expected = epoch(start([first.address]))
    fleet.nodes, got = [first.address], []
    job = start("ray://any")

    def grow():
        fleet.nodes.append(start_node(pictures, options=("--state", str(tmp_path / "new"))).address)
        eventually(lambda: names(job) == fleet.nodes)
        got.append(job._source.clients[1].received_bytes)

    same(epoch(job, 2, grow), expected)
    assert job._source.clients[1].received_bytes > got[0], "more than the row that it was tried with"
    assert job._source.version == 0, "nothing that was under way was dropped"
    same(epoch(job), epoch_of(start, first, 1))


def epoch_of(start, node, number):
    job = start([node.address])
    job.loader.set_epoch(number)
    return epoch(job)


def test_a_node_that_is_no_longer_of_the_fleet_is_asked_no_more(start, pictures, start_node, fleet, eventually):
    first, second = start_node(pictures), start_node(pictures)
    expected = epoch(start([first.address]))
    fleet.nodes = [first.address, second.address]
    job = start("ray://any")
    gone = next(client for client in job._source.clients if client.name == second.address)

    def shrink():
        fleet.nodes.remove(second.address)
        eventually(lambda: names(job) == [first.address])

    same(epoch(job, 2, shrink), expected)
    before = gone.received_bytes
    same(epoch(job), epoch_of(start, first, 1))
    assert gone.received_bytes == before


def test_an_epoch_goes_on_when_its_only_node_is_back_under_another_address(start, pictures, start_node, fleet):
    first = start_node(pictures)
    expected = epoch(start([first.address]))
    fleet.nodes = [first.address]
    job = start("ray://any")

    def move():
        first.kill()
        fleet.nodes[:] = [start_node(pictures).address]

    same(epoch(job, 2, move), expected)
    assert names(job) == fleet.nodes


def test_the_last_node_stays_although_the_fleet_has_none(start, pictures, start_node, fleet):
    first = start_node(pictures)
    fleet.nodes = [first.address]
    job = start("ray://any")
    looked = threading.Event()
    fleet.addresses = lambda: looked.set() or []
    samples, _ = epoch(job, 2, lambda: looked.wait(20))
    assert sorted(samples) == list(range(50))
    assert names(job) == [first.address]


def test_whoever_does_not_know_the_nodes_for_a_while_stops_nothing(start, pictures, start_node, fleet, eventually):
    first, second = start_node(pictures), start_node(pictures)
    fleet.nodes = [first.address]
    job = start("ray://any")
    looked = threading.Event()

    def fail():
        looked.set()
        raise UnreachableError("the keeper is being started anew")

    fleet.addresses = fail
    samples, _ = epoch(job, 2, lambda: looked.wait(20))
    assert sorted(samples) == list(range(50))
    fleet.addresses = lambda: [first.address, second.address]
    eventually(lambda: len(names(job)) == 2)


def test_an_epoch_does_not_wait_for_a_node_that_is_being_made_ready(
    start, pictures, start_node, fleet, eventually, monkeypatch
):
    first, second = start_node(pictures), start_node(pictures)
    fleet.nodes = [first.address]
    job = start("ray://any")
    begun, may_go_on = threading.Event(), threading.Event()

    def calibrate_again(client):
        begun.set()
        may_go_on.wait(60)

    monkeypatch.setattr(NodeClient, "calibrate_again", calibrate_again)
    fleet.nodes.append(second.address)
    samples, _ = epoch(job, 2, lambda: begun.wait(20))
    assert sorted(samples) == list(range(50)), "the whole epoch, while the node is not ready"
    assert names(job) == [first.address]
    may_go_on.set()
    eventually(lambda: names(job) == [first.address, second.address])


def test_patience_does_not_end_while_the_next_node_is_being_made_ready(start, pictures, start_node, fleet, monkeypatch):
    monkeypatch.setattr("headwater.train.feed.RETRY_EVERY_S", 0.01)
    first = start_node(pictures)
    fleet.nodes = [first.address]
    job = start("ray://any", patience_s=0.5)
    may_go_on, asked, come = threading.Event(), [], job._source._come

    def counted():
        if coming := come():
            asked.append(coming)
        if len(asked) == 100:  # so many hundredths of a second: twice as long as its patience
            may_go_on.set()
        return coming

    monkeypatch.setattr(job._source, "_come", counted)
    monkeypatch.setattr(NodeClient, "calibrate_again", lambda client: may_go_on.wait(60))

    def move():
        fleet.nodes[:] = [start_node(pictures).address]
        first.kill()

    samples, _ = epoch(job, 2, move)
    assert sorted(samples) == list(range(50))
    assert len(asked) >= 100


def test_a_node_with_other_files_does_not_join_and_that_is_said_once(
    start, pictures, start_node, fleet, eventually, caplog, monkeypatch
):
    first, second = start_node(pictures), start_node(pictures)
    fleet.nodes = [first.address]
    job = start("ray://any")
    tried = []
    listed = NodeClient.list_samples

    def other(client, *args, **options):
        tried.append(client.name)
        found = listed(client, *args, **options)
        return replace(found, labels=(found.labels + 1) % 3)

    monkeypatch.setattr(NodeClient, "list_samples", other)
    fleet.nodes.append(second.address)
    eventually(lambda: len(tried) >= 3)
    assert names(job) == [first.address]
    told = [each for each in caplog.records if "other files" in each.getMessage() and each.levelno == logging.WARNING]
    assert len(told) == 1
    looks, addresses = [], fleet.addresses
    fleet.addresses = lambda: looks.append(len(tried)) or addresses()
    eventually(lambda: len(looks) > 40)
    assert looks[40] - looks[0] <= 4, "all samples are listed for it, each time more seldom"


def test_a_node_that_comes_while_another_plan_takes_over_has_what_that_one_needs(
    start, pictures, start_node, fleet, eventually, monkeypatch, tmp_path
):
    first = start_node(pictures)
    fleet.nodes = [first.address]
    job = start("ray://any")
    earlier = [cut for cut in job.cuts if cut.legal and 0 < cut.index < job.plan.cut][-1]
    other = replace(job.plan, cut=earlier.index, cut_name=earlier.name)
    ask_once = job._source._ask_once

    def adopt(worker, carried):
        ask_once(worker, carried)
        if job.plan != other:
            job.adopt(other)

    monkeypatch.setattr(job._source, "_ask_once", adopt)
    fleet.nodes.append(start_node(pictures, options=("--state", str(tmp_path / "new"))).address)
    eventually(lambda: names(job) == fleet.nodes)
    assert job.plan == other
    before = job._source.clients[1].received_bytes
    samples, _ = epoch(job)
    assert sorted(samples) == list(range(50))
    assert job._source.clients[1].received_bytes > before, "it makes rows, too"


def test_a_node_joins_a_job_that_has_its_prefix_here(near, pictures, start_node, fleet, eventually, tmp_path):
    first, second = (start_node(pictures, options=("--state", str(tmp_path / each))) for each in "ab")
    fleet.nodes = [first.address]
    known = near(pictures, [first.address])
    plan = here_plan(known.cuts[known.plan.cut], chunk_rows=4, node_batch=4)
    job = near(pictures, "ray://any", plan=plan)
    fleet.nodes.append(second.address)
    eventually(lambda: names(job) == fleet.nodes)


def test_whoever_left_is_hung_up_on_once_no_reply_is_under_way(
    start, pictures, start_node, fleet, eventually, monkeypatch
):
    first, second = start_node(pictures), start_node(pictures)
    fleet.nodes = [first.address, second.address]
    job = start("ray://any")
    gone = job._source.clients[1]
    is_busy, hung_up = [True], []
    monkeypatch.setattr(NodeClient, "is_busy", property(lambda client: is_busy[0]))
    monkeypatch.setattr(gone, "close", lambda: hung_up.append(1))
    looks, addresses = [], fleet.addresses
    fleet.addresses = lambda: looks.append(1) or addresses()
    fleet.nodes.remove(second.address)
    eventually(lambda: names(job) == [first.address])
    looks.clear()
    eventually(lambda: len(looks) > 2)
    assert not hung_up
    is_busy[0] = False
    eventually(lambda: hung_up)


def test_what_a_node_that_comes_is_asked_ends_with_the_job(
    start, pictures, start_node, fleet, eventually, monkeypatch, tmp_path
):
    """A listing, on a disk that hangs: the node gives signs of life for ever."""
    fleet.nodes = [start_node(pictures).address]
    job = start("ray://any")
    begun, free = threading.Event(), threading.Event()
    monkeypatch.setattr(service, "list_samples", lambda *args, **options: begun.set() or free.wait(60))
    hanging = service.Node("grpc://127.0.0.1:0", (str(pictures),), state=tmp_path / "state", num_threads=1)
    try:
        fleet.nodes.append(f"grpc://127.0.0.1:{hanging.port}")
        assert begun.wait(20)
        job.close()
        eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("join-grpc")])
    finally:
        free.set()
        hanging.stop(5)


def test_a_fleet_without_a_node_that_answers_is_an_error_once_patience_is_over(near, pictures, fleet, start_node):
    gone = start_node(pictures)
    gone.kill()
    fleet.nodes = [gone.address]
    with pytest.raises(UnreachableError, match=r"no node of the fleet has answered for 0 s(?s:.*)does not answer"):
        near(pictures, "ray://any", patience_s=0)
    assert fleet.is_closed


def test_a_job_that_is_closed_follows_no_longer(start, pictures, start_node, fleet, eventually):
    fleet.nodes = [start_node(pictures).address]
    job = start("ray://any")
    job.close()
    eventually(lambda: not [each for each in threading.enumerate() if each.name in ("follow", "revive")])
    assert fleet.is_closed


def test_addresses_fleets_and_what_is_neither():
    assert directory_of(["grpc://a:1", "grpc://b:1", "grpc://a:1"]).addresses() == ["grpc://a:1", "grpc://b:1"]
    assert isinstance(directory_of(["grpc://a:1"]), Named)
    for wrong in ([], "grpc://a:1", "photos", ["ray://photos", "grpc://a:1"]):
        with pytest.raises(ConfigError, match=r"ray://photos"):
            directory_of(wrong)
    with pytest.raises(ConfigError, match="no name for a fleet"):
        directory_of("ray://Not A Name")


class Slow:
    """A worker that makes chunks when it is told."""

    def __init__(self, name):
        self.name, self.asked, self.may_go_on = name, [], threading.Event()

    def prepare(self):
        """There."""

    def heard(self, chunk):
        return None

    def rows(self, chunk, stopped):
        self.asked.append(chunk)
        self.may_go_on.wait(60)
        return Reply(torch.ones(1, dtype=bool).numpy(), (), ())

    def stop(self, stopped):
        self.may_go_on.set()


def test_chunks_of_a_worker_that_left_go_to_others_and_its_late_reply_changes_nothing(eventually):
    first, second = Slow("first"), Slow("second")
    second.may_go_on.set()
    feed = Feed({"first": first}, 12, lambda index, name: index, per_worker=2, patience_s=60.0)
    eventually(lambda: len(first.asked) == 2)
    feed.join("second", second)
    feed.join("second", second)  # it is there
    feed.leave("first")
    feed.leave("first")
    found, chunks = iter(feed), []
    for _ in range(6):
        chunks.append(next(found).chunk)
    first.may_go_on.set()
    chunks += [reply.chunk for reply in found]
    assert chunks == list(range(12))
    assert len(first.asked) == 2


def test_a_worker_that_left_may_come_back_under_its_name(eventually):
    first, again = Slow("node"), Slow("node")
    again.may_go_on.set()
    feed = Feed({"node": first}, 6, lambda index, name: index, per_worker=1, patience_s=60.0)
    eventually(lambda: first.asked)
    feed.leave("node")
    feed.join("node", again)
    found = iter(feed)
    chunks = [next(found).chunk]
    first.may_go_on.set()
    assert chunks + [reply.chunk for reply in found] == list(range(6))

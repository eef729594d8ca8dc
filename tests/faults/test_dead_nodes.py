"""Nodes that die, come back, stay away, or were never there: every sample once, or a plain error soon."""

import http.server
import socket
import threading

import pytest

from headwater.errors import UnreachableError


@pytest.mark.parametrize("seed", [0, 1])
def test_an_epoch_survives_the_death_of_one_of_three_nodes(near, pictures, start_node, seed, ids_of):
    nodes = [start_node(pictures) for _ in range(3)]
    job = near(pictures, [node.address for node in nodes], chunk_rows=2, prefetch=1, seed=seed)
    seen = []
    for x, _ in job.loader:
        if len(seen) == 8:
            nodes[seed].kill()
        seen += x.samples.tolist()
    assert sorted(seen) == list(range(50))
    assert sorted(ids_of(job.loader)) == list(range(50)), "the next epoch, with the node still dead"


def test_an_epoch_survives_a_restart_of_its_only_node(near, pictures, start_node, tmp_path):
    options = ("--state", str(tmp_path / "state"))
    node = start_node(pictures, options=options)
    job = near(pictures, [node.address], chunk_rows=2, prefetch=1)
    seen = []
    for x, _ in job.loader:
        if len(seen) == 8:
            node.kill()
            start_node(pictures, options=options, listen=node.listen)
        seen += x.samples.tolist()
    assert sorted(seen) == list(range(50))


def test_a_node_that_comes_back_with_an_empty_disk_is_sent_the_prefix_again(near, pictures, start_node, tmp_path):
    node = start_node(pictures, options=("--state", str(tmp_path / "one")))
    job = near(pictures, [node.address], chunk_rows=2, prefetch=1)
    iterator = iter(job.loader)
    seen = next(iterator)[0].samples.tolist()
    node.kill()
    start_node(pictures, options=("--state", str(tmp_path / "two")), listen=node.listen)
    seen += [sample for x, _ in iterator for sample in x.samples.tolist()]
    assert sorted(seen) == list(range(50))


def test_nodes_that_stay_dead_end_the_epoch_when_patience_does(near, pictures, start_node, our_threads, eventually):
    nodes = [start_node(pictures) for _ in range(2)]
    job = near(pictures, [node.address for node in nodes], chunk_rows=2, prefetch=1, patience_s=1)
    iterator = iter(job.loader)
    next(iterator)
    for node in nodes:
        node.kill()
    with pytest.raises(UnreachableError, match=r"no node has answered for 1 s(?s:.*)headwater serve"):
        list(iterator)
    eventually(lambda: not our_threads())
    assert job.loader.state_dict()["position"] > 0, "the run can go on from here"


def test_the_position_after_an_error_resumes_without_loss(near, pictures, start_node, ids_of):
    node = start_node(pictures)
    job = near(pictures, [node.address], chunk_rows=2, prefetch=1, patience_s=0)
    seen = []

    def take_until_it_fails():
        for x, _ in job.loader:
            seen.extend(x.samples.tolist())
            node.kill()

    with pytest.raises(UnreachableError):
        take_until_it_fails()
    again = near(pictures)
    again.loader.load_state_dict(job.loader.state_dict())
    assert sorted(seen + ids_of(again.loader)) == list(range(50))


def test_a_dead_address_is_named_at_once(near, pictures):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(UnreachableError, match=f"{address} does not answer.*headwater serve"):
        near(pictures, [address])


@pytest.fixture
def silent():
    """A port where somebody listens and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"grpc://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def web_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *args: None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"grpc://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("who", ["silent", "web_server"])
def test_something_else_on_the_port_is_a_plain_error(who, near, pictures, request, monkeypatch):
    monkeypatch.setattr("headwater.train.client.ANSWER_WITHIN_S", 1.0)
    address = request.getfixturevalue(who)
    with pytest.raises(UnreachableError, match=f"{address} does not answer.*is the address right"):
        near(pictures, [address])


class Broken:
    """A worker that is gone, and whose way back runs into a mistake of ours."""

    name = "broken"

    def prepare(self):
        raise RuntimeError("a mistake of ours")

    def rows(self, chunk, stopped):
        raise UnreachableError("gone")

    def stop(self, stopped):
        pass


def test_a_mistake_while_a_node_is_asked_again_does_not_leave_the_loop_waiting(caplog, monkeypatch):
    from headwater.train import feed

    monkeypatch.setattr(feed, "RETRY_EVERY_S", 0.01)
    one = feed.Feed({"broken": Broken()}, 1, lambda index, worker: index, per_worker=1, patience_s=0.05)
    with pytest.raises(UnreachableError, match="no node has answered"):
        list(one)
    assert "a mistake of ours" in caplog.text

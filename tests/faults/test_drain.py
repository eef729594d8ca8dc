"""A node that is told to stop: it finishes what it has, trainers go elsewhere at once, and nothing is lost."""

import contextlib
import http.client
import json
import re
import signal
import socket
import threading

import pyarrow.flight as flight
import pytest
import torch
from torch.nn.functional import cross_entropy

from headwater.data.layouts import list_samples
from headwater.data.transforms import Resize, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import UnreachableError
from headwater.train.client import NodeClient

JSON = ("--log-format", "json", "--http", "127.0.0.1:0")
ONE_STREAM = ("sh", "-c", 'exec "$@" 2>&1', "sh")  # what goes to standard error is read with the rest
LARGE = Transforms([Resize((2000, 2000))])


@pytest.fixture
def start_json_node(start_node, pictures):
    return lambda *options: start_node(pictures, options=(*JSON, *options), wrap=ONE_STREAM)


@pytest.fixture
def stalled(pictures):
    """stalled(node): a stream of large rows that nobody reads for the moment, so that something is under way."""
    clients, readers = [], []

    def begin(node):
        clients.append(flight.connect(node.address))
        samples = list_samples(str(pictures))
        want = Extraction(samples.url, LARGE, None, (LARGE.pixel_spec,), node_batch=1)
        chunk = Chunk(want, "stalled", 0, 0, 0, tuple(samples.take(range(8))), reuse=False)
        reader = clients[-1].do_get(flight.Ticket(chunk.dumps()))
        while not reader.read_chunk().data.num_rows:
            pass  # signs of life
        readers.append(reader)  # a reader that is dropped hangs up
        return reader

    yield begin
    for client in clients:
        client.close()


def get(node, path):
    """Status and text of a page."""
    connection = http.client.HTTPConnection(json.loads(node.said)["metrics"].split("/")[2], timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def lines(node):
    """All that the node said, which is JSON."""
    return [json.loads(line) for line in (node.said, *node.process.stdout)]


def rest_of(reader):
    return sum(item.data.num_rows for item in reader)


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


def stop(node, eventually):
    node.process.send_signal(signal.SIGTERM)
    eventually(lambda: get(node, "/readyz") == (503, "draining\n"))


def test_an_epoch_goes_on_elsewhere_while_one_of_two_nodes_drains(
    near, pictures, start_node, start_json_node, stalled, eventually
):
    first, second = start_json_node("--drain-s", "600"), start_node(pictures)
    addresses = [first.address, second.address]
    expected = epoch(near(pictures, addresses, chunk_rows=2, prefetch=1))
    reader = stalled(first)
    samples, losses = epoch(near(pictures, addresses, chunk_rows=2, prefetch=1), 2, lambda: stop(first, eventually))
    assert samples == expected[0]
    assert losses == pytest.approx(expected[1], rel=1e-5)
    assert get(first, "/healthz") == (200, "ok\n"), "it is still there, with a stream under way"
    assert rest_of(reader) == 7, "what was under way is finished"
    assert first.process.wait(30) == 0
    assert lines(first)[-1]["event"] == "the node ends: everything under way was finished"


def test_an_epoch_waits_for_its_only_node_to_come_back(
    near, pictures, start_node, start_json_node, stalled, eventually, tmp_path
):
    state = ("--state", str(tmp_path / "state"))
    node = start_json_node("--drain-s", "600", *state)
    expected = epoch(near(pictures, [node.address], chunk_rows=2, prefetch=1))
    reader, codes = stalled(node), []

    def replace():
        eventually(lambda: 'outcome="refused"} ' in get(node, "/metrics")[1], 60)  # the trainer has asked
        rest_of(reader)
        codes.append(node.process.wait(30))
        start_node(pictures, options=state, listen=node.listen)

    replacing = threading.Thread(target=replace)

    def restart():
        stop(node, eventually)
        replacing.start()

    samples, losses = epoch(near(pictures, [node.address], chunk_rows=2, prefetch=1), 2, restart)
    replacing.join()
    assert codes == [0]
    assert samples == expected[0]
    assert losses == pytest.approx(expected[1], rel=1e-5)


def test_a_node_that_drains_says_so_and_a_second_signal_ends_it_at_once(start_json_node, stalled, eventually):
    node = start_json_node("--drain-s", "600")
    stalled(node)
    node.process.send_signal(signal.SIGINT)
    eventually(lambda: get(node, "/readyz")[0] == 503)
    client = NodeClient(node.address)
    assert client.hello()["draining"]
    with pytest.raises(UnreachableError, match=f"{node.address} is being stopped"):
        client.prepare()
    with pytest.raises(UnreachableError, match=f"{node.address}: the node is being stopped and takes nothing new"):
        client.download(1000)
    client.close()
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(30) == 0
    assert [each["under_way"] for each in lines(node) if "under_way" in each] == [1]


def test_what_takes_longer_than_the_drain_is_cut_off(start_json_node, stalled):
    node = start_json_node("--drain-s", "0.2")
    reader = stalled(node)
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(30) == 0
    with pytest.raises(flight.FlightError):
        rest_of(reader)
    assert "1 request took longer than 0.2 s and was cut off" in lines(node)[-1]["event"]


def test_hostile_http_clients_stop_neither_rows_nor_numbers(near, pictures, start_json_node, eventually):
    node = start_json_node("--cache-size", "0")
    host, port = json.loads(node.said)["metrics"].split("/")[2].split(":")
    hostile = [b"", b"GET /metrics HTT", b"GET /" + b"x" * 100_000, b"\xff\x00" * 100, b"POST / HTTP/1.1\r\n\r\n"]
    connections = [socket.create_connection((host, int(port)), timeout=30) for _ in range(100)]
    for number, connection in enumerate(connections):
        with contextlib.suppress(OSError):  # hung up on already
            connection.sendall(hostile[number % len(hostile)])

    def rows_sent():
        found = re.search(r'headwater_rows_sent_total{tenant="anyone"} (\d+)', get(node, "/metrics")[1])
        return int(found[1]) if found else 0

    seen = []
    samples, _ = epoch(near(pictures, [node.address], chunk_rows=2, prefetch=1), 6, lambda: seen.append(rows_sent()))
    assert sorted(samples) == list(range(50))
    assert 6 * 4 <= seen[0] < 50, "looked at in the middle of the epoch"
    eventually(lambda: rows_sent() == 50)
    assert get(node, "/healthz") == (200, "ok\n")
    for connection in connections:
        connection.close()
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(30) == 0
    assert not [each for each in lines(node) if each["level"] in ("error", "critical")]

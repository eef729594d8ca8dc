"""A node that answers with something else than what was asked: found, tried again, and in the end refused."""

import itertools
import json
import time
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from headwater.data import wire
from headwater.data.samples import Samples
from headwater.errors import DamagedError, HeadwaterError, NodeError, StoreError, VersionError
from headwater.node.service import Node
from headwater.train import client


def double(parts):
    for batch, metadata in parts:
        yield batch, metadata
        yield batch, b""


def foreign(parts):
    for batch, metadata in parts:
        yield batch.set_column(0, batch.schema.field(0), pa.array(np.asarray(batch.column(0)) + 1000)), metadata


def short(parts):
    for batch, metadata in parts:
        yield batch.slice(1), metadata


def bad_metadata(parts):
    for batch, _ in parts:
        yield batch, b"\xff{"


def nothing(parts):
    list(parts)
    return iter(())


LIES = {"double": double, "foreign": foreign, "short": short, "bad metadata": bad_metadata, "nothing": nothing}


class LyingNode(Node):
    """A node whose rows go through `lie`."""

    def __init__(self, lie, *args, **kwargs):
        self.lie = lie
        super().__init__(*args, **kwargs)

    def _rows(self, *args):
        return self.lie(super()._rows(*args))


@pytest.fixture
def lying(pictures, tmp_path):
    nodes = []

    def start(lie):
        nodes.append(LyingNode(lie, "grpc://127.0.0.1:0", (str(pictures),), state=tmp_path / "state", num_threads=1))
        return f"grpc://127.0.0.1:{nodes[-1].port}"

    yield start
    for node in nodes:
        node.stop(5)


@pytest.mark.parametrize("lie", LIES)
def test_damaged_rows_are_refused_after_a_few_tries(lie, lying, near, pictures):
    address = lying(LIES[lie])
    job = near(pictures, [address])
    with pytest.raises(DamagedError, match=f"failed 3 times.*{address}"):
        list(job.loader)


@pytest.mark.parametrize("lie", ["double", "short"])
def test_an_honest_node_makes_up_for_a_lying_one(lie, lying, near, pictures, start_node, ids_of):
    first = [True]

    def only_once(parts):
        return LIES[lie](parts) if first and first.pop() else parts

    job = near(pictures, [lying(only_once), start_node(pictures).address])
    assert sorted(ids_of(job.loader)) == list(range(50))


class Stub(flight.FlightServerBase):
    """Answers every action with `answers`, every request for data with `stream`."""

    def __init__(self, answers, stream=None):
        self.answers = answers
        self.stream = stream
        super().__init__("grpc://127.0.0.1:0")

    def do_action(self, context, action):
        return [answer if isinstance(answer, bytes) else json.dumps(answer).encode() for answer in self.answers]

    def do_get(self, context, ticket):
        return self.stream()


@pytest.fixture
def stub():
    servers = []

    def start(*answers, stream=None):
        servers.append(Stub(answers, stream))
        return f"grpc://127.0.0.1:{servers[-1].port}"

    yield start
    for server in servers:
        server.shutdown()


def test_another_protocol_is_named_with_the_way_out(stub, near, pictures):
    address = stub({"headwater": "9.9", "protocol": wire.PROTOCOL + 1})
    found = rf"9\.9 \(protocol {wire.PROTOCOL + 1}\).*install the same version on both: pip install"
    with pytest.raises(VersionError, match=found):
        near(pictures, [address])


@pytest.mark.parametrize("answers", [[], [b"\xff"], [[]], [{}], [1, 2]], ids=str)
def test_a_server_that_is_no_node_is_refused(answers, stub, near, pictures):
    with pytest.raises(NodeError, match="grpc://127"):
        near(pictures, [stub(*answers)])


HELLO = {"headwater": "0.1.0", "protocol": wire.PROTOCOL, "num_threads": 1, "cores": 1.0, "memory_bytes": 10**9,
         "max_upload_bytes": 10**9, "cpu_s": 0.1, "busy": {}, "roots": []}  # fmt: skip


def listing(metadata, schema=wire.LISTING_SCHEMA):
    return lambda: flight.GeneratorStream(schema, iter([(pa.RecordBatch.from_pylist([], schema=schema), metadata)]))


@pytest.mark.parametrize(
    "stream",
    [
        listing(b"\xff"),
        listing(b"[]"),
        listing(b'{"whole": 5}'),
        listing(b'{"whole": {}}'),
        listing(b""),
        listing(b'{"whole": {"classes": "x"}}', pa.schema([("a", pa.int64())])),
    ],
)
def test_a_listing_that_is_none_is_refused(stream, stub, near, pictures):
    with pytest.raises(DamagedError, match="listing"):
        near(pictures, [stub(HELLO, stream=stream)])


def listed(*counts):
    """A listing that gets no further, sign of life after sign of life."""
    signs = [wire.listing_progress(count) for count in counts]
    return lambda: flight.GeneratorStream(wire.LISTING_SCHEMA, iter([*signs, *wire.listing_batches(SAMPLES)]))


SAMPLES = Samples.build("file:///x", ["a", "b"], keys=["a/0.jpg", "b/1.jpg"], sizes=[5, 6], etags=["e", "f"],
                        labels=[0, 1])  # fmt: skip


@pytest.fixture
def minutes(monkeypatch):
    """A client's clock, a minute later at each look."""
    clock = itertools.count(0, 60).__next__
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter))


def test_a_listing_that_gets_no_further_is_told_of_and_given_up(stub, minutes, caplog):
    asked = client.NodeClient(stub(HELLO, stream=listed(*[7] * 20)))
    with pytest.raises(StoreError, match=r"no further than 7 samples of file:///x for 660 s, .* can it read the data"):
        asked.list_samples(wire.Listing("file:///x"), patience_s=60)
    assert "listing file:///x: no further than 7 samples for 120 s" in caplog.text
    asked.close()


def test_a_listing_may_take_any_time_as_long_as_it_gets_further(stub, minutes):
    asked = client.NodeClient(stub(HELLO, stream=listed(*range(40))))
    assert len(asked.list_samples(wire.Listing("file:///x"), patience_s=60)) == 2
    asked.close()


def test_a_listing_may_wait_for_a_quota_for_any_time(stub, minutes):
    empty = pa.RecordBatch.from_pylist([], schema=wire.LISTING_SCHEMA)
    signs = [(empty, wire.pack_waiting(None, wire.QUOTA))] * 40
    stream = flight.GeneratorStream(wire.LISTING_SCHEMA, iter([*signs, *wire.listing_batches(SAMPLES)]))
    asked = client.NodeClient(stub(HELLO, stream=lambda: stream))
    assert len(asked.list_samples(wire.Listing("file:///x"), patience_s=60)) == 2
    asked.close()


@pytest.mark.parametrize("error", [flight.FlightInternalError("division by zero"), ZeroDivisionError()], ids=repr)
def test_a_node_that_always_fails_ends_the_epoch(error, lying, near, pictures):
    """Flight made its error of an exception, or the node did not foresee it: another try may be worth it."""

    def explode(parts):
        raise error
        yield

    job = near(pictures, [lying(explode)])
    with pytest.raises(HeadwaterError, match="failed 3 times"):
        list(job.loader)


def test_a_chunk_that_kills_every_node_ends_the_epoch(lying, near, pictures, monkeypatch):
    from headwater.train import feed

    monkeypatch.setattr(feed, "MAX_DEATHS", 2)
    monkeypatch.setattr(feed, "RETRY_EVERY_S", 0.01)

    def die(parts):
        raise flight.FlightUnavailableError("gone")
        yield

    job = near(pictures, [lying(die)])
    with pytest.raises(NodeError, match="stopped answering 2 times while they worked on chunk"):
        list(job.loader)

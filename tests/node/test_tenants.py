"""Jobs share a node's memory: who does not fit waits and is told so, and what is let go really comes back."""

import contextlib
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import pytest
from onnx import helper as make
from onnx import numpy_helper

from headwater.core.admission import Need
from headwater.core.spec import TensorSpec
from headwater.core.tuning import Candidate
from headwater.data import wire
from headwater.data.decode import PIXEL_BYTES
from headwater.data.extract import Part
from headwater.data.memory import resident_bytes
from headwater.data.room import ROOM
from headwater.errors import ConfigError, HeadwaterError, RefusedError
from headwater.node import engines, tenants
from headwater.node.engine import Engine
from headwater.node.rooms import Room, Rooms
from headwater.node.service import Node
from headwater.node.tenants import budget, picture_bytes
from headwater.train.client import NodeClient

MB, GB = 1 << 20, 1 << 30


def hungry(build):
    """A model whose rows take much in the engine: 512 channels of the size of the input, 128 KB."""
    weights = np.random.default_rng(0).normal(size=(512, 3, 3, 3)).astype(np.float32)
    nodes = [make.make_node("Conv", ["x", "w"], ["a"], pads=[1] * 4), make.make_node("Sigmoid", ["a"], ["b"]),
             make.make_node("ReduceMean", ["b"], ["c"], axes=[2, 3], keepdims=0),
             make.make_node("Slice", ["c", "from", "to", "axis"], ["mean"])]  # fmt: skip
    bounds = {"from": 0, "to": 3, "axis": 1}
    tensors = [numpy_helper.from_array(weights, "w"),
               *(numpy_helper.from_array(np.array([value]), name) for name, value in bounds.items())]  # fmt: skip
    return build.model(nodes, tensors)


@pytest.mark.parametrize("name", engines.available())
def test_an_engine_gives_back_what_it_kept_from_a_large_group(build, name):
    engine = Engine(hungry(build), way=Candidate(name, 1, 1024))
    boundary = (TensorSpec("mean", (3,), "float32"),)
    rows = np.random.default_rng(0).normal(size=(1024, 3, 8, 8)).astype(np.float32)
    first = engine.run(rows[:2], boundary)[0].copy()
    before = resident_bytes()
    engine.run(rows, boundary)
    gc.collect()
    kept = resident_bytes() - before
    engine.shrink()
    assert kept > 100 * MB, "a group of 1,024 rows takes 128 MB in the engine"
    assert resident_bytes() - before < kept / 4
    assert (engine.run(rows[:2], boundary)[0] == first).all()


def test_an_engine_that_is_unloaded_is_loaded_again_when_somebody_asks(node, client, upload, build, chunk_of, never):
    chunk = chunk_of(prefix=upload(build.model()))
    assert client.rows(chunk, never).good.all()
    (tenant,) = node.hello()["memory"]["tenants"]
    node._prefixes.unload(tenant["tenant"].split()[-1])
    assert node.hello()["prefixes"] == []
    assert client.rows(chunk, never).good.all()
    assert len(node.hello()["prefixes"]) == 1


def test_who_waits_for_memory_is_told_its_place_and_served_when_there_is_some(node, client, chunk_of, never, caplog):
    rooms, found = node._tenants.rooms, []
    with node._tenants.errand("something large", rooms.budget_bytes) as errand:
        assert errand.is_in
        asking = threading.Thread(target=lambda: found.append(client.rows(chunk_of(), never)))
        asking.start()
        while "waiting for memory there: place 1 of 1" not in caplog.text:
            asking.join(0.05)
            assert asking.is_alive()
        assert rooms.to_json()["num_waiting"] == 1
    asking.join(60)
    assert found[0].good.all()
    assert caplog.text.count("waiting for memory") == 1


@pytest.fixture
def full(node, caplog):
    """full(work): carry it out while something takes all memory, until the log says that it waits; what came of it."""

    def run(work, client):
        found = []
        with node._tenants.errand("something large", node._tenants.rooms.budget_bytes) as errand:
            assert errand.is_in
            asking = threading.Thread(target=lambda: found.append(work()))
            asking.start()
            while "waiting for memory there: place 1 of 1" not in caplog.text:
                asking.join(0.05)
                assert asking.is_alive()
            assert list(client._waits.values()) == [wire.MEMORY]
        asking.join(60)
        assert client._waits == {}
        assert caplog.text.count("waiting for memory") == 1
        return found[0]

    return run


def test_uploads_and_measurements_that_wait_for_memory_are_told_their_place(
    full, client, build, chunk_of, tmp_path, caplog
):
    (tmp_path / "x.onnx").write_bytes(build.model())
    digest = build.digest(build.model())
    full(lambda: client.upload(digest, tmp_path / "x.onnx"), client)
    client.needs(digest, tmp_path / "x.onnx")
    assert client.has_prefix()
    caplog.clear()
    few = replace(chunk_of(), samples=chunk_of().samples[:5])
    assert full(lambda: client.probe(few), client)["decode_s"] > 0
    caplog.clear()

    def calibrate():
        with contextlib.suppress(RefusedError):  # of such a model, once its turn has come
            client.calibrate(wire.Calibrate(chunk_of(digest)))

    full(calibrate, client)


def test_a_chunk_that_waits_with_the_upload_of_its_prefix_is_heard_to_wait(
    full, client, build, chunk_of, tmp_path, never
):
    (tmp_path / "x.onnx").write_bytes(build.model())
    chunk, heard = chunk_of(build.digest(build.model())), []
    client.needs(chunk.extraction.prefix, tmp_path / "x.onnx")
    tell = client._tell_wait

    def noted(call, waiting):
        tell(call, waiting)
        heard.append(client.heard(chunk).waits_for)

    client._tell_wait = noted
    assert full(lambda: client.rows(chunk, never), client).good.all()
    assert wire.MEMORY in heard
    assert heard[-1] == ""


def nothing_of(chunk):
    tensors = [np.empty((0, *spec.shape), spec.dtype) for spec in chunk.extraction.boundary]
    return Part(np.empty(0, np.int64), tensors, ())


@pytest.fixture
def hung(node, monkeypatch):
    """The node's disk hangs, and the node says nothing but that it lives, until this is set."""
    go_on, rows = threading.Event(), node._extractor.rows

    def hang(store, chunk, *args, **options):
        while not go_on.wait(0.01):
            yield nothing_of(chunk)
        yield from rows(store, chunk, *args, **options)

    monkeypatch.setattr(node._extractor, "rows", hang)
    yield go_on
    go_on.set()


def until(holds, asking):
    while not holds():
        asking.join(0.01)
        assert asking.is_alive()


def test_who_is_in_waits_no_longer_though_no_row_has_come(node, client, chunk_of, never, hung):
    chunk, found = chunk_of(), []
    asking = threading.Thread(target=lambda: found.append(client.rows(chunk, never)))
    with node._tenants.errand("something large", node._tenants.rooms.budget_bytes):
        asking.start()
        until(lambda: client.heard(chunk) and client.heard(chunk).waits_for == wire.MEMORY, asking)
    until(lambda: not client.heard(chunk).waits_for, asking)
    assert client.heard(chunk).num_came == 0
    hung.set()
    asking.join(60)
    assert found[0].good.all()


def test_who_has_to_wait_again_in_the_middle_of_a_chunk_is_told_so(
    node, client, chunk_of, never, hung, monkeypatch, caplog
):
    chunk, found = chunk_of(), []
    asking = threading.Thread(target=lambda: found.append(client.rows(chunk, never)))
    asking.start()
    until(lambda: client.heard(chunk) and client.heard(chunk).waits_for == "", asking)
    with monkeypatch.context() as measured:
        measured.setattr(Room, "is_in", False)
        measured.setattr(Room, "place", (1, 1))
        until(lambda: client.heard(chunk).waits_for == wire.MEMORY, asking)
    until(lambda: not client.heard(chunk).waits_for, asking)
    assert "waiting for memory there: place 1 of 1" in caplog.text
    hung.set()
    asking.join(60)
    assert found[0].good.all()


def test_a_wait_is_over_with_its_call(node, client, chunk_of, caplog):
    stopped = threading.Event()
    with node._tenants.errand("something large", node._tenants.rooms.budget_bytes), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.rows, chunk_of(), stopped)
        while "waiting for memory" not in caplog.text:
            assert not wait([asked], timeout=0.01).done
        stopped.set()
        client.stop(stopped)
        assert isinstance(asked.exception(60), HeadwaterError)
    assert client._waits == {}


def test_a_row_counts_as_large_as_the_largest_sample_of_its_chunk(node, chunk_of):
    chunk = chunk_of()
    few = node._tenants._need(chunk).hold_bytes
    large = replace(chunk.samples[-1], size=900 * MB)
    assert node._tenants._need(replace(chunk, samples=(*chunk.samples[:-1], large))).hold_bytes >= 900 * MB > few


def test_what_never_fits_is_refused_with_the_way_out(node, client, chunk_of, never):
    rooms = node._tenants.rooms
    rooms.budget_bytes = rooms._machine.budget_bytes = 1000
    with pytest.raises(RefusedError, match=r"takes .* GB of memory on the node even for one row.*serve --memory"):
        client.rows(chunk_of(), never)


def test_groups_are_as_large_as_memory_allows_and_rows_the_same(node, client, chunk_of, never):
    chunk = chunk_of(node_batch=50)
    whole = client.rows(chunk, never)
    need = node._tenants._need(chunk)
    rooms = node._tenants.rooms
    rooms.budget_bytes = rooms._machine.budget_bytes = need.num_bytes(3)
    smaller = client.rows(replace(chunk, job="another"), never)
    assert rooms.to_json()["tenants"][-1]["group_rows"] <= 3
    for mine, other in zip(whole.tensors, smaller.tensors, strict=True):
        assert (mine == other).all()


def test_a_node_that_adapts_nothing_lets_everyone_in():
    rooms = Rooms(None, engines=None)
    room = rooms.open("job", Need("", 1 << 60, 0, 0, 512))
    assert room.is_in
    assert [room.take(1000), room.take(7)] == [512, 7]


def test_a_chunk_on_its_way_ends_with_the_reason_when_its_job_asks_for_too_much():
    rooms, told = Rooms(100, engines=None), []
    first = rooms.open("job", Need("", 0, 0, 1, 4))
    first.when_worth_asking(lambda: told.append("ask"))
    assert first.take(8) == 4
    with rooms.open("job", Need("", 0, 0, 1 << 30, 4)):
        assert told == ["ask"]
        with pytest.raises(RefusedError, match=r"takes 3\.22 GB of memory on the node even for one row"):
            first.take(4)
    rooms.close()


def test_too_little_memory_for_a_node_is_said_before_it_starts():
    with pytest.raises(ConfigError, match=r"100 MB of memory are too little for a node with 2 threads.*--memory"):
        budget(100_000_000, 2)


@pytest.mark.parametrize(("total", "threads"), [(1610 * 10**6, 1), (2 * 10**9, 2), (8 * GB, 8), (64 * GB, 32)])
def test_pictures_that_are_decoded_are_no_part_of_the_jobs_memory(total, threads, monkeypatch):
    monkeypatch.setattr(tenants, "memory_bytes", lambda: total)
    monkeypatch.setattr(tenants, "resident_bytes", lambda: 300_000_000)  # of a node; the tests' process grows
    pictures = picture_bytes(None, threads)
    assert budget(None, threads) + pictures + 300_000_000 < 0.9 * total
    assert pictures >= 24_000_000 * PIXEL_BYTES, "a camera's picture can be decoded on a small node, too"
    monkeypatch.setattr(tenants, "memory_bytes", lambda: 100 * total)
    assert picture_bytes(total, threads) == pictures, "--memory is the limit, not the machine"


def test_a_picture_that_is_too_large_for_the_node_is_refused_with_the_limit(
    state, pictures, chunk_of, monkeypatch, never
):
    monkeypatch.setattr(ROOM, "most_bytes", 1 << 40)
    node = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=2, max_memory_bytes=2 * GB)
    try:
        assert ROOM.most_bytes == picture_bytes(2 * GB, 2) <= GB // 2
        ROOM.allow(1000)
        client = NodeClient(f"grpc://127.0.0.1:{node.port}")
        (bad, *_) = client.rows(chunk_of(), never).bad
        assert "the memory here is for 100 at a time; shrink the picture" in bad.reason
        client.close()
    finally:
        node.stop(5)


def test_a_trainer_that_knows_nothing_of_waiting_reads_it_as_no_bad_samples():
    said = wire.pack_waiting((2, 3))
    assert wire.unpack_bad(said) == []
    assert wire.unpack_waiting(said) == wire.Waiting(wire.MEMORY, (2, 3))
    assert wire.unpack_waiting(b'{"bad": []}') is None
    assert wire.pack_waiting(None) == b""


def test_what_else_a_node_may_say_of_waiting_is_read_as_far_as_it_is_known():
    said = wire.pack_waiting(None, wire.QUOTA)
    assert wire.unpack_bad(said) == []
    assert wire.unpack_waiting(said) == wire.Waiting(wire.QUOTA)
    assert wire.unpack_waiting(b'{"waiting": [1, 2]}') == wire.Waiting(wire.MEMORY, (1, 2)), "of a node before this one"
    strange = [{}, {"waits_for": "luck"}, {"waits_for": ["memory"]}, {"waits_for": "memory"}, {"waiting": [1]}, [], 1]
    for said in (b"waiting", b"", *(json.dumps(each).encode() for each in strange)):
        assert wire.unpack_waiting(said) is None


def test_however_many_requests_wait_for_an_engine_one_thread_loads_it(node, client, upload, build, chunk_of, never):
    chunk, go_on, load, calls = chunk_of(prefix=upload(build.model())), threading.Event(), node._prefixes.engine, []

    def slowly(*args):
        calls.append(args)
        assert go_on.wait(60)
        return load(*args)

    node._prefixes.engine = slowly
    waiting, submit = threading.Semaphore(0), node._tenants._load

    def noted(*args):
        loading = submit(*args)
        waiting.release()  # only now: who comes once it is loaded would load it again
        return loading

    node._tenants._load = noted
    with ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(client.rows, chunk, never) for _ in range(4)]
        for _ in range(4):
            assert waiting.acquire(timeout=60)
        go_on.set()
        assert all(reply.result(60).good.all() for reply in replies)
    assert len(calls) == 1

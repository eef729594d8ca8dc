"""A disk that hangs takes what is its own; the others go on, and the node says which one it is."""

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from headwater.core.places import Places
from headwater.data import extract
from headwater.data.extract import Extractor
from headwater.data.layouts import list_samples
from headwater.data.parcel import TRAINING
from headwater.data.samples import SampleRef
from headwater.data.store import open_store
from headwater.data.transforms import Resize, Transforms
from headwater.data.wire import Listing
from headwater.node import hanging, service
from headwater.node.hanging import Hanging
from headwater.node.service import Node
from headwater.train.client import NodeClient
from headwater.train.peer import Peer

PIXELS = Transforms([Resize((8, 8))])


def eventually(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)


@pytest.fixture
def free():
    """The disk answers again."""
    free = threading.Event()
    yield free
    free.set()


@pytest.fixture
def dead(tmp_path, pictures, monkeypatch, free):
    """A folder whose disk hangs until then, on nodes of few readers that lose patience at once."""
    folder = tmp_path / "dead"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "000.jpg").write_bytes((pictures / "a" / "000.jpg").read_bytes())

    def hanging_at(function):
        def call(url, *args, **options):
            if str(folder) in url:
                free.wait(60)
            return function(url, *args, **options)

        return call

    monkeypatch.setattr(service, "open_store", hanging_at(open_store))
    monkeypatch.setattr(service, "list_samples", hanging_at(list_samples))
    monkeypatch.setattr(service, "NEAR_READERS", 2)
    monkeypatch.setattr(service, "MAX_LISTINGS", 1)
    monkeypatch.setattr(hanging, "HANGS_S", 0.0)
    return folder


@pytest.fixture
def serve(state):
    nodes = []

    def start(*roots):
        nodes.append(Node("grpc://127.0.0.1:0", tuple(map(str, roots)), state=state, num_threads=2))
        return nodes[-1], NodeClient(f"grpc://127.0.0.1:{nodes[-1].port}")

    yield start
    for each in nodes:
        each.stop(5)


def test_a_root_that_hangs_leaves_the_others_their_readers_and_listings(
    dead, free, pictures, serve, chunk_of, never, caplog
):
    node, client = serve(pictures, dead)
    chunk = chunk_of(folder=dead)
    with ThreadPoolExecutor(6) as pool:
        rows = [pool.submit(client.rows, replace(chunk, job=f"job {number}"), never) for number in range(4)]
        lists = [pool.submit(client.list_samples, Listing(chunk.extraction.url)) for _ in range(2)]
        eventually(lambda: node.hello()["hanging"] == {"reads": 2, "readers": 4, "listings": 1})
        assert client.rows(chunk_of(), never).good.all()
        assert len(client.list_samples(Listing(str(pictures)))) == len(chunk_of().samples)
        assert node.why_not_ready() == ""
        free.set()
        assert all(each.result(60).good.all() for each in rows)
        assert all(len(each.result(60)) == 1 for each in lists)
    for what in ("reads", "listings"):
        assert caplog.text.count(f"{what} of {dead.as_uri()} have had no answer for more than 0 s") == 1


def test_sessions_on_a_root_that_hangs_leave_those_on_others_their_readers(dead, free, pictures, serve):
    node, client = serve(pictures, dead)
    peers = []

    def session(folder, key):
        """A session that has asked for a row there; what comes of it."""
        events = queue.SimpleQueue()
        peers.append(Peer(key, client, events))
        samples = [SampleRef(0, "a/000.jpg", 0, -1, (folder / "a" / "000.jpg").stat().st_size, "").to_json()]
        peers[-1].send("open", {"training": TRAINING, "url": folder.as_uri(), "job": f"job {key}", "seed": 0,
                                "transforms": PIXELS.to_json(), "codec": "raw", "max_rows": 1, "depth": 1,
                                "measure": 0, "graph": None})  # fmt: skip
        peers[-1].send("fetch", {"key": key, "epoch": 0, "samples": samples})
        peers[-1].send("forward", {"step": 1, "micro": 0, "key": key, "version": 0})
        assert events.get(timeout=60)[1].kind == "ready"
        return lambda: events.get(timeout=60)[1].kind

    hung = [session(dead, key) for key in range(3)]
    eventually(lambda: node.hello()["hanging"] == {"reads": 2, "readers": 4, "listings": 0})
    assert session(pictures, 3)() == "rows"
    assert node.why_not_ready() == ""
    free.set()
    assert [rows() for rows in hung] == ["rows"] * 3
    for each in peers:
        each.close()


def test_a_node_with_no_reader_left_says_so(dead, free, serve, chunk_of, never):
    node, client = serve(dead)
    with ThreadPoolExecutor(2) as pool:
        rows = [pool.submit(client.rows, chunk_of(folder=dead), never) for _ in range(2)]
        eventually(lambda: node.why_not_ready().startswith("no reader is left: 2 reads have had no answer"))
        free.set()
        assert all(each.result(60).good.all() for each in rows)
    eventually(lambda: node.why_not_ready() == "")


def test_reads_of_samples_that_hang_leave_the_readers_of_another_place(chunk_of, monkeypatch):
    extractor, free, read_sample = Extractor(2, 2, are_places=True), threading.Event(), extract.read_sample
    chunk = chunk_of()
    dead, alive = open_store(chunk.extraction.url), open_store(chunk.extraction.url)

    def read(store, ref):
        if store is dead:
            free.wait(60)
        return read_sample(store, ref)

    monkeypatch.setattr(extract, "read_sample", read)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: list(extractor.rows(dead, chunk, None, place="dead")))
        eventually(lambda: extractor.hanging(0.0)["dead"] == 2)
        assert sum(len(part.ids) for part in extractor.rows(alive, chunk, None, place="alive")) == len(chunk.samples)
        free.set()
        assert sum(len(part.ids) for part in slow.result(60)) == len(chunk.samples)
    extractor.close()


def test_a_listing_that_goes_on_does_not_hang(monkeypatch):
    extractor = Extractor(1, 1)
    found = Hanging(extractor, Places(1))
    assert found.may_list("x", 0.0)
    assert not found.may_list("x", 0.0)
    with found.listing("x") as heard:
        heard()
        assert found.look() == {"reads": 0, "readers": 1, "listings": 0}
        monkeypatch.setattr(hanging, "HANGS_S", -1.0)
        assert found.look()["listings"] == 1
    assert found.look()["listings"] == 0
    assert found.may_list("x", 0.0)
    extractor.close()

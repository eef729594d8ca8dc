"""Sessions that last: their rows are paid for, their tokens are those of now, and how they end is counted."""

import queue
import threading
import time
from contextlib import nullcontext
from datetime import date
from types import SimpleNamespace

import numpy as np
import pytest

from headwater.core.access import entry_text, token_digest
from headwater.core.rate import Rate
from headwater.core.spec import TensorSpec
from headwater.data.layouts import list_samples
from headwater.data.parcel import OPENING, TRAINING, Parcel
from headwater.data.samples import SampleRef
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.errors import DamagedError, HeadwaterError, RefusedError, UnreachableError
from headwater.node import quotas, session
from headwater.node.calls import ANYONE, Asked
from headwater.node.exchange import GoneError
from headwater.node.service import Node, _SessionHost
from headwater.node.session import Opened, Session
from headwater.train.access import Access
from headwater.train.client import NodeClient
from headwater.train.peer import Peer

PIXELS = Transforms([Resize((8, 8)), ToFloat()])
TOKEN = f"hw_{'a' * 43}"


def opening(url="file:///data", **about):
    return {"training": TRAINING, "url": url, "job": "job", "seed": 0, "transforms": PIXELS.to_json(), "codec": "raw",
            "max_rows": 100, "depth": 1, "measure": 0, "graph": None, **about}  # fmt: skip


def fetch(key, num_rows=100):
    refs = [SampleRef(number, f"{number}.jpg", 0, -1, 1, "").to_json() for number in range(num_rows)]
    return Parcel("fetch", {"key": key, "epoch": 0, "samples": refs})


def forward(key):
    return Parcel("forward", {"step": key, "micro": 0, "key": key, "version": 0})


class Call:
    """An exchange in which time passes only where the session rests; the trainer leaves after `stays_s`."""

    def __init__(self, *said, stays_s=float("inf")):
        self.said, self.heard, self.rested_s, self.stays_s = list(said), [], 0.0, stays_s

    is_gone = property(lambda self: self.rested_s >= self.stays_s)

    def take(self):
        if not self.said:
            raise GoneError
        return self.said.pop(0)

    def send(self, parcel):
        self.heard.append(parcel)

    def admit(self, words):
        pass

    def rest(self, seconds):
        self.rested_s += seconds
        return self.is_gone


class Room:
    def wait(self, within_s):
        return True


class Host:
    """A node with room for everything that lets a tenant have so many rows a second."""

    num_threads, weight, extractor, max_weight_bytes = 1, 1.0, None, 0

    def __init__(self, call, per_s):
        self._call, self._rate, self.num_sent, self.serves = call, Rate(per_s), 0, lambda: None

    def check_root(self, url):
        pass

    def job(self, name):
        return name

    def where(self, url):
        return ""

    def check_allowed(self):
        pass

    def check_serving(self):
        self.serves()

    def place(self, waits):
        return nullcontext()

    def room(self, num_bytes):
        return nullcontext(Room())

    def pause_s(self, num_rows):
        return self._rate.wait_s(num_rows, self._call.rested_s)

    def sent(self, num_rows, num_bytes):
        self.num_sent += num_rows


@pytest.fixture
def read(monkeypatch):
    """How many samples sessions have begun to read."""
    found = SimpleNamespace(num=0)

    class Pixels:
        weight = 1.0

        def __init__(self, *given):
            self._rows = {}

        def fetch(self, key, epoch, refs):
            found.num += len(refs)
            self._rows[key] = np.zeros((len(refs), 3, 8, 8), np.float32)

        def take(self, key):
            return self._rows.pop(key)

        def forget(self):
            self._rows.clear()

        def close(self):
            pass

    monkeypatch.setattr(session, "Pixels", Pixels)
    return found


def test_rows_are_paid_for_once_and_in_full_before_they_are_read(read):
    messages = [each for key in range(4) for each in (fetch(key), forward(key))]
    call = Call(Parcel("open", opening()), *messages)
    host = Host(call, per_s=1)
    with pytest.raises(GoneError):
        Session(call, host).run()
    assert call.rested_s == pytest.approx(300)  # the first hundred at once; far more than a minute each
    assert host.num_sent == 400
    assert [each.kind for each in call.heard if each.kind != "waiting"] == ["ready", *["rows"] * 4]
    assert {each.about["for"] for each in call.heard if each.kind == "waiting"} == {"rate"}


def test_what_is_fetched_and_dropped_is_paid_for_as_well(read):
    messages = [each for key in range(4) for each in (fetch(key), Parcel("drop"))]
    call = Call(Parcel("open", opening()), *messages)
    with pytest.raises(GoneError):
        Session(call, Host(call, per_s=1)).run()
    assert call.rested_s == pytest.approx(300)


def test_nobody_pays_for_a_trainer_that_is_gone(read):
    call = Call(Parcel("open", opening()), fetch(0), fetch(1), stays_s=3)
    with pytest.raises(GoneError):
        Session(call, Host(call, per_s=1)).run()
    assert call.rested_s <= 4
    assert read.num == 100


def test_a_node_that_is_stopped_meanwhile_sends_the_trainer_to_others(read):
    call = Call(Parcel("open", opening()), fetch(0), fetch(1))
    host = Host(call, per_s=1)

    def serves():
        if call.rested_s > 3:
            raise UnreachableError("the node is being stopped")

    host.serves = serves
    with pytest.raises(UnreachableError):
        Session(call, host).run()
    assert call.rested_s < 6


@pytest.fixture
def file(tmp_path):
    """The tokens file; write(fields) replaces it."""
    path = tmp_path / "tokens.toml"

    class File:
        def write(self, **fields):
            path.write_text(entry_text("a", token_digest(TOKEN), fields))

    found = File()
    found.path = path
    found.write()
    return found


@pytest.fixture
def guarded(pictures, state, file):
    """A node with a token."""
    node = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=2, tokens=file.path)
    yield node
    node.stop(5)


@pytest.fixture
def start(pictures):
    """start(node, token): a session; its peer, and what is heard next."""
    open_ones = []

    def start(node, token=None, **about):
        events = queue.SimpleQueue()
        client = NodeClient(f"grpc://127.0.0.1:{node.port}", Access(token))
        peer = Peer(0, client, events)
        open_ones.append((peer, client))
        peer.send("open", opening(**{"url": list_samples(str(pictures)).url, **about}))

        def hear():
            _, said = events.get(timeout=60)
            if isinstance(said, HeadwaterError):
                raise said
            return said

        return peer, hear

    yield start
    for peer, client in open_ones:
        peer.close()
        client.close()


def rows_of(pictures, key=1, num=4):
    refs = [ref.to_json() for ref in list_samples(str(pictures)).take(range(num))]
    return "fetch", {"key": key, "epoch": 0, "samples": refs}


@pytest.mark.parametrize(("changes", "match"), [
    (lambda folder: {"roots": [str(folder)]}, "not below what tenant a may read"),
    (lambda folder: {"expires": date(2020, 1, 1)}, "expired at 2020-01-02"),
])  # fmt: skip
def test_a_token_that_allows_less_now_allows_less_to_sessions_that_run(changes, match, guarded, start, file, pictures):
    peer, hear = start(guarded, TOKEN)
    assert hear().kind == "ready"
    file.write(**changes(pictures / "a"))
    peer.send(*rows_of(pictures))
    with pytest.raises(RefusedError, match=match):
        hear()


@pytest.mark.parametrize("kind", ["fetch", "weights", "collect", "forward"])
def test_nothing_is_done_any_more_for_a_token_that_was_taken_back(kind, guarded, start, file, pictures):
    from headwater.core.graph import Call, End, PrefixGraph, Value, Weight

    pixels, made, weight = (TensorSpec(name, shape, "float32") for name, shape in
                            (("x", (3, 8, 8)), ("y", (4, 6, 6)), ("weight", (4, 3, 3, 3))))  # fmt: skip
    calls = (Call("aten.conv2d.default", (Value(0), Weight("weight")), {}),)
    graph = PrefixGraph((pixels,), calls, {"weight": weight}, frozenset({"weight"}), (End("end", 1, (1,), (made,)),))
    peer, hear = start(guarded, TOKEN, graph=graph.to_json())
    assert hear().kind == "ready"
    file.path.write_text(entry_text("b", token_digest(f"hw_{'b' * 43}"), {}))
    about = {"fetch": rows_of(pictures)[1], "weights": {"version": 0, "base": -1}, "collect": {"step": 1},
             "forward": {"step": 1, "micro": 0, "key": 1, "version": 0}}  # fmt: skip
    peer.send(kind, about[kind])
    with pytest.raises(RefusedError, match="not one of this node's any more"):
        hear()


def test_a_quota_that_is_lowered_counts_for_sessions_that_run(guarded, file):
    host = _SessionHost(guarded, Asked("training", "a"), guarded.grants()[0])
    assert [host.pause_s(100), host.pause_s(100), host.weight] == [0, 0, 1]
    file.write(rows_per_second=10, weight=0.5, max_upload="1KB")
    host.check_allowed()
    assert [host.pause_s(100), host.weight, host.max_weight_bytes] == [0, 0.5, 1000]
    assert host.pause_s(1) > 5


def test_a_session_above_max_chunks_waits_for_its_turn_and_says_so(guarded, start, file, monkeypatch):
    monkeypatch.setattr(quotas, "_POLL_S", 0.01)
    file.write(max_chunks=1)
    first, hear = start(guarded, TOKEN)
    assert hear().kind == "ready"
    _, hear = start(guarded, TOKEN)  # as after a cut link, while the node has not noticed yet
    said = hear()
    assert (said.kind, said.about["for"]) == ("waiting", "quota")
    first.close()
    assert hear().kind == "ready"


def test_nobody_has_a_share_of_the_threads_as_another_tenants_job(guarded, start, pictures, monkeypatch):
    """Trainers call their jobs as they like: by the number of their process, say."""
    jobs, rows = [], guarded._extractor.rows

    def noted(store, chunk, *given, **more):
        jobs.append(chunk.job)
        return rows(store, chunk, *given, **more)

    monkeypatch.setattr(guarded._extractor, "rows", noted)
    peer, hear = start(guarded, TOKEN, job="b/partition-7")
    assert hear().kind == "ready"
    peer.send(*rows_of(pictures))
    peer.send("forward", forward(1).about)
    assert hear().kind == "rows"
    assert jobs == ["a/b/partition-7"]


def once(holds):
    """Wait for an event, with a deadline that is far away."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        threading.Event().wait(0.01)


def counted(node, name, *labels):
    return {(each, more[1:]): amount for each, more, amount in node.calls.items()}.get((name, labels), 0)


def test_a_session_that_fails_is_counted_shown_and_logged_once_like_any_request(node, start, caplog):
    peer, hear = start(node, url="file:///etc")
    with pytest.raises(RefusedError, match="not below"):
        hear()
    peer.close()
    once(lambda: counted(node, "requests", "training", "failed"))
    assert counted(node, "errors", "RefusedError") == 1
    assert counted(node, "requests", "training", "done") == 0
    assert [(each["request"], each["kind"]) for each in node.calls.faults()] == [("training", "RefusedError")]
    (record,) = [each for each in caplog.records if each.name.startswith("headwater.node")]
    assert record.fields == {"request": "training", "tenant": ANYONE, "error": "RefusedError"}


def test_what_nobody_foresaw_in_a_session_is_counted_with_its_traceback(node, start, pictures, caplog, monkeypatch):
    monkeypatch.setattr(node, "_store", lambda url: 1 / 0)
    peer, hear = start(node)
    assert hear().kind == "ready"
    peer.send(*rows_of(pictures))
    peer.send("forward", forward(1).about)
    with pytest.raises(HeadwaterError, match="unexpected ZeroDivisionError"):
        hear()
    peer.close()
    once(lambda: counted(node, "errors", "unexpected"))
    (record,) = [each for each in caplog.records if each.name.startswith("headwater.node")]
    assert record.exc_info[0] is ZeroDivisionError


def test_a_session_that_ends_well_is_done_and_its_rows_are_counted(node, start, pictures):
    peer, hear = start(node)
    assert hear().kind == "ready"
    peer.send(*rows_of(pictures))
    peer.send("forward", forward(1).about)
    rows = hear()
    peer.close()
    once(lambda: counted(node, "requests", "training", "done"))
    assert counted(node, "rows_sent") == 4
    assert counted(node, "row_bytes_sent") == rows.num_bytes


def test_a_trainer_that_vanishes_has_abandoned_its_session(node, start, caplog):
    peer, hear = start(node)
    assert hear().kind == "ready"
    peer._reader.cancel()
    once(lambda: counted(node, "requests", "training", "abandoned"))
    assert counted(node, "errors", "UnreachableError") == 0
    assert not [each for each in caplog.records if each.name.startswith("headwater.node")]


def parsed(text, words=None):
    batch, _ = Parcel("a").to_batch()
    return Parcel.from_batch(batch, text, words or {"open": OPENING})


@pytest.mark.parametrize(("kind", "num"), [("fetch", 10_000), ("norm", 10_000), ("open", 600_000), ("", 10_000)])
def test_words_that_would_fill_the_memory_are_refused_before_they_are_read(kind, num, monkeypatch):
    text = b'{"kind":"%s","about":{"x":[%s[]]},"arrays":[]}' % (kind.encode(), b"[]," * num)
    monkeypatch.setattr("headwater.data.parcel.json.loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(DamagedError, match="values are the limit: use smaller batches"):
        parsed(text)


def test_a_message_that_begins_as_another_is_refused():
    with pytest.raises(DamagedError, match="began as open"):
        parsed(b'{"kind":"open","about":{},"arrays":[],"kind":"fetch"}')


def test_as_many_samples_may_be_asked_for_as_the_session_is_for():
    words = {"fetch": Opened.of(Parcel("open", opening(max_rows=20_000))).fetch_words}
    refs = [SampleRef(number, f"{'folder, ' * 8}{number}.jpg", 0, -1, 2**40, "e" * 40).to_json()
            for number in range(20_000)]  # fmt: skip
    _, text = Parcel("fetch", {"key": 1, "epoch": 0, "samples": refs}).to_batch()
    with pytest.raises(DamagedError, match="limit"):
        parsed(text)
    assert len(parsed(text, words).about["samples"]) == 20_000

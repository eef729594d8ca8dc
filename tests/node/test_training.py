"""What a stranger may make a node that trains do: nothing but arithmetic on arrays that fit its memory."""

import json
import queue
import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from headwater.core.graph import NORM, Call, End, PrefixGraph, Value, Weight
from headwater.core.spec import TensorSpec
from headwater.data.layouts import list_samples
from headwater.data.parcel import TRAINING, Parcel, checksum, pack_rows, unpack_rows
from headwater.data.transforms import Resize, ToFloat, Tokenize, Transforms
from headwater.errors import ConfigError, DamagedError, HeadwaterError, RefusedError
from headwater.node import exchange
from headwater.node.training.build import footprint
from headwater.train.peer import Peer

PIXELS = Transforms([Resize((8, 8)), ToFloat()])
X, Y = TensorSpec("x", (3, 8, 8), "float32"), TensorSpec("y", (4, 6, 6), "float32")
WEIGHT = TensorSpec("weight", (4, 3, 3, 3), "float32")
CONV = (Call("aten.conv2d.default", (Value(0), Weight("weight")), {}),)


def graph(calls=CONV, boundary=Y, weight=WEIGHT):
    end = End("end", len(calls), (len(calls),), (boundary,))
    return PrefixGraph((X,), tuple(calls), {"weight": weight}, frozenset({"weight"}), (end,))


@pytest.fixture
def open_session(client, pictures):
    """open_session(graph): a session of its own; say(kind, …) sends, hear() gives the next word."""
    peers = []

    def start(prefix, url=None, **about):
        events = queue.SimpleQueue()
        peers.append(Peer(0, client, events))
        about = {"training": TRAINING, "url": url or list_samples(str(pictures)).url, "job": "job", "seed": 0,
                 "transforms": PIXELS.to_json(), "codec": "raw", "max_rows": 8, "depth": 1, "measure": 0,
                 "graph": None if prefix is None else prefix.to_json(), **about}  # fmt: skip
        peers[-1].send("open", about)

        def hear():
            _, said = events.get(timeout=60)
            if isinstance(said, HeadwaterError):
                raise said
            return said

        return peers[-1], hear

    yield start
    for peer in peers:
        peer.close()


def test_a_session_trains_and_gives_gradients(open_session, pictures):
    peer, hear = open_session(graph())
    assert hear().kind == "ready"
    weight = np.ones((4, 3, 3, 3), np.float32)
    peer.send("weights", {"version": 0, "base": -1}, {"weight": weight})
    peer.send("commit", {"version": 0})
    refs = [ref.to_json() for ref in list_samples(str(pictures)).take(range(4))]
    peer.send("fetch", {"key": 1, "epoch": 0, "samples": refs})
    peer.send("forward", {"step": 1, "micro": 0, "key": 1, "version": 0, "alone": True})
    assert hear().kind == "committed"
    (rows,) = unpack_rows("raw", (Y,), hear(), 4)
    peer.send("backward", {"step": 1, "micro": 0}, pack_rows("raw", (Y,), [np.ones_like(rows)]))
    peer.send("collect", {"step": 1})
    assert hear().array("weight", (4, 3, 3, 3), "float32").sum() == pytest.approx(rows.sum(), rel=1e-4)
    peer.send("check")
    assert hear().about["sum"] == checksum({"weight": weight})


@pytest.mark.parametrize(("changes", "match"), [
    ({"boundary": TensorSpec("y", (4, 5, 5), "float32")}, "where it says"),
    ({"boundary": TensorSpec("y", (4, 6, 6), "float64")}, "where it says"),
    ({"weight": TensorSpec("weight", (4, 9, 3, 3), "float32")}, "can't run"),
    ({"calls": [Call("aten.relu.default", (), {})]}, "can't run"),
    ({"calls": [Call("aten.relu.default", (3,), {})]}, "can't run"),
    ({"calls": [*CONV, Call("aten.sym_size.int", (Value(1), 0), {})], "boundary": Y}, "not a tensor"),
    ({"calls": [Call("aten.repeat.default", (Value(0), [10**6, 1, 1, 10**6]), {})]}, "where it says|memory"),
    ({"calls": [Call("py.mul", (2**62, 4), {})]}, "64 bits"),
    ({"calls": [Call("py.floordiv", (1, 0), {})]}, "can't run"),
    ({"calls": [Call("py.mul", ([1], 10**10), {})]}, "for numbers"),
    ({"calls": [Call("py.mul", ("x", 10**11), {})]}, "for numbers"),
    ({"calls": [Call("aten.expand.default", (Value(0), [8, 3, 8, 8]), {}),
                Call("aten.reshape.default", (Value(1), [1, 1536]), {}),
                Call("aten.expand.default", (Value(2), [2**40, 1536]), {}),
                Call("aten.unbind.int", (Value(3), 0), {})]}, "pieces"),
    ({"calls": [Call("aten.select.int", (Value(0), 0, 0), {}),
                Call("aten.repeat.default", (Value(1), [2000, 1, 1]), {}),
                Call("aten.split.Tensor", (Value(2), 1), {})]}, "pieces"),
    ({"weight": TensorSpec("weight", (2**31 - 1,) * 4, "float32")}, "no memory holds"),
    ({"calls": [Call("aten.repeat.default", (Value(0), [1, 1, 1, 512]), {}),
                *[Call("aten.unbind.int", (Value(1), 3), {})] * 25]}, "tensors"),
])  # fmt: skip
def test_a_prefix_that_can_not_run_is_refused_before_it_takes_memory(changes, match, open_session):
    _, hear = open_session(graph(**changes))
    with pytest.raises(HeadwaterError, match=match):
        hear()


SEEN = [Call("aten.mul.Tensor", (Value(0), Weight("weight")), {}), Call("aten.sym_size.int", (Value(1), 0), {}),
        Call("py.sub", (8, Value(2)), {}), Call("py.mul", (Value(3), 10**6), {}), Call("py.add", (Value(4), 1), {}),
        Call("aten.repeat.default", (Weight("weight"), [Value(5)]), {})]  # fmt: skip


def told(prefix, end, open_session, pictures):
    """What a session says of a step with a batch of four."""
    peer, hear = open_session(PrefixGraph((X,), tuple(prefix), {"weight": TensorSpec("weight", (1,), "float32")},
                                          frozenset({"weight"}), (End("end", len(prefix), (end,), (X,)),)))  # fmt: skip
    refs = [ref.to_json() for ref in list_samples(str(pictures)).take(range(4))]
    peer.send("weights", {"version": 0, "base": -1}, {"weight": np.ones(1, np.float32)})
    peer.send("commit", {"version": 0})
    peer.send("fetch", {"key": 1, "epoch": 0, "samples": refs})
    peer.send("forward", {"step": 1, "micro": 0, "key": 1, "version": 0, "alone": True})
    peer.send("backward", {"step": 1, "micro": 0}, {"0": np.ones((4, *X.shape), np.float32)})
    peer.send("collect", {"step": 1})
    return [hear().kind for _ in range(4)]


def test_a_prefix_that_makes_more_of_fewer_rows_is_refused(open_session, pictures):
    with pytest.raises(ConfigError, match="more for fewer"):
        told(SEEN, 1, open_session, pictures)


def test_a_value_that_was_overwritten_before_its_gradient_is_a_plain_error(open_session, pictures):
    calls = [SEEN[0], Call("aten.sigmoid.default", (Value(1),), {}), Call("aten.mul_.Tensor", (Value(2), 2.0), {})]
    with pytest.raises(ConfigError, match="no gradients"):
        told(calls, 2, open_session, pictures)


def test_a_view_that_repeats_itself_counts_for_as_large_as_it_looks():
    calls = (Call("aten.expand.default", (Weight("weight"), [2**40]), {}),)
    found = PrefixGraph((X,), calls, {"weight": TensorSpec("weight", (1,), "float32")}, frozenset(),
                        (End("end", 1, (0,), (X,)),))  # fmt: skip
    assert footprint(found, found.ends[0], 2)[1] >= 2**42


def test_a_node_whose_answer_nobody_foresaw_is_lost_and_the_trainer_does_not_wait(client):
    found = client.in_words(OverflowError("of a node"))
    assert isinstance(found, DamagedError)
    assert "can't be read" in str(found)


def test_every_end_that_is_measured_has_to_fit_the_memory(open_session):
    large = TensorSpec("y", (3, 8000, 80000), "float32")
    calls = (Call("aten.repeat.default", (Value(0), [1, 1, 1000, 10000]), {}),)
    ends = (End("large", 1, (1,), (large,)), End("small", 0, (0,), (X,)))
    _, hear = open_session(PrefixGraph((X,), calls, {}, frozenset(), ends), measure=64)
    with pytest.raises(HeadwaterError, match="memory"):
        hear()


def test_inputs_count_as_memory_also_where_nothing_is_trained(open_session):
    _, hear = open_session(None, max_rows=1 << 20, transforms=Transforms([Resize((4000, 4000)), ToFloat()]).to_json())
    with pytest.raises(HeadwaterError, match="memory"):
        hear()


def test_a_prefix_with_two_inputs_is_refused(open_session):
    found = graph()
    _, hear = open_session(PrefixGraph((X, X), found.calls, found.weights, found.trained, found.ends))
    with pytest.raises(ConfigError, match="takes 2 inputs"):
        hear()


def test_texts_are_refused(open_session):
    _, hear = open_session(None, transforms=Transforms([Tokenize("0" * 64, 8)]).to_json())
    with pytest.raises(HeadwaterError, match="of texts"):
        hear()


def test_no_more_micro_batches_are_under_way_than_memory_was_reserved_for(open_session, pictures):
    peer, hear = open_session(graph(), depth=2)
    refs = [ref.to_json() for ref in list_samples(str(pictures)).take(range(4))]
    peer.send("weights", {"version": 0, "base": -1}, {"weight": np.ones((4, 3, 3, 3), np.float32)})
    peer.send("commit", {"version": 0})
    for micro in range(3):
        peer.send("fetch", {"key": micro, "epoch": 0, "samples": refs})
        peer.send("forward", {"step": 1, "micro": micro, "key": micro, "version": 0, "alone": True})
    assert [hear().kind for _ in range(4)] == ["ready", "committed", "rows", "rows"]
    with pytest.raises(HeadwaterError, match="2 micro-batches are under way"):
        hear()


def test_two_batches_of_many_parts_may_be_asked_for_and_no_third(open_session, pictures):
    peer, hear = open_session(None, max_rows=1, ahead=50)
    refs = [ref.to_json() for ref in list_samples(str(pictures)).take(range(50))]
    for key in range(100):
        peer.send("fetch", {"key": key, "epoch": key // 50, "samples": [refs[key % 50]]})
    peer.send("forward", {"step": 1, "micro": 0, "key": 0, "version": 0})
    assert [hear().kind, hear().kind] == ["ready", "rows"]
    for key in range(100, 103):
        peer.send("fetch", {"key": key, "epoch": 2, "samples": [refs[0]]})
    with pytest.raises(HeadwaterError, match="asked for already"):
        hear()


def test_what_frozen_layers_made_is_made_anew_when_their_weights_change_after_it_was_asked_for(open_session, pictures):
    first, second = (TensorSpec(name, (3, 3, 1, 1), "float32") for name in ("first", "second"))
    calls = (Call("aten.conv2d.default", (Value(0), Weight("first")), {}),
             Call("aten.conv2d.default", (Value(1), Weight("second")), {}))  # fmt: skip
    peer, hear = open_session(PrefixGraph((X,), calls, {"first": first, "second": second}, frozenset({"second"}),
                                          (End("end", 2, (2,), (X,)),)))  # fmt: skip
    eye = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)
    refs = [ref.to_json() for ref in list_samples(str(pictures)).take(range(4))]

    def rows(step, version):
        peer.send("forward", {"step": step, "micro": 0, "key": step, "version": version, "alone": True})
        return unpack_rows("raw", (X,), hear(), 4)[0]

    assert hear().kind == "ready"
    peer.send("weights", {"version": 0, "base": -1}, {"first": eye, "second": eye})
    peer.send("commit", {"version": 0})
    assert hear().kind == "committed"
    peer.send("fetch", {"key": 1, "epoch": 0, "samples": refs})
    before = rows(1, 0)
    peer.send("backward", {"step": 1, "micro": 0}, pack_rows("raw", (X,), [before]))
    peer.send("collect", {"step": 1})
    assert hear().kind == "grads"
    peer.send("fetch", {"key": 2, "epoch": 1, "samples": refs})
    peer.send("weights", {"version": 1, "base": 0}, {"first": 2 * eye})
    peer.send("commit", {"version": 1})
    assert hear().kind == "committed"
    np.testing.assert_array_equal(rows(2, 1), 2 * before)


def test_a_prefix_that_makes_more_than_the_node_has_is_refused(open_session):
    large = TensorSpec("y", (3, 8000, 80000), "float32")
    _, hear = open_session(
        graph([Call("aten.repeat.default", (Value(0), [1, 1, 1000, 10000]), {})], large), max_rows=64
    )
    with pytest.raises(HeadwaterError, match="memory"):
        hear()


def test_data_elsewhere_is_not_read(open_session):
    _, hear = open_session(None, url="file:///etc")
    with pytest.raises(HeadwaterError, match="not below what this node serves"):
        hear()


@pytest.mark.parametrize("said", [
    ("backward", {"step": 1, "micro": 0}, {}),
    ("forward", {"step": 1, "micro": 0, "key": 9, "version": 0}, {}),
    ("weights", {"version": 0, "base": -1}, {"other": np.zeros(3, np.float32)}),
    ("weights", {"version": 0, "base": -1}, {"weight": np.zeros(3, np.float32)}),
    ("weights", {"version": -1, "base": -1}, {}),
    ("commit", {"version": 0}, {}),
    ("collect", {"step": "one"}, {}),
    ("fetch", {"key": 1, "epoch": 0, "samples": [[1, "../x", 0, -1, 1, ""]]}, {}),
    ("fetch", {"key": 1, "epoch": 0, "samples": []}, {}),
    ("measure", {"key": 1}, {}),
    ("run", {}, {}),
])  # fmt: skip
def test_a_message_that_makes_no_sense_ends_the_session_with_a_plain_error(said, open_session):
    peer, hear = open_session(graph())
    assert hear().kind == "ready"
    peer.send(*said)
    with pytest.raises(HeadwaterError) as raised:
        hear()
    assert "unexpected" not in str(raised.value)


def test_batch_norms_need_no_tensor_of_their_own(open_session):
    calls = [*CONV, Call(NORM, (Value(1), None, None), {"eps": 1e-5})]
    _, hear = open_session(graph(calls))
    assert hear().kind == "ready"


def test_a_parcel_survives_the_wire():
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([], np.int64),
        "c": np.float64(3).reshape(()),
    }
    batch, said = Parcel("kind", {"n": 1}, arrays).to_batch()
    found = Parcel.from_batch(batch, said)
    assert (found.kind, found.about) == ("kind", {"n": 1})
    for name, each in arrays.items():
        np.testing.assert_array_equal(found.arrays[name], each)


@pytest.mark.parametrize("said", [
    b"", b"[]", b"{}", b'{"kind": 1, "about": {}, "arrays": []}', b'{"kind": "a", "about": {}, "arrays": []}',
    json.dumps({"kind": "a", "about": {}, "arrays": [{"name": "a", "shape": [3], "dtype": "float32"}]}).encode(),
    json.dumps({"kind": "a", "about": {}, "arrays": [{"name": "a", "shape": [-2], "dtype": "float32"}]}).encode(),
    json.dumps({"kind": "a", "about": {}, "arrays": [{"name": "a", "shape": [2], "dtype": "object"}]}).encode(),
])  # fmt: skip
def test_a_parcel_that_is_not_what_it_says_is_refused(said):
    batch, _ = Parcel("a", {}, {"a": np.zeros(2, np.float32)}).to_batch()
    with pytest.raises(DamagedError):
        Parcel.from_batch(batch, said)


def test_beside_a_size_of_zero_the_others_are_looked_at_too():
    batch, _ = Parcel("a", {}, {"a": np.zeros(0, np.float32)}).to_batch()
    said = {"kind": "a", "about": {}, "arrays": [{"name": "a", "shape": [0, *[2**31 - 1] * 3], "dtype": "float32"}]}
    with pytest.raises(DamagedError, match="no array has"):
        Parcel.from_batch(batch, json.dumps(said).encode())


def test_a_message_too_large_for_the_wire_says_what_to_do():
    piece = np.broadcast_to(np.zeros(1, np.float32), (1 << 30,))  # takes no memory
    with pytest.raises(RefusedError, match="smaller batches"):
        Parcel("rows", {}, {"0": piece}).to_batch()


class Talker:
    """The reading side of a call: endless messages."""

    def __init__(self):
        self.num_read, self.ended = 0, threading.Event()
        self._item = Parcel("fetch", {}, {"0": np.zeros(1000)}).to_batch()

    def read_chunk(self):
        if self.ended.is_set():
            raise StopIteration
        self.num_read += 1
        batch, words = self._item
        return SimpleNamespace(data=batch, app_metadata=pa.py_buffer(words))

    def begin(self, schema):
        pass

    def write_with_metadata(self, batch, words):
        pass


def test_a_call_ends_however_much_comes_that_is_damaged():
    batch, words = Parcel("fetch").to_batch()
    good, bad = (SimpleNamespace(data=batch, app_metadata=pa.py_buffer(each)) for each in (words, b"no words"))
    talker = Talker()
    coming = iter([good, bad, bad, *[good] * (2 * exchange.MAX_PENDING)])
    talker.read_chunk = lambda: next(coming)

    def work(call):
        raise RefusedError("no")

    with pytest.raises(RefusedError, match="no"):
        exchange.Exchange(talker, talker, lambda: False).carry(work)
    assert next(coming, None) is None


def test_who_talks_faster_than_is_listened_to_is_held_back(monkeypatch):
    monkeypatch.setattr(exchange, "MAX_PENDING_BYTES", 50_000)
    talker, heard = Talker(), []

    def work(call):
        heard.extend(call.take() for _ in range(20))
        while call._pending_bytes < 40_000:  # until it is full again
            threading.Event().wait(0.01)
        heard.append(talker.num_read)
        talker.ended.set()

    exchange.Exchange(talker, talker, lambda: False).carry(work)
    assert heard[-1] <= 20 + 50_000 // 8000 + 1


def test_nothing_is_read_before_the_session_is_let_in():
    talker, let_in, looked, seen = Talker(), threading.Event(), [], []

    def is_cancelled():  # whoever does not read looks now and then whether it is worth waiting
        looked.append(True)
        if len(looked) == 2:
            let_in.set()
        return False

    def work(call):
        let_in.wait()
        seen.append(talker.num_read)
        call.take()
        talker.ended.set()

    exchange.Exchange(talker, talker, lambda: False, is_cancelled).carry(work)
    assert seen == [0]

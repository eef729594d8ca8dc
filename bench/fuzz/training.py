"""Training near data: what a trainer sends to a node that trains a prefix, and what nodes answer to a trainer."""

from __future__ import annotations

import json
import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from bench.fuzz.documents import chains, is_small
from bench.fuzz.replies import Line, make_client
from bench.fuzz.requests import Call, Item, make_node
from bench.fuzz.target import Harness, Room, Target, join, split
from headwater.core.graph import NORM, Dtype, End, PrefixGraph, Value, Weight
from headwater.core.graph import Call as Step
from headwater.core.spec import TensorSpec
from headwater.data import wire
from headwater.data.parcel import SCHEMA, TRAINING, Parcel, checksum, unpack_rows
from headwater.data.samples import SampleRef
from headwater.errors import ConfigError, DataError, HeadwaterError, NodeError, RefusedError
from headwater.node.exchange import Exchange
from headwater.node.rooms import Room as Reserved
from headwater.node.service import _SessionHost
from headwater.node.session import Session

_PLAIN = (ConfigError, DataError, NodeError)
_X = TensorSpec("x", (3, 8, 8), "float32")
_Y = TensorSpec("y", (4, 6, 6), "float32")
_MOST_BYTES = 1 << 16  # of an array in an input
# What a session may reserve: what it takes by itself, with what frozen layers make kept, and a little more. So no input
# computes for long.
_ROOM_BYTES = (200 << 20) + (256 << 20) + (24 << 20)


class _Writer:
    """What the node has said."""

    def __init__(self) -> None:
        self.said: list[Parcel] = []

    def begin(self, schema: pa.Schema) -> None:
        pass

    def write_with_metadata(self, batch: pa.RecordBatch, metadata: pa.Buffer) -> None:
        self.said.append(Parcel.from_batch(batch, metadata.to_pybytes()))


class _Reader:
    def __init__(self, items: Iterator[Any], until: Callable[[int], None] = lambda count: None) -> None:
        """`until`: waits until so many messages were dealt with."""
        self._items, self._until, self._count = items, until, 0

    def read_chunk(self) -> Any:
        try:
            found = next(self._items)
        except StopIteration:
            self._until(self._count)
            raise
        self._count += 1
        return found


class _Call(Exchange):
    """One whose other side hangs up when everything it said was dealt with."""

    def __init__(self, items: Iterator[Any], writer: _Writer) -> None:
        super().__init__(_Reader(items, self._wait), writer, lambda: False)
        self._num_taken, self._wants_more = 0, False

    def take(self) -> Parcel:
        self._wants_more = True
        try:
            return super().take()
        finally:
            self._wants_more = False
            self._num_taken += 1

    def _wait(self, count: int) -> None:
        while not (self._wants_more and self._num_taken >= count):
            time.sleep(0.0002)


def _carry(items: Iterator[Any], work: Callable[[Exchange], None]) -> None:
    """A call with these messages; the error that the node tells."""
    writer = _Writer()
    _Call(items, writer).carry(work)
    for each in writer.said:
        if each.kind == "error":
            raise wire.error_from_wire(each.about["error"].encode()) or AssertionError("an error that says nothing")


def _message(room: Room) -> Harness:
    """Words, and Arrow messages: what is taken for a message says the same when it is sent again."""

    def take_all(exchange: Exchange) -> None:
        while True:
            parcel = exchange.take()
            again = Parcel.from_batch(*Parcel(parcel.kind, {}, parcel.arrays).to_batch())
            assert checksum(again.arrays) == checksum(parcel.arrays)
            for codec in ("raw", "bf16"):
                for rows in unpack_rows(codec, (_Y,), parcel, 2):
                    assert rows.shape == (2, *_Y.shape)

    def harness(data: bytes) -> None:
        said, stream = split(data, 2)

        def items() -> Iterator[Item]:
            with pa.ipc.open_stream(pa.BufferReader(stream)) as reader:
                for batch in reader:
                    yield Item(batch, pa.py_buffer(said))

        _carry(items(), take_all)

    return harness


def _message_seeds() -> Sequence[bytes]:
    rows = np.ones((2, *_Y.shape), np.float32)
    parcels = [Parcel("rows", {"step": 1}, {"0": rows}), Parcel("commit", {"version": 3}),
               Parcel("weights", {"version": 1, "base": -1}, {"a": np.arange(3), "b": np.zeros((0, 2), np.float16)}),
               Parcel("rows", {}, {"0": np.ones((2, *_Y.shape), np.int16)})]  # fmt: skip
    seeds = []
    for compression, parcel in zip((None, None, "lz4", "zstd"), parcels, strict=True):
        batch, said = parcel.to_batch()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_batch(batch)
        seeds.append(join(said, sink.getvalue().to_pybytes()))
    return seeds


class _Host(_SessionHost):
    max_weight_bytes = 1 << 16
    tenant = "anyone"

    def room(self, num_bytes: int) -> Reserved:
        if num_bytes > _ROOM_BYTES:
            raise RefusedError(f"{num_bytes} bytes are more than there are here")
        return super().room(num_bytes)


def _session(room: Room) -> Harness:
    """A list of messages: each an object of a kind, words (`about`), arrays, and the number (`fill`) they are full
    of."""
    node = make_node(room)

    def harness(data: bytes) -> None:
        messages = _messages(room.fill_in(data))
        about = messages[0].get("about") if messages else None
        if isinstance(about, dict) and not _is_small(about.get("transforms")):
            return
        host = _Host(node, Call(), None)  # type: ignore[arg-type]
        _carry(iter(_items(messages)), lambda exchange: Session(exchange, host).run())

    return harness


def _messages(text: bytes) -> list[dict[str, Any]]:
    """None for what is no list, or too deep to be written again: that is for `message`."""
    try:
        tree = json.loads(text)
        json.dumps(tree)
    except (ValueError, RecursionError):
        return []
    return [each for each in tree if isinstance(each, dict)][:40] if isinstance(tree, list) else []


def _is_small(tree: Any) -> bool:
    try:
        return is_small(tree)
    except RecursionError:
        return True  # and no transforms


def _items(messages: Sequence[dict[str, Any]]) -> list[Item]:
    """As they come; none where one is too deep to be written here."""
    try:
        return [_item(each) for each in messages]
    except RecursionError:
        return []


def _item(message: dict[str, Any]) -> Item:
    listed = message.get("arrays", [])
    said = {"kind": message.get("kind"), "about": message.get("about", {}), "arrays": listed}
    values = [_bytes_of(each, message.get("fill", 0)) for each in (listed if isinstance(listed, list) else [])]
    batch = pa.RecordBatch.from_arrays([pa.array(values, pa.large_binary())], schema=SCHEMA)
    return Item(batch, pa.py_buffer(json.dumps(said).encode()))


def _bytes_of(listed: Any, fill: Any) -> bytes:
    """As many as the array has, if it is no large one."""
    try:
        spec = TensorSpec.from_json(listed)
        if spec.row_bytes > _MOST_BYTES:
            return b""
        with np.errstate(all="ignore"):
            return np.full(math.prod(spec.shape), fill).astype(spec.dtype).tobytes()
    except (HeadwaterError, TypeError, ValueError, OverflowError):
        return b""


def _listed(**arrays: tuple[tuple[int, ...], str]) -> list[dict[str, Any]]:
    return [TensorSpec(name, *each).to_json() for name, each in arrays.items()]


def _graph(calls: Sequence[Step], boundary: TensorSpec, trained: Sequence[str], at: int, **weights: Any) -> PrefixGraph:
    specs = {name: TensorSpec(name, shape, "float32") for name, shape in weights.items()}
    ends = (End("first", 0, (0,), (_X,)), End("end", len(calls), (at,), (boundary,)))
    return PrefixGraph((_X,), tuple(calls), specs, frozenset(trained), ends)


def _graphs() -> list[PrefixGraph]:
    """Small ones: a frozen layer, a batch-norm of the whole batch, sizes that are computed, and much of what there is
    to compute with."""
    conv = Step("aten.conv2d.default", (Value(0), Weight("a")), {})
    norm = Step(NORM, (Value(1), Weight("b"), None), {"eps": 1e-5})
    relu = Step("aten.relu.default", (Value(2),), {})
    whole = _graph([conv, norm, relu], _Y, ["a", "b"], 3, a=(4, 3, 3, 3), b=(4,))
    frozen = _graph([conv, norm, relu], _Y, ["b"], 3, a=(4, 3, 3, 3), b=(4,))
    plain = _graph([conv], _Y, [], 1, a=(4, 3, 3, 3))
    sized = _graph([
        Step("aten.mul.Tensor", (Value(0), Weight("a")), {}), Step("aten.sym_size.int", (Value(1), 0), {}),
        Step("py.mul", (Value(2), 2), {}), Step("py.floordiv", (Value(3), 2), {}),
        Step("aten.reshape.default", (Value(1), [Value(4), 192]), {}),
        Step("aten.split.Tensor", (Value(5), 96, 1), {}), Step("py.getitem", (Value(6), 1), {}),
        Step("aten.linear.default", (Value(7), Weight("b"), None), {}),
    ], TensorSpec("y", (5,), "float32"), ["a", "b"], 8, a=(1,), b=(5, 96))  # fmt: skip
    return [whole, frozen, plain, sized, _zoo()]


def _zoo() -> PrefixGraph:
    v = Value(1)
    some: list[tuple[str, tuple[Any, ...]]] = [
        ("max_pool2d.default", (v, [2, 2], [2, 2], [0, 0], [1, 1], False)), ("avg_pool2d.default", (v, [2, 2], [2, 2])),
        ("adaptive_avg_pool2d.default", (v, [2, 3])), ("adaptive_max_pool2d.default", (v, [2, 2])),
        ("conv2d.padding", (v, Weight("c"), None, [1, 1], "same")),
        ("conv_transpose2d.input", (v, Weight("d"), None, [2, 2], [1, 1], [1, 1], 1, [1, 1])),
        ("pixel_unshuffle.default", (v, 2)), ("channel_shuffle.default", (v, 3)),
        ("upsample_nearest2d.vec", (v, [9, 9], None)), ("upsample_bilinear2d.vec", (v, None, False, [2.0, 2.0])),
        ("group_norm.default", (v, 3)), ("layer_norm.default", (v, [8, 8])), ("rms_norm.default", (v, [8, 8])),
        ("instance_norm.default", (v, None, None, None, None, True, 0.1, 1e-5, False)),
        ("batch_norm.default", (v, None, None, Weight("e"), Weight("e"), False, 0.1, 1e-5, False)),
        ("scaled_dot_product_attention.default", (v, v, v)), ("einsum.default", ("nchw,nchw->nc", [v, v])),
        ("to.dtype", (v, Dtype("int64"))), ("chunk.default", (v, 2, 1)), ("unbind.int", (v, 1)),
        ("cat.default", ([v, v], 1)), ("stack.default", ([v, v], 1)), ("roll.default", (v, [1], [2])),
        ("flip.default", (v, [2])), ("pad.default", (v, [1, 1, 1, 1], "reflect")),
        ("constant_pad_nd.default", (v, [1, 2], 0.5)), ("repeat.default", (v, [1, 1, 2, 1])),
        ("permute.default", (v, [0, 2, 3, 1])), ("unflatten.int", (v, 1, [3, 1])), ("slice.Tensor", (v, 2, 1, 7, 2)),
        ("narrow.default", (v, 2, 1, 3)), ("select.int", (v, 1, 0)), ("movedim.int", (v, 1, 2)),
        ("expand.default", (v, [-1, 3, 8, 8])), ("var_mean.correction", (v, [2, 3])), ("mean.dim", (v, [2, 3], True)),
        ("sum.dim_IntList", (v, [1])), ("amax.default", (v, [1])), ("linalg_vector_norm.default", (v, 2, [1])),
        ("clamp.default", (v, -1.0, 1.0)), ("pow.Tensor_Scalar", (v, 2)), ("softmax.int", (v, 1)),
        ("gelu.default", (v,)), ("prelu.default", (v, Weight("e"))), ("dropout.default", (v, 0.5, True)),
        ("leaky_relu_.default", (v, 0.1)), ("matmul.default", (v, v)), ("flatten.using_ints", (v, 1)),
        ("embedding.default", (Weight("f"), Value(19))), ("flatten.using_ints", (Value(19), 0)),
    ]  # fmt: skip
    some.append(("index_select.default", (v, 1, Value(len(some) + 1))))
    calls = [Step("aten.mul.Tensor", (Value(0), Weight("a")), {}), *(Step(f"aten.{op}", args, {}) for op, args in some)]
    return _graph(calls, _X, ["a", "c"], 1, a=(1,), c=(3, 3, 3, 3), d=(3, 2, 3, 3), e=(3,), f=(5, 2))


def _opening(graph: PrefixGraph | None, **about: Any) -> dict[str, Any]:
    said = {"training": TRAINING, "url": "file://@ROOT@", "job": "job", "seed": 0, "transforms": chains()[0].to_json(),
            "codec": "raw", "max_rows": 4, "ahead": 4, "depth": 2, "measure": 0,
            "graph": None if graph is None else graph.to_json(), **about}  # fmt: skip
    return {"kind": "open", "about": said}


def _fetching(key: int) -> dict[str, Any]:
    refs = (SampleRef(0, "a/0.jpg", 0, -1, 700, ""), SampleRef(1, "a/1.png", 0, -1, 5, ""))
    return {"kind": "fetch", "about": {"key": key, "epoch": 0, "samples": [ref.to_json() for ref in refs]}}


def _session_seeds() -> Sequence[bytes]:
    seeds: list[Any] = [
        [_opening(None), _fetching(1), {"kind": "forward", "about": {"step": 1, "micro": 0, "key": 1}}],
        [_opening(_graphs()[0], measure=2), _fetching(1), {"kind": "measure", "about": {"key": 1}}],
    ]
    for place, graph in enumerate(_graphs()):
        end, codec = graph.ends[-1], ("raw", "fp16", "bf16")[place % 3]
        arrays = [spec.to_json() for spec in graph.weights.values()]
        passes = not graph.trained
        forward = {"step": 1, "micro": 0, "key": 1, "version": 0, "alone": place != 0, "passes": passes}
        sums = {"kind": "norm", "arrays": _listed(sums=((2, 4), "float32")), "fill": 1.0}
        rows = {"raw": "float32", "fp16": "float16", "bf16": "int16"}[codec]
        steps = [
            _opening(graph, codec=codec), {"kind": "weights", "about": {"version": 0, "base": -1}, "arrays": arrays,
                                           "fill": 0.5},
            {"kind": "commit", "about": {"version": 0}}, _fetching(1), {"kind": "forward", "about": forward},
            {**sums, "about": {"step": 1, "round": 0, "count": 72}},
            {"kind": "backward", "about": {"step": 1, "micro": 0, "scales": [2.0]}, "fill": 1,
             "arrays": _listed(**{"0": ((2, *end.boundary[0].shape), rows)})},
            {**sums, "about": {"step": 1, "round": 1}},
            {"kind": "gather", "about": {"circle": "0" * 32, "number": 1, "rank": 0, "nodes": 2}},
            {"kind": "add", "about": {"step": 1, "number": 1, "passes": True}},
            {"kind": "collect", "about": {"step": 1}}, {"kind": "check", "about": {}}, _fetching(2),
            {"kind": "drop", "about": {}},
        ]  # fmt: skip
        learns = ("backward", "add", "collect", "norm")
        seeds.append([each for each in steps if not passes or each["kind"] not in learns])
    return [json.dumps(each).encode() for each in seeds]


class _Both(Line):
    """A connection whose answers in a session are these messages."""

    messages: Sequence[dict[str, Any]] = ()

    def do_exchange(self, descriptor: Any) -> tuple[Any, Any]:
        return _Sink(), _Reader(iter(_items(self.messages)))


class _Sink:
    """Takes whatever a trainer says."""

    def begin(self, schema: pa.Schema) -> None:
        pass

    def write_with_metadata(self, batch: pa.RecordBatch, metadata: pa.Buffer) -> None:
        pass

    def done_writing(self) -> None:
        pass

    def close(self) -> None:
        pass


def _answers(room: Room) -> Harness:
    """A list of messages as for `session`, of two nodes: one with a place (`node`) of 1 comes from the second. They are
    answers to a step of a trainer."""
    from headwater.train import partition_measure
    from headwater.train.attempt import LostError
    from headwater.train.peer import Peer

    clients = [make_client()[0] for _ in range(2)]
    lines = [_Both(), _Both()]
    for client, line in zip(clients, lines, strict=True):
        client._client = line  # type: ignore[assignment]

    def harness(data: bytes) -> None:
        messages = _messages(data)
        for number, line in enumerate(lines):
            line.messages = [each for each in messages if (each.get("node") == 1) == (number == 1)]
        both = any(each.get("node") == 1 for each in messages)
        among = any(each.get("kind") in ("adding", "sum", "apart") for each in messages)  # who adds up?
        own: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
        peers = {number: Peer(number, clients[number], own[number]) for number in range(2 if both else 1)}
        try:
            attempt = _attempt(peers, _merged(peers, own, messages), among)
            with np.errstate(all="ignore"):
                attempt.run()
                attempt.apply()
            for message in messages:
                if message.get("kind") == "measured":
                    for item in _items([message]):
                        parcel = Parcel.from_batch(item.data, item.app_metadata.to_pybytes())
                        partition_measure._checked(clients[0], parcel, attempt._work.prefix)
        except LostError as lost:
            raise lost.why from None
        finally:
            for peer in peers.values():
                peer.close()

    return harness


def _merged(peers: Any, own: Sequence[Any], messages: Sequence[dict[str, Any]]) -> queue.SimpleQueue[Any]:
    """What peers have heard, in the order of the messages."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for peer in peers.values():
        for thread in peer._threads[1:]:
            thread.join()
    for number in [*(int(each.get("node") == 1) for each in messages), *[0, 1] * (len(messages) + 1)]:
        if not own[number].empty():
            events.put(own[number].get())
    return events


@cache
def _suffix() -> Any:
    from torch import nn

    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(_Y.shape), 2))


def _attempt(peers: Any, events: Any, among: bool) -> Any:
    """A step with two rows of each node, and a prefix that has a batch-norm. `among` themselves nodes can add up."""
    import torch
    from torch import Tensor

    from headwater.model.trainable import Norm, Trainable
    from headwater.train.attempt import Attempt, Part, Work
    from headwater.train.circle import Meetings

    meetings = Meetings()
    meetings.look(peers)
    for peer in peers.values() if among else ():
        meetings.heard(peer, Parcel("met", {"number": 1}))
    graph = _graphs()[0]
    tensors = {name: torch.zeros(spec.shape, requires_grad=True) for name, spec in graph.weights.items()}
    norm = Norm("b", torch.zeros(4), torch.ones(4), 0.1)
    prefix = Trainable(graph, tensors, (norm,), ((torch.zeros(()), 1),), {"first": (False,), "end": (True,)})
    suffix = _suffix()
    count = 2 * len(peers)

    def assemble(rows: list[np.ndarray]) -> list[Tensor]:
        return [torch.from_numpy(np.array(each)) for each in rows]

    def loss(found: Any, labels: Tensor) -> Tensor:
        result: Tensor = torch.nn.functional.cross_entropy(found, labels)
        return result

    work = Work(suffix, (_Y,), (True,), prefix, "raw", assemble, list(suffix.parameters()), "mean", 1)
    parts = [{number: Part(np.array([2 * number, 2 * number + 1]), 1) for number in peers}]
    return Attempt(7, work, peers, events, parts, [torch.zeros(count, dtype=torch.int64)], loss, lambda: None,
                   patience_s=60.0, meetings=meetings)  # fmt: skip


def _answer_seeds() -> Sequence[bytes]:
    def steps(node: int, alone: bool, among: bool = False, apart: bool = False) -> list[dict[str, Any]]:
        sums = _listed(sums=((2, 4), "float32"))
        said = {"step": 7, "norm": 0, "count": 72}
        norms = [
            {"kind": "norm", "about": {**said, "round": 0, "way": "forward"}, "arrays": sums, "fill": 1},
            {"kind": "norm", "about": {**said, "round": 1, "way": "backward"}, "arrays": sums, "fill": 1},
        ]
        rows = {"kind": "rows", "about": {"step": 7, "micro": 0}, "fill": 0.5,
                "arrays": _listed(**{"0": ((2, *_Y.shape), "float32")})}  # fmt: skip
        grads = {"kind": "grads", "about": {"step": 7}, "fill": 0.5,
                 "arrays": _listed(a=((4, 3, 3, 3), "float32"), b=((4,), "float32"))}  # fmt: skip
        ends: list[dict[str, Any]] = [grads]
        if among:
            whole = _listed(float32=((4 * 3 * 3 * 3 + 4 + 2,), "float32"))
            ends = [{"kind": "adding", "about": {"step": 7}},
                    {"kind": "sum", "about": {"step": 7}, "fill": 2.0, "arrays": whole} if node == 0 and not apart else
                    {"kind": "apart", "about": {"number": 1, "why": "no"}}, *([grads] if apart else [])]  # fmt: skip
        order = [norms[0], rows, *([] if alone else [norms[1]]), *ends]
        return [{"node": node, **each} for each in ({"kind": "committed", "about": {}}, *order)]

    times = {"pixels_s": 0.1, "rows": 2, "ends": {"first": [0.1, 0.1], "end": [0.1, 0.2]}}
    measured = {"kind": "measured", "about": times}
    error = {"kind": "error", "about": {"error": wire.error_to_wire(RefusedError("no")).decode()}}
    both = [
        [each for pair in zip(*(steps(node, False, among, apart) for node in (0, 1)), strict=False) for each in pair]
        for among, apart in ((False, False), (True, False), (True, True))
    ]
    return [json.dumps(each).encode() for each in ([*steps(0, True), measured], *both, [error], [{"kind": "beat"}])]


TARGETS = (
    Target("message", "a message of a training session", _message, _message_seeds, _PLAIN, 40),
    Target("session", "a training session on a node: a prefix as plain data, built and run", _session, _session_seeds,
           _PLAIN, 60, "json"),
    Target("steps", "what nodes answer in a training session", _answers, _answer_seeds, (HeadwaterError,), 40, "json"),
)  # fmt: skip

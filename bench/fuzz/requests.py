"""What a stranger may send to a node: tickets, actions and uploads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from bench.fuzz.documents import chains, is_small
from bench.fuzz.target import SECRET, Harness, Room, Target, join, split
from headwater.core.spec import TensorSpec
from headwater.data import wire
from headwater.data.samples import SampleRef
from headwater.errors import ConfigError, DataError, ModelError, NodeError
from headwater.node.onnxfile import check_self_contained
from headwater.node.prefixes import Prefixes
from headwater.node.service import Node

_PLAIN = (ConfigError, DataError, NodeError, ModelError)


class Call:
    """What the service knows of a call: one from this machine, which nobody gives up on."""

    def is_cancelled(self) -> bool:
        return False

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def peer_identity(self) -> bytes:
        return b""

    def get_middleware(self, name: str) -> None:
        return None


def make_node(room: Room) -> Node:
    return Node("grpc://127.0.0.1:0", (str(room.root),), state=room.state, num_threads=1, max_upload_bytes=1 << 16)


@contextmanager
def _as_told() -> Iterator[None]:
    """A status as the error that it carries: one that nobody foresaw is of no class that is allowed."""
    try:
        yield
    except flight.FlightServerError as error:
        raise wire.error_from_wire(error.extra_info) or error from None


def _ticket(room: Room) -> Harness:
    node = make_node(room)

    def harness(data: bytes) -> None:
        with _as_told():
            node.do_get(Call(), flight.Ticket(room.fill_in(data)))

    return harness


def _request(room: Room) -> Harness:
    """The same, and what was asked is done: samples listed, rows made."""
    node = make_node(room)

    def harness(data: bytes) -> None:
        with _as_told():
            ticket = room.fill_in(data)
            node.do_get(Call(), flight.Ticket(ticket))
            asked = wire.loads(ticket)
            if isinstance(asked, wire.Listing):
                for batch, _ in node._listing(asked, Call()):
                    batch.validate(full=True)
            elif isinstance(asked, wire.Chunk) and is_small(asked.extraction.transforms.to_json()):
                asked = replace(asked, samples=asked.samples[:8])
                schema = wire.rows_schema(asked.extraction.codec, asked.extraction.boundary)
                for batch, metadata in node._rows(asked, schema, Call()):
                    assert SECRET not in metadata
                    batch.validate(full=True)

    return harness


def _ticket_seeds() -> Sequence[bytes]:
    samples = (SampleRef(0, "a/0.jpg", 0, -1, 9000, ""), SampleRef(1, "a/1.png", 0, -1, 9000, ""),
               SampleRef(7, "b/3.jpg", 0, 5, 5, ""), SampleRef(8, "link/secret.jpg", 0, -1, 9, ""))  # fmt: skip
    seeds = []
    for chain, codec in zip(chains(), ("raw", "fp16", "bf16", "int8"), strict=True):
        want = wire.Extraction("file://@ROOT@", chain, None, (chain.pixel_spec,), codec=codec, node_batch=2)
        seeds.append(wire.Chunk(want, "job", 1, 2, 3, samples).dumps())
    model = wire.Extraction("@ROOT@", chains()[0], "0" * 64, (TensorSpec("y", (3,), "float32"),), outputs=("y",))
    chunk = wire.Chunk(model, "job", 1, 2, 3, samples)
    seeds += [chunk.dumps(), wire.Probe(chunk).dumps(), wire.Calibrate(chunk).dumps(), wire.Blob(100).dumps()]
    return [*seeds, wire.Listing("file://@ROOT@").dumps(), wire.Listing("@ROOT@/a", "folders").dumps(),
            wire.Listing("@ROOT@/list.csv", "table", "path", 1).dumps()]  # fmt: skip


def _request_seeds() -> Sequence[bytes]:
    return [seed for seed in _ticket_seeds() if json.loads(seed)["kind"] in ("rows", "listing")]


def _action(room: Room) -> Harness:
    node = make_node(room)

    def harness(data: bytes) -> None:
        kind, _, body = data.partition(b"\0")
        with _as_told():
            list(node.do_action(Call(), flight.Action(kind.decode(errors="replace"), body)))

    return harness


def _action_seeds() -> Sequence[bytes]:
    return [b"hello\0", b"status\0", b"has-prefix\0" + b"0" * 64, b"has-prefix\0../../x", b"shell\0ls",
            b"has-tokenizer\0" + b"0" * 64, b"table\0" + b"\2\0\0\0{}"]  # fmt: skip


@dataclass(frozen=True)
class Item:
    data: Any
    app_metadata: Any = None


def _items(stream: bytes) -> Iterator[Item]:
    """As Flight hands them over: it reads the same messages with the same code. A first byte of 1: words alone."""
    if stream[:1] == b"\1":
        yield Item(None, pa.py_buffer(stream[:20]))
        stream = stream[1:]
    with pa.ipc.open_stream(pa.BufferReader(stream)) as reader:
        for batch in reader:
            yield Item(batch)


def _upload(room: Room) -> Harness:
    node = make_node(room)
    # The first load is the targets' of models.py; in a child for each input it would take a third of a second.
    node._prefixes = Prefixes(
        room.state / "uploads", 1 << 16, try_out=lambda path: check_self_contained(path.read_bytes())
    )

    def harness(data: bytes) -> None:
        command, stream = split(data, 2)
        with _as_told():
            node.do_put(Call(), flight.FlightDescriptor.for_command(command), _items(stream), None)

    return harness


def _upload_seeds() -> Sequence[bytes]:
    seeds = []
    for column in (pa.array([b"abc", b"", b"def"], pa.binary()), pa.array([b"abc", None], pa.large_binary()),
                   pa.array([b"ab", b"cd"], pa.binary(2)), pa.array(["x", "y"]).dictionary_encode()):  # fmt: skip
        for compression in (None, "lz4"):
            sink = pa.BufferOutputStream()
            batch = pa.record_batch([column], names=["piece"])
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
                writer.write_batch(batch)
            digest = hashlib.sha256(b"abcdef").hexdigest().encode()
            seeds.append(join(digest, sink.getvalue().to_pybytes()))
    stream = seeds[0][2 + 64 :]
    tokenizer = b"tokenizer " + hashlib.sha256(b"abcdef").hexdigest().encode()
    return [*seeds, join(b"blob", stream), join(b"0" * 64, b"\1" + stream), join(tokenizer, stream)]


TARGETS = (
    Target("ticket", "a ticket: any request, parsed and checked", _ticket, _ticket_seeds, _PLAIN, 200, "json"),
    Target("request", "a ticket whose request is carried out", _request, _request_seeds, _PLAIN, 40, "json"),
    Target("action", "an action", _action, _action_seeds, _PLAIN, 20),
    Target("upload", "an upload: its name, and its pieces as Arrow messages", _upload, _upload_seeds, _PLAIN, 60),
)

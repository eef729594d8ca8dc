"""What a node may answer to a trainer: rows, listings, and plain answers. A node may lie, or be no node at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from bench.fuzz.documents import chains
from bench.fuzz.target import Harness, Room, Target, join, split
from headwater.core.spec import TensorSpec
from headwater.data import wire
from headwater.data.samples import Packed, SampleRef, Samples
from headwater.data.shards.manifest import check_transforms
from headwater.errors import ConfigError, DataError, HeadwaterError, NodeError, RefusedError
from headwater.train.client import NodeClient

_BOUNDARY = (TensorSpec("y", (2, 3), "float32"), TensorSpec("m", (), "bool"))
_REFS = tuple(SampleRef(number, "a.jpg", 0, -1, 5, "") for number in range(4))


@dataclass
class _Wire:
    """In the place of a Flight client: whatever is asked, the answer is these bytes."""

    answer: bytes = b""
    words: bytes = b""

    def do_action(self, action: Any, options: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(body=pa.py_buffer(self.answer))

    def do_get(self, ticket: Any, options: Any = None) -> Any:
        return _Stream(self.answer, self.words)


@dataclass(eq=False)
class _Stream:
    answer: bytes
    words: bytes

    def __iter__(self) -> Iterator[Any]:
        words = pa.py_buffer(self.words) if self.words else None
        with pa.ipc.open_stream(pa.BufferReader(self.answer)) as reader:
            for batch in reader:
                yield SimpleNamespace(data=batch, app_metadata=None)
            if words is not None:
                yield SimpleNamespace(data=pa.RecordBatch.from_pylist([], schema=reader.schema), app_metadata=words)

    def cancel(self) -> None:
        pass


def _client() -> tuple[NodeClient, _Wire]:
    client, line = NodeClient("grpc://127.0.0.1:1"), _Wire()
    client.close()
    client._client = line
    return client, line


def _rows(room: Room) -> Harness:
    client, line = _client()

    def harness(data: bytes) -> None:
        codec, line.words, line.answer = split(data, 3)
        name = codec.decode(errors="replace")
        want = wire.Extraction("file:///x", chains()[0], None, _BOUNDARY, codec=name if name in CODECS else "raw")
        reply = client.rows(wire.Chunk(want, "job", 1, 2, 3, _REFS), threading.Event())
        assert len(reply.good) == len(_REFS)
        assert all(len(tensor) == reply.good.sum() for tensor in reply.tensors)

    return harness


CODECS = ("raw", "fp16", "bf16", "int8")


def _stream(batches: Sequence[pa.RecordBatch], compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue().to_pybytes())


def _rows_seeds() -> Sequence[bytes]:
    seeds = []
    for codec in CODECS:
        tensors = [np.ones((4, 2, 3), np.float32), np.ones(4, bool)]
        batch = wire.pack_rows(codec, _BOUNDARY, np.arange(4), tensors)
        bad = wire.pack_bad([wire.Bad(3, "a.jpg", "why")])
        seeds.append(join(codec.encode(), b"", _stream([batch])))
        seeds.append(join(codec.encode(), bad, _stream([batch.slice(0, 3)], "zstd")))
    return seeds


def _listing(room: Room) -> Harness:
    client, line = _client()

    def harness(data: bytes) -> None:
        line.words, line.answer = split(data, 2)
        samples = client.list_samples(wire.Listing("file:///x"))
        check_transforms(samples, chains()[0])
        _ = samples.fingerprint, samples.keys.to_pylist(), samples.take(range(len(samples)))

    return harness


def _listing_seeds() -> Sequence[bytes]:
    seeds = []
    for packed in (None, Packed("f" * 64, json.dumps(chains()[0].fixed_part().to_json()))):
        samples = Samples.build("file:///x", ["a", "b"], keys=["a/0.jpg", "b/1.jpg"], sizes=[5, 6], etags=["e", "f"],
                                labels=[0, 1], packed=packed)  # fmt: skip
        *batches, (_, words) = wire.listing_batches(samples)
        seeds.append(join(words, _stream([batch for batch, _ in batches])))
    return seeds


def _answer(room: Room) -> Harness:
    """Whatever is JSON: who the node is, whether it has a prefix, what a probe found, and its errors."""
    client, line = _client()
    chunk = wire.Chunk(wire.Extraction("file:///x", chains()[0], None, _BOUNDARY), "job", 1, 2, 3, _REFS)

    def harness(data: bytes) -> None:
        line.answer = data
        error = wire.error_from_wire(data)
        assert error is None or isinstance(error, HeadwaterError)
        line.words, empty = data, _stream([wire.blob_batch(b"")])
        for ask in (client.hello, client.has_prefix, lambda: client.probe(chunk)):
            line.answer = empty if ask not in (client.hello, client.has_prefix) else data
            try:
                ask()
            except (NodeError, ConfigError, DataError):
                continue

    return harness


def _answer_seeds() -> Sequence[bytes]:
    hello = {"headwater": "0.1.0", "protocol": wire.PROTOCOL, "roots": ["file:///x"], "num_threads": 2, "cores": 2.0,
             "machine": "m", "memory_bytes": 10**9, "max_upload_bytes": 10**9, "codecs": ["raw"], "prefixes": [],
             "precisions": ["fp32"], "precision_faults": {}, "engines": ["onnxruntime"], "engine_versions": "1",
             "busy": {"read_s": 0.0, "num_bad": 0}, "cache_fault": None, "cpu_s": 0.5}  # fmt: skip
    probe = {"read_s": 0.1, "decode_s": 0.1, "finish_s": 0.1, "prefix_s": 0.1, "kernels": [["a", 0.1]],
             "encode_s_per_byte": {"raw": 1e-9}, "pipeline_s": 0.1, "sample_bytes": 100.0}  # fmt: skip
    answers: list[Any] = [hello, probe, True, {"error": wire.error_to_wire(RefusedError("no")).decode()}]
    return [*(json.dumps(each).encode() for each in answers), wire.error_to_wire(RefusedError("no")),
            wire.error_to_wire(DataError("x"))]  # fmt: skip


TARGETS = (
    Target("rows", "rows that a node sent", _rows, _rows_seeds, (NodeError,), 60),
    Target("listing", "a listing that a node sent", _listing, _listing_seeds, (NodeError, DataError), 40),
    Target("answer", "who a node is, its measurements and errors", _answer, _answer_seeds, (), 60, "json"),
)

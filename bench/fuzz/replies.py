"""What a node may answer to a trainer: rows, also in files, listings and plain answers. It may lie, or be no node."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from bench.fuzz.documents import chains
from bench.fuzz.target import Harness, Room, Target, join, split
from headwater.core.spec import TensorSpec
from headwater.data import wire
from headwater.data.handover import ALIGN, Handed
from headwater.data.samples import Packed, SampleRef, Samples
from headwater.data.shards.manifest import check_transforms
from headwater.errors import ConfigError, DamagedError, DataError, HeadwaterError, NodeError, RefusedError
from headwater.train.client import NodeClient

_BOUNDARY = (TensorSpec("y", (2, 3), "float32"), TensorSpec("m", (), "bool"))
_REFS = tuple(SampleRef(number, "a.jpg", 0, -1, 5, "") for number in range(4))
HELLO = {"headwater": "0.1.0", "protocol": wire.PROTOCOL, "roots": ["file:///x"], "num_threads": 2, "cores": 2.0,
          "machine": "m", "memory_bytes": 10**9, "max_upload_bytes": 10**9, "codecs": ["raw"], "prefixes": [],
          "precisions": ["fp32"], "precision_faults": {}, "engines": ["onnxruntime"], "engine_versions": "1",
          "busy": {"read_s": 0.0, "num_bad": 0}, "cache_fault": None, "cpu_s": 0.5}  # fmt: skip
_TOLD = {"folder": "@ROOT@/hand-over", "mark": ".headwater-mark-0c", "secret": "s" * 32}
_MARK = [_TOLD["mark"], "file", 32, [_TOLD["secret"]]]
_MOST_BYTES = 1 << 40  # of a file: beyond any memory, and no more on a disk than what was written


@dataclass
class Line:
    """In the place of a Flight client: whatever is asked, the answer is these bytes, and these words after them."""

    answer: bytes = b""
    words: Sequence[bytes] = ()

    def do_action(self, action: Any, options: Any = None) -> Iterator[Any]:
        yield SimpleNamespace(body=pa.py_buffer(self.answer))

    def do_get(self, ticket: Any, options: Any = None) -> Any:
        return _Stream(self.answer, self.words)


@dataclass(eq=False)
class _Stream:
    answer: bytes
    words: Sequence[bytes]

    def __iter__(self) -> Iterator[Any]:
        with pa.ipc.open_stream(pa.BufferReader(self.answer)) as reader:
            for batch in reader:
                yield SimpleNamespace(data=batch, app_metadata=None)
            for words in filter(None, self.words):
                empty = pa.RecordBatch.from_pylist([], schema=reader.schema)
                yield SimpleNamespace(data=empty, app_metadata=pa.py_buffer(words))

    def cancel(self) -> None:
        pass


def make_client() -> tuple[NodeClient, Line]:
    client, line = NodeClient("grpc://127.0.0.1:1"), Line()
    client.close()
    client._client = line
    return client, line


def _rows(room: Room) -> Harness:
    client, line = make_client()

    def harness(data: bytes) -> None:
        codec, words, line.answer = split(data, 3)
        line.words = [words]
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
    client, line = make_client()

    def harness(data: bytes) -> None:
        words, line.answer = split(data, 2)
        line.words = [words]
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
    client, line = make_client()
    chunk = wire.Chunk(wire.Extraction("file:///x", chains()[0], None, _BOUNDARY), "job", 1, 2, 3, _REFS)

    def harness(data: bytes) -> None:
        line.answer = data
        error = wire.error_from_wire(data)
        assert error is None or isinstance(error, HeadwaterError)
        line.words, empty = [data], _stream([wire.blob_batch(b"")])
        for ask in (client.hello, client.has_prefix, lambda: client.probe(chunk)):
            line.answer = empty if ask not in (client.hello, client.has_prefix) else data
            try:
                ask()
            except (NodeError, ConfigError, DataError):
                continue

    return harness


def _answer_seeds() -> Sequence[bytes]:
    probe = {"read_s": 0.1, "decode_s": 0.1, "finish_s": 0.1, "prefix_s": 0.1, "kernels": [["a", 0.1]],
             "encode_s_per_byte": {"raw": 1e-9}, "pipeline_s": 0.1, "sample_bytes": 100.0}  # fmt: skip
    answers: list[Any] = [HELLO, probe, True, {"error": wire.error_to_wire(RefusedError("no")).decode()}]
    return [*(json.dumps(each).encode() for each in answers), wire.error_to_wire(RefusedError("no")),
            wire.error_to_wire(DataError("x"))]  # fmt: skip


def _handed(room: Room) -> Harness:
    """An object: what a node tells of its folder (`hand_over`), the mark in there (`mark`), what the node says where
    rows would be (`words`), and what else lies there (`there`). A folder or mark that is left out is as it should be;
    what lies there has a name, a kind, bytes, and pages of pieces of text; "@SUM@" is the right checksum."""
    client, line = make_client()
    want = wire.Extraction("file:///x", chains()[0], None, _BOUNDARY)
    chunk = wire.Chunk(want, "job", 1, 2, 3, _REFS, trace=True, hand_over=True)
    no_rows = _stream([pa.RecordBatch.from_pylist([], schema=wire.rows_schema("raw", _BOUNDARY))])
    folder, beside = room.root / "hand-over", room.root / "beside.headwater-rows"
    folder.mkdir()
    beside.write_bytes(bytes(2 * ALIGN))
    seen = {"hand_over": {**_TOLD, "folder": str(folder)}, "mark": _MARK, "words": [], "there": []}

    def harness(data: bytes) -> None:
        tree = {**seen, **_object(room.fill_in(data))}
        if _leads_out(tree["hand_over"], room):
            return
        files = _lay_out(folder, [tree["mark"], *_listed(tree["there"])], room.outside / "secret.jpg")
        words = [_with_sum(said, files) for said in _listed(tree["words"])]
        line.answer = json.dumps({**HELLO, "hand_over": tree["hand_over"]}).encode()
        line.words = [json.dumps(said).encode() for said in words]
        try:
            is_seen = client.finds_folder()
            line.answer = no_rows
            reply = client.rows(chunk, threading.Event())
        finally:
            assert beside.exists()
        good = np.flatnonzero(reply.good)
        assert len(reply.good) == len(_REFS)
        assert [tensor.shape for tensor in reply.tensors] == [(len(good), *spec.shape) for spec in _BOUNDARY]
        found = {_REFS[place].id: tuple(tensor[row : row + 1].tobytes() for tensor in reply.tensors)
                 for row, place in enumerate(good)}  # fmt: skip
        handed = [said["handed"] for said in words if said.get("handed") is not None] if is_seen else []
        assert found == {number: row for name, ids, _ in handed
                         for number, row in zip(ids, _rows_in(files[name]), strict=False)}  # fmt: skip
        assert not {name for name, _, _ in handed} & set(os.listdir(folder))

    return harness


def _object(text: bytes) -> dict[str, Any]:
    """Empty for what is none, or is too deep to be written again: that is for `rows` and `answer`."""
    try:
        tree = json.loads(text)
        json.dumps(tree)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _listed(part: Any) -> list[Any]:
    return part if isinstance(part, list) else [part]


def _leads_out(told: Any, room: Room) -> bool:
    """A trainer looks for a mark wherever a node says, and the guard would take that for an escape."""
    folder = told.get("folder") if isinstance(told, dict) else None
    return isinstance(folder, str) and not f"{os.path.abspath(folder)}/".startswith(f"{room.root}/")


def _lay_out(folder: Path, things: Sequence[Any], secret: Path) -> dict[str, bytes]:
    """Put there what an input says, as far as a disk takes it, and nothing else; the bytes of each file, but for zeros
    at its end. Links lead to what nobody may open."""
    for old in folder.iterdir():
        if old.is_dir():
            old.rmdir()
        else:
            old.unlink()
    files = {}
    for each in things:
        match each:
            case [str(name), str(kind), int(size), list(pages)] if os.path.basename(name) == name:
                path = folder / name
                with suppress(OSError, ValueError):  # a name that no disk takes
                    if kind == "file" and not os.path.lexists(path):
                        files[name] = _write(path, min(max(size, 0), _MOST_BYTES), pages)
                    elif kind == "link":
                        path.symlink_to(secret)
                    elif kind == "pipe":
                        os.mkfifo(path)
                    elif kind == "folder":
                        path.mkdir()
    return files


def _write(path: Path, size: int, pages: Sequence[Any]) -> bytes:
    texts = ["".join(piece for piece in _listed(page) if isinstance(piece, str)) for page in pages[:4]]
    parts = [text.encode("latin-1", "replace") for text in texts]
    data = b"".join(part + bytes(-len(part) % ALIGN) for part in parts)[:size]
    with path.open("xb") as file:
        file.write(data)
        file.truncate(size)
    return data


def _with_sum(said: Any, files: dict[str, bytes]) -> Any:
    match said:
        case {"handed": [str(name), _, "@SUM@"]}:
            said["handed"][2] = _sum(files.get(name, b""))
    return said


def _sum(data: bytes) -> int:
    return sum(memoryview(data + bytes(-len(data) % 8)).cast("Q")) % 2**64


def _rows_in(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Of a file with no more rows than a chunk has: each of its tensors takes a page."""
    data = data.ljust(2 * ALIGN, b"\0")
    for row in range(len(_REFS)):
        yield data[24 * row : 24 * row + 24], data[ALIGN + row : ALIGN + row + 1]


def _handed_seeds() -> Sequence[bytes]:
    """Three that are taken, then those that are not."""
    one, two = "0a.headwater-rows", "0b.headwater-rows"
    numbers, flags = np.arange(24, dtype=np.float32).tobytes(), b"\0\1\1\0"
    pages = [[text[at : at + step] for at in range(0, len(text), step)]
             for text, step in ((numbers.decode("latin-1"), 24), (flags.decode("latin-1"), 1))]  # fmt: skip
    file, ids = [one, "file", 2 * ALIGN, pages], [2, 0, 3, 1]
    handed = Handed(one, (0, 1, 2, 3), _sum(numbers + flags)).to_json()
    told = {"hand_over": _TOLD, "mark": _MARK, "words": [{"bad": [], "handed": handed}], "there": [file]}
    whole = {"words": [{"bad": [], "handed": [one, ids, "@SUM@"]}], "there": [file]}
    parts = {"words": [{"bad": [], "waiting": [1, 2]}, {"bad": [], "waits_for": "quota"},
                       {"bad": [[3, "a.jpg", "why"]], "handed": [one, [1, 2], "@SUM@"]},
                       {"bad": [], "handed": [two, [0], "@SUM@"]},
                       {"bad": [], "spans": [["read", "a", 0.1, 0.2]], "clock": [0.0, 1.0]}],
             "there": [file, [two, *file[1:]]]}  # fmt: skip
    names = ("../beside.headwater-rows", "@ROOT@/beside.headwater-rows")
    elsewhere = [{**whole, "words": [{"bad": [], "handed": [name, ids, 0]}]} for name in names]
    no_file = [{**whole, "there": [[one, kind, 0, []]]} for kind in ("link", "pipe", "folder")]
    return [json.dumps(each).encode() for each in (told, whole, parts, *elsewhere, *no_file)]


TARGETS = (
    Target("rows", "rows that a node sent", _rows, _rows_seeds, (NodeError,), 60),
    Target("listing", "a listing that a node sent", _listing, _listing_seeds, (NodeError, DataError), 40),
    Target("answer", "who a node is, its measurements and errors", _answer, _answer_seeds, (), 60, "json"),
    Target("handed", "rows handed over in files: what is said of them, and what lies there", _handed, _handed_seeds,
           (DamagedError,), 40, "json"),
)  # fmt: skip

"""Embedding tables: messages to a node, its files, what it answers, and tables that were saved."""

from __future__ import annotations

import json
import math
import shutil
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.fuzz.target import Harness, Room, Target, join, split
from headwater.core.bags import Bags
from headwater.core.form import to_json
from headwater.core.spec import ITEM_BYTES
from headwater.core.table import TableSpec
from headwater.data.tablewire import bags_arrays, pack
from headwater.data.wire import PROTOCOL
from headwater.errors import ConfigError, DataError, HeadwaterError, NodeError
from headwater.node.part import Part
from headwater.node.tables import Tables
from headwater.train import tablefile
from headwater.train.tables import Table

_SPEC = TableSpec(40, 3, "float32", "rowwise_adagrad")
_BAGS = Bags(np.array([5, 1, 5, 9, 30, 1]), np.array([2, 3, 1]))
_CACHE_BYTES = 1 << 20
_MOST_ITEMS = 1 << 13  # of an array in an input
_DTYPES = ("int32", "int64", "float32", "float64")
_STEP = {"what": "step", "lease": "a", "table": "t", "part": 0, "number": 7, "lr": 0.1}


def _table(room: Room) -> Harness:
    """A list of messages: each a header and arrays, which are a name, a type, a shape and what they are full of; or the
    bytes of one message. A table that was trained by them can be opened again, and stands where it stood."""
    folder = room.state / "tables"
    first = room.state / "first"
    _opened(first).close()

    def harness(data: bytes) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(first, folder)
        tables = Tables(folder, 1 << 22, 4 << 20)
        error: HeadwaterError | None = None
        try:
            with np.errstate(all="ignore"):
                for message in _messages(data):
                    try:
                        list(tables.call(pa.py_buffer(message), "me", None))
                    except (ConfigError, NodeError) as refused:
                        error = refused
            stood = {each: part.once.version for each, part in tables._open.items()}
        finally:
            tables.close()
        for each, version in stood.items():
            again = Part(each, _CACHE_BYTES)
            found = again.once.version
            again.close()
            assert found == version, f"a part at version {version} is at {found} after a restart"
        if error is not None:
            raise error

    return harness


def _opened(folder: Path) -> Tables:
    """With one table."""
    tables = Tables(folder, 1 << 22, 4 << 20)
    header = {"what": "open", "table": "t", "part": 0, "lease": "a", "cache_bytes": 1 << 20, "make": True}
    list(tables.call(pack({**header, "spec": to_json(_SPEC)}), "me", None))
    return tables


def _messages(data: bytes) -> list[bytes]:
    try:
        tree = json.loads(data)
        json.dumps(tree)
    except (ValueError, RecursionError):
        return [data]
    return [_packed(*each) for each in tree if isinstance(each, list) and len(each) == 2][:20] if isinstance(
        tree, list) else [data]  # fmt: skip


def _packed(header: Any, listed: Any) -> bytes:
    """A message that says this, whether it has it or not."""
    arrays = listed if isinstance(listed, list) else [listed]
    named = [each[:3] if isinstance(each, list) else each for each in arrays]
    said = {"protocol": PROTOCOL, **header} if isinstance(header, dict) else header
    if isinstance(said, dict):
        said["arrays"] = named
    head = json.dumps(said).encode()
    return struct.pack("<I", len(head)) + head + b"".join(map(_bytes_of, arrays))


def _bytes_of(entry: Any) -> bytes:
    match entry:
        case [_, str(dtype), list(shape), fill] if dtype in _DTYPES:
            try:
                count = math.prod(shape)
                if not 0 <= count <= _MOST_ITEMS:
                    return b""
                with np.errstate(all="ignore"):
                    return np.resize(np.asarray(fill, dtype), count).tobytes() if count else b""
            except (TypeError, ValueError, OverflowError):
                return b""
    return b"" if not isinstance(entry, list) else bytes(ITEM_BYTES["int64"])


def _plain(arrays: dict[str, np.ndarray]) -> list[Any]:
    return [[name, each.dtype.name, list(each.shape), each.reshape(-1).tolist()] for name, each in arrays.items()]


def _grads(version: int, **more: Any) -> list[Any]:
    header = {**_STEP, "version": version, "settled": version - 1, **more}
    return [header, _plain({"grads": np.full((len(_BAGS), _SPEC.dim), 0.5, np.float32)})]


def _table_seeds() -> Sequence[bytes]:
    bags, about = _plain(bags_arrays(_BAGS)), {"lease": "a", "table": "t", "part": 0}
    stage = [{**about, "what": "stage", "number": 7}, bags]
    records = {"places": np.array([0, 4, 8]), "records": np.ones((3, 5), np.float32)}
    trains = [
        stage, [{**about, "what": "measure"}, bags],
        _grads(1), _grads(2), [{**about, "what": "fetch", "number": 7, "version": 2, "since": 1}, []],
        [{**about, "what": "put", "version": 3, "settled": 2}, _plain(records)],
        [{**_grads(4)[0]}, [*_grads(4)[1], *bags]],
        [{**about, "what": "trained", "start": 0, "most": 5}, []], [{**about, "what": "back", "version": 4}, []],
    ]  # fmt: skip
    brings = [stage, [{**stage[0], "number": 8, "version": 0, "since": -1}, bags],
              _grads(1, bring={"number": 8, "since": 0, "soft": True}), [{**about, "what": "about"}, []]]  # fmt: skip
    opens = [
        [{**about, "table": "u", "what": "open", "cache_bytes": 0, "make": True, "spec": to_json(_SPEC)}, []],
        [{**about, "table": "u", "what": "grow", "num_embeddings": 50}, []],
        [{**about, "table": "u", "what": "read"}, _plain({"places": np.array([3, 1, 3])})],
        [{**about, "table": "u", "what": "close"}, []], [{**about, "table": "u", "what": "drop"}, []],
    ]  # fmt: skip
    weighted = Bags(_BAGS.ids, _BAGS.lengths, np.ones(6, np.float32))
    raw = pack({**about, "what": "stage", "number": 1}, bags_arrays(weighted))
    return [*(json.dumps(each).encode() for each in (trains, brings, opens)), raw, _packed(*_grads(1))]


def _files(room: Room) -> Harness:
    """A word, and five files of a part: the head, records, seats, the log and the journal. With "mend" the checksums of
    the last two are made right."""
    folder = room.state / "part"

    def harness(data: bytes) -> None:
        word, head, vectors, seats, log, journal = split(data, 6)
        if word == b"mend":
            log, journal = _mended_log(log), _mended_journal(journal)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, content in (("table.json", head), ("vectors", vectors), ("seats", seats), ("log", log),
                              ("journal", journal)):  # fmt: skip
            if name != "journal" or content:
                (folder / name).write_bytes(content)
        with np.errstate(all="ignore"):
            part = Part(folder, _CACHE_BYTES)
            try:
                part.open("a")
                num = part.spec.num_in(part.part)
                assert len(part.read("a", np.arange(min(num, 64)))) == min(num, 64)
                places, _ = part.trained("a", 0, 100)
                part.read("a", places)
                part.settle("a")
            finally:
                part.close()

    return harness


def _mended_log(data: bytes) -> bytes:
    raw, place, head = bytearray(data), 0, struct.Struct("<4sIQQI")
    while place + head.size <= len(raw):
        mark, _, version, length, _ = head.unpack_from(raw, place)
        start = place + head.size
        said = head.pack(mark, zlib.crc32(raw[start : start + length]), version, length, 0)[:-4]
        raw[place:start] = said + struct.pack("<I", zlib.crc32(said))
        place = start + length
    return bytes(raw)


def _mended_journal(data: bytes) -> bytes:
    return data if len(data) < 24 else data[:4] + struct.pack("<I", zlib.crc32(data[24:])) + data[8:]


@cache
def _files_seeds() -> Sequence[bytes]:
    seeds = []
    with tempfile.TemporaryDirectory() as scratch:
        tables = _opened(Path(scratch))
        (part,) = tables._open.values()
        for message in _messages(_table_seeds()[0])[:3]:
            list(tables.call(message, "me", None))
        logged = (part.folder / "log").read_bytes()
        seeds.append(_joined(part.folder))
        where, slots = part.hot.dirty()
        homes, records = np.stack([where, np.arange(len(where))]), part._records[slots]
        part.settle("a")
        seeds.append(_joined(part.folder))
        part._write_journal(part.once.version, homes, records)
        seeds.append(_joined(part.folder))
        (part.folder / "journal").unlink()
        (part.folder / "log").write_bytes(logged)
        seeds.append(_joined(part.folder, b"as it is"))
        tables.close()
    return seeds


def _joined(folder: Path, word: bytes = b"mend") -> bytes:
    names = ("table.json", "vectors", "seats", "log", "journal")
    return join(word, *((folder / name).read_bytes() if (folder / name).exists() else b"" for name in names))


class _Node:
    """A client of a node that says what it was told to."""

    name = "node"

    def __init__(self) -> None:
        self.answers: list[Any] = []

    def tell(self, kind: str, body: bytes) -> Iterator[pa.Buffer]:
        found = self.answers.pop(0) if self.answers else []
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, list) and len(each) == 2:
                yield pa.py_buffer(_packed(*each))
            else:
                yield pa.py_buffer(json.dumps(each).encode())

    def close(self) -> None:
        pass


def _told(room: Room) -> Harness:
    """A list with the answers to each call, in the form of `table`: opening, going back, and then a step, a reading, a
    saving and a growing."""

    def harness(data: bytes) -> None:
        client = _Node()
        try:
            tree = json.loads(data)
            json.dumps(tree)
        except (ValueError, RecursionError):
            return
        client.answers = tree if isinstance(tree, list) else [tree]
        with np.errstate(all="ignore"):
            table = Table(_SPEC, "t", [client], patience_s=0.0)  # type: ignore[list-item]
            try:
                batch, sums = table.pooled(_BAGS)
                assert sums.shape == (len(_BAGS), _SPEC.dim)
                table.train(batch, sums, 0.1)
                vectors, state = table.read(np.arange(3))
                assert (vectors.shape, state.shape) == ((3, _SPEC.dim), (3,))
                for ids in tablefile.trained(table, 100):
                    table.write(ids, np.zeros((len(ids), _SPEC.dim)))
                table.grow(50)
            finally:
                table.close()

    return harness


def _told_seeds() -> Sequence[bytes]:
    about = {"spec": to_json(_SPEC), "part": 0, "version": 3, "checkpoint": 1, "cache_vectors": 9, "disk_bytes": 5}
    pooled = _plain({"which": np.arange(3, dtype=np.int32), "vectors": np.ones((3, 3), np.float32)})
    places = _plain({"places": np.array([4, 9])})
    rows = _plain({"records": np.ones((3, 5), np.float32)})
    grown = {**about, "spec": {**to_json(_SPEC), "num_embeddings": 50}}
    good = [[[about, []]], [[about, []]], [[{}, pooled]], [[{}, []]], [[{}, rows]], [[{"on": 9}, places]],
            [[{}, []]], [[{"on": None}, places]], [[{}, []]], [[grown, []]]]  # fmt: skip
    part = _plain({"which": np.array([1], np.int32), "vectors": np.ones((1, 3), np.float32)})
    missed = [*good[:2], [[{"missed": "why"}, []]], [[{}, part]], [[{}, pooled]]]
    return [json.dumps(each).encode() for each in (good, missed)]


class _Into:
    """A table that nobody has trained, into which a saved one is loaded."""

    spec, version, name = _SPEC, 0, "t"

    def write(self, ids: np.ndarray, vectors: np.ndarray, state: np.ndarray | None = None) -> None:
        assert len(ids) == len(vectors)
        assert vectors.shape[1:] == (_SPEC.dim,)
        assert state is None or len(state) == len(ids)


def _saved(room: Room) -> Harness:
    folder = room.root / "saved"
    folder.mkdir()

    def harness(data: bytes) -> None:
        head, part = split(data, 2)
        (folder / "table.json").write_bytes(head)
        (folder / "part-00000.arrow").write_bytes(part)
        tablefile.load(_Into(), str(folder))  # type: ignore[arg-type]

    return harness


def _saved_seeds() -> Sequence[bytes]:
    ids, vectors = np.array([4, 9, 30]), np.ones((3, 3), np.float32)
    part = tablefile._pack(_SPEC, ids, vectors, np.zeros(3, np.float32)).to_pybytes()
    head = {"format": tablefile.FORMAT, "spec": to_json(_SPEC), "version": 3, "num_files": 1, "num_vectors": 3}
    return [join(json.dumps(head).encode(), part), join(json.dumps({**head, "num_files": 2}).encode(), part)]


TARGETS = (
    Target("table", "messages about an embedding table, one after the other", _table, _table_seeds,
           (ConfigError, NodeError), 60, "json"),
    Target("table-files", "the files of a part of a table", _files, _files_seeds, (NodeError,), 30),
    Target("table-answers", "what nodes answer about a table", _told, _told_seeds, (NodeError,), 30, "json"),
    Target("table-saved", "a saved table", _saved, _saved_seeds, (ConfigError, DataError, NodeError), 20),
)  # fmt: skip

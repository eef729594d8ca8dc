"""Saved tables: what was trained, in files at any URL.

Owns the format. A folder has `table.json` (the spec, and the version that was saved) and `part-NUMBER.arrow`, Arrow
files with columns `id`, `vector` and, of an optimizer that keeps something, `state`. Vectors that nobody trained are
not in it: they are a function of the spec. So a saved table is as large as what was learned, and may be loaded onto any
number of nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.core.form import from_json, shown, to_json
from headwater.core.table import TableSpec
from headwater.data.store import Store, make_folder, open_store
from headwater.errors import ConfigError, DamagedError, HeadwaterError
from headwater.progress import Progress
from headwater.train.tables import READ_BYTES, Table

FORMAT = "headwater-table"
_HEAD = "table.json"


def save(table: Table, url: str) -> int:
    """Write what was trained; how many vectors that is. The head comes last: without it, nothing was saved."""
    make_folder(url)
    store = open_store(url)
    store.delete([_HEAD])
    table.settle()
    most, number, total = max(1, READ_BYTES // table.spec.vector_bytes), 0, 0
    with Progress().step(f"saving the table {table.name}"):
        for ids in trained(table, most):
            vectors, state = table.read(ids)
            store.write(_name(number), _pack(table.spec, ids, vectors, state))
            number, total = number + 1, total + len(ids)
        head = {"format": FORMAT, "spec": to_json(table.spec), "version": table.version, "num_files": number,
                "num_vectors": total}  # fmt: skip
        store.write(_HEAD, json.dumps(head).encode())
    return total


def load(table: Table, url: str) -> int:
    """Put saved vectors into a table that nobody has trained; how many they are."""
    store = open_store(url)
    head = read_head(store, url)
    spec: TableSpec = head["spec"]
    _check(table.spec, spec, url)
    if table.version != 0:
        raise ConfigError(f"table {table.name} has {table.version} steps behind it; a saved one is loaded into a table "
                          "that has none: give it another name, or drop it")  # fmt: skip
    total = 0
    with Progress().step(f"loading the table {table.name}"):
        for number in range(head["num_files"]):
            ids, vectors, state = _unpack(spec, bytes(store.read_whole(_name(number))), f"{url}/{_name(number)}")
            table.write(ids, vectors, state)
            total += len(ids)
    if total != head["num_vectors"]:
        raise DamagedError(f"{url} has {total:,} vectors, and should have {head['num_vectors']:,}; files are missing")
    return total


def read_head(store: Store, url: str) -> dict[str, Any]:
    """What `table.json` says, checked."""
    try:
        head = json.loads(bytes(store.read(_HEAD, max_bytes=1 << 16)))
    except (HeadwaterError, ValueError, RecursionError) as error:
        raise ConfigError(f"{url} has no saved table that can be read: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ConfigError(f"{url}/{_HEAD} is not of a saved table")
    for name in ("version", "num_files", "num_vectors"):
        if type(head.get(name)) is not int or head[name] < 0:
            raise ConfigError(f"{url}/{_HEAD} lacks {name}, a whole number")
    return {**head, "spec": from_json(TableSpec, head.get("spec"), f"{url}/{_HEAD}: spec")}


def trained(table: Table, most: int) -> Iterator[np.ndarray]:
    """The ids of trained vectors, so many at a time."""
    for part, line in enumerate(table.lines):
        start: int | None = 0
        while start is not None:
            header, arrays = line.now({"what": "trained", "start": start, "most": most})
            found, before, start = arrays.get("places"), start, header.get("on")
            if found is None or found.ndim != 1 or found.dtype.kind != "i" or len(found) > most:
                raise DamagedError(f"{line.client.name} does not say which vectors of {table.name} were trained")
            if start is not None and not (type(start) is int and start > before):
                raise DamagedError(f"{line.client.name} would have table {table.name} read from {shown(start)} on, "
                                   f"after {before:,}")  # fmt: skip
            if len(found):
                yield table.spec.ids_of(part, found.astype(np.int64))


def _check(into: TableSpec, saved: TableSpec, url: str) -> None:
    """The same table, but for how many nodes it is on, and for having grown."""
    same = replace(saved, num_parts=into.num_parts, num_embeddings=into.num_embeddings)
    if same != into or saved.num_embeddings > into.num_embeddings:
        wrong = [name for name, value in vars(same).items() if value != getattr(into, name)] or ["num_embeddings"]
        raise ConfigError(f"the table saved in {url} has another {', '.join(wrong)}: "
                          f"{', '.join(str(getattr(saved, name)) for name in wrong)}; make the module with "
                          "that")  # fmt: skip


def _name(number: int) -> str:
    return f"part-{number:05d}.arrow"


def _schema(spec: TableSpec) -> pa.Schema:
    kind = pa.float32() if spec.dtype == "float32" else pa.float64()
    fields = [
        pa.field("id", pa.int64(), False),
        pa.field("vector", pa.list_(pa.field("item", kind, False), spec.dim), False),
    ]
    return pa.schema([*fields, pa.field("state", kind, False)] if spec.state_bytes else fields)


def _pack(spec: TableSpec, ids: np.ndarray, vectors: np.ndarray, state: np.ndarray) -> pa.Buffer:
    schema = _schema(spec)
    flat = pa.array(vectors.reshape(-1))
    columns = [pa.array(ids), pa.FixedSizeListArray.from_arrays(flat, type=schema.field("vector").type)]
    batch = pa.record_batch([*columns, pa.array(state)] if spec.state_bytes else columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_batch(batch)
    return sink.getvalue()


def _unpack(spec: TableSpec, data: bytes, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    try:
        with pa.ipc.open_file(pa.py_buffer(data)) as file:
            if not file.schema.equals(_schema(spec)) or file.num_record_batches != 1:
                raise DamagedError(f"{name} has other columns than the table")
            batch = file.get_batch(0)
        batch.validate(full=True)
        ids = batch.column(0).to_numpy()
        vectors = batch.column(1).flatten().to_numpy().reshape(len(ids), spec.dim)
        state = batch.column(2).to_numpy() if spec.state_bytes else None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamagedError(f"{name} can't be read: {str(error)[:200]}") from None
    if len(ids) and (ids.min() < 0 or ids.max() >= spec.num_embeddings or len(np.unique(ids)) != len(ids)):
        raise DamagedError(f"{name} has ids that the table has not, or twice")
    return ids, vectors, state

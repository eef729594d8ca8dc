"""Texts in the rows of a file: a column of Parquet, CSV, TSV or JSON lines, each row a sample.

Owns the reading of one column, the memory that columns in use may take, and what the etag of such a sample says. A
sample's offset is its row, and its length that of the text in UTF-8. A file is read once and its column kept: a request
for each row would cost a store far more than the texts are worth.
"""

from __future__ import annotations

import csv
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from headwater.core.form import shown
from headwater.data.memory import memory_bytes
from headwater.data.parquetfile import parquet_names, read_parquet
from headwater.data.samples import WHOLE, SampleRef
from headwater.data.store import Store
from headwater.errors import BadSampleError, ChangedError, DataError

SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl")
MAX_FILE_BYTES = 256 << 20  # it is read whole
MAX_TEXT_BYTES = 1 << 20
KEPT_BYTES = memory_bytes() // 8  # of columns, in this process
_SHOWN = 5


def is_text(key: str) -> bool:
    """Whether the key ends like a file of texts."""
    return key.lower().endswith(SUFFIXES)


def etag_of(etag: str, column: str) -> str:
    """Etags of texts: that of the file, a blank, and the column."""
    return f"{etag} {quote(column, safe='')}"


def names(data: bytes, key: str) -> list[str]:
    """The columns of a file. DataError if it is no such file."""
    if key.lower().endswith(".parquet"):
        with _parquet_faults(key):
            return parquet_names(data)
    if key.lower().endswith(".jsonl"):
        numbered = enumerate(io.BytesIO(data), 1)
        number, first = next(((number, line) for number, line in numbered if line.strip()), (1, b"{}"))
        return list(_object(first, number, key))
    return _header(data, key)


def columns(data: bytes, key: str, wanted: Sequence[str]) -> list[pa.LargeStringArray]:
    """These columns as text; a cell without a value is a null. DataError if a column is missing, or of another type."""
    found = names(data, key)
    for name in wanted:
        if name not in found:
            raise DataError(f"{key}: there is no column {shown(name)}; it has {', '.join(found)[:200]}")
    if key.lower().endswith(".parquet"):
        with _parquet_faults(key):
            table = read_parquet(data)
        return [_text(table[name], key, name) for name in wanted]
    if key.lower().endswith(".jsonl"):
        return _from_lines(data, key, wanted)
    table = _from_csv(data, key, found)
    return [_text(table[name], key, name) for name in wanted]


@contextmanager
def _parquet_faults(key: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise DataError(f"{key}: not a Parquet file: {error}; write it again") from None


def _text(column: Any, key: str, name: str) -> pa.LargeStringArray:
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{key}: column {name} has type {column.type}; it must be text or whole numbers")
    found = pc.cast(column, pa.large_string()).combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found


def _header(data: bytes, key: str) -> list[str]:
    try:
        text = io.TextIOWrapper(io.BytesIO(data), "utf-8-sig", newline="")
        found = [cell.strip() for cell in next(csv.reader(text, delimiter=_mark(key)), [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{key}: not a text table in UTF-8: {error}; write it again") from None
    if not any(found) or len(set(found)) != len(found):
        raise DataError(f"{key}: its first line must name the columns, each once; it is {shown(', '.join(found))}")
    return found


def _mark(key: str) -> str:
    return "\t" if key.lower().endswith(".tsv") else ","


def _from_csv(data: bytes, key: str, header: list[str]) -> pa.Table:
    skipped: list[arrow_csv.InvalidRow] = []

    def note(row: arrow_csv.InvalidRow) -> str:
        skipped.append(row)
        return "skip"

    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(data.removeprefix(b"\xef\xbb\xbf")),
            read_options=arrow_csv.ReadOptions(column_names=header, skip_rows_after_names=1, use_threads=False,
                                               block_size=max(1 << 20, len(data) + 1)),
            parse_options=arrow_csv.ParseOptions(delimiter=_mark(key), newlines_in_values=True,
                                                 invalid_row_handler=note),
            convert_options=arrow_csv.ConvertOptions(column_types=dict.fromkeys(header, pa.large_string()),
                                                     strings_can_be_null=False),
        )  # fmt: skip
    except pa.ArrowException as error:
        raise DataError(
            f"{key}: not a text table in UTF-8: {str(error).splitlines()[0][:200]}; write it again"
        ) from None
    if skipped:
        faults = "; ".join(f"row {row.number}: {str(row.text)[:60]!r}" for row in skipped[:_SHOWN])
        raise DataError(f"{key}: {len(skipped):,} rows do not have the {len(header)} columns of the first line: "
                        f"{faults}; correct them, or quote cells that have the delimiter in them")  # fmt: skip
    return table


def _from_lines(data: bytes, key: str, wanted: Sequence[str]) -> list[pa.LargeStringArray]:
    cells: list[list[str | None]] = [[] for _ in wanted]
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        said = _object(line, number, key)
        for name, column in zip(wanted, cells, strict=True):
            value = said.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, str | int)):
                raise DataError(f"{key}: line {number}: {name} is {shown(value)}; it must be text or a whole number")
            column.append(None if value is None else str(value))
    try:
        return [pa.array(column, pa.large_string()) for column in cells]
    except (UnicodeEncodeError, pa.ArrowException):  # half a character: JSON has them, no text does
        raise DataError(f"{key}: a text has half a character (a lone surrogate); write it again") from None


def _object(line: bytes, number: int, key: str) -> dict[str, Any]:
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key}: line {number} is not JSON ({str(error)[:80]}); write it again") from None
    if not isinstance(said, dict):
        raise DataError(f"{key}: line {number} is {shown(said)}; each line must be an object with the columns")
    return said


def read_file(store: Store, key: str) -> bytes:
    """All of a file."""
    size = store.size(key)
    if size > MAX_FILE_BYTES:
        raise DataError(f"{key} has {size:,} bytes, and the limit for a file of texts is {MAX_FILE_BYTES:,}: it is "
                        "read whole; write it as several files in one folder, and give the folder")  # fmt: skip
    return bytes(store.read_whole(key))


class Texts:
    """Columns in memory: those used last, within so many bytes. One is read at a time: a file takes several times its
    bytes meanwhile, and threads that want the same wait for it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, ...], pa.LargeStringArray] = OrderedDict()
        self._door = threading.Lock()
        self._lock = threading.Lock()

    def column(self, store: Store, key: str, etag: str, column: str) -> pa.LargeStringArray:
        """The column of a file with this etag. ChangedError if it has another one by now."""
        name = (store.url, key, etag, column)
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        with self._door:
            with self._lock:
                if name in self._kept:
                    return self._kept[name]
            store.check_etag(key, store.etag(key), etag)
            (found,) = columns(read_file(store, key), key, [column])
            with self._lock:
                self._kept[name] = found
                total = sum(each.nbytes for each in self._kept.values())
                while total > self._max_bytes and len(self._kept) > 1:
                    total -= self._kept.popitem(last=False)[1].nbytes
            return found


_TEXTS = Texts(KEPT_BYTES)  # of the process


def read_text(store: Store, ref: SampleRef) -> bytes:
    """The text of a sample, in UTF-8."""
    etag, _, column = ref.etag.rpartition(" ")
    found = _TEXTS.column(store, ref.key, etag, unquote(column))
    place = f"{ref.key} row {ref.offset}"
    if ref.offset >= len(found):
        raise BadSampleError(place, f"the file has {len(found):,} rows; list the data again")
    value = found[ref.offset].as_py()
    if value is None:
        raise BadSampleError(place, "there is no text; fill it in, or drop the row")
    if len(text := value.encode()) > MAX_TEXT_BYTES:
        raise BadSampleError(place, f"the text has {len(text):,} bytes, the limit is {MAX_TEXT_BYTES:,}; shorten it")
    if len(text) > (listed := ref.size if ref.length == WHOLE else ref.length):
        raise ChangedError(f"{place} in {store!r} has changed since it was listed: has {len(text):,} bytes, listed "
                           f"with {listed:,}; list the data again (start a new job)")  # fmt: skip
    return bytes(text)

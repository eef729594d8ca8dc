"""Manifests: a CSV or Parquet file with a path and a label in each row. Paths are relative to the manifest's folder.

Sizes and etags come from one listing of that folder, never from a request for each sample.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from headwater.data.decode import is_picture
from headwater.data.layouts.listing import Listing, number_labels, some
from headwater.data.parquetfile import read_parquet
from headwater.data.samples import Samples
from headwater.data.store import key_fault
from headwater.errors import ConfigError, DataError, EmptyDataError, LabelError

CSV_SUFFIXES = (".csv", ".tsv", ".txt")
SUFFIXES = (*CSV_SUFFIXES, ".parquet")
LOOKED_FOR = "rows with a path and a label in a manifest (.csv, .tsv, .txt, .parquet)"
_PATH_NAMES = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "key", "name")
LABEL_NAMES = ("label", "class", "target", "category", "label_id", "class_id", "y")

Column = str | int | None


@dataclass(frozen=True)
class _Rows:
    """A manifest in memory. `names` is None where there is no header; `data` is the text that rows came from."""

    where: str
    names: list[str] | None
    columns: list[pa.Array]
    data: bytes | None

    def place(self, row: int) -> str:
        """Where a row is, for a message. Lines are counted only when an error needs them."""
        if self.data is None:
            return f"row {row}"
        return f"line {_line(self.data, row + (self.names is not None))}"


def _line(data: bytes, row: int) -> int:
    """The number of the line that holds a row, both counted as a reader of them would: lines from 1, rows from 0."""
    lines = [number for number, line in enumerate(data.splitlines(), 1) if line]
    return lines[min(row, len(lines) - 1)]  # cells with line ends in them: as near as can be told


def read_table(listing: Listing, name: str, path_column: Column = None, label_column: Column = None) -> Samples:
    """Samples of the manifest `name` in the root of the listing.

    Columns are given by name, or by number from 0. Left out, the path is the column that is called so or holds
    picture names, and the label the one that is called so or follows the path.
    """
    data = bytes(listing.store.read(name))
    where = f"{listing.shown}/{name}"
    rows = _from_parquet(data, where) if name.lower().endswith(".parquet") else _from_csv(data, where)
    if not rows.columns or not len(rows.columns[0]):
        raise EmptyDataError(f"{where}: the manifest has no rows; looked for {LOOKED_FOR}")
    path_at = _find(rows, path_column, "path_column", _PATH_NAMES, _first_pictures(rows))
    label_at = _find(rows, label_column, "label_column", LABEL_NAMES, _neighbour(rows, path_at))
    if path_at == label_at:
        raise ConfigError(f"{where}: column {path_at} can't be both path and label; give path_column and label_column")
    keys = pc.replace_substring_regex(_text(rows, path_at), r"^(\./)+", "")
    labels = _text(rows, label_at)
    _check_labels(rows, keys, labels)
    found = _locate(rows, keys, listing)
    numbers, classes = number_labels(labels.to_pylist(), rows.place, where)
    return Samples.build(
        listing.store.url,
        classes,
        keys=keys,
        sizes=listing.sizes[found],
        etags=listing.etags.take(pa.array(found)),
        labels=numbers,
        num_ignored=len(listing) - len(np.unique(found)),
    )


def _from_parquet(data: bytes, where: str) -> _Rows:
    try:
        table = read_parquet(data)
    except ValueError as error:
        raise DataError(f"{where}: not a Parquet file: {error}; write it again") from None
    return _Rows(where, table.column_names, [_whole(column) for column in table.columns], None)


def _from_csv(data: bytes, where: str) -> _Rows:
    data = data.removeprefix(b"\xef\xbb\xbf")
    first = data.lstrip(b"\r\n").split(b"\n", 1)[0]
    delimiter = max(",\t;", key=lambda mark: first.count(mark.encode()))
    skipped: list[arrow_csv.InvalidRow] = []

    def note(row: arrow_csv.InvalidRow) -> str:
        skipped.append(row)
        return "skip"

    if not first.strip():
        return _Rows(where, None, [], data)
    try:
        data.decode()
        header = [cell.strip() for cell in next(csv.reader([first.decode()], delimiter=delimiter))]
        table = arrow_csv.read_csv(
            pa.BufferReader(data),
            read_options=arrow_csv.ReadOptions(autogenerate_column_names=True, use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=note),
            convert_options=arrow_csv.ConvertOptions(
                column_types={f"f{number}": pa.large_string() for number in range(len(header))},
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{where}: not a text table in UTF-8: {str(error).splitlines()[0]}; write it again") from None
    if skipped:
        faults = [f"line {_line(data, row.number - 1)}: {row.text[:80]!r}" for row in skipped[:5]]
        raise LabelError(
            f"{where}: {len(skipped):,} rows do not have the {len(header)} columns of the first: "
            f"{some(faults, len(skipped))}; "
            "correct them, or quote cells that have the delimiter in them"
        )
    if len(table.columns) != len(header):
        raise DataError(f"{where}: its first line reads as {len(header)} cells or as {len(table.columns)}; is a quote "
                        "not closed?")  # fmt: skip
    has_header = not any(is_picture(cell) for cell in header)
    columns = [pc.utf8_trim_whitespace(_whole(column)) for column in table.columns]
    if has_header:
        columns = [column[1:] for column in columns]
    return _Rows(where, header if has_header else None, columns, data)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    joined = column.combine_chunks()
    return pa.concat_arrays(joined.chunks) if isinstance(joined, pa.ChunkedArray) else joined


def _first_pictures(rows: _Rows) -> int | None:
    for number, column in enumerate(rows.columns):
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            first = column[0].as_py()
            if first is not None and is_picture(first):
                return number
    return None


def _neighbour(rows: _Rows, path_at: int) -> int | None:
    others = [number for number in range(len(rows.columns)) if number != path_at]
    return next((number for number in others if number > path_at), others[0] if others else None)


def _find(rows: _Rows, asked: Column, argument: str, usual: tuple[str, ...], guess: int | None) -> int:
    count = len(rows.columns)
    has = f"columns {', '.join(rows.names)}" if rows.names else f"{count} columns and no header"
    if isinstance(asked, str) and not (asked.isascii() and asked.isdigit() and len(asked) < 10):
        if rows.names is None or asked not in rows.names:
            raise ConfigError(f"{rows.where}: {argument} is {asked[:80]!r}, the manifest has {has}; use one of them")
        return rows.names.index(asked)
    if asked is not None:
        if not 0 <= int(asked) < count:
            raise ConfigError(f"{rows.where}: {argument} is {asked}, the manifest has {has}; count from 0")
        return int(asked)
    lower = [name.lower() for name in rows.names or ()]
    number = next((lower.index(name) for name in usual if name in lower), guess)
    if number is None:
        raise LabelError(
            f"{rows.where}: can't tell the {argument.removesuffix('_column')} among its {has}; give {argument}"
        )
    return number


def _text(rows: _Rows, number: int) -> pa.LargeStringArray:
    column = rows.columns[number]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type) or pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return pc.fill_null(pc.cast(column, pa.large_string()), "")
    name = rows.names[number] if rows.names else number
    raise LabelError(f"{rows.where}: column {name} has type {column.type}; it must be text or whole numbers")


def _check_labels(rows: _Rows, keys: Any, labels: Any) -> None:
    empty = np.flatnonzero(pc.equal(labels, "").to_numpy(zero_copy_only=False))
    if len(empty):
        faults = [f"{rows.place(int(row))}: {keys[int(row)].as_py()}" for row in empty[:5]]
        raise LabelError(
            f"{rows.where}: {len(empty):,} rows have no label: {some(faults, len(empty))}; fill it in or drop the rows"
        )


def _locate(rows: _Rows, keys: Any, listing: Listing) -> np.ndarray:
    """The index in the listing of each key."""
    found = pc.index_in(keys, value_set=listing.keys)
    if found.null_count:
        missing = np.flatnonzero(pc.is_null(found).to_numpy(zero_copy_only=False))
        faults = []
        for row in missing[:5]:
            key = keys[int(row)].as_py()
            reason = f" ({fault})" if (fault := key_fault(key)) else ""
            faults.append(f"{rows.place(int(row))}: {key}{reason}")
        raise LabelError(
            f"{rows.where}: {len(missing):,} of {len(keys):,} rows name a file that is not in {listing.shown}: "
            f"{some(faults, len(missing))}; put the files there, drop the rows, or write paths relative to the manifest"
        )
    return np.asarray(found.to_numpy(), dtype=np.int64)

"""Texts: files whose rows are the samples, with a text and a label in each (Parquet, CSV, TSV, JSON lines)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.data import textfile
from headwater.data.layouts.listing import Listing, number_labels, some
from headwater.data.layouts.table import LABEL_NAMES
from headwater.data.samples import Samples
from headwater.errors import ConfigError, DataError, EmptyDataError, LabelError

SUFFIXES = textfile.SUFFIXES
LOOKED_FOR = "rows with a text and a label (.parquet, .csv, .tsv, .jsonl)"
_TEXT_NAMES = ("text", "sentence", "content", "review", "body", "document", "question", "title")
_MAX_NAME = 200

Column = str | int | None


def read_texts(
    listing: Listing,
    text_column: Column = None,
    label_column: Column = None,
    on_page: Callable[[int], None] | None = None,
) -> Samples:
    """Samples of every file of texts in the listing. Columns are given by name, or by number from 0; left out, they are
    those that are called so (text, label, …), the same in all files."""
    chosen = listing.where(listing.ending(*SUFFIXES))
    if not len(chosen):
        raise EmptyDataError(f"{listing.shown}: none of {len(listing):,} objects has texts; looked for {LOOKED_FOR}")
    keys, etags = chosen.keys.to_pylist(), chosen.etags.to_pylist()
    lengths: list[np.ndarray] = []
    total = 0
    labels: list[str] = []
    asked: list[str] = []
    for key in keys:
        data = textfile.read_file(listing.store, key)
        found = textfile.names(data, key)
        where = f"{listing.shown}/{key}"
        text_name = _find(found, text_column, "text_column", _TEXT_NAMES, where)
        label_name = _find(found, label_column, "label_column", LABEL_NAMES, where)
        if text_name == label_name:
            raise ConfigError(f"{where}: column {text_name} can't be both text and label; give text_column and "
                              "label_column")  # fmt: skip
        text, label = textfile.columns(data, key, [text_name, label_name])
        _check_filled(text, where, text_name, empty_too=False)
        _check_filled(label, where, label_name, empty_too=True)
        lengths.append(pc.binary_length(text).to_numpy().astype(np.int64))
        total += text.nbytes
        if total > textfile.KEPT_BYTES:  # every batch has rows of all files: they would be read again and again
            raise DataError(f"{listing.shown} has more than {textfile.KEPT_BYTES:,} bytes of texts, which is what this "
                            "machine keeps in memory (an eighth of it); use one with more, or a part of the "
                            "set")  # fmt: skip
        labels += label.to_pylist()
        asked.append(text_name)
        if on_page is not None:
            on_page(len(labels))
    if not labels:
        raise EmptyDataError(f"{listing.shown}: {len(keys):,} files have no row; looked for {LOOKED_FOR}")
    counts = [len(each) for each in lengths]
    starts = list(accumulate(counts, initial=0))

    def place(row: int) -> str:
        file = int(np.searchsorted(starts, row, side="right")) - 1
        return f"{keys[file]} row {row - starts[file]}"

    numbers, classes = number_labels(labels, place, listing.shown)
    sizes = np.concatenate(lengths)
    repeated = np.repeat(np.arange(len(keys)), counts)
    tags = [textfile.etag_of(etag, name) for etag, name in zip(etags, asked, strict=True)]
    return Samples.build(
        listing.store.url,
        classes,
        keys=chosen.keys.take(pa.array(repeated)),
        sizes=sizes,
        etags=pa.array(tags, pa.large_string()).take(pa.array(repeated)),
        labels=numbers,
        offsets=np.concatenate([np.arange(count) for count in counts]),
        lengths=sizes,
        num_ignored=len(listing) - len(chosen),
    )


def _find(found: list[str], asked: Column, argument: str, usual: tuple[str, ...], where: str) -> str:
    if isinstance(asked, int):
        if not 0 <= asked < len(found):
            raise ConfigError(f"{where}: {argument} is {asked}, and there are {len(found)} columns; count from 0")
        return found[asked]
    if asked is not None:
        if len(asked) > _MAX_NAME:
            raise ConfigError(f"{where}: {argument} has {len(asked)} characters; the limit is {_MAX_NAME}")
        if asked not in found:
            raise ConfigError(f"{where}: {argument} is {asked[:80]!r}, and it has {', '.join(found)[:200]}; use one of "
                              "them")  # fmt: skip
        return asked
    lower = [name.lower() for name in found]
    for name in usual:
        if name in lower:
            return found[lower.index(name)]
    raise LabelError(f"{where}: can't tell the {argument.removesuffix('_column')} among {', '.join(found)[:200]}; give "
                     f"{argument}")  # fmt: skip


def _check_filled(column: pa.LargeStringArray, where: str, name: str, empty_too: bool) -> None:
    missing = pc.is_null(column).to_numpy(zero_copy_only=False)
    if empty_too:
        missing = missing | pc.equal(pc.fill_null(column, ""), "").to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(missing)
    if len(rows):
        faults = [f"row {row}" for row in rows[:5]]
        raise LabelError(f"{where}: {len(rows):,} rows have no {name}: {some(faults, len(rows))} (counted from 0); "
                         "fill it in, or drop the rows")  # fmt: skip

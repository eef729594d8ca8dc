"""Layouts: how samples and labels lie in a store.

Owns `list_samples` and the choice of a layout. Each layout is one file that turns a listing into `Samples`.
May import `headwater.data` and `headwater.errors`.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.data.layouts import folders, shards, table, tars, texts
from headwater.data.layouts.listing import Listing, list_one, list_store
from headwater.data.samples import Samples
from headwater.data.store import Store, full_url, open_store, redact, split_url
from headwater.errors import BadSampleError, ConfigError, DataError, EmptyDataError

LAYOUTS = {"folders": folders.LOOKED_FOR, "table": table.LOOKED_FOR, "tars": tars.LOOKED_FOR,
           "shards": shards.LOOKED_FOR, "text": texts.LOOKED_FOR}  # fmt: skip


def list_samples(
    url: str,
    layout: str = "auto",
    *,
    path_column: str | int | None = None,
    label_column: str | int | None = None,
    text_column: str | int | None = None,
    on_page: Callable[[int], None] | None = None,
) -> Samples:
    """List the data set at `url`: class folders, a manifest (its own URL), a .tar, a folder of .tar, a packed set, or
    texts (a file or a folder of them, with layout="text").

    `layout` is "auto" or one of `LAYOUTS`. The columns are for manifests and texts. `on_page` hears how many objects
    were seen so far, for progress.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; it must be auto, {', '.join(LAYOUTS)}")
    shown, ending = redact(full_url(url)), full_url(url).lower()
    if text_column is not None and layout != "text":
        raise ConfigError(f"{shown}: text_column is for texts; give layout='text'")
    if layout == "text":
        if path_column is not None:
            raise ConfigError(f"{shown}: path_column is for manifests; texts have text_column and label_column")
        if not ending.endswith(texts.SUFFIXES):
            return texts.read_texts(list_store(open_store(url), on_page), text_column, label_column, on_page)
        store, name = _open_file(url, texts.LOOKED_FOR)
        return texts.read_texts(list_one(store, name), text_column, label_column, on_page)
    if layout == "auto" and ending.endswith(table.SUFFIXES):
        layout = "table"
    if layout != "table" and (path_column is not None or label_column is not None):
        raise ConfigError(f"{shown}: path_column and label_column are for manifests; give the URL of a CSV or Parquet")
    if layout == "table":
        if not ending.endswith(table.SUFFIXES):
            raise ConfigError(f"{shown}: a manifest's URL ends in one of {', '.join(table.SUFFIXES)}")
        store, name = _open_file(url, table.LOOKED_FOR)
        return table.read_table(list_store(store, on_page), name, path_column, label_column)
    if ending.endswith(".tar"):
        if layout in ("folders", "shards"):
            raise ConfigError(f"{shown}: a tar is not a folder; use layout='tars' or 'auto'")
        store, name = _open_file(url, tars.LOOKED_FOR)
        return tars.read_tars(list_one(store, name), on_page)
    listing = list_store(open_store(url), on_page)
    if layout == "auto":
        layout = _recognise(listing)
    if layout == "shards":
        return shards.read_shards(listing)
    return folders.read_folders(listing) if layout == "folders" else tars.read_tars(listing, on_page)


def _open_file(url: str, looked_for: str) -> tuple[Store, str]:
    """The folder that a file is in, and the file's name."""
    root, name = split_url(url)
    store = open_store(root)
    try:
        store.size(name)
    except BadSampleError:
        raise EmptyDataError(f"{redact(root)}/{name} does not exist; looked for {looked_for}") from None
    return store, name


def _recognise(listing: Listing) -> str:
    if shards.is_packed(listing):
        return "shards"
    num_pictures, num_tars = int(listing.pictures().sum()), int(listing.ending(".tar").sum())
    if num_pictures and num_tars:
        raise DataError(
            f"{listing.shown} has {num_pictures:,} pictures and {num_tars:,} tars; give layout='folders' or 'tars'"
        )
    if num_pictures or num_tars:
        return "folders" if num_pictures else "tars"
    manifests = listing.where(listing.ending(*table.SUFFIXES)).keys.to_pylist()
    hint = f"; a manifest is read by its own URL, such as {listing.shown}/{manifests[0]}" if manifests else ""
    raise EmptyDataError(
        f"{listing.shown} has no sample among {len(listing):,} objects; looked for {'; '.join(LAYOUTS.values())}{hint}"
    )


def root_of(url: str) -> str:
    """The folder below which all of a data set lies: its own URL, or the one that a manifest or tar is in."""
    url = full_url(url)
    return split_url(url)[0] if url.lower().endswith((*table.SUFFIXES, *texts.SUFFIXES, ".tar")) else url

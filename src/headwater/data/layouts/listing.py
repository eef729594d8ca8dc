"""One listing of a store, as columns.

Owns `Listing`: what every layout starts from, so that a store is listed once and no sample costs a request of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.data.decode import SUFFIXES
from headwater.data.store import Store, redact
from headwater.errors import LabelError

_SHOWN = 5  # faults written out in an error; the rest are counted
_MAX_CLASSES = 1_000_000


@dataclass(frozen=True, eq=False)
class Listing:
    """Every object below a store's root, in the store's order."""

    store: Store
    keys: pa.LargeStringArray
    sizes: np.ndarray
    etags: pa.LargeStringArray

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def shown(self) -> str:
        """The root as it may appear in a message."""
        return redact(self.store.url)

    def where(self, chosen: np.ndarray) -> Listing:
        """The objects with these indices, or where this mask is true."""
        rows = pa.array(np.flatnonzero(chosen) if chosen.dtype == bool else chosen)
        return Listing(self.store, self.keys.take(rows), self.sizes[chosen], self.etags.take(rows))

    def visible(self) -> np.ndarray:
        """Mask of the objects with no part of their key beginning with a dot."""
        return np.asarray(~_mask(self.keys, r"(^|/)\."), dtype=bool)

    def pictures(self) -> np.ndarray:
        """Mask of the visible objects that end like a picture."""
        return self.ending(*SUFFIXES)

    def ending(self, *suffixes: str) -> np.ndarray:
        """Mask of the visible objects with one of these endings."""
        endings = "|".join(suffix.lstrip(".").replace(".", r"\.") for suffix in suffixes)
        return np.asarray(self.visible() & _mask(self.keys, rf"(?i)\.({endings})$"), dtype=bool)


def _mask(keys: pa.LargeStringArray, pattern: str) -> np.ndarray:
    return np.asarray(pc.match_substring_regex(keys, pattern).to_numpy(zero_copy_only=False), dtype=bool)


def list_store(store: Store, on_page: Callable[[int], None] | None = None) -> Listing:
    """List all of a store. `on_page` hears the number of objects seen so far."""
    keys: list[pa.Array] = []
    etags: list[pa.Array] = []
    sizes: list[np.ndarray] = []
    count = 0
    for page in store.list():
        keys.append(pa.array([entry.key for entry in page], pa.large_string()))
        etags.append(pa.array([entry.etag for entry in page], pa.large_string()))
        sizes.append(np.array([entry.size for entry in page], np.int64))
        count += len(page)
        if on_page is not None:
            on_page(count)
    empty = pa.array([], pa.large_string())
    return Listing(
        store,
        pa.concat_arrays(keys) if keys else empty,
        np.concatenate(sizes) if sizes else np.empty(0, np.int64),
        pa.concat_arrays(etags) if etags else empty,
    )


def list_one(store: Store, name: str) -> Listing:
    """The listing that has one object only."""
    sizes, etags = np.array([store.size(name)], np.int64), pa.array([store.etag(name)], pa.large_string())
    return Listing(store, pa.array([name], pa.large_string()), sizes, etags)


def some(faults: list[str], count: int | None = None) -> str:
    """The first few faults, and how many more there are."""
    count = len(faults) if count is None else count
    shown = "; ".join(islice(faults, _SHOWN))
    return shown + (f"; and {count - _SHOWN:,} more" if count > _SHOWN else "")


def number_labels(labels: list[str], places: Callable[[int], str], where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as written to (numbers, class names).

    If the first one is a whole number all must be, and they are kept; otherwise each name becomes the index of its
    place in sorted order. `places(i)` names the i-th one in an error.
    """
    if not labels:
        return np.empty(0, np.int64), ()
    if _whole(labels[0]) is None:
        classes = tuple(sorted(set(labels)))
        index = {name: number for number, name in enumerate(classes)}
        return np.fromiter((index[name] for name in labels), np.int64, len(labels)), classes
    numbers = [_whole(label) for label in labels]
    bad = [row for row, number in enumerate(numbers) if number is None or not 0 <= number < _MAX_CLASSES]
    if bad:
        faults = [f"{places(row)}: {json.dumps(labels[row])}" for row in bad[:_SHOWN]]
        raise LabelError(
            f"{where}: {len(bad):,} labels are not whole numbers from 0 to {_MAX_CLASSES - 1:,} as the first one is: "
            f"{some(faults, len(bad))}; correct them, or use names for all"
        )
    found = np.array(numbers, np.int64)
    return found, tuple(str(number) for number in range(int(found.max()) + 1))


def _whole(text: str) -> int | None:
    digits = text[1:] if text[:1] == "-" else text
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None

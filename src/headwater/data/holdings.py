"""Which node holds which samples, where nodes have disks of their own.

Owns `Holdings`, made of what each node listed. A sample that several nodes list (same key, place, size and class) is
one sample with replicas; each node is asked for it by its own etag. May import errors, `data.samples`, `data.shards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headwater.data.samples import WHOLE, SampleRef, Samples
from headwater.data.shards.reading import sum_of_record
from headwater.errors import ConfigError, DataError

_Row = tuple[str, int, int, int, str, int]


@dataclass(frozen=True, eq=False)
class Holdings:
    """All samples, and for each node the row of its own listing that each of them is (-1: not there)."""

    samples: Samples
    listings: Mapping[str, Samples]
    rows: Mapping[str, np.ndarray]
    groups: np.ndarray  # per sample: the number of its set of holders
    holders: tuple[frozenset[str], ...]  # per such number

    @property
    def is_split(self) -> bool:
        """Is there a sample that not every node holds?"""
        return any(len(names) < len(self.listings) for names in self.holders)

    def refs(self, node: str, ids: Iterable[int]) -> list[SampleRef]:
        """These samples as this node knows them."""
        wanted = np.fromiter(ids, np.int64)
        own = self.rows[node][wanted]
        assert (own >= 0).all(), "asked of a node that does not hold it"
        listed = self.listings[node]
        etags = listed.etags.take(pa.array(own)).to_pylist()
        return [
            SampleRef(ref.id, ref.key, ref.offset, ref.length, ref.size, etag)
            for ref, etag in zip(self.samples.take(wanted), etags, strict=True)
        ]


def unite(listings: Mapping[str, Samples]) -> Holdings:
    """What all nodes hold together. DataError where two nodes have different things under one name."""
    packed = {listed.packed for listed in listings.values()}
    if len(packed) != 1:
        raise ConfigError("nodes have packed sets of different sources under one name; use one set, or replicas of it")
    (set_of,) = packed
    if set_of is not None:
        _check_replicas(listings)
    classes = max((listed.classes for listed in listings.values()), key=len)
    if any(listed.classes != classes[: len(listed.classes)] for listed in listings.values()):
        classes = tuple(sorted({name for listed in listings.values() for name in listed.classes}))
    places: dict[tuple[object, ...], int] = {}
    columns: list[_Row] = []
    first: list[str] = []
    own: dict[str, list[int]] = {}
    for name, listed in listings.items():
        own[name] = []
        seen: Counter[tuple[object, ...]] = Counter()
        for row in _rows(listed, classes):
            key, offset, length, size, _, label = row
            again = seen[key, offset, label]  # a list may name one file twice
            seen[key, offset, label] += 1
            place = places.setdefault((key, offset, label, again), len(columns))
            own[name].append(place)
            if place == len(columns):
                columns.append(row)
                first.append(name)
            elif columns[place][2:4] != (length, size):
                raise DataError(
                    f"{key} has {columns[place][3]:,} bytes on {first[place]} and {size:,} bytes on {name}; what two "
                    "nodes hold under one name must be the same: remove one of them, or rename it"
                )
    keys, offsets, lengths, sizes, etags, labels = zip(*columns, strict=True)
    urls = {listed.url for listed in listings.values()}
    if len(urls) != 1:
        raise ConfigError(f"nodes listed different places: {', '.join(sorted(urls))}")
    samples, numbers = Samples.build_from(
        urls.pop(), classes, keys=list(keys), offsets=list(offsets), lengths=list(lengths), sizes=list(sizes),
        etags=list(etags), labels=list(labels), packed=set_of,
        num_ignored=sum(listed.num_ignored for listed in listings.values()),
    )  # fmt: skip
    rows = {}
    for name, places_of in own.items():
        rows[name] = np.full(len(samples), -1, np.int64)
        rows[name][numbers[places_of]] = np.arange(len(places_of))
    held = np.stack([rows[name] >= 0 for name in listings], axis=1)
    patterns, groups = np.unique(held, axis=0, return_inverse=True)
    names = np.array(list(listings))
    holders = tuple(frozenset(names[each].tolist()) for each in patterns)
    return Holdings(samples, listings, rows, groups.reshape(-1), holders)


def _check_replicas(listings: Mapping[str, Samples]) -> None:
    """ConfigError if nodes have one packed set in different shards: a place in them is then another sample on each."""
    (first, one), *others = listings.items()
    records = [sum_of_record(etag) for etag in one.etags.to_pylist()]
    for name, other in others:
        if (one.digest, one.classes) != (other.digest, other.classes):
            raise ConfigError(
                f"{one.url}: {first} and {name} have the same samples packed differently (one with another "
                "--shard-size?), so a place in the shards is another picture on each; copy the folder of one node to "
                "the others, or pack it with the same options on all of them"
            )
        theirs = map(sum_of_record, other.etags.to_pylist())
        if differing := next((key for key, mine, its in zip(one.keys.to_pylist(), records, theirs, strict=True)
                              if mine != its), None):  # fmt: skip
            raise ConfigError(
                f"{one.url}: {first} and {name} have the same samples packed with other pixels (the first in "
                f"{differing}; by other versions of Pillow?), so rows would depend on who makes them; copy the folder "
                "of one node to the others"
            )


def _rows(listed: Samples, classes: tuple[str, ...]) -> list[_Row]:
    """Its samples as plain rows, with classes numbered as in `classes`."""
    number = {name: place for place, name in enumerate(classes)}
    labels = [number[listed.classes[label]] for label in listed.labels.tolist()]
    lengths = [WHOLE if length < 0 else length for length in listed.lengths.tolist()]
    return list(
        zip(listed.keys.to_pylist(), listed.offsets.tolist(), lengths, listed.sizes.tolist(),
            listed.etags.to_pylist(), labels, strict=True)
    )  # fmt: skip

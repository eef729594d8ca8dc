"""The embedding tables of a node: which there are, whose they are, and the calls about them.

Owns `Tables`: a folder for each tenant, in it one for each part of a table; how much of disk and memory they may take
together; and what is answered to each kind of call. Without a folder for tables a node has none.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.access import Grant
from headwater.core.form import from_json
from headwater.core.table import MAX_PARTS, TableSpec
from headwater.data import tablewire
from headwater.data.tablewire import UNKNOWN_TABLE, bags_of, pack, places, unpack, whole
from headwater.errors import ConfigError, RefusedError
from headwater.node.part import ClosedError, Part

LEAST_CACHE_BYTES = 1 << 20  # of a part's vectors in memory
MAX_OPEN = 1024  # parts; each has files open
IDLE_S = 600.0  # a part that nobody has called for so long is closed where its memory is wanted
MAX_READ_BYTES = 64 << 20
_Message = tuple[dict[str, Any], dict[str, np.ndarray]]


class Tables:
    """Below `folder`, within `max_bytes` of disk (as if every vector had been trained) and `cache_bytes` of memory."""

    def __init__(self, folder: Path | None, max_bytes: int = 0, cache_bytes: int = 0) -> None:
        self.folder, self.max_bytes, self.cache_bytes = folder, max_bytes, cache_bytes
        self._lock = threading.Lock()
        self._open: dict[Path, Part] = {}
        self._caches: dict[Path, int] = {}
        self._called: dict[Path, float] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def to_json(self) -> dict[str, Any] | None:
        """What a node says of itself."""
        if self.folder is None:
            return None
        return {"max_bytes": self.max_bytes, "cache_bytes": self.cache_bytes, "open": len(self._open)}

    def close(self) -> None:
        with self._lock:
            for part in self._open.values():
                part.close()
            self._open.clear()

    def call(self, body: Any, tenant: str, grant: Grant | None) -> Iterator[bytes]:
        """The answers to one message."""
        if self.folder is None:
            raise RefusedError("this node keeps no embedding tables; start it with `headwater serve … --tables FOLDER`")
        header, arrays = unpack(body)
        what = header.get("what")
        name, number = tablewire.text(header, "table"), whole(header, "part", 0, MAX_PARTS)
        folder = self.folder / tenant / name / str(number)
        if what == "open":
            yield self._opened(folder, header, grant)
            return
        if what == "drop":
            self._drop(folder, tablewire.text(header, "lease"))
            yield pack({})
            return
        lease, part = tablewire.text(header, "lease"), self._part(folder)
        if what == "step" or what == "put":
            part.step(lease, body)
            if header.get("bring") is not None:
                yield _bring(part, lease, header["bring"], whole(header, "version", 1))
            part.sync()
            yield pack({})
        elif what == "stage":
            part.stage(lease, whole(header, "number"), bags_of(arrays, part.spec, part.part))
            if header.get("version") is not None:
                yield _pooled(part, lease, header)
            else:
                yield pack({})
        elif what == "fetch":
            yield _pooled(part, lease, header)
        else:
            yield from self._seldom(folder, what, part, lease, header, arrays, grant)

    def _seldom(
        self,
        folder: Path,
        what: Any,
        part: Part,
        lease: str,
        header: dict[str, Any],
        arrays: dict[str, np.ndarray],
        grant: Grant | None,
    ) -> Iterator[bytes]:
        if what == "read":
            where = places(arrays, "places")
            if len(where) * part.spec.vector_bytes > MAX_READ_BYTES:
                raise ConfigError(f"{len(where):,} vectors are too many for one answer; ask for fewer at a time")
            yield pack({}, {"records": part.read(lease, where)})
        elif what == "measure":
            yield pack(part.measure(lease, bags_of(arrays, part.spec, part.part)))
        elif what == "trained":
            where, on = part.trained(lease, whole(header, "start"), whole(header, "most", 1, 1 << 22))
            yield pack({"on": on}, {"places": where})
        elif what == "back":
            part.back(lease, whole(header, "version"))
            yield pack(part.about())
        elif what == "grow":
            num = whole(header, "num_embeddings", 1)
            with self._lock:  # what others make meanwhile counts, too
                self._check_room(folder, replace(part.spec, num_embeddings=num).part_bytes(part.part), grant)
                part.grow(lease, num)
            yield pack(part.about())
        elif what == "close":
            part.settle(lease)
            with self._lock:
                # Unless another trainer has taken it over since.
                if self._open.get(folder) is part and part.once.lease == lease:
                    self._shut(folder)
            yield pack({})
        elif what == "about":
            yield pack(part.about())
        else:
            raise ConfigError(f"a message about a table asks for {str(what)[:40]!r}, which there is not")

    def _opened(self, folder: Path, header: dict[str, Any], grant: Grant | None) -> bytes:
        while True:
            try:
                return self._open_once(folder, header, grant)
            except ClosedError:  # by whoever had it before, in this very moment
                continue

    def _open_once(self, folder: Path, header: dict[str, Any], grant: Grant | None) -> bytes:
        lease = tablewire.text(header, "lease")
        spec = from_json(TableSpec, header.get("spec"), "the table")
        number = whole(header, "part", 0, spec.num_parts - 1)
        wanted = whole(header, "cache_bytes")
        with self._lock:
            part = self._open.get(folder)
            if part is not None and part.log.fault is not None:  # what its disk has kept counts, not its memory
                self._shut(folder)
                part = None
            if part is None and not (folder / "table.json").exists():
                if not header.get("make"):
                    raise RefusedError(f"{UNKNOWN_TABLE}: there is no part {number} of {folder.parent.name} here")
                self._check_room(folder, spec.part_bytes(number), grant)
                folder.mkdir(parents=True, exist_ok=True)
                part = self._opening(folder, wanted, (spec, number))
            elif part is None:
                part = self._opening(folder, wanted, None)
            self._called[folder] = time.monotonic()
        _check_same(part.spec, spec, folder.parent.name)
        return pack(part.open(lease))

    def _part(self, folder: Path) -> Part:
        with self._lock:
            self._called[folder] = time.monotonic()
            if (part := self._open.get(folder)) is not None:
                return part
            if not (folder / "table.json").exists():
                raise RefusedError(f"{UNKNOWN_TABLE}: there is no part {folder.name} of {folder.parent.name} here")
            return self._opening(folder, 0, None)

    def _opening(self, folder: Path, wanted: int, make: tuple[TableSpec, int] | None) -> Part:
        if len(self._open) >= MAX_OPEN:
            raise RefusedError(
                f"{MAX_OPEN} parts of tables are open already; close some, or put small ones into one table"
            )
        cache_bytes = self._take_memory(wanted)
        part = self._open[folder] = Part(folder, cache_bytes, make)
        self._caches[folder] = part.cache_bytes  # a small table takes less
        return part

    def _take_memory(self, wanted: int) -> int:
        """For one more part: what it wants, or half of what is left; of those that nobody calls, if nothing is."""
        left = self.cache_bytes - sum(self._caches.values())
        if left < 2 * LEAST_CACHE_BYTES:
            idle = [folder for folder in self._open if time.monotonic() - self._called.get(folder, 0.0) > IDLE_S]
            for folder in idle:
                self._shut(folder)
            left = self.cache_bytes - sum(self._caches.values())
        if left < LEAST_CACHE_BYTES:
            raise RefusedError(f"the node's {self.cache_bytes / 1e6:,.0f} MB for tables are taken by {len(self._open)} "
                               "that are open; give it more (--table-memory), or close one")  # fmt: skip
        return min(max(wanted or left // 2, LEAST_CACHE_BYTES), left)

    def _shut(self, folder: Path) -> None:
        self._open.pop(folder).close()
        self._caches.pop(folder)

    def _drop(self, folder: Path, lease: str) -> None:
        with self._lock:
            if (part := self._open.get(folder)) is not None:
                part.check_owner(lease)
                self._shut(folder)
            (folder / "table.json").unlink(missing_ok=True)  # without it, the rest is nothing
            shutil.rmtree(folder, ignore_errors=True)
            for each in (folder.parent, folder.parent.parent):
                if each != self.folder:
                    try:
                        each.rmdir()
                    except OSError:
                        break

    def _check_room(self, folder: Path, num_bytes: int, grant: Grant | None) -> None:
        """Once every vector is trained, the files are as large as they say."""
        assert self.folder is not None
        sizes = {file.parent: file.stat().st_size for file in self.folder.glob("*/*/*/vectors")}
        others = sum(size for each, size in sizes.items() if each != folder)
        if others + num_bytes > self.max_bytes:
            raise RefusedError(f"this part of the table may come to {num_bytes / 1e9:,.3g} GB, and the node's tables "
                               f"have {others / 1e9:,.3g} of {self.max_bytes / 1e9:,.3g} GB; give them more "
                               "(--table-size), or drop one")  # fmt: skip
        own = sum(size for each, size in sizes.items() if each != folder and each.parts[-3] == folder.parts[-3])
        most = None if grant is None else grant.quota.max_table_bytes
        if most is not None and own + num_bytes > most:
            raise RefusedError(f"tables of tenant {folder.parts[-3]} would come to {(own + num_bytes) / 1e9:,.3g} GB, "
                               f"and its quota is {most / 1e9:,.3g} GB; drop one, or ask whoever runs the "
                               "node")  # fmt: skip


def _bring(part: Part, lease: str, bring: Any, version: int) -> bytes:
    if not isinstance(bring, dict):
        raise ConfigError("what a step is to bring is named by number and since")
    return _pooled(part, lease, {**bring, "version": version})


def _pooled(part: Part, lease: str, header: dict[str, Any]) -> bytes:
    number, since = whole(header, "number"), whole(header, "since", -1)
    try:
        which, vectors = part.pooled(lease, number, whole(header, "version"), since)
    except RefusedError as error:
        if header.get("soft") is not True:
            raise
        return pack({"missed": str(error)[:200]})  # the step that was to bring it has been done all the same
    return pack({}, {"which": which.astype(np.int32), "vectors": vectors})


def _check_same(found: TableSpec, wanted: TableSpec, name: str) -> None:
    """What makes it another table; the number of vectors may have grown meanwhile."""
    for field in ("dim", "dtype", "optimizer", "eps", "init", "scale", "seed", "num_parts", "zero_id"):
        if getattr(found, field) != getattr(wanted, field):
            raise RefusedError(f"the table {name} is there with {field} {getattr(found, field)}, and "
                               f"{getattr(wanted, field)} was asked for; give it another name, or drop that "
                               "one")  # fmt: skip
    if found.num_embeddings < wanted.num_embeddings:
        raise RefusedError(f"the table {name} is there with {found.num_embeddings:,} vectors, and "
                           f"{wanted.num_embeddings:,} were asked for; grow it (resize)")  # fmt: skip


def default_table_bytes(folder: Path) -> int:
    """Half of what is free on the disk."""
    free = os.statvfs(folder)
    return free.f_bavail * free.f_frsize // 2

"""What a tenant may take of a node, enforced.

Owns `Quotas`: how many of a tenant's streams run at once and how many rows a second they begin (further ones wait, with
signs of life meanwhile), and what it may upload and have kept. Which prefix is whose is in files beside them,
`<digest>.tenant`; so it is with tokenizers, which count among a tenant's prefixes. A call without a grant, on a node
without tokens, passes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from headwater.core.access import Grant
from headwater.core.rate import Rate
from headwater.data import wire
from headwater.data.tokenizerfile import FILES_KEPT
from headwater.errors import RefusedError

MAX_USED = 256  # prefixes of a tenant that are remembered; 64 of all tenants' are loaded at once
MAX_WAITING = 256  # streams of one tenant; each is a thread of the node
# Times the largest: what a tenant's may have together while they come in. Trainers of one job send at once.
UPLOADS_AT_ONCE = 16
_POLL_S = 1.0


class Quotas:
    """`folder` is that of the prefixes, `tokenizers` that of these."""

    def __init__(self, folder: Path, tokenizers: Path | None = None) -> None:
        self._folder = folder
        self._tokenizers = tokenizers
        self._room = threading.Condition()
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._uploading: Counter[str] = Counter()  # bytes that have come of uploads under way
        self._rates: dict[tuple[str, int], Rate] = {}
        # Prefixes by tenant, since the start, the last to be asked for at the end.
        self._used: defaultdict[str, dict[str, None]] = defaultdict(dict)

    def stream(
        self, grant: Grant | None, schema: pa.Schema, inner: Iterator[Any], abandoned: Callable[[], bool], num_rows: int
    ) -> Iterator[Any]:
        """`inner`, once the tenant may have it; until then empty batches that say what for. It is told if nobody waits
        any more."""
        if grant is None:
            yield from inner
            return
        life = pa.RecordBatch.from_pylist([], schema=schema), wire.pack_waiting(None, wire.QUOTA)
        inside = False
        try:
            with self._wait(grant):
                while not (inside := self._enter(grant)) and not abandoned():
                    yield life
                until = time.monotonic() + self._wait_s(grant, num_rows)
                while (left_s := until - time.monotonic()) > 0 and not abandoned():
                    yield life
                    time.sleep(min(left_s, _POLL_S))
            yield from inner
        finally:
            if inside:
                with self._room:
                    self._running[grant.tenant] -= 1
                    self._room.notify_all()

    @contextlib.contextmanager
    def _wait(self, grant: Grant) -> Iterator[None]:
        with self._room:
            if self._waiting[grant.tenant] >= MAX_WAITING:
                raise RefusedError(f"{MAX_WAITING} requests of tenant {grant.tenant} wait already; lower the plan's "
                                   "prefetch, or run fewer jobs at once")  # fmt: skip
            self._waiting[grant.tenant] += 1
        try:
            yield
        finally:
            with self._room:
                self._waiting[grant.tenant] -= 1

    def _enter(self, grant: Grant) -> bool:
        """Within a second, or not yet."""
        most = grant.quota.max_chunks
        with self._room:
            if most is not None and not self._room.wait_for(lambda: self._running[grant.tenant] < most, _POLL_S):
                return False
            self._running[grant.tenant] += 1
            return True

    def _wait_s(self, grant: Grant, num_rows: int) -> float:
        per_s = grant.quota.rows_per_s
        if per_s is None or not num_rows:
            return 0.0
        with self._room:
            rate = self._rates.setdefault((grant.tenant, per_s), Rate(per_s))
            return rate.wait_s(num_rows, time.monotonic())

    @contextlib.contextmanager
    def session(self, grant: Grant | None, waits: Callable[[], None]) -> Iterator[None]:
        """A call that lasts, which counts as one of the tenant's streams: once there is room for one more. Until then
        `waits` is called every second; what it raises ends the wait."""
        if grant is None:
            yield
            return
        with self._wait(grant):
            while not self._enter(grant):
                waits()
        try:
            yield
        finally:
            with self._room:
                self._running[grant.tenant] -= 1
                self._room.notify_all()

    def pause_s(self, grant: Grant | None, num_rows: int) -> float:
        """How long the tenant has to wait before so many rows begin."""
        return 0.0 if grant is None else self._wait_s(grant, num_rows)

    def uses(self, grant: Grant | None, digest: str | None) -> None:
        """The tenant has asked for this prefix. One that is not here is nobody's: any number of them can be named."""
        if grant is None or digest is None or not (self._folder / f"{digest}.onnx").exists():
            return
        with self._room:
            used = self._used[grant.tenant]
            used.pop(digest, None)
            used[digest] = None
            if len(used) > MAX_USED:
                del used[next(iter(used))]

    def shown(self, grant: Grant, prefixes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the prefixes in use that the tenant has asked for itself."""
        with self._room:
            used = set(self._used[grant.tenant])
        return [each for each in prefixes if each["digest"] in used]

    def pieces(self, grant: Grant | None, pieces: Iterable[bytes], most: int) -> Iterator[bytes]:
        """An upload, as long as it is within what the tenant may upload and have kept; the node itself takes `most`."""
        if grant is None:
            yield from pieces
            return
        limit, total, counted = grant.quota.upload_bytes(most), 0, 0
        try:
            for piece in pieces:
                total += len(piece)
                if limit < total <= most:  # beyond that the node refuses it by itself
                    raise RefusedError(f"the prefix has more than {limit / 1e6:,.3g} MB, the limit of tenant "
                                       f"{grant.tenant}; cut earlier, or ask whoever runs the node for "
                                       "more")  # fmt: skip
                with self._room:
                    self._uploading[grant.tenant] += len(piece)
                    counted = total
                    if self._uploading[grant.tenant] > UPLOADS_AT_ONCE * limit:
                        raise RefusedError(f"uploads of tenant {grant.tenant} that are under way have more than "
                                           f"{UPLOADS_AT_ONCE * limit / 1e6:,.3g} MB together; send one after the "
                                           "other")  # fmt: skip
                yield piece
        finally:
            with self._room:
                self._uploading[grant.tenant] -= counted

    def uploaded(self, grant: Grant | None, digest: str, *, is_tokenizer: bool = False) -> None:
        """The tenant's file is kept from now on; what it used longest ago goes if all of its take too much."""
        if grant is None:
            return
        folder = self._tokenizers if is_tokenizer else self._folder
        assert folder is not None
        owner = folder / f"{digest}.tenant"
        with self._room:
            with contextlib.suppress(OSError):  # on a full disk it is nobody's, and goes with the longest unused ones
                if not owner.exists():  # otherwise it is somebody else's, who uploaded it at the same time
                    owner.write_text(grant.tenant)
            tokenizers = self._kept(grant.tenant, self._tokenizers, ".json")
            kept = [*self._kept(grant.tenant, self._folder, ".onnx"), *tokenizers]
            total, most = sum(size for _, size, _, _ in kept), grant.quota.max_prefix_bytes
            too_many = {file for *_, file, _ in tokenizers[:-FILES_KEPT]}
            for _, size, file, mark in sorted(kept):
                if file.stem == digest or (file not in too_many and (most is None or total <= most)):
                    continue
                total -= size
                for path in (file, mark):
                    path.unlink(missing_ok=True)

    def _kept(self, tenant: str, folder: Path | None, suffix: str) -> list[tuple[int, int, Path, Path]]:
        """(when it was last used, bytes, file, mark) of each file of this tenant; the one used longest ago first."""
        kept = []
        for mark in folder.glob("*.tenant") if folder is not None else ():
            with contextlib.suppress(OSError, ValueError):
                if not (file := mark.with_suffix(suffix)).exists():
                    mark.unlink()
                elif mark.read_text() == tenant:
                    kept.append((file.stat().st_mtime_ns, file.stat().st_size, file, mark))
        return sorted(kept)

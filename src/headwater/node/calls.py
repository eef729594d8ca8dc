"""Requests on their way through a node: how many are under way, what was sent, what went wrong.

Owns `Calls`, the lock and the log around `core.drain` and `core.tally`, and `Asked`, what is known of a request. Each
request passes here once, so each error is counted and logged once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from headwater.core.drain import Drain, State
from headwater.core.seldom import Seldom
from headwater.core.tally import Tally
from headwater.data import wire
from headwater.data.secrets import redact
from headwater.errors import DamagedError, HeadwaterError, UnreachableError

UNEXPECTED = "unexpected"  # errors that have no name of ours
ANYONE = "anyone"  # the tenant of a node without tokens
_ACCESS = "access"  # the middleware that knows whose token came with a call
MAX_FAULTS, MAX_FAULT_CHARS = 50, 300  # that are shown to people
_LINES_AT_ONCE, _LINE_EVERY_S = 50, 1.0  # in the log about requests that failed: a stranger may cause any number

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A request, as far as it is known. `kind` is one of a few: rows, listing, probe, calibrate, blob, upload, …"""

    kind: str
    tenant: str = ANYONE
    job: str = ""
    epoch: int | None = None
    chunk: int | None = None
    group_rows: int | None = None

    @classmethod
    def of(cls, request: wire.Listing | wire.Chunk | wire.Probe | wire.Calibrate | wire.Blob, tenant: str) -> Asked:
        if isinstance(request, wire.Chunk):
            return cls("rows", tenant, request.job[:80], request.epoch, request.index, request.extraction.node_batch)
        return cls(type(request).__name__.lower(), tenant)

    def fields(self) -> dict[str, Any]:
        """For the log."""
        named = {"request": self.kind, "tenant": self.tenant, "job": self.job or None, "epoch": self.epoch,
                 "chunk": self.chunk}  # fmt: skip
        return {name: value for name, value in named.items() if value is not None}


def tenant_of(context: flight.ServerCallContext) -> str:
    """Whose call this is: what its token says, on a node that asks for one."""
    visit: Any = context.get_middleware(_ACCESS)
    return visit.grant.tenant if visit is not None else ANYONE


class Calls:
    """What a node was asked for and did, since its start. `changed` is told when the node may end."""

    def __init__(self, drain_s: float = 0.0) -> None:
        self._lock = threading.RLock()  # the garbage collector may end a stream anywhere, also in here
        self._drain = Drain(drain_s)
        self._tally = Tally()
        self._seldom = Seldom(_LINES_AT_ONCE, _LINE_EVERY_S)
        self._faults: deque[dict[str, Any]] = deque(maxlen=MAX_FAULTS)
        self.changed: Callable[[], object] = lambda: None

    @property
    def is_serving(self) -> bool:
        """Whether new requests are taken."""
        return self._drain.state is State.SERVING

    def items(self) -> list[tuple[str, tuple[str, ...], float]]:
        """(name, labels, amount) of everything that was counted."""
        with self._lock:
            return self._tally.items()

    def faults(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """The newest requests that failed, the last one first; of one tenant, if it is named."""
        with self._lock:
            found = [dict(each) for each in reversed(self._faults)]
        return [each for each in found if tenant in (None, each["tenant"])]

    def check_serving(self) -> None:
        """UnreachableError, which sends a trainer to other nodes, on a node that is about to end."""
        if not self.is_serving:
            raise UnreachableError("the node is being stopped and takes nothing new; ask other nodes, or this one "
                                   "once it is back")  # fmt: skip

    @contextmanager
    def watched(self, asked: Asked) -> Iterator[None]:
        """What goes wrong in here is counted and logged."""
        try:
            yield
        except GeneratorExit:  # nobody reads the rest
            self._over(asked, "abandoned")
            raise
        except Exception as error:
            self._went_wrong(asked, error)
            raise

    @contextmanager
    def under_way(self, asked: Asked) -> Iterator[None]:
        """A request from its beginning to its end; a node that is about to end does not begin with it."""
        with self.watched(asked):
            with self._lock:
                began = self._drain.begin()
                if began:
                    self._tally.add("requests_under_way", asked.tenant, asked.kind)
                    if asked.group_rows is not None:
                        self._tally.put("group_rows", asked.tenant, amount=asked.group_rows)
            if not began:
                self.check_serving()
            start = time.perf_counter()
            try:
                yield
                self._over(asked, "done")
            finally:
                with self._lock:
                    self._tally.add("requests_under_way", asked.tenant, asked.kind, amount=-1)
                    self._tally.add("request_seconds", asked.tenant, asked.kind, amount=time.perf_counter() - start)
                    self._drain.finish()
                    may_end = self._drain.state is State.ENDED
                if may_end:
                    self.changed()

    def stream(self, asked: Asked, batches: Iterator[Any]) -> Iterator[Any]:
        """These batches, as a request that is under way for as long as they are taken."""
        with self.under_way(asked):
            for item in batches:
                yield item
                if asked.kind == "rows":
                    self._sent_batch(asked, *item)

    def received(self, asked: Asked, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """An upload, piece by piece."""
        for piece in pieces:
            with self._lock:
                self._tally.add("upload_bytes", asked.tenant, amount=len(piece))
            yield piece

    def sent(self, asked: Asked, num_rows: int, num_bytes: int, num_bad: int = 0) -> None:
        """Rows have gone to whoever asked, and samples without one."""
        with self._lock:
            self._tally.add("rows_sent", asked.tenant, amount=num_rows)
            self._tally.add("row_bytes_sent", asked.tenant, amount=num_bytes)
            self._tally.add("bad_samples", asked.tenant, amount=num_bad)

    def told_to_stop(self) -> None:
        """A signal: the first begins the drain, the second ends it."""
        with self._lock:
            was = self._drain.state
            self._drain.told(time.monotonic())
            left_s, num_left = self._drain.left_s(time.monotonic()), self._drain.num_under_way
        if was is State.SERVING and left_s is not None:
            log.info("draining: nothing new is taken, %d under way may take %.3g s; another signal ends it now",
                     num_left, left_s, extra={"fields": {"under_way": num_left, "drain_s": left_s}})  # fmt: skip

    def end(self, why: str) -> None:
        """Whoever the node works for is gone."""
        with self._lock:
            self._drain.end(why)

    def look(self) -> tuple[str | None, float | None]:
        """Why the node ends now, if it does; and after how many seconds to look again, if nothing is told before."""
        with self._lock:
            now = time.monotonic()
            self._drain.passed(now)
            return self._drain.why or None, self._drain.left_s(now)

    def _sent_batch(self, asked: Asked, batch: pa.RecordBatch, metadata: bytes) -> None:
        num_bad = num_handed = 0
        if metadata:
            with contextlib.suppress(DamagedError):  # for the trainer to find
                num_bad = len(wire.unpack_bad(metadata))
                handed = wire.unpack_handed(metadata)
                num_handed = 0 if handed is None else len(handed.ids)
        self.sent(asked, batch.num_rows + num_handed, batch.nbytes, num_bad)

    def _over(self, asked: Asked, how: str) -> None:
        with self._lock:
            self._tally.add("requests", asked.tenant, asked.kind, how)

    def _went_wrong(self, asked: Asked, error: BaseException) -> None:
        """A status is made of the error that it carries; one that carries none says that nobody waits any more."""
        if isinstance(error, flight.FlightError):
            if error.__cause__ is None:
                self._over(asked, "abandoned")
                return
            error = error.__cause__
        if isinstance(error, UnreachableError):
            self._over(asked, "refused")
            self._write(logging.DEBUG, asked, error)
            return
        self._over(asked, "failed")
        # What nobody foresaw is logged with its traceback; where it was put into words already, these name its cause.
        foreseen = isinstance(error, HeadwaterError) and type(error) is not HeadwaterError
        with self._lock:
            self._tally.add("errors", asked.tenant, type(error).__name__ if foreseen else UNEXPECTED)
            self._keep(asked, type(error).__name__ if foreseen else UNEXPECTED, error)
        self._write(logging.WARNING if foreseen else logging.ERROR, asked, error)

    def _keep(self, asked: Asked, kind: str, error: BaseException) -> None:
        """For people who look; one after the other that are alike are one."""
        said = redact(str(error))[:MAX_FAULT_CHARS] if kind != UNEXPECTED else "unexpected; the node's log has more"
        same = {"tenant": asked.tenant, "kind": kind, "request": asked.kind, "said": said}
        times = 1
        if self._faults and same.items() <= self._faults[-1].items():
            times += self._faults.pop()["times"]
        self._faults.append({"at_s": time.time(), "times": times, **same})

    def _write(self, level: int, asked: Asked, error: BaseException) -> None:
        if not log.isEnabledFor(level):
            return
        with self._lock:
            left_out = self._seldom.may(time.monotonic())
        if left_out is None:
            return
        fields = {**asked.fields(), "error": type(error).__name__, **({"left_out": left_out} if left_out else {})}
        trace = None if level < logging.ERROR else error.__cause__ or error
        log.log(level, "%s: %s", type(error).__name__, error, exc_info=trace, extra={"fields": fields})

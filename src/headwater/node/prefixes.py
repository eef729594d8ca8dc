"""The prefixes that a node holds, by digest.

Owns the folder of ONNX files and the engines loaded from it. A prefix is uploaded once and kept across restarts; a file
whose digest no longer fits is thrown away and asked for again. Nothing here is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from headwater.core.plan import LIMITS
from headwater.core.tuning import AUTO, ENGINES, Candidate, Tuned, wish
from headwater.data.wire import UNKNOWN_CALIBRATION, UNKNOWN_PREFIX, Calibrate, Extraction
from headwater.errors import RefusedError
from headwater.node import engines
from headwater.node.allowed import check_upload
from headwater.node.calibrations import Calibrations
from headwater.node.child import Children, is_alive
from headwater.node.engine import Engine
from headwater.node.onnxfile import check_self_contained
from headwater.node.tryout import try_out as _try_out
from headwater.node.tuning import Subject, Tuning

TRIED_AT_ONCE = 2  # uploads: each takes a process and its memory
# Loaded at once; the least recently used is dropped. Memory sets a lower limit: see node.tenants.
MAX_ENGINES = 64
FILES_KEPT = 8  # times the largest upload: what the folder may hold
TOUCH_EVERY_S = 60.0  # how often a file is marked as used while requests come
SIGN_EVERY_S = 5.0  # while an upload waits for its turn to be tried

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A prefix as a request wants it run. `outputs` None: all of them."""

    digest: str
    outputs: tuple[str, ...] | None = None
    precision: str = "fp32"
    engine: str = AUTO
    calibration: str | None = None

    @classmethod
    def of(cls, want: Extraction) -> Wanted:
        assert want.prefix is not None
        calibration = want.calibration if want.precision == "int8" else None
        return cls(want.prefix, want.outputs, want.precision, want.engine, calibration)

    @property
    def name(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Loaded:
    """An engine, and how it came to be the one."""

    engine: Engine
    tuned: Tuned


def _load_here(path: Path) -> None:
    """RefusedError if it can't be loaded; in this process, for uploads of one's own trainer."""
    Engine(path.read_bytes())


class Prefixes:
    """ONNX files in `folder`, and engines for those in use; `num_threads` groups run at once, each in pieces of as many
    rows as was found best, or whole."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        num_threads: int = 1,
        *,
        in_pieces: bool = True,
        is_wary: bool = True,
        try_out: Callable[[Path], None] | None = None,
    ) -> None:
        """`is_wary` of uploads: they are tried out in a process of their own, which takes half a second.

        `try_out` has a first look at one instead.
        """
        self._folder = folder
        self.max_bytes = max_bytes
        self._num_threads = num_threads
        self._in_pieces = in_pieces
        self._max_total_bytes = FILES_KEPT * max_bytes
        self._tuning = Tuning(folder.parent / "tuning", num_threads)
        self._calibrations = Calibrations(folder.parent / "int8", self._max_total_bytes)
        self._children = Children()
        self._try_out = try_out or (partial(_try_out, self._children) if is_wary else _load_here)
        self._trying = threading.BoundedSemaphore(TRIED_AT_ONCE)
        self._lock = threading.Lock()
        self._engines: OrderedDict[Wanted, _Loaded] = OrderedDict()
        self._verified: dict[str, tuple[int, ...]] = {}  # digest → the state of the file when it was last hashed
        self._touched: dict[str, float] = {}  # digest → when its file was last marked as used
        self._doors: dict[Wanted, tuple[threading.Lock, int]] = {}  # being loaded: its lock, and how many want it
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part"):
            if not is_alive(leftover.name.split("-")[0]):  # an upload cut short by a kill
                leftover.unlink(missing_ok=True)

    def __contains__(self, digest: str) -> bool:
        return self._path(digest).exists()

    def put(
        self,
        digest: str,
        pieces: Iterable[bytes],
        room: Callable[[int], Any] = contextlib.nullcontext,
        sign: Callable[[], None] = lambda: None,
        run: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        """Take an upload in pieces. It is kept only if it is whole, what it says it is, and can be run.

        `room` makes room for a model of so many bytes to be looked at; `sign` is called now and then while others are
        looked at; `run` carries the look out, which may take a minute or two.
        """
        total, sha = 0, hashlib.sha256()
        with self._on_disk():
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=f"{os.getpid()}-", suffix=".part")
        try:
            with self._on_disk(), os.fdopen(handle, "wb") as file:
                for piece in pieces:
                    total += len(piece)
                    if total > self.max_bytes:
                        raise RefusedError(
                            f"the prefix has more than {self.max_bytes / 1e9:.2f} GB, this node's limit; cut earlier, "
                            "or raise the limit with `headwater serve --max-upload`"
                        )
                    sha.update(piece)
                    file.write(piece)
            if sha.hexdigest() != digest:
                found = sha.hexdigest()
                raise RefusedError(f"{total} bytes arrived with sha256 {found}, not {digest}; upload it again")
            with room(total), self._turn(sign):
                run(partial(self._look_at, Path(name)))
            with self._on_disk():
                os.replace(name, self._path(digest))
                self._make_room(digest)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _on_disk(self) -> Iterator[None]:
        """The disk's own work, and nothing else: an OSError may also be a trainer's that has hung up."""
        try:
            yield
        except OSError as error:
            raise RefusedError(
                f"the prefix can't be kept in {self._folder}: {error.strerror or error}; make room on that disk, or "
                "let the node use another one (`headwater serve --state FOLDER`; for a node that your script starts, "
                "XDG_CACHE_HOME)"
            ) from error

    @contextlib.contextmanager
    def _turn(self, sign: Callable[[], None]) -> Iterator[None]:
        """One of those that are tried at once."""
        while not self._trying.acquire(timeout=SIGN_EVERY_S):
            sign()
        try:
            yield
        finally:
            self._trying.release()

    def _look_at(self, path: Path) -> None:
        """RefusedError if it can't be run, or may not be; requests may want only a part of it."""
        with self._on_disk():
            model = path.read_bytes()
        check_upload(model, self.max_bytes)
        check_self_contained(model)
        del model
        with self._on_disk():
            self._try_out(path)

    def path(self, digest: str) -> Path:
        """Where this prefix is kept."""
        if digest not in self:
            raise RefusedError(f"{UNKNOWN_PREFIX} {digest}")
        return self._path(digest)

    def check(self, wanted: Wanted) -> None:
        """RefusedError, with the way out, if this can't be run here as it is wanted; loads nothing."""
        if self.ready(wanted) is None:  # what is loaded needs no file
            self.path(wanted.digest)
        self._touch(wanted.digest)
        engine, must = wish(wanted.engine)
        engines.check_possible(engine if must else AUTO, wanted.precision)
        if wanted.precision == "int8":
            if wanted.calibration is None:
                raise RefusedError("an int8 prefix needs a calibration, and the request names none")
            if not self._calibrations.has(wanted.digest, wanted.calibration):
                raise RefusedError(f"{UNKNOWN_CALIBRATION} {wanted.calibration} of prefix {wanted.digest}")

    def calibrate(self, request: Calibrate, abandoned: Callable[[], bool] = lambda: False) -> None:
        """Make ready for the int8 form of a prefix; takes a while, or ends soon once nobody waits for it any more."""
        engines.check_possible(AUTO, "int8")
        digest = request.chunk.extraction.prefix
        if digest is None:
            raise RefusedError("a calibration needs a prefix, and the request names none")
        self._read(digest)  # whole, and what it says it is
        self._calibrations.calibrate(request, self._path(digest), abandoned)

    def engine(self, wanted: Wanted, limit_bytes: int | None = None) -> Engine:
        """The engine for this; tried out, within this memory, and loaded if need be, which takes a while."""
        return self._loaded(wanted, limit_bytes).engine

    def ready(self, wanted: Wanted) -> Engine | None:
        """The engine for this if it is loaded; takes no time."""
        with self._lock:
            if wanted not in self._engines:
                return None
            self._engines.move_to_end(wanted)
            return self._engines[wanted].engine

    def tuned(self, wanted: Wanted) -> Tuned | None:
        """How this runs, if it is loaded."""
        with self._lock:
            loaded = self._engines.get(wanted)
        return None if loaded is None else loaded.tuned

    def num_bytes(self, digest: str) -> int:
        """Of the prefix's file."""
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            raise RefusedError(f"{UNKNOWN_PREFIX} {digest}") from None

    def shrink(self, name: str) -> None:
        """Have an engine give back what it keeps from larger groups."""
        with self._lock:
            found = [loaded.engine for wanted, loaded in self._engines.items() if wanted.name == name]
        for each in found:
            each.shrink()

    def unload(self, name: str) -> None:
        """Let go of an engine; it is loaded again when somebody asks."""
        with self._lock:
            for wanted in [each for each in self._engines if each.name == name]:
                del self._engines[wanted]

    def way(self, wanted: Wanted, limit_bytes: int | None = None) -> tuple[Path, Sequence[str] | None, Candidate]:
        """The file to run, which of its outputs, and how: for whoever runs it in another process. Loads no engine."""
        with self._lock:
            loaded = self._engines.get(wanted)
        path, outputs, tuned = self._tuned(wanted, limit_bytes)
        return path, outputs, (loaded.tuned if loaded else tuned).candidate

    def in_use(self) -> list[dict[str, Any]]:
        """What was chosen for each prefix that is loaded, what else was tried, and why."""
        with self._lock:
            found = list(self._engines.items())
        return [
            {"digest": wanted.digest, "outputs": None if wanted.outputs is None else list(wanted.outputs),
             "precision": wanted.precision, **loaded.tuned.to_json()}
            for wanted, loaded in found
        ]  # fmt: skip

    def files(self) -> dict[str, int]:
        """How many prefixes are held, and their bytes."""
        sizes = []
        for path in self._folder.glob("*.onnx"):
            with contextlib.suppress(FileNotFoundError):  # made room for another one just now
                sizes.append(path.stat().st_size)
        return {"num": len(sizes), "bytes": sum(sizes)}

    def close(self) -> None:
        """End what is being tried or made."""
        self._children.close()
        self._tuning.close()
        self._calibrations.close()

    def _loaded(self, wanted: Wanted, limit_bytes: int | None) -> _Loaded:
        with self._lock:
            if wanted in self._engines:
                self._engines.move_to_end(wanted)
                return self._engines[wanted]
        with self._loading(wanted):  # several requests for a new cut come together; one of them loads it
            with self._lock:
                if wanted in self._engines:
                    return self._engines[wanted]
            return self._load(wanted, limit_bytes)

    @contextlib.contextmanager
    def _loading(self, key: Wanted) -> Iterator[None]:
        with self._lock:
            door, waiting = self._doors.get(key, (threading.Lock(), 0))
            self._doors[key] = door, waiting + 1
        try:
            with door:
                yield
        finally:
            with self._lock:
                door, waiting = self._doors[key]
                self._doors[key] = door, waiting - 1
                if waiting == 1:
                    del self._doors[key]

    def _tuned(self, wanted: Wanted, limit_bytes: int | None) -> tuple[Path, Sequence[str] | None, Tuned]:
        self.check(wanted)
        self._read(wanted.digest)
        path, outputs = self._file(wanted)
        subject = Subject(wanted.digest, wanted.outputs, wanted.precision)
        return path, outputs, self._tuning.tuned(subject, path, outputs, wanted.engine, limit_bytes)

    def _load(self, wanted: Wanted, limit_bytes: int | None) -> _Loaded:
        path, outputs, tuned = self._tuned(wanted, limit_bytes)
        if not self._in_pieces:
            tuned = replace(tuned, candidate=replace(tuned.candidate, batch=LIMITS["node_batch"][1]))
        try:
            model = path.read_bytes()
        except FileNotFoundError:  # made room for another one just now
            raise RefusedError(f"{UNKNOWN_PREFIX} {wanted.digest}") from None
        try:
            engine = Engine(model, outputs, way=tuned.candidate, at_once=self._num_threads, precision=wanted.precision)
        except RefusedError as error:
            others = set(engines.engines_for(wanted.precision)) - {tuned.candidate.engine}
            if wish(wanted.engine)[1] or ENGINES[0] not in others:
                raise
            log.warning("%s failed as it was loaded (%s); %s runs prefix %s instead", tuned.candidate.engine, error,
                        ENGINES[0], wanted.digest[:12])  # fmt: skip
            tuned = Tuned(Candidate(), tuned.trials, f"{tuned.candidate.engine} failed as it was loaded: {error}")
            engine = Engine(model, outputs, way=tuned.candidate, at_once=self._num_threads, precision=wanted.precision)
        return self._remember(wanted, _Loaded(engine, tuned))

    def _file(self, wanted: Wanted) -> tuple[Path, Sequence[str] | None]:
        """Where the model is that this takes, and which of its outputs."""
        path = self._path(wanted.digest)
        if wanted.precision != "int8":
            return path, wanted.outputs
        assert wanted.calibration is not None
        return self._calibrations.file(wanted.digest, wanted.calibration, wanted.outputs, path), None

    def _read(self, digest: str) -> None:
        """Make sure of the stored file: hashed again only if something has touched it, since it serves many cuts."""
        path = self._path(digest)
        try:
            state = _state(path)
            if self._verified.get(digest) != state and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
                path.unlink(missing_ok=True)
                raise RefusedError(f"{UNKNOWN_PREFIX} {digest}: the stored file was damaged and is gone")
        except FileNotFoundError:
            raise RefusedError(f"{UNKNOWN_PREFIX} {digest}") from None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: the last to go when room is needed
            after = _state(path)
            if after[:2] == state[:2]:  # the file that was hashed
                self._verified[digest] = after

    def _touch(self, digest: str) -> None:
        """It is used now: the last to go when room is needed."""
        path, now = self._path(digest), time.monotonic()
        if now - self._touched.get(digest, -TOUCH_EVERY_S) < TOUCH_EVERY_S:
            return
        self._touched[digest] = now
        with contextlib.suppress(OSError):
            before = _state(path)
            os.utime(path)
            if self._verified.get(digest) == before:
                self._verified[digest] = _state(path)

    def _make_room(self, newest: str) -> None:
        """Delete what was used longest ago until the folder is within its limit; it can be uploaded again."""
        found = sorted(self._folder.glob("*.onnx"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in found)
        for path in found:
            if total <= self._max_total_bytes or path.stem == newest:
                continue
            total -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _remember(self, wanted: Wanted, loaded: _Loaded) -> _Loaded:
        with self._lock:
            loaded = self._engines.setdefault(wanted, loaded)
            self._engines.move_to_end(wanted)
            while len(self._engines) > MAX_ENGINES:
                self._engines.popitem(last=False)
            return loaded

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.onnx"


def _state(path: Path) -> tuple[int, ...]:
    """Differs once a file was replaced or written to."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns

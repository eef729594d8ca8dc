"""The prefixes that a node holds, by digest.

Owns the folder of ONNX files and the engines loaded from it. A prefix is uploaded once and kept across restarts; a file
whose digest no longer fits is thrown away and asked for again. Nothing here is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from headwater.data.wire import UNKNOWN_PREFIX
from headwater.errors import RefusedError
from headwater.node.engine import Engine

MAX_ENGINES = 8  # loaded at once; the least recently used is dropped
FILES_KEPT = 8  # times the largest upload: what the folder may hold


_Key = tuple[str, tuple[str, ...] | None]  # digest, and which outputs; None: all


class Prefixes:
    """ONNX files in `folder`, and engines for those in use."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self.max_bytes = max_bytes
        self._max_total_bytes = FILES_KEPT * max_bytes
        self._lock = threading.Lock()
        self._engines: OrderedDict[_Key, Engine] = OrderedDict()
        self._verified: dict[str, tuple[int, ...]] = {}  # digest → the state of the file when it was last hashed
        self._doors: dict[_Key, tuple[threading.Lock, int]] = {}  # being loaded: its lock, and how many want it
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("*.part"):
            if not _is_alive(leftover.name.split("-")[0]):  # an upload cut short by a kill
                leftover.unlink(missing_ok=True)

    def __contains__(self, digest: str) -> bool:
        return self._path(digest).exists()

    def put(self, digest: str, pieces: Iterable[bytes]) -> None:
        """Take an upload in pieces. It is kept only if it is whole, what it says it is, and can be run."""
        total, sha = 0, hashlib.sha256()
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=f"{os.getpid()}-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
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
            Engine(Path(name).read_bytes())  # refused now if it can't be run; requests may want only a part of it
            os.replace(name, self._path(digest))
            self._make_room(digest)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def path(self, digest: str) -> Path:
        """Where this prefix is kept."""
        if digest not in self:
            raise RefusedError(f"{UNKNOWN_PREFIX} {digest}")
        return self._path(digest)

    def engine(self, digest: str, outputs: tuple[str, ...] | None = None) -> Engine:
        """The engine for these outputs of this prefix, or for all of them; loaded if need be."""
        key = digest, outputs
        with self._lock:
            if key in self._engines:
                self._engines.move_to_end(key)
                return self._engines[key]
        with self._loading(key):  # several requests for a new cut come together; one of them loads it
            with self._lock:
                if key in self._engines:
                    return self._engines[key]
            return self._load(key)

    @contextlib.contextmanager
    def _loading(self, key: _Key) -> Iterator[None]:
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

    def _load(self, key: _Key) -> Engine:
        digest, outputs = key
        path = self._path(digest)
        try:
            state = _state(path)
            model = path.read_bytes()
        except FileNotFoundError:
            raise RefusedError(f"{UNKNOWN_PREFIX} {digest}") from None
        # A file that serves many cuts is loaded for each of them; hashed again only if something has touched it.
        if self._verified.get(digest) != state and hashlib.sha256(model).hexdigest() != digest:
            path.unlink(missing_ok=True)
            raise RefusedError(f"{UNKNOWN_PREFIX} {digest}: the stored file was damaged and is gone")
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: the last to go when room is needed
            after = _state(path)
            if after[:2] == state[:2]:  # the file that was hashed
                self._verified[digest] = after
        return self._remember(key, Engine(model, outputs))

    def _make_room(self, newest: str) -> None:
        """Delete what was used longest ago until the folder is within its limit; it can be uploaded again."""
        found = sorted(self._folder.glob("*.onnx"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in found)
        for path in found:
            if total <= self._max_total_bytes or path.stem == newest:
                continue
            total -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _remember(self, key: _Key, engine: Engine) -> Engine:
        with self._lock:
            engine = self._engines.setdefault(key, engine)
            self._engines.move_to_end(key)
            while len(self._engines) > MAX_ENGINES:
                self._engines.popitem(last=False)
            return engine

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.onnx"


def _state(path: Path) -> tuple[int, ...]:
    """Differs once a file was replaced or written to."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # somebody else's, and alive
        return True
    return True

"""The calibrations that a node holds, and the int8 prefixes made with them.

Owns a folder:

    <prefix>-<calibration>-<format>.json    the samples, and the range of every value in that prefix on them
    <key>-<sha256>.onnx                     an int8 prefix; the key covers the prefix, its outputs and the calibration

Both are kept across restarts. A file that is damaged is made again, or asked for again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headwater.data import wire
from headwater.data.room import ROOM
from headwater.errors import RefusedError
from headwater.node.child import Children, is_alive
from headwater.node.quantise import Ranges, has_vnni

FORMAT = "headwater-int8 2"  # has a say in every name: raise it when another file is made of the same samples
_WITHIN_S = 600.0  # a slow device with a large model
_POLL_S = 0.25  # how soon it is noticed that nobody waits any more


class Calibrations:
    """Calibrations and int8 files in `folder`, at most `max_bytes` of the latter."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._children = Children()
        self._lock = threading.Lock()
        for leftover in folder.glob("*.part"):
            if not is_alive(leftover.name.rpartition(".part")[0].rpartition(".")[2].partition("-")[0]):
                leftover.unlink(missing_ok=True)  # cut short by a kill

    def has(self, prefix: str, calibration: str) -> bool:
        return self._read(prefix, calibration) is not None

    def calibrate(self, request: wire.Calibrate, path: Path, abandoned: Callable[[], bool] = lambda: False) -> None:
        """Find the ranges of the prefix at `path` on the request's samples, unless they are known."""
        digest = request.chunk.extraction.prefix
        assert digest is not None
        target = self._path(digest, request.digest)
        with self._alone(abandoned):  # many chunks may miss it at once; it takes the memory of a whole prefix
            if self._read(digest, request.digest) is not None:
                return
            said = self._ask({"request": request.dumps().decode(), "path": str(path)}, abandoned)
            scratch = target.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                scratch.write_text(json.dumps({"request": request.dumps().decode(), "ranges": said["ranges"]}))
                scratch.replace(target)
            except OSError as error:
                scratch.unlink(missing_ok=True)
                raise RefusedError(f"the calibration can't be kept: {error.strerror}; make room on the node's disk, "
                                   "or use fp32") from None  # fmt: skip

    def file(self, prefix: str, calibration: str, outputs: Sequence[str] | None, path: Path) -> Path:
        """The int8 file of the prefix at `path` that gives these outputs; made if need be."""
        key = hashlib.sha256(json.dumps([FORMAT, prefix, calibration, outputs, has_vnni()]).encode()).hexdigest()
        for found in self._folder.glob(f"{key}-*.onnx"):
            if found.stem == f"{key}-{hashlib.sha256(found.read_bytes()).hexdigest()}":
                return found
            found.unlink(missing_ok=True)
        kept = self._read(prefix, calibration)
        if kept is None:
            raise RefusedError(f"{wire.UNKNOWN_CALIBRATION} {calibration} of prefix {prefix}")
        request, ranges = kept
        scratch = self._folder / f"{key}.{os.getpid()}-{threading.get_ident()}.part"
        try:
            self._ask({"path": str(path), "target": str(scratch), "ranges": ranges, "request": request,
                       "outputs": None if outputs is None else list(outputs)})  # fmt: skip
            target = self._folder / f"{key}-{hashlib.sha256(scratch.read_bytes()).hexdigest()}.onnx"
            scratch.replace(target)
        except OSError as error:
            raise RefusedError(f"an int8 prefix can't be kept: {error.strerror}; make room on the node's disk, or use "
                               "fp32") from None  # fmt: skip
        finally:
            scratch.unlink(missing_ok=True)
        self._make_room(target)
        return target

    def close(self) -> None:
        """End what is being made."""
        self._children.close()

    def _read(self, prefix: str, calibration: str) -> tuple[str, Ranges] | None:
        """The request and its ranges; None if they are not here, or no longer readable."""
        path = self._path(prefix, calibration)
        try:
            kept = json.loads(path.read_bytes())
            ranges = {str(name): (float(low), float(high)) for name, (low, high) in kept["ranges"].items()}
            return str(kept["request"]), ranges
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, OverflowError):
            path.unlink(missing_ok=True)
        return None

    @contextlib.contextmanager
    def _alone(self, abandoned: Callable[[], bool]) -> Iterator[None]:
        while not self._lock.acquire(timeout=_POLL_S):
            if abandoned():
                raise RefusedError("nobody waits for this calibration any more")
        try:
            yield
        finally:
            self._lock.release()

    def _ask(self, asked: dict[str, Any], abandoned: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        asked = {**asked, "picture_bytes": ROOM.most_bytes}
        try:
            ended = self._children.run("headwater.node.quantise", json.dumps(asked).encode(), _WITHIN_S, abandoned)
        except OSError as error:
            raise RefusedError(f"what makes an int8 prefix can't be started: {error}; make room there, or use fp32"
                               ) from None  # fmt: skip
        try:
            answer = json.loads(ended.said)
        except ValueError:
            raise RefusedError(f"what makes an int8 prefix {ended}; use fp32") from None
        if "error" in answer:
            raise wire.error_from_wire(answer["error"].encode()) or RefusedError(str(answer["error"]))
        result: dict[str, Any] = answer
        return result

    def _make_room(self, newest: Path) -> None:
        """Delete what was made longest ago until the files are within their limit; they can be made again."""
        found = sorted(self._folder.glob("*.onnx"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in found)
        for path in found:
            if total > self._max_bytes and path != newest:
                total -= path.stat().st_size
                path.unlink(missing_ok=True)

    def _path(self, prefix: str, calibration: str) -> Path:
        return self._folder / f"{prefix}-{calibration}-{FORMAT.rpartition(' ')[2]}.json"

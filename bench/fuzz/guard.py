"""One input at a time into a harness, and what is held against it.

Owns the limits: an input may take a second of CPU and half a gigabyte, raise what its target allows, start nothing, and
open nothing but what lies in its room, the program's own files and what a system tells everybody. Python's files are
seen by an audit hook, those of native code by watching the folder that no input may lead to.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.fuzz.target import Harness, Room, Target

LIMIT_S = 1.0  # of CPU
LIMIT_BYTES = 512 << 20  # of memory, on top of what the process has before
ADDRESS_BYTES = 4 << 30  # of addresses, on top: beyond it even memory that is never touched is refused
_OWN = tuple({os.path.realpath(each) for each in (sys.prefix, sys.base_prefix, *sys.path) if each})
_OF_ALL = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/", "/usr/", "/lib")
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "ctypes.dlopen")
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_IN_OPEN, _IN_NONBLOCK = 0x20, 0x800


@dataclass(frozen=True)
class Fault:
    """What an input did that none may do: `kind` is error, slow, memory or escape."""

    kind: str
    where: str
    said: str


class Guard:
    """Runs the inputs of one target in this process."""

    def __init__(self, target: Target, room: Room) -> None:
        self._target = target
        self._room = room
        self._inside = str(room.root.parent) + "/"
        self._is_on = False
        self._escapes: list[str] = []
        self._watch = _Watch(room.outside)
        sys.addaudithook(self._audit)
        self._harness: Harness = target.make(room)
        for seed in target.seeds():  # what is imported or built once is not an input's
            with _swallowed():
                self._harness(seed)
        self._watch.seen()
        gc.collect()
        self._base_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def limit(self) -> None:
        """Take no more addresses than that from now on."""
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_BYTES, now + ADDRESS_BYTES))

    def run(self, data: bytes) -> Fault | None:
        """What is wrong with how this input was taken."""
        fault, taken_s = self._run(data)
        if fault is None and taken_s > LIMIT_S:
            fault, taken_s = self._run(data)  # once more: others may have been at work
            if fault is None and taken_s > LIMIT_S:
                return Fault("slow", self._target.name, f"{taken_s:.1f} s of CPU")
        return fault

    def _run(self, data: bytes) -> tuple[Fault | None, float]:
        fault = None
        self._escapes.clear()
        begin = time.process_time()
        self._is_on = True
        try:
            self._harness(data)
        except self._target.allowed:
            pass
        except MemoryError as error:
            fault = Fault("memory", _place(error), str(error)[:200])
        except Exception as error:
            fault = Fault("error", _place(error), f"{type(error).__name__}: {error}"[:300])
        finally:
            self._is_on = False
        taken_s = time.process_time() - begin
        seen = self._watch.seen()
        if self._escapes or seen:
            return Fault("escape", (self._escapes or [f"opened {seen}"])[0], "; ".join(self._escapes[:5])), taken_s
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if fault is None and (peak_kb - self._base_kb) << 10 > LIMIT_BYTES:
            fault = Fault("memory", self._target.name, f"{(peak_kb - self._base_kb) >> 10} MB at once")
            self._base_kb = peak_kb
        return fault, taken_s

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, int) and not self._may_open(path, flags):
                self._escapes.append(f"open {path!r}")
        elif event in _WRITES:
            if not isinstance(arguments[0], int) and not _full(arguments[0], arguments[-1]).startswith(self._inside):
                self._escapes.append(f"{event} {arguments[0]!r}")
        elif event.startswith(_STARTS):
            self._escapes.append(f"{event} {str(arguments)[:100]}")

    def _may_open(self, path: Any, flags: int) -> bool:
        full = _full(path, follows=not flags & os.O_NOFOLLOW)
        if full.startswith(self._inside) and not full.startswith(str(self._room.outside)):
            return True
        reads_only = not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        return reads_only and full.startswith((*_OWN, *_OF_ALL))


def _full(path: Any, folder: Any = None, follows: bool = True) -> str:
    """`folder` is an open one that the path begins in, where it is a number above zero; `follows` a link at its end."""
    base = os.readlink(f"/proc/self/fd/{folder}") if isinstance(folder, int) and folder > 0 else ""
    whole = os.path.join(base, os.fsdecode(path))
    if follows:
        return os.path.realpath(whole)
    return os.path.normpath(os.path.join(os.path.realpath(os.path.dirname(whole)), os.path.basename(whole)))


def _place(error: BaseException) -> str:
    """The last line of ours that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if "headwater" in Path(each.filename).parts] or frames
    return f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"


@contextmanager
def _swallowed() -> Iterator[None]:
    try:
        yield
    except Exception:
        return


class _Watch:
    """Tells which files of a folder were opened, whoever did it (inotify)."""

    def __init__(self, folder: Path) -> None:
        system = ctypes.CDLL(None, use_errno=True)
        self._queue = system.inotify_init1(_IN_NONBLOCK)
        if self._queue < 0 or system.inotify_add_watch(self._queue, os.fsencode(folder), _IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "the folder can't be watched")

    def seen(self) -> list[str]:
        """Since it was asked last."""
        try:
            data = os.read(self._queue, 1 << 16)
        except BlockingIOError:
            return []
        names, place = [], 0
        while place < len(data):
            _, _, _, size = struct.unpack_from("iIII", data, place)
            name = data[place + 16 : place + 16 + size].rstrip(b"\0").decode()
            if name:  # the folder itself is opened by whoever lists what lies around it
                names.append(name)
            place += 16 + size
        return names

"""Files of this machine as memory. Owns `Maps`: a few mappings, each of a file as it was when it was mapped.

A file that was replaced or changed since is mapped anew, and one that is gone is let go within a minute, or the disk
would stay as full as it was. Who writes shards never changes one in place: a file that is
cut short under a mapping ends the process that looks at it (SIGBUS), and no check just before can quite rule that out;
so does a part of it that the disk can't read.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

# Before Python 3.13 each mapping holds a file descriptor, and a process often gets no more than 1,024.
MAX_MAPS = 4096 if sys.version_info >= (3, 13) else 256
TIDY_EVERY_S = 60.0
MAX_CHECKED = 4096  # files of which it is known what was checked; for a shard of 64 MB that is about 30 KB (estimated)
_T = TypeVar("_T")
State = tuple[int, int, int]
Place = tuple[str, str]  # the root that it was asked for by, and its path


@dataclass(frozen=True, slots=True)
class Mapped:
    """A file's bytes. `checked` is for whoever checks parts of it: the places that were found to be whole."""

    view: memoryview
    etag: str
    checked: set[int]


class Maps:
    """Mappings by path; the one that was used longest ago goes when there are too many.

    What was checked of a file is still known when it is mapped again, as long as nobody wrote to it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By root and path: what may be read below one root may be out of bounds below another.
        self._maps: OrderedDict[Place, tuple[State, Mapped]] = OrderedDict()
        self._checked: OrderedDict[Place, tuple[State, set[int]]] = OrderedDict()
        self._will_tidy = False

    def get(self, path: str, etag: Callable[[], str], root: str = "") -> Mapped:
        """The file at `path` as it is now; `etag` is asked when it has to be mapped, and says whether it may be read
        below `root`. Raises OSError."""
        place, state = (root, path), _state(os.stat(path))
        with self._lock:
            if place in self._maps and self._maps[place][0] == state:
                self._maps.move_to_end(place)
                return self._maps[place][1]
        with open(path, "rb") as file:
            state = _state(os.fstat(file.fileno()))
            view, named = memoryview(_map(file.fileno()) if state[1] else b""), etag()
        with self._lock:
            known, checked = self._checked.get(place, (state, set()))
            mapped = Mapped(view, named, checked if known == state else set())
            _put(self._checked, place, (state, mapped.checked), MAX_CHECKED)
            _put(self._maps, place, (state, mapped), MAX_MAPS)
            self._tidy_later()
        return mapped

    def tidy(self) -> None:
        """Let go of files that are gone or are others by now."""
        with self._lock:
            kept = [(place, state) for place, (state, _) in self._maps.items()]
        # Not under the lock: a disk may hang.
        stale = [place for place, state in kept if not _is_still(place[1], state)]
        with self._lock:
            for place in stale:
                self._maps.pop(place, None)
            self._will_tidy = False
            if self._maps:
                self._tidy_later()

    def _tidy_later(self) -> None:
        """The lock is held."""
        if not self._will_tidy:
            self._will_tidy = True
            timer = threading.Timer(TIDY_EVERY_S, self.tidy)
            timer.daemon = True
            timer.start()


def _put(kept: OrderedDict[Place, _T], place: Place, value: _T, most: int) -> None:
    """As the newest of at most so many."""
    kept[place] = value
    kept.move_to_end(place)
    while len(kept) > most:
        kept.popitem(last=False)


def _state(found: os.stat_result) -> State:
    """Differs once a file was replaced or written to."""
    return found.st_ino, found.st_size, found.st_mtime_ns


def _is_still(path: str, state: State) -> bool:
    try:
        return _state(os.stat(path)) == state
    except OSError:
        return False


def _map(descriptor: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, trackfd=False)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

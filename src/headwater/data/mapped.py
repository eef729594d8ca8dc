"""Files of this machine as memory. Owns `Maps`: a few mappings, each of a file as it was when it was mapped.

A file that was replaced or changed since is mapped anew. Who writes shards never changes one in place: a file that is
cut short under a mapping ends the process that looks at it, and no check just before can quite rule that out.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

# Before Python 3.13 each mapping holds a file descriptor, and a process often gets no more than 1,024.
MAX_MAPS = 4096 if sys.version_info >= (3, 13) else 256


@dataclass(frozen=True, slots=True)
class Mapped:
    """A file's bytes. `checked` is for whoever checks parts of it: the places that were found to be whole."""

    view: memoryview
    etag: str
    checked: set[int] = field(default_factory=set)


class Maps:
    """Mappings by path; the one that was made first goes when there are too many."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: dict[str, tuple[tuple[int, int, int], Mapped]] = {}

    def get(self, path: str, etag: Callable[[], str]) -> Mapped:
        """The file at `path` as it is now; `etag` is asked when it has to be mapped. Raises OSError."""
        found = os.stat(path)
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        with self._lock:
            if path in self._maps and self._maps[path][0] == state:
                return self._maps[path][1]
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            state = (found.st_ino, found.st_size, found.st_mtime_ns)
            mapped = Mapped(memoryview(_map(file.fileno()) if found.st_size else b""), etag())
        with self._lock:
            self._maps.pop(path, None)
            while len(self._maps) >= MAX_MAPS:
                del self._maps[next(iter(self._maps))]
            self._maps[path] = (state, mapped)
        return mapped


def _map(descriptor: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ, trackfd=False)
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

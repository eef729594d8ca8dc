"""Trying, again and again, to join an aggregator that went away. Owns `Rejoin`, a thread beside the carrier."""

from __future__ import annotations

import logging
import threading

from headwater.errors import HeadwaterError
from headwater.reduce.joining import Joined, Ticket, join

TRY_S = 10.0  # for the others to come, each time
PAUSE_S = 1.0

log = logging.getLogger(__name__)


class Rejoin:
    """Joins once, however long it takes, or until it is stopped."""

    def __init__(self, where: tuple[str, int], ticket: Ticket) -> None:
        self._where, self._ticket = where, ticket
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._found: Joined | None = None
        self._thread = threading.Thread(target=self._try, name="headwater rejoin", daemon=True)
        self._thread.start()

    @property
    def has_joined(self) -> bool:
        with self._lock:
            return self._found is not None

    def take(self) -> Joined:
        with self._lock:
            found, self._found = self._found, None
        assert found is not None
        return found

    def stop(self) -> None:
        self._over.set()
        with self._lock:
            if self._found is not None:
                self._found.close("done")
                self._found = None

    def _try(self) -> None:
        while not self._over.is_set():
            try:
                found = join(self._where, self._ticket, TRY_S)
            except (HeadwaterError, OSError) as error:  # a connection may end at any moment
                log.debug("not joined again yet: %s", error)
                self._over.wait(PAUSE_S)
                continue
            with self._lock:
                if not self._over.is_set():
                    self._found = found
                    return
            found.close("done")

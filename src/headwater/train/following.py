"""A job's nodes follow its fleet: those that come are made ready and asked, those that went are no longer asked.

Owns `Following`, the thread that asks a directory, `Clients`, a job's connections, and `first_nodes`, those that it
begins with. What a node that came must hold, and how the epoch under way goes on, is `train.source`'s business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from headwater.errors import HeadwaterError, UnreachableError
from headwater.train.access import Access
from headwater.train.client import NodeClient
from headwater.train.directory import Directory
from headwater.train.source import Source

LOOK_S = 1.0
MOST_LOOKS = 64  # until a node that can't join is tried again: what it is asked may be a listing of all samples

log = logging.getLogger(__name__)


class Clients:
    """The connections of a job, so that all of them are closed with it, whenever they were opened."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._open: list[NodeClient] = []
        self._lock = threading.RLock()  # the garbage collector may close the job anywhere, also in here

    def connect(self, address: str) -> NodeClient:
        client = NodeClient(address, self._access)
        with self._lock:
            self._open.append(client)
        return client

    def let_go(self, client: NodeClient) -> None:
        """Hang up on one."""
        with self._lock:
            self._open = [each for each in self._open if each is not client]
        client.close()

    def close(self) -> None:
        with self._lock:
            clients, self._open = self._open, []
        for client in clients:
            client.close()


def first_nodes(directory: Directory, clients: Clients, patience_s: float) -> list[NodeClient]:
    """Nodes to begin with. Of those that were named all are taken, whether or not they answer, which is found out soon;
    of a fleet those that do, and if none does, one is waited for."""
    if not directory.may_change:
        return [clients.connect(address) for address in directory.addresses()]
    deadline, why = time.monotonic() + patience_s, "none is up"
    while True:
        found = []
        try:
            addresses = directory.addresses()
        except UnreachableError as error:  # whoever knows may be on its way back
            addresses, why = [], str(error)
        for address in addresses:
            client = clients.connect(address)
            try:
                client.prepare()
            except UnreachableError as error:
                why = str(error)
                clients.let_go(client)
            else:
                found.append(client)
        if found:
            return found
        if time.monotonic() >= deadline:
            raise UnreachableError(f"no node of the fleet has answered for {patience_s:g} s: {why}")
        time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))


@dataclass(frozen=True)
class _Refused:
    """Why a node could not join, how many looks it was then left alone, and at which it is tried again."""

    why: str
    pause: int
    again: int


class Following:
    """One thread beside a job whose nodes are a fleet's, and one for each node that comes."""

    def __init__(
        self,
        source: Source,
        directory: Directory,
        clients: Clients,
        check: Callable[[NodeClient], None],
    ) -> None:
        """`check` raises if a node does not have the job's data."""
        self._source, self._directory, self._clients, self._check = source, directory, clients, check
        self._lock = threading.RLock()  # the garbage collector may close the job anywhere, also in here
        self._coming: set[str] = set()
        self._refused: dict[str, _Refused] = {}  # by address
        self._left: list[NodeClient] = []  # by whom a reply may still come
        self._num_looks = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Follow no longer. A node that is being made ready is let go as soon as that is over."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                found = self._directory.addresses()
            except HeadwaterError as error:  # whoever knows is away; the nodes are not
                log.debug("the fleet does not say which nodes it has: %s", error)
                continue
            except Exception:
                if not self._closed.is_set():
                    log.exception("the run goes on with its nodes, and no longer follows the fleet")
                return
            self._look(found)

    def _look(self, found: list[str]) -> None:
        self._hang_up()
        here = {client.name: client for client in self._source.clients}
        with self._lock:
            self._num_looks += 1
            self._refused = {address: each for address, each in self._refused.items() if address in found}
            resting = {address for address, each in self._refused.items() if self._num_looks < each.again}
            new = [address for address in found if address not in {*here, *self._coming, *resting}]
            self._coming.update(new)
        for address in new:
            # Each by itself: one may be sent a large file.
            threading.Thread(target=self._welcome, args=(address,), name=f"join-{address}", daemon=True).start()
        if not found:
            return
        for name, client in here.items():
            if name not in found and self._source.leave(client):
                log.info("%s is no longer of the fleet", name)
                self._left.append(client)

    def _hang_up(self) -> None:
        """On those that left, as soon as no reply of theirs is under way: while a job runs, any number may come and
        go."""
        left, self._left = self._left, []
        for client in left:
            if client.is_busy:
                self._left.append(client)
            else:
                self._clients.let_go(client)

    def _welcome(self, address: str) -> None:
        client = None
        joined = False
        try:
            client = self._clients.connect(address)
            self._check(client)
            joined = self._source.welcome(client)
            if joined:
                log.info("%s has joined", address)
        except UnreachableError as error:  # it may be gone by now
            log.debug("%s can't join: %s", address, error)
        except HeadwaterError as error:
            is_told = self._refuse(address, str(error))
            log.log(logging.DEBUG if is_told else logging.WARNING, "%s can't join: %s", address, error)
        except Exception as error:
            if not self._refuse(address, repr(error)):
                log.exception("unexpected error while %s was made ready", address)
        finally:
            with self._lock:
                self._coming.discard(address)
            if client is not None and not joined:
                self._clients.let_go(client)

    def _refuse(self, address: str, why: str) -> bool:
        """Leave it alone, each time for twice as long; whether that was the reason before, too."""
        with self._lock:
            before = self._refused.get(address)
            pause = 2 if before is None else min(2 * before.pause, MOST_LOOKS)
            self._refused[address] = _Refused(why, pause, self._num_looks + pause)
        return before is not None and before.why == why

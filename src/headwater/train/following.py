"""A job's nodes follow its fleet: those that come are made ready and asked, those that went are no longer asked.

Owns `Following`, the thread that asks a directory, `Clients`, a job's connections, and `first_nodes`, those that it
begins with. What a node that came must hold, and how the epoch under way goes on, is `train.source`'s business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from headwater.errors import HeadwaterError, UnreachableError
from headwater.train.access import Access
from headwater.train.client import NodeClient
from headwater.train.directory import Directory
from headwater.train.source import Source

LOOK_S = 1.0

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
        self._refused: dict[str, str] = {}  # address → why, told once
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
        here = {client.name: client for client in self._source.clients}
        with self._lock:
            new = [address for address in found if address not in here and address not in self._coming]
            self._coming.update(new)
            self._refused = {address: why for address, why in self._refused.items() if address in found}
        for address in new:
            # Each by itself: one may be sent a large file.
            threading.Thread(target=self._welcome, args=(address,), name=f"join-{address}", daemon=True).start()
        if not found:
            return
        for name, client in here.items():
            if name not in found and self._source.leave(client):  # its connection stays: a reply may be under way
                log.info("%s is no longer of the fleet", name)

    def _welcome(self, address: str) -> None:
        client = None
        joined = False
        try:
            client = self._clients.connect(address)
            self._check(client)
            joined = self._source.welcome(client)
            if joined:
                log.info("%s has joined", address)
        except HeadwaterError as error:
            with self._lock:
                is_told = self._refused.get(address) == str(error)
                self._refused[address] = str(error)
            unreachable = isinstance(error, UnreachableError)  # it may be gone by now
            log.log(logging.DEBUG if is_told or unreachable else logging.WARNING, "%s can't join: %s", address, error)
        except Exception:
            log.exception("unexpected error while %s was made ready", address)
        finally:
            with self._lock:
                self._coming.discard(address)
            if client is not None and not joined:
                self._clients.let_go(client)

"""Where a job's nodes are: named one by one, or found by the name of their fleet.

Owns the `Directory` protocol and its two implementations. Another one, for a service that Kubernetes resolves, say,
would be a class here with the same three names.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from headwater.data.cluster import Cluster, check_name
from headwater.errors import ConfigError, UnreachableError

RAY = "ray://"
ENDS_WITHIN_S = 5.0


class Directory(Protocol):
    """Tells which nodes there are."""

    @property
    def may_change(self) -> bool:
        """Whether it is worth asking again: nodes come and go, and get other addresses."""

    def addresses(self) -> list[str]:
        """Of the nodes that are there at this moment; UnreachableError if that can't be told."""

    def close(self) -> None:
        """Let go of what it holds."""


class Named:
    """Nodes that the user has named."""

    may_change = False

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = list(dict.fromkeys(addresses))

    def addresses(self) -> list[str]:
        return list(self._addresses)

    def close(self) -> None:
        """Nothing is held."""


class RayFleet:
    """The nodes that `headwater up --ray` keeps: its keeper, an actor with the fleet's name, is asked."""

    may_change = True

    def __init__(self, name: str) -> None:
        self.name = check_name(name)
        self._cluster = Cluster()
        self._closed = threading.Event()
        self._asking = threading.RLock()  # the garbage collector may close the job anywhere, also in here

    def addresses(self) -> list[str]:
        with self._asking:
            if self._closed.is_set():
                raise UnreachableError("the job is closed")
            keeper = self._cluster.find(self.name)
            if keeper is None:
                raise ConfigError(f"there is no fleet called {self.name} on this Ray cluster; start it with "
                                  f"`headwater up s3://… --ray auto --name {self.name}`")  # fmt: skip
            found = self._cluster.ask(keeper.addresses.remote(), unless=self._closed)
            return [str(each) for each in found]

    def close(self) -> None:
        """Ray must not be let go while somebody asks; a question that hangs in Ray itself keeps the connection."""
        self._closed.set()
        if self._asking.acquire(timeout=ENDS_WITHIN_S):
            try:
                self._cluster.close()
            finally:
                self._asking.release()


def directory_of(nodes: Sequence[str] | str) -> Directory:
    """What `nodes` stands for: a list of addresses, or a fleet."""
    given = [nodes] if isinstance(nodes, str) else list(nodes)
    fleets = [each for each in given if each.startswith(RAY)]
    if not given or (isinstance(nodes, str) and not fleets):
        raise ConfigError(f'nodes is {nodes!r}; it must be a list of addresses, the name of a fleet such as '
                          '"ray://photos", None, or "inline"')  # fmt: skip
    if fleets and len(given) > 1:
        raise ConfigError(f"nodes has the fleet {fleets[0]} and others; a job has the nodes of one fleet, or those "
                          "that are named")  # fmt: skip
    return RayFleet(given[0].removeprefix(RAY)) if fleets else Named(given)

"""The way to a Ray cluster, and the names of what Headwater has there.

Owns `Cluster`, and what goes wrong on the way in words of ours. Ray is imported when a fleet on Ray is asked for, and
never before. It is trusted: whoever may start actors on a cluster may run anything on its machines.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from headwater.errors import ConfigError, UnreachableError

NAMESPACE = "headwater"
RESOURCE = "storage"  # what machines that have nodes are started with
ANSWER_WITHIN_S = 10.0
_LOOK_S = 0.25  # how soon it is noticed that nobody waits any more
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

_lock = threading.Lock()
_num_users = 0  # of a connection that we have opened


def check_name(name: str) -> str:
    """The name, if a fleet may be called that."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:80]!r} is no name for a fleet: it has 1 to 63 lower-case letters, digits, and "
                          "hyphens in between, such as photos")  # fmt: skip
    return name


def import_ray() -> Any:
    """Ray, or how to get it."""
    if find_spec("ray") is None:
        raise ConfigError("a fleet on Ray needs ray, and it is not installed here: pip install '.[ray]' in a checkout, "
                          "with the version that the cluster has")  # fmt: skip
    import ray

    return ray


class Cluster:
    """A connection to a Ray cluster, shared by all who use one in this process; `close` gives it back."""

    def __init__(self, address: str = "auto") -> None:
        """`address` is that of the cluster's head, such as 10.0.0.5:6379, or "auto": RAY_ADDRESS, or the cluster that
        this machine is part of. A script that has called `ray.init` is on its cluster already."""
        self.ray = import_ray()
        self._closed = False
        global _num_users
        with _lock:
            self._ours = _num_users > 0 or not self.ray.is_initialized()
            if not self.ray.is_initialized():
                self._open(address)
            _num_users += self._ours

    def _open(self, address: str) -> None:
        where = os.environ.get("RAY_ADDRESS") or address if address == "auto" else address
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if main else None
        try:
            if where != "auto":
                _check_reachable(where)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Ray's own, for whoever writes actors
                self.ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # of many kinds, from many layers
            raise UnreachableError(
                f"no Ray cluster at {where} ({_first_line(error)}); start Ray on this machine (`ray start "
                "--address=HEAD:6379`; `ray start --head` makes a cluster), or say where it is with RAY_ADDRESS; with "
                "token authentication, this user needs the cluster's token, too (RAY_AUTH_TOKEN)"
            ) from None
        finally:
            if main and before is not None:  # what a signal does to a script is the script's business
                signal.signal(signal.SIGTERM, before)

    def close(self) -> None:
        """Hang up, if nobody else is connected through us."""
        global _num_users
        with _lock:
            if self._closed:
                return
            self._closed = True
            _num_users -= self._ours
            if self._ours and _num_users == 0:
                self.ray.shutdown()

    def find(self, name: str) -> Any:
        """An actor of ours by its name; None if there is none."""
        try:
            return self.ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            return None

    def names(self) -> list[str]:
        """Of all actors of ours."""
        found = self.ray.util.list_named_actors(all_namespaces=True)
        return sorted(each["name"] for each in found if each["namespace"] == NAMESPACE)

    def ask(self, call: Any, within_s: float = ANSWER_WITHIN_S, unless: threading.Event | None = None) -> Any:
        """What an actor answers to a call that was made; UnreachableError if it does not, or once `unless` is set."""
        deadline = time.monotonic() + within_s
        with self.plain_errors():
            while True:
                left_s = max(0.0, deadline - time.monotonic())
                if self.ray.wait([call], timeout=min(_LOOK_S, left_s))[0] or not left_s:
                    return self.ray.get(call, timeout=0)
                if unless is not None and unless.is_set():
                    raise UnreachableError("nobody waits for the answer any more")

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Ray's errors as ours: what an actor said, or that it does not answer."""
        try:
            yield
        except self.ray.exceptions.RayTaskError as error:
            raise ConfigError(said_by(error)) from None
        except self.ray.exceptions.RayError as error:
            raise UnreachableError(f"Ray: {_first_line(error)}") from None

    def machines(self) -> dict[str, float]:
        """Of the cluster's machines that are up and may have nodes: address → how many."""
        return {
            str(each["NodeManagerAddress"]): float(each["Resources"][RESOURCE])
            for each in self.ray.nodes()
            if each["Alive"] and each["Resources"].get(RESOURCE, 0) > 0
        }


def _check_reachable(address: str) -> None:
    """Whether anybody listens there: where nobody does, Ray would end the whole process."""
    host, _, port = address.partition("://")[2].rpartition(":") if "://" in address else address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("it must look like 10.0.0.5:6379")
    socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_WITHIN_S).close()


def said_by(error: BaseException) -> str:
    """The error that an actor raised, without Ray's account of where."""
    cause = getattr(error, "cause", None)
    return str(cause) if isinstance(cause, Exception) else _first_line(error)


def _first_line(error: BaseException) -> str:
    with contextlib.suppress(Exception):
        return str(error).strip().split("\n")[0][:300] or type(error).__name__
    return type(error).__name__

"""One node of a fleet, in the process of a Ray actor.

Owns `Member` and `NodeOptions`. The node is the one that `headwater serve` runs, in the actor's own process: when that
is killed, port, memory and locks are free at once, and nothing is left that somebody would have to end.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headwater.core.access import check_exposed
from headwater.data.cluster import import_ray
from headwater.data.secrets import keep_out_of_logs
from headwater.data.store import open_store
from headwater.node.logs import set_up_logs
from headwater.node.serve import DRAIN_S, STOP_WITHIN_S, open_node
from headwater.node.tls import Tls

MANY_HERE = 8  # folders for kept rows, where so many nodes are on one machine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeOptions:
    """What every node of a fleet is started with: options of `headwater serve`. Paths are of the storage machines."""

    roots: tuple[str, ...]
    port: int = 0
    tokens: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    insecure: bool = False
    threads: int = 0
    state: str = ""
    cache_dir: str = ""
    cache_bytes: int | None = None
    max_upload_bytes: int = 2 << 30
    memory_bytes: int | None = None
    drain_s: float = DRAIN_S

    @property
    def scheme(self) -> str:
        return "grpc+tls" if self.tls_cert else "grpc"

    def check_exposed(self, host: str) -> list[str]:
        """What keeps nobody out where others reach that address; ConfigError if nobody said that they may."""
        return check_exposed(host, bool(self.tokens), bool(self.tls_cert), self.insecure, self.roots)

    def unlike(self, other: NodeOptions) -> list[str]:
        """What differs."""
        return [each.name for each in fields(self) if getattr(self, each.name) != getattr(other, each.name)]


class Member:
    """What the actor does: it opens the node, tells of it, and drains it."""

    def __init__(self, options: NodeOptions) -> None:
        set_up_logs("text", "info")  # Ray keeps what an actor writes
        keep_out_of_logs()
        host = str(import_ray().util.get_node_ip_address())
        if without := options.check_exposed(host):
            log.warning("INSECURE: %s has no %s", host, " and no ".join(without))
        for root in options.roots:
            open_store(root)  # a folder that is not there is found now, not by the first trainer
        tls = None
        if options.tls_cert:
            client_ca = Path(options.tls_client_ca) if options.tls_client_ca else None
            tls = Tls(Path(options.tls_cert), Path(options.tls_key), client_ca)
        host = f"[{host}]" if ":" in host else host
        self._node = open_node(
            options.roots,
            listen=f"{options.scheme}://{host}:{options.port}",
            state=Path(options.state) if options.state else None,
            num_threads=options.threads or None,
            max_upload_bytes=options.max_upload_bytes,
            cache_bytes=options.cache_bytes,
            cache_folder=Path(options.cache_dir) if options.cache_dir else None,
            num_caches=MANY_HERE,
            drain_s=options.drain_s,
            max_memory_bytes=options.memory_bytes,
            tokens=Path(options.tokens) if options.tokens else None,
            tls=tls,
        )
        self._address = f"{options.scheme}://{host}:{self._node.port}"
        self._changed = threading.Event()
        self._node.calls.changed = self._changed.set
        self._ending: threading.Thread | None = None
        self._ended = ""
        log.info("serving %s on %s", ", ".join(self._node.roots), self._address)

    def look(self) -> dict[str, Any]:
        """How it is doing; counters are since its start."""
        hello = self._node.hello()
        begun = sum(amount for name, labels, amount in self._node.calls.items()
                    if name == "requests_under_way" and labels[1] == "rows")  # fmt: skip
        return {
            "address": self._address,
            "pid": os.getpid(),
            "queue": max(0.0, begun - hello["chunks"]["stalled"]),
            "busy_s": float(hello["busy"]["decode_s"]) + float(hello["busy"]["infer_s"]),
            "num_threads": int(hello["num_threads"]),
            "cpu_s": float(hello["cpu_s"]),
            "cores": float(hello["cores"]),
            "draining": bool(hello["draining"]),
            "ended": self._ended,
        }

    def drain(self) -> None:
        """Take nothing new, finish what is under way, and let go of everything; `look` tells when that is done."""
        if self._ending is None:
            self._node.calls.told_to_stop()
            self._ending = threading.Thread(target=self._end, name="drain", daemon=True)
            self._ending.start()

    def _end(self) -> None:
        while True:
            why, left_s = self._node.calls.look()
            if why is not None:
                break
            self._changed.wait(left_s)
            self._changed.clear()
        self._node.stop(STOP_WITHIN_S)
        log.info("the node ends: %s", why)
        self._ended = why

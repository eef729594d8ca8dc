"""Nodes, looked at again and again: what `headwater ui` and `headwater top` show.

Owns `Watched`: a thread a node, so that one that does not answer holds up no other. `core.looks` makes rates of looks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwater.core.looks import Look, Looks, Seen, together, view
from headwater.core.plain import all_plain, plain
from headwater.data.secrets import redact
from headwater.errors import HeadwaterError
from headwater.train.access import Access
from headwater.train.client import NodeClient

EVERY_S, AT_MOST_S = 1.0, 10.0  # between looks; the longer one where a node does not answer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """Of one node: what was seen, or why nothing is."""

    address: str
    seen: Seen | None
    fault: str = ""

    def to_json(self) -> dict[str, Any]:
        data = {"name": redact(self.address), "fault": self.fault}
        return data if self.seen is None else {**data, **view(self.seen)}


class Watched:
    """These nodes, from now on; with `while_asked_s`, only while somebody asks."""

    def __init__(
        self, addresses: Sequence[str], access: Access, every_s: float = EVERY_S, while_asked_s: float | None = None
    ) -> None:
        self._every_s, self._while_asked_s = every_s, while_asked_s
        self._wake = threading.Condition()
        self._closed = False
        self._asked_at = time.monotonic()
        self._found: dict[str, Found | None] = dict.fromkeys(addresses)
        self._clients = {address: NodeClient(address, access) for address in self._found}
        self._num_looks = dict.fromkeys(self._found, 0)
        for address in self._found:
            threading.Thread(target=self._watch, args=(address,), name="watch", daemon=True).start()

    def found(self, within_s: float = 0.0, num_looks: int = 1) -> list[Found]:
        """As of now. `within_s`: wait so long until each node was looked at so often, or did not answer."""
        with self._wake:
            self._asked_at = time.monotonic()
            self._wake.notify_all()
            self._wake.wait_for(lambda: all(self._is_known(each, num_looks) for each in self._found), timeout=within_s)
            return [each if each is not None else Found(address, None, "has not answered yet")
                    for address, each in self._found.items()]  # fmt: skip

    def to_json(self, within_s: float = 0.0) -> dict[str, Any]:
        """What the page shows."""
        found = self.found(within_s)
        seen = [each.seen for each in found if each.seen is not None]
        return {
            "kind": "ui",
            "at_s": time.time(),
            "nodes": [each.to_json() for each in found],
            "together": view(together(seen)) if len(found) > 1 and seen else None,
        }

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for client in self._clients.values():
            client.close()

    def _is_known(self, address: str, num_looks: int) -> bool:
        found = self._found[address]
        return found is not None and (bool(found.fault) or self._num_looks[address] >= num_looks)

    def _watch(self, address: str) -> None:
        looks, wait_s = Looks(), self._every_s
        while True:
            found = self._look(address, looks)
            if found.fault:
                looks, wait_s = Looks(), min(AT_MOST_S, 2 * wait_s)
            else:
                wait_s = self._every_s
            with self._wake:
                self._found[address] = found
                self._num_looks[address] = 0 if found.fault else self._num_looks[address] + 1
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._closed, timeout=wait_s)
                self._wake.wait_for(lambda: self._closed or self._is_asked())
                if self._closed:
                    return

    def _is_asked(self) -> bool:
        return self._while_asked_s is None or time.monotonic() - self._asked_at < self._while_asked_s

    def _look(self, address: str, looks: Looks) -> Found:
        try:
            said = all_plain(self._clients[address].status())  # it may say anything
            numbers = {(name, *labels): float(value) for name, labels, value in said["numbers"]}
            looks.add(Look(time.monotonic(), numbers, said["about"]))
            seen = looks.seen()
            assert seen is not None
            view(seen), view(together([seen]))  # what a node says of itself may be anything
        except HeadwaterError as error:
            return Found(address, None, plain(redact(str(error))))
        except Exception as error:
            log.debug("%s can't be shown", address, exc_info=True)
            return Found(address, None, f"says of itself what can't be shown ({type(error).__name__}); is it a node of "
                                        "this version?")  # fmt: skip
        return Found(address, seen)

"""Nodes that add their gradients up among themselves, as the trainer arranges it.

Owns `Meetings`: which nodes are told to meet, and what they say of it. `core.circle` decides. Where they meet, and with
what key, their operators said to them; this process knows neither.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping

from headwater.core.circle import Circle
from headwater.core.plain import plain
from headwater.data.parcel import Parcel
from headwater.train.peer import Peer

log = logging.getLogger(__name__)


class Meetings:
    """Of one job, one after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_added = 0  # sums that came from nodes
        self._name = secrets.token_hex(16)  # nobody else can take a place who has not seen it
        self._circle = Circle()
        self._clock = clock
        self._is_told = False  # that they are apart: it is tried again and again

    @property
    def number(self) -> int:
        return self._circle.number

    @property
    def members(self) -> frozenset[int]:
        """Nodes that can add up together now."""
        return self._circle.members

    def look(self, peers: Mapping[int, Peer]) -> None:
        """Before each step: have these meet, if they have not yet."""
        wanted = self._circle.look({number: peer.session for number, peer in peers.items()}, self._clock())
        if wanted is not None:
            for rank, node in enumerate(wanted.nodes):
                peers[node].send("gather", {"circle": self._name, "number": wanted.number, "rank": rank,
                                            "nodes": len(wanted.nodes)})  # fmt: skip

    def heard(self, peer: Peer, parcel: Parcel) -> bool:
        """A node has met the others, or is apart; whether that ends what there was."""
        number = parcel.number("number")
        if parcel.kind == "met":
            self._circle.met(peer.number, number)
            if self.members and self._is_told:
                log.warning("nodes add up among themselves again")
                self._is_told = False
            return False
        if not self._circle.apart(peer.number, number, self._clock()):
            return False
        said = parcel.about.get("why")
        why = plain(said)[:500] if isinstance(said, str) else "it did not say why"
        if not self._is_told:
            log.warning("nodes don't add up among themselves, and their gradients come here one by one: %s: %s",
                        peer.name, why)  # fmt: skip
            self._is_told = True
        return True

    def begins(self) -> None:
        """They are told to add up."""
        self._circle.begins()

    def added(self) -> None:
        """Their sum is here."""
        self._circle.added()
        self.num_added += 1

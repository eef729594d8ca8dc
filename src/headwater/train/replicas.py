"""The nodes that have a copy of the prefix: who is there, and which weights each of them has.

Owns `Replicas`: sessions that are opened, lost and opened again, and the weights, of which each node gets what has
changed since it got some. The weights themselves are the model's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core.owed import GIVE_UP_TIMES
from headwater.data.parcel import checksum
from headwater.errors import DamagedError, HeadwaterError, RefusedError, StoreError, UnreachableError, VersionError
from headwater.train.client import NodeClient
from headwater.train.peer import SILENT_S, Event, Peer, SilentError
from headwater.train.reply import QUIET_S

log = logging.getLogger(__name__)

READY_WITHIN_S = 600.0  # a node may have to wait for memory, and says so meanwhile
ASK_AGAIN_S = 1.0
_WAITS_FOR = {"quota": "one of its tenant's streams to end", "rate": "its tenant's rows per second"}
PIECE_BYTES = 16 << 20  # weights are sent in messages of about this size
PASSING = (UnreachableError, DamagedError, StoreError)  # what a node that is asked again may have got over


class Replicas:
    """Sessions on nodes. `tensors` are those of the prefix, by name; `about` is what a session is opened with."""

    def __init__(
        self,
        clients: Sequence[NodeClient],
        tensors: Mapping[str, Tensor],
        about: Mapping[str, Any],
        patience_s: float,
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.peers: dict[int, Peer] = {}
        self.rejoined = 0  # how often a node came back
        self._clients = clients
        self._tensors = tensors
        self._about = about
        self._patience_s = patience_s
        self._version = -1
        self._marks: dict[str, tuple[int, int]] = {}  # of each tensor as it was when it was last sent
        self._changed: dict[str, int] = {}  # the version in which it became what it is
        self._lock = threading.Lock()
        self._joining: set[int] = set()
        self._waiting: set[int] = set()  # of these, who were told to wait their turn
        self._silences: Counter[int] = Counter()
        self._shunned: dict[int, float] = {}  # until when, as long as others are there
        self._joined: list[Peer] = []
        self._tried = [float("-inf")] * len(clients)
        self._why: dict[int, HeadwaterError] = {}
        self._closed = False

    def open(self) -> None:
        """Begin with all of them at once; what keeps one from it is raised."""
        threads = [
            threading.Thread(target=self._join, args=(number,), daemon=True) for number in range(len(self._clients))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._take_joined()
        if self._why:
            raise next(iter(self._why.values()))

    def present(self) -> dict[int, Peer]:
        """Who is there now, whoever has come back included. If nobody is, they are waited for; being told to wait for
        others to end does not count as silence."""
        begun = time.monotonic()
        deadline = begun + self._patience_s
        told = False
        while True:
            self._invite()
            self._take_joined()
            if self.peers:
                return dict(self.peers)
            why = next(iter(list(self._why.values())), None)  # a list: others add to it meanwhile
            if why is not None and not isinstance(why, PASSING):
                raise why
            if self._waiting and time.monotonic() < begun + READY_WITHIN_S:
                deadline = time.monotonic() + self._patience_s
            if time.monotonic() > deadline:
                raise why or UnreachableError(f"no node has answered for {self._patience_s:g} s")
            if not told:
                told = True
                log.warning("no node is there; waiting for one for up to %g s (%s)", self._patience_s, why)
            time.sleep(0.05)

    def wait_for(self, numbers: set[int]) -> None:
        """Until one of these is there: nobody else has what is needed."""
        begun = time.monotonic()
        deadline = begun + self._patience_s
        while not numbers & set(self.peers):
            self._invite(numbers)
            self._take_joined()
            if self._waiting & numbers and time.monotonic() < begun + READY_WITHIN_S:
                deadline = time.monotonic() + self._patience_s
            if time.monotonic() > deadline:
                names = ", ".join(self._clients[number].name for number in sorted(numbers))
                raise UnreachableError(f"{names}, which alone has some of the samples, has not answered for "
                                       f"{self._patience_s:g} s")  # fmt: skip
            time.sleep(0.05)

    def lose(self, peer: Peer, why: HeadwaterError) -> None:
        """This session has ended."""
        if self.peers.get(peer.number) is peer:
            del self.peers[peer.number]
            self._why[peer.number] = why
            self._tried[peer.number] = time.monotonic() - ASK_AGAIN_S / 2
            log.warning("%s is lost: %s", peer.name, why)
            if isinstance(why, SilentError):  # it would come back at once, and hold up the next step as long
                self._silences[peer.number] += 1
                times = GIVE_UP_TIMES * 2 ** min(10, self._silences[peer.number] - 1)
                self._shunned[peer.number] = time.monotonic() + times * (self._patience_s or QUIET_S)
        peer.close()

    def note_changes(self) -> int:
        """Which weights the model has now is a version; a new one, if anything has changed."""
        version = self._version + 1
        found = False
        for name, tensor in self._tensors.items():
            mark = (tensor._version, tensor.data_ptr())
            if self._marks.get(name) != mark:
                self._marks[name], self._changed[name], found = mark, version, True
        if found:
            self._version = version
        return self._version

    def bring_up(self, peer: Peer) -> int:
        """Send a node what has changed since it last got weights; bytes of it."""
        base, num_bytes = peer.version, 0
        if base == self._version:
            return 0
        piece: dict[str, np.ndarray] = {}
        about = {"version": self._version, "base": base}
        for name, changed in self._changed.items():
            if changed > base:
                piece[name] = array_of(self._tensors[name])
                num_bytes += piece[name].nbytes
                if sum(each.nbytes for each in piece.values()) > PIECE_BYTES:
                    peer.send("weights", about, piece)
                    piece = {}
        peer.send("weights", about, piece)
        peer.send("commit", {"version": self._version})
        peer.version = self._version
        return num_bytes

    def checksum(self) -> str:
        """Of the model's weights, as every replica must have them."""
        return checksum({name: array_of(each) for name, each in self._tensors.items()})

    def close(self) -> None:
        self._closed = True
        with self._lock:
            joined, self._joined = self._joined, []
        for peer in (*self.peers.values(), *joined):
            peer.close()
        self.peers.clear()

    def _invite(self, needed: Collection[int] = ()) -> None:
        """Ask those that are not there, each by itself, now and then; seldom one that had lived and got nothing done,
        unless it is needed."""
        now = time.monotonic()
        for number in range(len(self._clients)):
            if number in self.peers or now - self._tried[number] < ASK_AGAIN_S:
                continue
            if self.peers and number not in needed and now < self._shunned.get(number, now):
                continue
            with self._lock:
                if number in self._joining:
                    continue
                self._joining.add(number)
            self._tried[number] = now
            threading.Thread(target=self._join, args=(number,), name=f"join-{number}", daemon=True).start()

    def _join(self, number: int) -> None:
        """A session on this node, if it answers."""
        client, peer = self._clients[number], None
        own: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            if client.hello().get("draining"):
                raise UnreachableError(f"{client.name} is being stopped")
            peer = Peer(number, client, own)
            peer.send("open", self._about)
            self._await_ready(peer, own)
            peer._events = self.events
            while not own.empty():  # what came in between
                self.events.put(own.get())
            with self._lock:
                if self._closed:  # nobody else would hang up
                    raise UnreachableError("the job is closed")
                self._joined.append(peer)
        except HeadwaterError as error:
            self._why[number] = error
            if peer is not None:
                peer.close()
        finally:
            self._tried[number] = time.monotonic()
            with self._lock:
                self._joining.discard(number)
                self._waiting.discard(number)

    def _await_ready(self, peer: Peer, own: queue.SimpleQueue[Event]) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        told = False
        while not self._closed:
            try:
                _, said = own.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline or time.monotonic() - peer.heard > SILENT_S:
                    raise UnreachableError(f"{peer.name} does not begin with the session") from None
                continue
            if isinstance(said, HeadwaterError):
                raise said
            if said.kind == "ready":
                return
            if said.kind == "waiting" and not told:
                told = True
                self._waiting.add(peer.number)
                what = _WAITS_FOR.get(str(said.about.get("for")), "memory there; others use it now")
                log.warning("%s: waiting for %s", peer.name, what)
        raise UnreachableError("the job is closed")

    def _take_joined(self) -> None:
        with self._lock:
            joined, self._joined = self._joined, []
        for peer in joined:
            if self._why.pop(peer.number, None) is not None:
                self.rejoined += 1
                log.warning("%s is back", peer.name)
            self.peers[peer.number] = peer


def array_of(tensor: Tensor) -> np.ndarray:
    """A tensor's values now, of which later steps change nothing."""
    with torch.no_grad():
        return np.array(tensor.detach().cpu().numpy())


def is_passing(error: HeadwaterError) -> bool:
    """May it help to ask again, here or elsewhere?"""
    return isinstance(error, PASSING) and not isinstance(error, VersionError | RefusedError)

"""A session's place among nodes that add their gradients up on an aggregator, so that the trainer gets one sum.

Owns `Circle`, and what it asks of an aggregator. Which one that is, and with what key, the node's operator says: a
trainer names neither, it says only who meets whom (docs/partition.md). `core.circle` has the trainer's side, and what
must hold.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from headwater.core.form import shown
from headwater.core.plain import plain
from headwater.data.parcel import Parcel
from headwater.errors import DamagedError, HeadwaterError
from headwater.node.exchange import Exchange, GoneError

MAX_NODES = 1024
MEET_WITHIN_S = 25.0  # until all have joined; core.circle.GATHER_WITHIN_S is more than that
LOOK_S = 0.25  # how often who waits for a sum looks whether it is wanted still
MAX_MEETING = 4  # threads of a session that wait for others; a trainer goes on to the next before the last has ended
STEP_MARK = 4096  # steps are told apart by what is left of their number; a sum of so much is exact in float32
_NAME = re.compile(r"[0-9a-f]{32}")


class Sum(Protocol):
    """An array on its way."""

    @property
    def is_done(self) -> bool: ...


class Adder(Protocol):
    """A place in a job of an aggregator (`reduce.reducer.Reducer`)."""

    def begin(self, values: np.ndarray) -> Sum:
        """Begin to add an array up, in place."""

    def pump(self, wait_s: float) -> None: ...
    def abandon(self) -> None:
        """Go without a word, which ends the job for the others, too."""


class Aggregator(Protocol):
    """The one that the node's operator named."""

    def join(self, job: str, session: str, rank: int, num_workers: int, within_s: float) -> Adder: ...


class ApartError(Exception):
    """Gradients were not added up; why."""


class Circle:
    """At most one place at a time."""

    def __init__(self, exchange: Exchange, aggregator: Aggregator | None, tenant: str) -> None:
        self._exchange = exchange
        self._aggregator = aggregator
        self._tenant = tenant
        self._lock = threading.Lock()
        self._number = -1  # of the circle that is there, or is meeting
        self._adder: Adder | None = None
        self._num_meeting = 0

    def gather(self, parcel: Parcel) -> None:
        """Join others, in a thread of its own: they may take a while, and steps go on meanwhile."""
        name, number = parcel.about.get("circle"), parcel.number("number")
        num_nodes = parcel.number("nodes", 2, MAX_NODES)
        rank = parcel.number("rank", 0, num_nodes - 1)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DamagedError(f"gather: circle is {shown(name)}; it must be 32 hexadecimal digits")
        # Of another tenant's trainer, or of another operator's nodes, nobody can take a place, whatever it says.
        job = hashlib.blake2b(f"{self._tenant}\n{name}".encode(), digest_size=16).hexdigest()
        self.leave()
        with self._lock:
            self._number = number
            why = ""
            if self._aggregator is None:
                why = "this node has no aggregator; whoever runs it names one with --reduce HOST:PORT"
            elif self._num_meeting >= MAX_MEETING:
                why = "it still waits for nodes that it was to meet before"
            else:
                self._num_meeting += 1
        if why:
            self._exchange.send(Parcel("apart", {"number": number, "why": why}))
            return
        threading.Thread(target=self._meet, args=(job, number, rank, num_nodes), name="circle", daemon=True).start()

    def _meet(self, job: str, number: int, rank: int, num_nodes: int) -> None:
        assert self._aggregator is not None
        adder: Adder | None = None
        said = Parcel("met", {"number": number})
        try:
            adder = self._aggregator.join(job, str(number), rank, num_nodes, MEET_WITHIN_S)
        except HeadwaterError as error:
            said = Parcel("apart", {"number": number, "why": plain(str(error))[:500]})
        finally:
            with self._lock:
                self._num_meeting -= 1
                if adder is not None and self._number == number:
                    self._adder, adder = adder, None
                    is_wanted = True
                else:
                    is_wanted = self._number == number
        if adder is not None:  # the session has gone on to another one, or ended
            adder.abandon()
        if is_wanted:
            with contextlib.suppress(GoneError):
                self._exchange.send(said)

    def add(self, number: int, step: int, arrays: Sequence[np.ndarray]) -> None:
        """Add these up with those of the others, in place. ApartError if that can't be; they may be anything then, and
        the circle has ended."""
        with self._lock:
            adder = self._adder if self._number == number else None
        if adder is None:
            raise ApartError(f"circle {number} is not there")
        marks = np.array([1, step % STEP_MARK], np.float32)
        try:
            sums = [adder.begin(each) for each in (marks, *arrays)]
            while not all(each.is_done for each in sums):
                if self._exchange.is_gone:
                    raise GoneError
                if self._exchange.has_come("drop", "collect", "gather"):
                    raise ApartError("the trainer has given it up")
                adder.pump(LOOK_S)
            if marks[1] != marks[0] * (step % STEP_MARK):
                raise ApartError(f"the sum is not of step {step} alone")
        except HeadwaterError as error:
            self.leave()
            raise ApartError(str(error)) from error
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """For the others, too, it has ended."""
        with self._lock:
            adder, self._adder, self._number = self._adder, None, -1
        if adder is not None:
            adder.abandon()

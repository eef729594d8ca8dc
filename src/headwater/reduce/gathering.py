"""Who comes to an aggregator, and when a job is complete. Owns `Guest`, `Gathering` and the check of a join."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import JoinRefusedError
from headwater.reduce.control import Lines, is_proof, nonce
from headwater.reduce.joining import LANES, UDP, Ticket

MAX_WORKERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes part of lines that are logged
_SESSION = re.compile(r"[A-Za-z0-9._-]{0,64}")


@dataclass
class Guest:
    """A connection, from its first moment on."""

    lines: Lines
    host: str
    nonce: str = field(default_factory=nonce)
    ticket: Ticket | None = None
    their_nonce: str = ""
    port: int = 0
    place: tuple[int, str] | None = None  # the key that was shown, and the job's name: two keys never meet
    has_left: bool = False
    came_at: float = field(default_factory=time.monotonic)


@dataclass
class Gathering:
    """A job that waits for its workers."""

    session: str
    num_workers: int
    lane: str
    guests: dict[int, Guest] = field(default_factory=dict)
    is_joining_root: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.guests) == self.num_workers


def read_join(guest: Guest, said: dict[str, Any], keys: Sequence[bytes], num_workers: int) -> Ticket:
    """What a guest wants to join; JoinRefusedError says why it may not. Fills in what the guest said of itself."""
    names = ("rank", "workers", "weight", "port")
    numbers = [said.get(name) for name in names]
    texts = [said.get(name) for name in ("join", "session", "nonce", "lane")]
    if not all(type(each) is int for each in numbers) or not all(isinstance(each, str) for each in texts):
        raise JoinRefusedError("this is no join: a field is missing or has the wrong type")
    rank, workers, weight, port = (int(each) for each in numbers if each is not None)
    job, session, theirs, lane = (str(each) for each in texts)
    if not _NAME.fullmatch(job) or not _SESSION.fullmatch(session) or len(theirs) > 64:
        raise JoinRefusedError("job must be a name of letters, digits, '.', '_' and '-', at most 64")
    facts = (guest.nonce, theirs, job, session, rank, workers, weight, lane, port)
    # All of them, so that how long it takes tells nothing.
    fitting = [number for number, key in enumerate(keys) if is_proof(said.get("proof"), key, "join", *facts)]
    if not fitting:
        raise JoinRefusedError("the key is not one of this aggregator's; give the job the key of its --key-file, as "
                               "key=… or in HEADWATER_REDUCE_KEY")  # fmt: skip
    if not (1 <= workers <= MAX_WORKERS and 0 <= rank < workers and 1 <= weight <= MAX_WORKERS and 0 <= port < 65536):
        raise JoinRefusedError(f"worker {rank} of {workers} can't be; a job has 1 to {MAX_WORKERS} workers")
    if num_workers and workers != num_workers:
        raise JoinRefusedError(f"the job has {workers} workers, and this aggregator is for jobs of {num_workers} "
                               "(--workers)")  # fmt: skip
    if lane not in LANES or (port == 0) == (lane == UDP):
        raise JoinRefusedError(f"the lane {lane[:20]!r} is none; blocks travel by {' or '.join(LANES)}")
    guest.ticket = Ticket(job, session, rank, workers, weight, keys[fitting[0]], lane)
    guest.their_nonce, guest.port, guest.place = theirs, port, (fitting[0], job)
    return guest.ticket

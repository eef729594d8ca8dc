"""How a worker, or a leaf, joins a job on an aggregator. Owns `LANES`, `Ticket`, `Joined`, `join`."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headwater.core.form import shown
from headwater.errors import AggregatorGoneError, JoinRefusedError
from headwater.reduce.connection import BLOCK_BYTES, Connection
from headwater.reduce.control import PROTOCOL, Lines, is_proof, nonce, proof, said_of, tag_of
from headwater.reduce.packets import BUFFER_BYTES, Layout
from headwater.reduce.wire import Wire

TCP, UDP = LANES = ("tcp", "udp")  # how blocks travel
# What an aggregator may say of a job: whoever answers at its address has memory taken here by it.
MAX_PIECE_BYTES = BLOCK_BYTES
MAX_TOTAL = 1 << 20
MAX_WINDOW_BYTES = 256 << 20


@dataclass(frozen=True)
class Ticket:
    """Who joins what. All workers of one start of a job say the same `session`."""

    job: str
    session: str
    rank: int
    num_workers: int
    weight: int = 1  # workers behind it: more than one for a leaf
    key: bytes = b""
    lane: str = TCP


@dataclass
class Joined:
    """A job that has begun."""

    control: Lines
    wire: Wire | Connection
    layout: Layout
    num_slots: int
    total: int  # workers, those behind leaves counted
    job_id: str
    up_tag: int
    down_tag: int
    heard: list[dict[str, Any]]  # said right behind the start

    def close(self, reason: str = "") -> None:
        if reason:
            self.control.say(leave=reason)
        self.control.close()
        self.wire.close()


def join(
    where: tuple[str, int], ticket: Ticket, within_s: float, make_wire: Callable[[socket.socket, Layout], Wire] = Wire
) -> Joined:
    """Join, and wait until all workers have. AggregatorGoneError if nobody answers or not all come in time."""
    name = f"{where[0]}:{where[1]}"
    deadline = time.monotonic() + within_s
    try:
        sock = socket.create_connection(where, timeout=max(within_s, 0.1))
    except OSError as error:
        raise AggregatorGoneError(f"no aggregator answers at {name}: {error}; start one there (headwater reduce "
                                  f"--listen {name}), or correct switch=") from None  # fmt: skip
    with contextlib.ExitStack() as stack:
        control = Lines(sock)
        stack.callback(control.close)
        heard: list[dict[str, Any]] = []
        hello = _next(control, heard, deadline, name, ticket)
        if hello.get("headwater-reduce") != PROTOCOL or not isinstance(hello.get("nonce"), str):
            raise JoinRefusedError(f"{name} is no aggregator that speaks version {PROTOCOL} of the protocol; it said "
                                   f"{said_of(hello.get('headwater-reduce'))}. Use the same version of headwater on "
                                   "both sides")  # fmt: skip
        ours = nonce()
        udp: socket.socket | None = None
        port = 0
        if ticket.lane == UDP:
            udp = socket.socket(sock.family, socket.SOCK_DGRAM)
            stack.callback(udp.close)
            udp.bind((sock.getsockname()[0], 0))
            udp.connect((sock.getpeername()[0], where[1]))
            port = udp.getsockname()[1]
        said = (
            hello.get("nonce"),
            ours,
            ticket.job,
            ticket.session,
            ticket.rank,
            ticket.num_workers,
            ticket.weight,
            ticket.lane,
            port,
        )
        control.say(join=ticket.job, session=ticket.session, rank=ticket.rank, workers=ticket.num_workers,
                    weight=ticket.weight, lane=ticket.lane, port=port, nonce=ours,
                    proof=proof(ticket.key, "join", *said))  # fmt: skip
        start = _next(control, heard, deadline, name, ticket)
        if "refused" in start:
            why = said_of(start["refused"])
            raise JoinRefusedError(f"{name} refused worker {ticket.rank} of job {ticket.job!r}: {why}")
        if ended := start.get("gone") or start.get("stopped"):
            raise AggregatorGoneError(f"the job {ticket.job!r} did not begin on {name}: {said_of(ended)}")
        job_id = start.get("start")
        facts = tuple(start.get(each) for each in ("slots", "piece_bytes", "total"))
        if (
            not isinstance(job_id, str)
            or not all(type(each) is int and each >= 1 for each in facts)
            or not is_proof(start.get("proof"), ticket.key, "start", ours, job_id, *facts)
        ):
            raise JoinRefusedError(
                f"what answers at {name} does not know the job's key; it is not the aggregator meant"
            )
        num_slots, piece_bytes, total = (int(each or 0) for each in facts)
        if piece_bytes % 8 or piece_bytes > MAX_PIECE_BYTES or total > MAX_TOTAL:
            raise JoinRefusedError(f"{name} would have pieces of {shown(piece_bytes)} bytes and {shown(total)} "
                                   f"workers; the limits are {MAX_PIECE_BYTES:,}, in multiples of 8, and "
                                   f"{MAX_TOTAL:,}")  # fmt: skip
        if num_slots * max(Layout(piece_bytes).block_bytes, BUFFER_BYTES) > MAX_WINDOW_BYTES:
            raise JoinRefusedError(f"{name} would have {shown(num_slots)} blocks under way, which take more than "
                                   f"{MAX_WINDOW_BYTES / 1e6:,.0f} MB here; start it with a smaller "
                                   "--window")  # fmt: skip
        layout = Layout(piece_bytes)
        wire = make_wire(udp, layout) if udp else connect(where, ticket, str(job_id), deadline)
        stack.pop_all()
    return Joined(control, wire, layout, num_slots, total, str(job_id), tag_of(ticket.key, job_id, ticket.rank),
                  tag_of(ticket.key, job_id, "all"), heard)  # fmt: skip


def connect(where: tuple[str, int], ticket: Ticket, job_id: str, deadline: float) -> Connection:
    """The connection for the blocks of a job that has begun. It proves the key by itself: who saw a job start can't
    take a worker's place."""
    name = f"{where[0]}:{where[1]}"
    heard: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        try:
            sock = socket.create_connection(where, timeout=max(deadline - time.monotonic(), 0.1))
        except OSError as error:
            raise AggregatorGoneError(f"the aggregator at {name} answers no more: {error}") from None
        lines = Lines(sock)
        stack.callback(lines.close)
        theirs, ours = _next(lines, heard, deadline, name, ticket).get("nonce"), nonce()
        if not isinstance(theirs, str):
            raise AggregatorGoneError(f"what answers at {name} now is no aggregator")
        lines.say(blocks=job_id, rank=ticket.rank, nonce=ours,
                  proof=proof(ticket.key, "blocks", theirs, ours, job_id, ticket.rank))  # fmt: skip
        answer = _next(lines, heard, deadline, name, ticket)
        if not is_proof(answer.get("open"), ticket.key, "open", ours, job_id, ticket.rank):
            why = said_of(answer.get("refused", "it did not prove the key"))
            raise AggregatorGoneError(f"{name} let worker {ticket.rank} of job {ticket.job!r} join, and then refused "
                                      f"its connection: {why}")  # fmt: skip
        stack.pop_all()
    return Connection(sock)


def _next(control: Lines, heard: list[dict[str, Any]], deadline: float, name: str, ticket: Ticket) -> dict[str, Any]:
    """The next line; those behind it stay in `heard`."""
    waiting = select.poll()  # select() takes no file beyond the 1,024th of a process
    waiting.register(control, select.POLLIN)
    while not heard:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not waiting.poll(left_s * 1000):
            raise AggregatorGoneError(f"the job {ticket.job!r} did not begin on {name} in time: not all of its "
                                      f"{ticket.num_workers} workers have joined; are they all started, with the same "
                                      "job, session and aggregator?")  # fmt: skip
        said = control.hear()
        if said is None:
            raise AggregatorGoneError(f"the aggregator at {name} closed the connection before the job began; its log "
                                      "says why")  # fmt: skip
        heard += said
    return heard.pop(0)

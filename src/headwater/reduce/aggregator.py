"""The aggregator: one thread that lets workers in, moves their packets, and says who is gone. Owns `Aggregator`.

TCP on its port is for joining, for noticing who goes, and for the blocks of jobs that chose that lane: a second
connection of each worker. UDP on the same port is for packets. Each worker has a UDP socket of its own here, connected
to it, so that one worker's burst can't push out another's, and the kernel drops what comes from elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from headwater.errors import AggregatorGoneError, ConfigError, HeadwaterError, JoinRefusedError
from headwater.reduce import flowjob, slotjob
from headwater.reduce.connection import BLOCK_BYTES, GONE_EVENTS, Connection
from headwater.reduce.control import PROTOCOL, Lines, is_proof, nonce, proof, tag_of
from headwater.reduce.flowjob import FlowJob, FlowMember
from headwater.reduce.gathering import Gathering, Guest, read_join
from headwater.reduce.joining import TCP, UDP, Joined, Ticket, join
from headwater.reduce.leaf import FlowUplink, PacketUplink, uplink_of
from headwater.reduce.packets import DEFAULT_PIECE_BYTES, Layout
from headwater.reduce.slotjob import Member, MisfitError, SlotJob
from headwater.reduce.wire import open_wire

# Of each worker's blocks under way, by lane. Packets: 42 ms at 100 Mbit/s, less than a switch port holds. TCP finds out
# by itself what the port holds, and a wider window lets a worker sleep for longer.
WINDOW_BYTES = {TCP: 2 << 20, UDP: 512 << 10}
MEMORY_BYTES = 1 << 30  # for the slots of all jobs
STATUS_S = 10.0
MAX_GUESTS = 4096
_READABLE = select.EPOLLIN | select.EPOLLRDHUP
_TICK_S = 0.1  # how often a leaf looks at the clock
_KERNEL_SHARE = 0.6  # of a socket's buffer that payload may take; the rest is the kernel's own bookkeeping
_ROOT_JOIN_S = 60.0
_SAY_WITHIN_S = 10.0  # what a guest wants to join

log = logging.getLogger(__name__)


@dataclass
class Running:
    """A job that has begun."""

    session: str
    job: SlotJob | FlowJob
    guests: dict[int, Guest]
    uplink: PacketUplink | FlowUplink | None = None


class Aggregator:
    """Serves jobs until it is stopped."""

    def __init__(
        self,
        listen: tuple[str, int],
        *,
        num_workers: int = 0,
        keys: Sequence[bytes] = (),
        window_bytes: int | None = None,
        max_memory_bytes: int = MEMORY_BYTES,
        piece_bytes: int = DEFAULT_PIECE_BYTES,
        root: tuple[str, int] | None = None,
        place: tuple[int, int] = (0, 1),
    ) -> None:
        """`num_workers` 0 takes jobs of any size. `window_bytes` None takes what suits the lane. With
        `root` this is a leaf, the `place[0]`-th of `place[1]`."""
        self._num_workers, self._keys = num_workers, list(keys) or [b""]
        self._window_bytes, self._max_memory_bytes = window_bytes, max_memory_bytes
        self._layout = Layout(piece_bytes)
        self._root, self._place = root, place
        self.counts: Counter[str] = Counter()  # of jobs that ended, and of strangers
        self._num_bytes = 0  # of jobs that ended
        self._jobs: dict[tuple[int, str], Gathering | Running] = {}
        self._guests: dict[int, Guest] = {}
        self._calls: dict[int, Callable[[int], None]] = {}  # per file: what to do when something can be done with it
        self._door, self._strangers = _open_door(listen)
        self.port: int = self._door.getsockname()[1]
        self._epoll = select.epoll()
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)
        self._stopping, self._closing = False, threading.RLock()  # a signal may come anywhere
        self._handed_over: list[Callable[[], None]] = []  # from threads that join a root
        self._status_at, self._status_bytes = time.monotonic(), 0
        self._look_at = 0.0  # when guests and the status are due again
        self._watch(self._door.fileno(), self._let_in)
        self._watch(self._strangers.fileno(), self._count_strangers)
        self._watch(self._told, self._be_told)

    # Life

    def run(self) -> None:
        """Until `stop` is called, from any thread or signal."""
        try:
            while not self._stopping:
                leaves = self._root is not None and self._jobs
                for fd, event in self._epoll.poll(_TICK_S if leaves else STATUS_S / 10):
                    if (call := self._calls.get(fd)) is not None:
                        call(event)
                if leaves:
                    self._tick_uplinks()
                if (now := time.monotonic()) >= self._look_at:
                    self._look_at = now + STATUS_S / 10
                    self._dismiss_silent()
                    if now - self._status_at >= STATUS_S:
                        self._say_status()
        finally:
            self._close()

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    @property
    def tell_fd(self) -> int:
        """Written to, it wakes the loop; for signals."""
        return self._tell

    def _close(self) -> None:
        for place in list(self._jobs):
            self._end(place, "the aggregator was stopped", what="stopped")
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        for each in (self._door, self._strangers):
            each.close()
        self._epoll.close()
        with self._closing:
            os.close(self._told)
            os.close(self._tell)
            self._tell = -1

    def _wake(self) -> None:
        """From any thread; nothing once it has ended: the files' numbers may be others' by then."""
        with self._closing:
            if self._tell >= 0:
                os.write(self._tell, b"\0")

    def _watch(self, fd: int, call: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self._calls[fd] = call
        self._epoll.register(fd, events)

    def _forget(self, fd: int) -> None:
        if self._calls.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _be_told(self, event: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._told, 4096)
        while self._handed_over:
            self._handed_over.pop(0)()

    def _count_strangers(self, event: int) -> None:
        with contextlib.suppress(OSError):
            for _ in range(64):
                self._strangers.recv(1)
                self.counts["foreign"] += 1

    # Joining

    def _let_in(self, event: int) -> None:
        if len(self._guests) >= MAX_GUESTS:
            self._dismiss_oldest()
        try:
            sock, peer = self._door.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no more files may be open
                self._dismiss_oldest()
            return
        try:
            guest = Guest(Lines(sock), peer[0])
        except OSError:  # it is gone again
            sock.close()
            return
        if len(self._guests) >= MAX_GUESTS:
            sock.close()
            return
        self._guests[sock.fileno()] = guest
        self._watch(sock.fileno(), partial(self._hear, guest))
        guest.lines.say(**{"headwater-reduce": PROTOCOL, "nonce": guest.nonce})

    def _dismiss_oldest(self) -> None:
        """Of those who have not said yet what they want: it takes a worker a moment, and a stranger for ever."""
        if (oldest := next((each for each in self._guests.values() if each.ticket is None), None)) is not None:
            self._dismiss(oldest)

    def _dismiss_silent(self) -> None:
        """Guests who have not said for a while what they want: there is room for so many only."""
        latest = time.monotonic() - _SAY_WITHIN_S
        for guest in [each for each in self._guests.values() if each.ticket is None and each.came_at < latest]:
            self._dismiss(guest)

    def _hear(self, guest: Guest, event: int) -> None:
        said = guest.lines.hear()
        if said is None:
            self._gone(guest)
            return
        try:
            self._listen_to(guest, said)
        except Exception:  # a fault of ours that one guest found must not take all jobs along
            log.exception("what %s said could not be dealt with", guest.host)
            self._gone(guest)

    def _listen_to(self, guest: Guest, said: list[dict[str, Any]]) -> None:
        for each in said:
            if "join" in each and guest.ticket is None:
                try:
                    self._join(guest, each)
                except JoinRefusedError as error:
                    log.warning("refused a worker from %s: %s", guest.host, error)
                    guest.lines.say(refused=str(error))
                    self._dismiss(guest)
                    return
            elif "blocks" in each and guest.ticket is None:
                self._attach(guest, each)
                return
            elif "ask" in each:
                self._asked(guest, each["ask"])
            elif "leave" in each:
                self._left(guest)
                return  # whatever it says behind that

    def _join(self, guest: Guest, said: dict[str, object]) -> None:
        ticket = read_join(guest, said, self._keys, self._num_workers)
        assert guest.place is not None
        there = self._jobs.get(guest.place)
        if there is not None and there.session != ticket.session:
            self._end(guest.place, f"another start of job {ticket.job!r} took its place")
            there = None
        if there is None:
            there = self._jobs[guest.place] = Gathering(ticket.session, ticket.num_workers, ticket.lane)
        if isinstance(there, Running) or ticket.rank in there.guests:
            guest.ticket = None
            same = there.guests.get(ticket.rank)
            if same is None:
                raise JoinRefusedError(f"job {ticket.job!r} runs with {len(there.guests)} workers, and this one says "
                                       f"that it is number {ticket.rank} of {ticket.num_workers}; start all workers "
                                       "with the same number, or give each job a name (job=)")  # fmt: skip
            raise JoinRefusedError(f"job {ticket.job!r} has a worker {ticket.rank} already, from {same.host}; give "
                                   "each worker a rank of its own, and each job a name (job=)")  # fmt: skip
        if ticket.num_workers != there.num_workers:
            guest.ticket = None
            raise JoinRefusedError(f"job {ticket.job!r} has {there.num_workers} workers, say those that are here, and "
                                   f"{ticket.num_workers}, says this one")  # fmt: skip
        if ticket.lane != there.lane:
            guest.ticket = None
            raise JoinRefusedError(f"the blocks of job {ticket.job!r} travel by {there.lane}, say those that are here, "
                                   f"and by {ticket.lane}, says this one; give all workers the same lane=")  # fmt: skip
        there.guests[ticket.rank] = guest
        if there.is_complete:
            if self._root is None:
                self._begin(guest.place, there)
            else:
                self._join_root(guest.place, there)

    def _join_root(self, place: tuple[int, str], there: Gathering) -> None:
        """In a thread of its own: other leaves may take a while."""
        assert self._root is not None
        there.is_joining_root = True
        weight = sum(guest.ticket.weight for guest in there.guests.values() if guest.ticket)
        ticket = Ticket(place[1], there.session, self._place[0], self._place[1], weight, self._keys[place[0]],
                        there.lane)  # fmt: skip

        def ask() -> None:
            found: Joined | HeadwaterError
            try:
                found = join(self._root, ticket, _ROOT_JOIN_S)  # type: ignore[arg-type]
            except HeadwaterError as error:
                found = error
            self._handed_over.append(lambda: self._root_said(place, there, found))
            self._wake()

        threading.Thread(target=ask, name="join the root", daemon=True).start()

    def _root_said(self, place: tuple[int, str], there: Gathering, found: Joined | HeadwaterError) -> None:
        if self._jobs.get(place) is not there:
            if isinstance(found, Joined):
                found.close("done")
        elif isinstance(found, Joined):
            self._begin(place, there, found)
        else:
            self._end(place, f"its root can't be joined: {found}", what="stopped")

    def _begin(self, place: tuple[int, str], there: Gathering, joined: Joined | None = None) -> None:
        """All workers are here; a leaf has `joined` its root."""
        key, job_id = self._keys[place[0]], nonce()
        guests = [there.guests[rank] for rank in range(there.num_workers)]
        total = joined.total if joined else sum(guest.ticket.weight for guest in guests if guest.ticket)
        uplink: PacketUplink | FlowUplink | None = None
        try:
            if joined:
                uplink = uplink_of(joined)
            job: SlotJob | FlowJob
            if there.lane == TCP:
                job = self._flow_job(place, guests, job_id, total, joined)
            else:
                job = self._slot_job(place, guests, job_id, total, joined)
        except (OSError, ConfigError) as error:
            if joined:
                joined.close("done")
            self._end(place, f"the job can't begin: {error}", what="stopped")
            return
        self._jobs[place] = Running(there.session, job, there.guests, uplink)
        if uplink is not None:
            job.root, uplink.job = uplink, job
            self._watch(uplink.fileno(), partial(self._uplink_ready, place, uplink), _READABLE)
            self._watch(uplink.joined.control.fileno(), partial(self._uplink_said, place, uplink))
        if isinstance(job, SlotJob):
            for member in job.members:
                self._watch(member.fileno(), partial(self._ready, place, job, member.rank))
        for guest in guests:
            facts = (job.slots, job.layout.piece_bytes, total)
            guest.lines.say(start=job_id, slots=job.slots, piece_bytes=job.layout.piece_bytes, total=total,
                            proof=proof(key, "start", guest.their_nonce, job_id, *facts))  # fmt: skip
        log.info("job %s begins", place[1], extra={"fields": {
            "workers": len(guests), "lane": there.lane, "slots": job.slots,
            "memory_mb": round(job.memory_bytes() / 1e6, 1)}})  # fmt: skip

    def _slot_job(
        self, place: tuple[int, str], guests: list[Guest], job_id: str, total: int, joined: Joined | None
    ) -> SlotJob:
        key, layout = self._keys[place[0]], joined.layout if joined else self._layout
        members: list[Member] = []
        try:
            for rank, guest in enumerate(guests):
                assert guest.ticket is not None
                local = guest.lines.sock.getsockname()[0]
                wire = open_wire((local, self.port), (guest.host, guest.port), layout, shared=True)
                members.append(Member(rank, guest.ticket.weight, guest.lines, wire, tag_of(key, job_id, rank)))
            block_bytes = layout.pieces * layout.packet_bytes
            receive_bytes = min(member.wire.receive_bytes for member in members)
            wanted, held = self._wanted_slots(UDP, layout.block_bytes), int(receive_bytes * _KERNEL_SHARE / block_bytes)
            if held < wanted:
                log.warning("the kernel gives a socket %d bytes, which hold %d blocks where %d are wanted; set the "
                            "sysctl net.core.rmem_max to 4194304", receive_bytes, held, wanted)  # fmt: skip
            num_slots = self._num_slots(min(wanted, held), partial(slotjob.memory_bytes, len(guests)), joined)
        except BaseException:
            for member in members:
                member.wire.close()
            raise
        return SlotJob(place[1], members, layout, num_slots, total, tag_of(key, job_id, "all"))

    def _flow_job(
        self, place: tuple[int, str], guests: list[Guest], job_id: str, total: int, joined: Joined | None
    ) -> FlowJob:
        wanted = self._wanted_slots(TCP, BLOCK_BYTES)
        num_slots = self._num_slots(wanted, partial(flowjob.memory_bytes, len(guests)), joined)
        members = [FlowMember(rank, guest.ticket.weight, guest.lines)
                   for rank, guest in enumerate(guests) if guest.ticket]  # fmt: skip
        return FlowJob(place[1], job_id, members, num_slots, total)

    def _wanted_slots(self, lane: str, block_bytes: int) -> int:
        return max(2, (self._window_bytes or WINDOW_BYTES[lane]) // block_bytes)

    def _num_slots(self, wanted: int, memory_bytes: Callable[[int], int], joined: Joined | None) -> int:
        """As many as are wanted and memory allows; a leaf has as many as its root, or none."""
        used = sum(each.job.memory_bytes() for each in self._running)
        if joined is not None:
            if (num_bytes := memory_bytes(joined.num_slots)) > self._max_memory_bytes - used:
                raise ConfigError(f"the job takes {num_bytes:,} bytes with the {joined.num_slots} slots of its root; "
                                  f"of {self._max_memory_bytes:,} (--memory) {used:,} are taken: allow more here, or "
                                  "less under way at the root (--window)")  # fmt: skip
            return joined.num_slots
        a_slot = memory_bytes(1) - memory_bytes(0)
        room = (self._max_memory_bytes - used - memory_bytes(0)) // a_slot
        if room < 1:
            raise ConfigError(f"the job takes {memory_bytes(0):,} bytes and {a_slot:,} a slot, of "
                              f"{self._max_memory_bytes:,} (--memory) {used:,} are taken; allow more")  # fmt: skip
        return max(1, min(wanted, room))

    # The lane tcp

    def _attach(self, guest: Guest, said: dict[str, object]) -> None:
        """A guest is the connection for the blocks of a worker that has joined, if it proves the key."""
        job_id, rank, theirs = (said.get(name) for name in ("blocks", "rank", "nonce"))
        for place, there in self._jobs.items():
            key = self._keys[place[0]]
            if (
                isinstance(there, Running) and isinstance(there.job, FlowJob) and there.job.job_id == job_id
                and isinstance(theirs, str) and type(rank) is int and 0 <= rank < len(there.job.members)
                and is_proof(said.get("proof"), key, "blocks", guest.nonce, theirs, job_id, rank)
                and there.job.members[rank].wire is None and not guest.lines.has_more
            ):  # fmt: skip
                fd = guest.lines.fileno()
                self._forget(fd)
                self._guests.pop(fd, None)
                guest.lines.say(open=proof(key, "open", theirs, job_id, rank))
                there.job.members[rank].wire = Connection(guest.lines.sock)
                self._watch(fd, partial(self._ready, place, there.job, rank))
                return
        self.counts["foreign"] += 1
        guest.lines.say(refused="the job is over, or has this connection already, or the key is another")
        self._dismiss(guest)

    def _asked(self, guest: Guest, block: object) -> None:
        there = self._jobs.get(guest.place) if guest.place else None
        if isinstance(there, Running) and isinstance(there.job, FlowJob) and type(block) is int:
            assert guest.ticket is not None
            if there.guests.get(guest.ticket.rank) is guest:
                there.job.asked(guest.ticket.rank, block)

    # Packets

    def _ready(self, place: tuple[int, str], job: SlotJob | FlowJob, rank: int, event: int) -> None:
        try:
            if event & select.EPOLLOUT:
                job.writable(rank)
            if event & ~select.EPOLLOUT:
                job.readable(rank)
        except MisfitError as error:
            self._end(place, str(error), what="fault")
            return
        except Exception:  # a fault of ours must not take other jobs along
            log.exception("job %s failed", job.name)
            self._end(place, "the aggregator failed at this job; its log has the reason", what="stopped")
            return
        if isinstance(job, FlowJob):
            for member in job.members:
                if member.wire is not None and member.wire.is_cut and member.fileno() in self._calls:
                    self._forget(member.fileno())  # its other connection tells whether it has left or is gone
        self._look_for_room(job)

    def _look_for_room(self, job: SlotJob | FlowJob) -> None:
        """Hear of room in the kernel where something waits for it."""
        each: Any
        for each in (*job.members, job.root) if job.root is not None else job.members:
            if each.has_backlog != each.waits_for_room and each.fileno() in self._calls:
                each.waits_for_room = not each.waits_for_room
                events = _READABLE if each is job.root else select.EPOLLIN
                self._epoll.modify(each.fileno(), events | (select.EPOLLOUT if each.waits_for_room else 0))

    def _uplink_ready(self, place: tuple[int, str], uplink: PacketUplink | FlowUplink, event: int) -> None:
        assert uplink.job is not None
        try:
            if event & select.EPOLLOUT:
                uplink.stream.writable()
            if event & ~select.EPOLLOUT:
                uplink.readable()
            if event & GONE_EVENTS and isinstance(uplink, FlowUplink):
                uplink.hear()  # the reason, if it is here
                raise AggregatorGoneError("the root closed the connection for blocks")
        except AggregatorGoneError as error:
            self._end(place, str(error), what="stopped")
            return
        except Exception:
            log.exception("job %s failed", uplink.job.name)
            self._end(place, "the leaf failed at this job; its log has the reason", what="stopped")
            return
        self._look_for_room(uplink.job)

    def _uplink_said(self, place: tuple[int, str], uplink: PacketUplink | FlowUplink, event: int) -> None:
        try:
            uplink.hear()
        except HeadwaterError as error:
            self._end(place, str(error), what="stopped")

    def _tick_uplinks(self) -> None:
        for place, there in list(self._jobs.items()):
            if isinstance(there, Running) and there.uplink is not None:
                try:
                    there.uplink.stream.writable()
                    there.uplink.tick()
                    self._look_for_room(there.job)
                except HeadwaterError as error:
                    self._end(place, str(error), what="stopped")

    # Leaving

    def _left(self, guest: Guest) -> None:
        """A worker is done. Others may still want sums that it took part in."""
        guest.has_left = True
        there = self._jobs.get(guest.place) if guest.place else None
        if there is None or guest not in there.guests.values():
            self._dismiss(guest)
            return
        assert guest.ticket is not None
        if isinstance(there, Gathering):
            self._gone(guest)
        elif all(each.has_left for each in there.guests.values()):
            self._end(guest.place, "all workers have left")  # type: ignore[arg-type]
        else:
            for each in there.guests.values():
                each.lines.say(left=guest.ticket.rank)
            self._forget(guest.lines.fileno())
            self._guests.pop(guest.lines.fileno(), None)

    def _gone(self, guest: Guest) -> None:
        """A connection is closed, and nothing was said."""
        place = guest.place
        there = self._jobs.get(place) if place else None
        self._dismiss(guest)
        if place is None or there is None or guest.ticket is None or there.guests.get(guest.ticket.rank) is not guest:
            return
        if isinstance(there, Gathering) and not there.is_joining_root:
            del there.guests[guest.ticket.rank]  # it may come again
            if not there.guests:
                del self._jobs[place]
            return
        self._end(place, f"worker {guest.ticket.rank} of job {guest.ticket.job!r} (at {guest.host}) is gone: its "
                  "connection to the aggregator was closed")  # fmt: skip

    def _end(self, place: tuple[int, str], reason: str, what: str = "gone") -> None:
        there = self._jobs.pop(place, None)
        if there is None:
            return
        log.info("job %s ends: %s", place[1], reason)
        if isinstance(there, Running):
            self.counts.update(there.job.counts)
            self._num_bytes += there.job.num_bytes
            for member in there.job.members:
                self._forget(member.fileno())
            if there.uplink is not None:
                for each in (there.uplink.joined.wire, there.uplink.joined.control):
                    self._forget(each.fileno())
                there.uplink.close()
        for guest in there.guests.values():
            if not guest.has_left:
                guest.lines.say(**{what: reason})
            self._dismiss(guest)
        if isinstance(there, Running):
            there.job.close()

    def _dismiss(self, guest: Guest) -> None:
        fd = guest.lines.fileno()
        if fd >= 0:
            self._forget(fd)
            self._guests.pop(fd, None)
            guest.lines.close()

    # Telling

    @property
    def _running(self) -> list[Running]:
        return [there for there in self._jobs.values() if isinstance(there, Running)]

    @property
    def num_bytes(self) -> int:
        """Added up so far, counted once for all workers."""
        return self._num_bytes + sum(there.job.num_bytes for there in self._running)

    def all_counts(self) -> Counter[str]:
        return sum((there.job.counts for there in self._running), Counter(self.counts))

    def _say_status(self) -> None:
        now, num_bytes = time.monotonic(), self.num_bytes
        if num_bytes != self._status_bytes:
            rate = (num_bytes - self._status_bytes) / (now - self._status_at)
            log.info("%d jobs, %.0f MB added up so far, %.1f MB/s", len(self._running), num_bytes / 1e6, rate / 1e6,
                     extra={"fields": {f"dropped_{name.replace(' ', '_')}": count
                                       for name, count in self.all_counts().items()}})  # fmt: skip
        self._status_at, self._status_bytes = now, num_bytes


def _open_door(listen: tuple[str, int]) -> tuple[socket.socket, socket.socket]:
    """TCP for joining; and a UDP socket that holds the same port, and gets what comes from strangers."""
    family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
    with contextlib.ExitStack() as stack:
        try:
            door = stack.enter_context(socket.create_server(listen, family=family, backlog=256))
            strangers = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            strangers.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            strangers.bind((listen[0], door.getsockname()[1]))
        except OSError as error:
            raise ConfigError(f"can't listen on {listen[0]}:{listen[1]}: {error}; choose another --listen, or end what "
                              "listens there") from None  # fmt: skip
        stack.pop_all()
    door.setblocking(False)
    strangers.setblocking(False)
    return door, strangers

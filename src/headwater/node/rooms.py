"""The clock, the lock and the thread around `core.admission`: a room for each request that needs memory.

Owns `Rooms` and `Room`. What the admission decides about engines is carried out by a thread of its own, since that may
wait for an inference to end; requests wait in the threads that serve them.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from headwater.core.admission import Admission, Decision, Need, Refuse, Shrink, Unload, Wake
from headwater.data.extract import Gate, Open
from headwater.data.memory import give_back
from headwater.errors import RefusedError

log = logging.getLogger(__name__)

_TICK_S = 1.0
_Wake = Callable[[], None]


class Engines(Protocol):
    """Where engines are kept, by name."""

    def shrink(self, name: str) -> None: ...

    def unload(self, name: str) -> None: ...


class Rooms:
    """The memory that requests share. Without a budget everyone gets what was asked for: for benchmarks alone."""

    def __init__(self, budget_bytes: int | None, engines: Engines, **times: float) -> None:
        """`times` are those of `Admission`."""
        self.budget_bytes = budget_bytes
        self._engines = engines
        self._machine = Admission(budget_bytes or 0, **times)
        self._wake = threading.Condition()
        self._rooms: dict[int, Room] = {}
        self._numbers = itertools.count(1)
        self._work: list[Shrink | Unload] = []
        self._closed = False
        if budget_bytes is not None:
            threading.Thread(target=self._keep, name="memory", daemon=True).start()

    def open(self, tenant: str, need: Need, *, errand: bool = False) -> Room:
        """A room for a request of this tenant; it may have to wait in front of it."""
        if self.budget_bytes is None:
            return Room(self, None, need)
        with self._wake:
            room = Room(self, next(self._numbers), need)
            assert room.number is not None
            self._rooms[room.number] = room
            decisions = self._machine.ask(room.number, tenant, need, time.monotonic(), errand=errand)
        self._carry_out(decisions)
        return room

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def to_json(self) -> dict[str, Any]:
        """For whoever asks how the memory is divided."""
        with self._wake:
            return {
                "budget_bytes": self.budget_bytes,
                "used_bytes": self._machine.used_bytes(),
                "num_waiting": self._machine.num_waiting,
                "tenants": [{"tenant": name, "group_rows": rows, "held_rows": held, "row_bytes": num_bytes}
                            for name, rows, held, num_bytes in self._machine.shares()],
            }  # fmt: skip

    def _carry_out(self, decisions: list[Decision]) -> None:
        """Not under the lock: who is woken takes its own."""
        woken: list[_Wake] = []
        with self._wake:
            for decision in decisions:
                match decision:
                    case Wake(request):
                        woken += [self._rooms[request].worth_asking] if request in self._rooms else []
                    case Refuse(request, need_bytes):
                        if request in self._rooms:
                            self._rooms[request].missing_bytes = need_bytes
                            woken.append(self._rooms[request].worth_asking)  # it may be in the middle of its chunk
                    case Shrink() | Unload():
                        self._work.append(decision)
            if decisions:
                self._wake.notify_all()
        for each in woken:
            each()

    def _keep(self) -> None:
        """The thread: what engines have to do, and that time passes."""
        ticked = time.monotonic()
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._work or self._closed, timeout=_TICK_S)
                if self._closed:
                    return
                work, self._work = self._work, []
            for each in work:
                self._let_go(each)
            if time.monotonic() - ticked >= _TICK_S:
                ticked = time.monotonic()
                self._tell(lambda: self._machine.tick(time.monotonic()))

    def _let_go(self, decision: Shrink | Unload) -> None:
        name = decision.engine
        if isinstance(decision, Shrink):
            self._engines.shrink(name)
            give_back()
            self._tell(lambda: self._machine.shrunk(name, time.monotonic()))
            return
        with self._wake:
            if not self._machine.may_unload(name):
                return
            self._engines.unload(name)  # under the lock, so that nobody comes to need it meanwhile
        gc.collect()  # an engine may be part of a ring of references
        give_back()
        self._tell(lambda: self._machine.unloaded(name, time.monotonic()))

    def _tell(self, event: Callable[[], list[Decision]]) -> None:
        with self._wake:
            decisions = event()
        self._carry_out(decisions)


class Room(Gate):
    """One request's: wait until it is in, then take groups. Close it when the request ends, however it does."""

    def __init__(self, rooms: Rooms, number: int | None, need: Need) -> None:
        self._rooms = rooms
        self.number = number
        self._open = Open(need.wanted)
        self.missing_bytes: int | None = None
        self.holds: Any = None  # what stays in memory while it is open
        self.worth_asking: _Wake = lambda: None

    @property
    def is_in(self) -> bool:
        """Whether the tenant has its share. RefusedError if it never can."""
        with self._rooms._wake:
            return self._is_in()

    def wait(self, within_s: float) -> bool:
        """Until it is in, or for so long; whether it is."""
        with self._rooms._wake:
            return self._rooms._wake.wait_for(self._is_in, timeout=within_s)

    def _is_in(self) -> bool:
        self._check()
        return self.number is None or self._rooms._machine.is_in(self.number)

    def _check(self) -> None:
        if self.missing_bytes is not None:
            assert self._rooms.budget_bytes is not None
            raise RefusedError(
                f"this takes {self.missing_bytes / 1e9:.2f} GB of memory on the node even for one row at once, and "
                f"there are {self._rooms.budget_bytes / 1e9:.2f} GB for all jobs; cut earlier, or give the node more "
                "(`headwater serve --memory`)"
            )

    @property
    def place(self) -> tuple[int, int] | None:
        """Its place among those that wait for memory, and how many they are; None if it is in."""
        with self._rooms._wake:
            if self.number is None or self._rooms._machine.is_in(self.number):
                return None
            return self._rooms._machine.place(self.number)

    @property
    def granted_bytes(self) -> int | None:
        """What the tenant may take in all; None if there is no limit."""
        with self._rooms._wake:
            return None if self.number is None else self._rooms._machine.granted_bytes(self.number)

    def needs(self, need: Need, *, measured: bool = False) -> None:
        """From now on. `measured`: of an engine that is loaded."""
        if (number := self.number) is not None:
            machine = self._rooms._machine
            event = machine.measured if measured else machine.needs
            self._rooms._tell(lambda: event(number, need, time.monotonic()))

    def take(self, most: int) -> int | None:
        """As of a gate. RefusedError if its tenant can't be served any more."""
        if self.number is None:
            return self._open.take(most)
        with self._rooms._wake:
            if self.number not in self._rooms._rooms:  # closed meanwhile
                return None
            self._check()
            return self._rooms._machine.take(self.number, most, time.monotonic())

    def give(self, rows: int) -> None:
        if (number := self.number) is not None:
            with self._rooms._wake:
                is_open = number in self._rooms._rooms
                decisions = self._rooms._machine.give(number, rows, time.monotonic()) if is_open else []
            self._rooms._carry_out(decisions)

    def when_worth_asking(self, ask: _Wake) -> None:
        self.worth_asking = ask

    def close(self) -> None:
        self.holds = None
        self.worth_asking = lambda: None  # or a chunk that was given up would hold its rows in a ring with this room
        if (number := self.number) is not None:
            with self._rooms._wake:
                was_open = self._rooms._rooms.pop(number, None) is not None
                decisions = self._rooms._machine.done(number, time.monotonic()) if was_open else []
            self._rooms._carry_out(decisions)

    def __enter__(self) -> Room:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

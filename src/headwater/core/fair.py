"""Whose task runs next: the one's who has had the least of the threads' time.

Owns `Fair`, a queue without clock or lock: how long a task took is told. Tenants that have something to do get time by
their weights (one each, unless told otherwise), however long their tasks are: with tasks in the order they came, a
tenant with a large model would get as much more time as its groups take longer than the others'.

A tenant's account is the seconds it was given ÷ its weight. It begins at the lowest account of those that have
something to do, and after a while without tasks it goes on no more than `LAG_S` of its time below it: nobody saves time
up, and who waits for its store for a moment loses nothing. A task is put on the account as it begins, with what such
tasks of that tenant took so far, since several threads choose before the first is done; what it really took puts it
right.

What holds (tests/core/test_fair.py): nothing is lost or doubled; of a tenant's tasks the most urgent comes first, then
the oldest; tenants of one weight that always have something to do are never further apart than two tasks for each
thread; a tenant waits for no more than that behind each of the others. Tasks of a place that has as many running as it
may (`core.places`) wait, and hold up nobody else.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headwater.core.places import Places

T = TypeVar("T")

LAG_S = 2.0
_NEW = 0.25  # how much the last task says about the next one of its kind


@dataclass
class _Account:
    had_s: float = 0.0
    running: int = 0
    tasks: list[tuple[int, int, object]] = field(default_factory=list)
    usual_s: dict[int, float] = field(default_factory=dict)  # urgency → what a task takes
    weight: float = 1.0


@dataclass(frozen=True)
class Turn:
    """One task's: whose it is, of which kind, what it was taken to take, by which weight that was put down, and
    where it runs."""

    tenant: str
    urgency: int
    guessed_s: float
    weight: float = 1.0
    place: str = ""


class Fair(Generic[T]):
    def __init__(self, places: Places | None = None) -> None:
        self._places = places
        self._accounts: dict[tuple[str, str], _Account] = {}  # by tenant and place
        self._counter = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def may(self) -> bool:
        """Whether there is a task that may begin now."""
        if self._places is None:
            return bool(self._size)
        return any(account.tasks and self._places.may(place) for (_, place), account in self._accounts.items())

    def put(self, tenant: str, urgency: int, task: T, weight: float = 1.0, place: str = "") -> None:
        """`weight` is the tenant's from here on."""
        account = self._accounts.get((tenant, place))
        if account is None:
            account = self._accounts[tenant, place] = _Account(self._lowest())
        elif not account.tasks and not account.running:
            account.had_s = max(account.had_s, self._lowest() - LAG_S / max(weight, 1.0))
        account.weight = weight
        self._counter += 1
        self._size += 1
        heapq.heappush(account.tasks, (urgency, self._counter, task))

    def take(self) -> tuple[Turn, T]:
        """The next task; there must be one that may begin."""
        waiting = [(account.had_s, account.tasks[0][1], key) for key, account in self._accounts.items()
                   if account.tasks and (self._places is None or self._places.may(key[1]))]  # fmt: skip
        _, _, key = min(waiting)
        account = self._accounts[key]
        if self._places is not None:
            self._places.take(key[1])
        urgency, _, task = heapq.heappop(account.tasks)
        guessed_s = account.usual_s.get(urgency, 0.0)
        account.had_s += guessed_s / account.weight
        account.running += 1
        self._size -= 1
        return Turn(key[0], urgency, guessed_s, account.weight, key[1]), task  # type: ignore[return-value]

    def took(self, turn: Turn, seconds: float) -> None:
        """A task is done."""
        if self._places is not None:
            self._places.give(turn.place)
        account = self._accounts.get((turn.tenant, turn.place))
        if account is None:  # forgotten meanwhile
            return
        account.had_s += (seconds - turn.guessed_s) / turn.weight
        account.running -= 1
        usual_s = account.usual_s.get(turn.urgency, seconds)
        account.usual_s[turn.urgency] = usual_s + _NEW * (seconds - usual_s)
        if not account.running and not account.tasks and len(self._accounts) > 1:
            self._forget_the_idle()

    def clear(self) -> None:
        """Drop what is queued."""
        self._accounts.clear()
        self._size = 0

    def _lowest(self) -> float:
        """Of those that have something to do; else where the last of them stood."""
        busy = [each.had_s for each in self._accounts.values() if each.tasks or each.running]
        return min(busy) if busy else max((each.had_s for each in self._accounts.values()), default=0.0)

    def _forget_the_idle(self) -> None:
        """Those that have saved up what one can; names must not pile up."""
        lowest = self._lowest() - LAG_S
        for key, each in list(self._accounts.items()):
            if not each.tasks and not each.running and each.had_s <= lowest and len(self._accounts) > 1:
                del self._accounts[key]

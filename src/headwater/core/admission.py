"""Who of a node's tenants may begin a group now, and of how many rows; who waits for memory; what has to be let go.

Owns `Admission`, a state machine without clock or lock: events and times go in, decisions come out. How large groups
may be is `core.batching`'s rule, asked again whenever a tenant comes, goes, or is measured. This file sees to it that
the change is safe: memory is counted as taken until it has really come back, not from when that was decided.

What counts against the budget:
- an engine, from the moment that somebody who is in needs it until it is unloaded;
- for a tenant's largest group since its engine was last shrunk, what the engine keeps for it (`work_bytes` a row): an
  engine gives nothing back by itself;
- for rows between their reading and their sending `hold_bytes` each, and at least for `GROUPS` groups of a tenant that
  is in, so that it can always go on.

A tenant is in once all this fits. It may hold more than `GROUPS` groups from what nobody else waits for. One that has
asked for nothing for `idle_s` gives its share back; its engine stays until somebody needs the memory, or for `gone_s`.

What holds (tests/core/test_admission.py explores it exhaustively): the count never exceeds the budget; while a request
is open, somebody can go on, or an engine is about to give memory back; nobody is overtaken; who is in stays in, unless
it is found to need more; a group has a row at least; when all are gone, everything is given back. A request may come to
need more for each row than was known of its tenant: what its tenant holds then counts for more than it takes, and the
count may be beyond the budget until some of that is sent. What is really taken never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from headwater.core.batching import Demand, most, share

GROUPS = 3  # one that is sent, one in the engine, one that is read and decoded
IDLE_S = 10.0  # a job that computes asks again within a step or two; one that evaluates its model does not
GONE_S = 120.0  # an engine takes a second or two to load again


@dataclass(frozen=True)
class Need:
    """What a tenant takes: bytes of its engine however few rows; for each row of a group, bytes that the engine works
    in, but for no more than `piece` rows at once, and bytes of pixels and results; and how large a group is good for
    what."""

    engine: str
    engine_bytes: int
    work_bytes: int
    hold_bytes: int
    wanted: int
    weight: float = 1.0
    rates: tuple[tuple[int, float], ...] = ()
    piece: int | None = None

    def work(self, rows: int) -> int:
        """Bytes that the engine works in for groups of so many rows."""
        return (rows if self.piece is None else min(rows, self.piece)) * self.work_bytes

    def num_bytes(self, rows: int) -> int:
        return self.engine_bytes + self.work(rows) + rows * GROUPS * self.hold_bytes


@dataclass(frozen=True)
class Wake:
    """This request may ask again: it is in, or a group may begin."""

    request: int


@dataclass(frozen=True)
class Refuse:
    """This request can't be served even by an empty node: so much is missing. It may have been served so far, until
    another of its tenant was found to take too much."""

    request: int
    need_bytes: int


@dataclass(frozen=True)
class Shrink:
    """Have this engine give back what it keeps from larger groups; then tell `shrunk`."""

    engine: str


@dataclass(frozen=True)
class Unload:
    """Let go of this engine; then tell `unloaded`."""

    engine: str


Decision = Wake | Refuse | Shrink | Unload


@dataclass
class _Tenant:
    need: Need
    place: int
    last_s: float
    is_errand: bool
    requests: dict[int, list[int]] = field(default_factory=dict)  # request → rows of each group under way
    holds: dict[int, int] = field(default_factory=dict)  # request → what a row of it holds; the most counts for all
    hungry: set[int] = field(default_factory=set)  # requests that were told to wait
    begun: set[int] = field(default_factory=set)  # requests that have had a group, and so hold on to their engine
    is_active: bool = True
    is_in: bool = False
    rows: int = 0  # of a group that begins now
    goal: int = 0  # what `rows` will be, once memory is there
    kept_rows: int = 0  # the largest group since the engine was shrunk

    @property
    def held(self) -> int:
        return sum(map(sum, self.requests.values()))

    @property
    def num_groups(self) -> int:
        return sum(map(len, self.requests.values()))

    @property
    def largest(self) -> int:
        return max((rows for groups in self.requests.values() for rows in groups), default=0)

    def needs(self, request: int, need: Need) -> None:
        """What this request takes, from now on; its samples may be larger or smaller than those of the others."""
        self.holds[request] = need.hold_bytes
        self.need = replace(need, hold_bytes=max(self.holds.values()))

    def row_bytes(self, rows: int, more_held: int = 0) -> int:
        """What its rows take where groups of so many may begin."""
        held = max(GROUPS * rows, self.held + more_held)
        return self.need.work(max(rows, self.kept_rows)) + held * self.need.hold_bytes


class Admission:
    def __init__(self, budget_bytes: int, *, idle_s: float = IDLE_S, gone_s: float = GONE_S) -> None:
        self.budget_bytes = budget_bytes
        self._idle_s, self._gone_s = idle_s, gone_s
        self._tenants: dict[str, _Tenant] = {}
        self._of: dict[int, str] = {}  # request → tenant
        self._loaded: dict[str, int] = {}  # engine → its bytes
        self._used_s: dict[str, float] = {}  # engine → when it was last of use
        self._letting_go: set[str] = set()  # engines that are being shrunk or unloaded
        self._arrivals = 0

    # What happens

    def ask(self, request: int, tenant: str, need: Need, now: float, *, errand: bool = False) -> list[Decision]:
        """A request comes. An errand's tenant is gone as soon as it is done."""
        assert request not in self._of
        found = self._tenants.get(tenant)
        if found is None:
            self._arrivals += 1
            found = self._tenants[tenant] = _Tenant(need, self._arrivals, now, errand)
        elif not found.is_active:
            self._arrivals += 1
            found.place, found.is_active = self._arrivals, True
        found.needs(request, need)
        found.last_s = now
        found.requests[request] = []
        found.hungry.add(request)
        self._of[request] = tenant
        return self._resolve(now)

    def measured(self, request: int, need: Need, now: float) -> list[Decision]:
        """The tenant's engine is loaded, and this is what it takes."""
        if need.engine:
            self._loaded[need.engine] = need.engine_bytes
            self._used_s[need.engine] = now
        return self.needs(request, need, now)

    def needs(self, request: int, need: Need, now: float) -> list[Decision]:
        """The tenant needs something else from now on."""
        tenant = self._tenant(request)
        tenant.last_s = now
        before = tenant.need
        tenant.needs(request, need)
        return [] if tenant.need == before else self._resolve(now)

    def take(self, request: int, at_most: int, now: float) -> int | None:
        """The rows that the next group of this request may have; None if it has to wait until it is woken."""
        tenant = self._tenant(request)
        tenant.last_s = now
        if tenant.is_in:
            rows = min(tenant.rows, at_most)
            assert rows >= 1
            is_own = tenant.num_groups < GROUPS and tenant.held + rows <= GROUPS * tenant.rows
            is_spare = self._is_calm() and self.used_bytes(tenant, rows) <= self.budget_bytes
            if is_own or is_spare:
                tenant.requests[request].append(rows)
                tenant.kept_rows = max(tenant.kept_rows, rows)
                tenant.hungry.discard(request)
                tenant.begun.add(request)
                return rows
        tenant.hungry.add(request)
        return None

    def give(self, request: int, rows: int, now: float) -> list[Decision]:
        """A group is sent."""
        tenant = self._tenant(request)
        tenant.last_s = now
        tenant.requests[request].remove(rows)
        return self._settle()

    def done(self, request: int, now: float) -> list[Decision]:
        """A request has ended, however it did."""
        name = self._of.pop(request)
        tenant = self._tenants[name]
        tenant.last_s = now
        del tenant.requests[request], tenant.holds[request]
        tenant.hungry.discard(request)
        tenant.begun.discard(request)
        if tenant.need.engine in self._used_s:
            self._used_s[tenant.need.engine] = now
        if tenant.is_errand and not tenant.requests:
            del self._tenants[name]
            return self._resolve(now)
        if tenant.holds and (hold_bytes := max(tenant.holds.values())) != tenant.need.hold_bytes:
            tenant.need = replace(tenant.need, hold_bytes=hold_bytes)
            return self._resolve(now)
        return self._settle()

    def tick(self, now: float) -> list[Decision]:
        """Time passes."""
        silent = [each for each in self._tenants.values()
                  if each.is_active and not each.requests and now - each.last_s > self._idle_s]  # fmt: skip
        for each in silent:
            each.is_active = each.is_in = False
            each.rows = each.goal = 0
        decisions = self._resolve(now) if silent else self._settle()
        old = [name for name in self._idle_engines() if now - self._used_s[name] > self._gone_s]
        for name in old:
            if name not in self._letting_go:
                self._letting_go.add(name)
                decisions.append(Unload(name))
        self._forget()
        return decisions

    def shrunk(self, engine: str, now: float) -> list[Decision]:
        """An engine keeps no more than for the groups that are under way."""
        self._letting_go.discard(engine)
        for each in self._tenants.values():
            if each.need.engine == engine:
                each.kept_rows = each.largest
        return self._settle()

    def may_unload(self, engine: str) -> bool:
        """Whether still nobody needs it; if somebody does, it stays, and the decision is forgotten."""
        if engine in self._idle_engines():
            return True
        self._letting_go.discard(engine)
        return False

    def unloaded(self, engine: str, now: float) -> list[Decision]:
        """An engine is gone."""
        self._letting_go.discard(engine)
        self._loaded.pop(engine, None)
        self._used_s.pop(engine, None)
        self._forget()
        return self._resolve(now)

    # What is known

    def is_in(self, request: int) -> bool:
        return self._tenant(request).is_in

    def granted_bytes(self, request: int) -> int:
        """What the tenant may take in all, its engine included."""
        tenant = self._tenant(request)
        return tenant.need.num_bytes(tenant.rows)

    def place(self, request: int) -> tuple[int, int]:
        """The place of this request's tenant among those that wait, and how many they are."""
        places = [each.place for each in self._waiting()]
        return places.index(self._tenant(request).place) + 1, len(places)

    def used_bytes(self, tenant: _Tenant | None = None, more_held: int = 0) -> int:
        """What counts against the budget; or would, if this tenant held some more rows."""
        engines = dict(self._loaded)
        total = 0
        for each in self._tenants.values():
            if each.is_in:
                engines[each.need.engine] = max(engines.get(each.need.engine, 0), each.need.engine_bytes)
            total += each.row_bytes(each.rows, more_held if each is tenant else 0)
        # Without a name, what is fixed is each tenant's own.
        own = sum(each.need.engine_bytes for each in self._tenants.values() if each.is_in and not each.need.engine)
        engines.pop("", None)
        return total + own + sum(engines.values())

    def shares(self) -> Iterator[tuple[str, int, int, int]]:
        """(tenant, rows of a group, rows it holds, bytes of rows) of everyone who is in."""
        for name, each in self._tenants.items():
            if each.is_in:
                yield name, each.rows, each.held, each.row_bytes(each.rows)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting())

    # How it is decided

    def _tenant(self, request: int) -> _Tenant:
        return self._tenants[self._of[request]]

    def _active(self) -> list[tuple[str, _Tenant]]:
        found = [(name, each) for name, each in self._tenants.items() if each.is_active]
        return sorted(found, key=lambda pair: pair[1].place)

    def _waiting(self) -> list[_Tenant]:
        return [each for _, each in self._active() if not each.is_in]

    def _is_calm(self) -> bool:
        """Whether nobody waits for memory, or for the size of groups that is due to it."""
        return all(each.is_in and each.rows >= each.goal for _, each in self._active())

    def _idle_engines(self) -> list[str]:
        """Loaded, and of no use to anyone who can use it now; the one unused for longest first."""
        needed = {each.need.engine for each in self._tenants.values() if each.is_in or each.begun}
        return sorted((name for name in self._loaded if name not in needed), key=lambda name: self._used_s[name])

    def _forget(self) -> None:
        """Those that ask for nothing and keep nothing."""
        for name, each in list(self._tenants.items()):
            if not each.is_active and each.need.engine not in self._loaded:
                del self._tenants[name]

    def _resolve(self, now: float) -> list[Decision]:
        """Ask the rule again, with all the memory there is: what idle engines keep, they will give."""
        decisions: list[Decision] = []
        active = self._active()
        demands = [self._demand(name, each) for name, each in active]
        found = share(demands, self.budget_bytes)
        for name, each in active:
            each.goal = found.rows.get(name, 0)
            if each.is_in and not each.goal:  # found to need more than was thought
                each.is_in = False
                each.rows = 0
                each.hungry |= set(each.requests)
            if name in found.too_large:
                need = replace(each.need, engine_bytes=self._fixed(each))
                decisions += [Refuse(request, need.num_bytes(1)) for request in sorted(each.hungry)]
        return decisions + self._settle()

    def _settle(self) -> list[Decision]:
        """Go as far towards what is due to everyone as memory allows now."""
        for each in self._tenants.values():
            each.rows = min(each.rows, each.goal)
            if each.need.engine not in self._loaded:  # nothing keeps what earlier groups took
                each.kept_rows = each.largest
        woken: list[Decision] = []
        is_short = False
        for _, each in self._active():
            if not each.goal or (is_short and not each.is_in):
                continue
            was_in, was_rows = each.is_in, each.rows
            each.is_in = True
            for rows in (each.goal, 1) if not was_in else (each.goal,):
                each.rows = rows
                if self.used_bytes() <= self.budget_bytes:
                    break
            else:
                each.is_in, each.rows = was_in, was_rows
                is_short = True
        for _, each in self._active():
            if each.is_in and each.hungry and (self._has_own(each) or self._is_calm()):
                woken += [Wake(request) for request in sorted(each.hungry)]
        return woken + self._let_go()

    def _has_own(self, tenant: _Tenant) -> bool:
        return tenant.num_groups < GROUPS and tenant.held < GROUPS * tenant.rows

    def _let_go(self) -> list[Decision]:
        """What engines keep from larger groups; and idle engines, where somebody lacks memory."""
        decisions: list[Decision] = []
        engines: dict[str, list[_Tenant]] = {}
        for each in self._tenants.values():
            engines.setdefault(each.need.engine, []).append(each)
        for name, users in engines.items():
            too_much = [each for each in users
                        if each.need.work(each.kept_rows) > each.need.work(max(each.rows, each.largest))]  # fmt: skip
            if too_much and name not in self._letting_go and name not in self._idle_engines():
                self._letting_go.add(name)
                decisions.append(Shrink(name))
        if not self._is_calm() or any(each.goal < most(self._demand("", each)) for _, each in self._active()):
            for name in self._idle_engines()[:1]:
                if not self._letting_go:
                    self._letting_go.add(name)
                    decisions.append(Unload(name))
        return decisions

    def _demand(self, name: str, tenant: _Tenant) -> Demand:
        need = tenant.need
        beyond_bytes = GROUPS * need.hold_bytes
        return Demand(name, self._fixed(tenant), need.work_bytes + beyond_bytes, need.wanted, need.weight, need.rates,
                      need.engine, need.piece, beyond_bytes)  # fmt: skip

    def _fixed(self, tenant: _Tenant) -> int:
        return max(tenant.need.engine_bytes, self._loaded.get(tenant.need.engine, 0))

"""Memory is never overdrawn, somebody can always go on, nobody is overtaken, and what was held comes back."""

from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.admission import GROUPS, Admission, Need, Refuse, Shrink, Unload, Wake

IDLE_S, GONE_S = 10.0, 100.0


class World:
    """An admission, and the memory that is really taken: engines keep what their largest group took until told."""

    def __init__(self, budget, needs, requests, holds=()):
        """`holds`: what a row of a request holds, where that is not what its tenant needs."""
        self.machine = Admission(budget, idle_s=IDLE_S, gone_s=GONE_S)
        self.budget, self.needs, self.holds = budget, needs, dict(holds)
        self.to_come = dict(enumerate(requests))  # request → tenant
        self.open, self.left, self.refused = {}, {}, set()  # request → tenant, → rows to do
        self.groups = []  # (request, rows)
        self.loaded, self.kept = set(), {}  # engines; tenant → rows that its engine keeps room for
        self.pending, self.entered, self.now = [], [], 0.0

    def carry_out(self, decisions):
        for decision in decisions:
            match decision:
                case Wake(request):
                    assert request in self.open
                case Refuse(request):
                    self.refused.add(request)
                case Shrink() | Unload():
                    assert decision not in self.pending
                    self.pending.append(decision)
        assert self.taken() <= min(self.machine.used_bytes(), self.budget)
        assert self.holds or self.machine.used_bytes() <= self.budget
        for request, tenant in self.open.items():
            if self.machine.is_in(request) and tenant not in self.entered:
                self.entered.append(tenant)

    def taken(self):
        """What is really taken."""
        engines = {self.needs[each].engine: self.needs[each].engine_bytes for each in self.needs}
        held = sum(rows * self.need(request).hold_bytes for request, rows in self.groups)
        kept = sum(self.needs[each].work(rows) for each, rows in self.kept.items())
        return sum(engines[each] for each in self.loaded if each) + held + kept

    def need(self, request):
        need = self.needs[self.open[request]]
        return replace(need, hold_bytes=self.holds.get(request, need.hold_bytes))

    def events(self):
        yield from (("ask", each) for each in list(self.to_come)[:1])
        for request, tenant in self.open.items():
            if request in self.refused or (not self.left[request] and request not in dict(self.groups)):
                yield "end", request
            elif self.machine.is_in(request) and self.left[request]:
                yield ("group" if self.needs[tenant].engine in self.loaded else "load"), request
        yield from (("send", each) for each in sorted(set(self.groups)))
        yield from (("obey", each) for each in self.pending)
        if any(each not in self.open.values() for each in self.entered):
            yield "pass", None

    def happen(self, event):
        what, which = event
        machine, now = self.machine, self.now
        if what == "ask":
            tenant = self.open[which] = self.to_come.pop(which)
            self.left[which] = self.needs[tenant].wanted
            self.carry_out(machine.ask(which, tenant, self.need(which), now))
        elif what == "load":
            self.loaded.add(self.needs[self.open[which]].engine)
            self.carry_out(machine.measured(which, self.need(which), now))
        elif what == "group":
            rows, tenant = machine.take(which, self.left[which], now), self.open[which]
            if rows is not None:
                assert 1 <= rows <= self.left[which]
                self.left[which] -= rows
                self.groups.append((which, rows))
                self.kept[tenant] = max(self.kept.get(tenant, 0), rows)
            self.carry_out([])
        elif what == "send":
            self.groups.remove(which)
            self.forget(self.open[which[0]])
            self.carry_out(machine.give(*which, now))
        elif what == "end":
            self.groups = [each for each in self.groups if each[0] != which]  # of one that was refused on its way
            self.forget(self.open.pop(which))
            self.carry_out(machine.done(which, now))
        elif what == "obey":
            self.pending.remove(which)
            self.obey(which)
        else:
            self.now += IDLE_S + 1
            self.carry_out(machine.tick(self.now))
            self.entered = [each for each in self.entered if each in self.open.values()]

    def forget(self, tenant):
        """Without an engine nothing keeps what a group worked in."""
        if not self.needs[tenant].engine:
            own = [rows for request, rows in self.groups if self.open[request] == tenant]
            self.kept[tenant] = max(own, default=0)

    def obey(self, decision):
        users = [each for each in self.kept if self.needs[each].engine == decision.engine]
        if isinstance(decision, Shrink):
            for each in users:
                own = [rows for request, rows in self.groups if self.open[request] == each]
                self.kept[each] = max(own, default=0)
            self.carry_out(self.machine.shrunk(decision.engine, self.now))
        elif self.machine.may_unload(decision.engine):
            assert not [rows for request, rows in self.groups if self.open[request] in users]
            self.loaded.discard(decision.engine)
            for each in users:
                del self.kept[each]
            self.carry_out(self.machine.unloaded(decision.engine, self.now))

    def can_go_on(self):
        """Whether an event other than time or newcomers leads on."""
        for what, which in self.events():
            if what == "group":
                if deepcopy(self.machine).take(which, self.left[which], self.now) is not None:
                    return True
            elif what not in ("ask", "pass"):
                return True
        return False

    def state(self):
        tenants = [(name, each.need, each.is_active, each.is_in, each.rows, each.goal, each.kept_rows, each.hungry)
                   for name, each in sorted(self.machine._tenants.items(), key=lambda pair: pair[1].place)]  # fmt: skip
        return repr((tenants, self.to_come, self.open, self.left, sorted(self.groups), sorted(self.loaded),
                     sorted(self.kept.items()), self.pending, sorted(self.machine._letting_go)))  # fmt: skip


SMALL = {
    "two who fit only in turns": (20, {"a": Need("A", 8, 2, 1, 2), "b": Need("B", 9, 2, 1, 2)}, "aba"),
    "two who share": (24, {"a": Need("A", 4, 2, 1, 2), "b": Need("B", 4, 2, 1, 2)}, "aab"),
    "three, the last has to wait": (
        26,
        {"a": Need("A", 3, 1, 1, 2), "b": Need("B", 4, 2, 1, 2), "c": Need("C", 6, 2, 1, 2)},
        "abc",
    ),
    "one engine for two, and one that never fits": (
        18,
        {"a": Need("A", 4, 1, 1, 2), "b": Need("A", 4, 1, 1, 2), "c": Need("C", 30, 1, 1, 1)},
        "abc",
    ),
    "one whose second request has larger samples": (24, {"a": Need("A", 4, 2, 1, 2), "b": Need("B", 4, 2, 1, 2)}, "aab",
                                                    {1: 3}),
    "one whose second request never fits": (24, {"a": Need("A", 4, 2, 1, 2), "b": Need("B", 4, 2, 1, 2)}, "aab",
                                            {1: 9}),
    "one whose later requests are small again": (20, {"a": Need("", 0, 1, 1, 2)}, "aaa", {0: 3, 1: 9}),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_whatever_happens_memory_is_kept_and_everyone_is_served(name):
    frontier, known, ends = [World(*SMALL[name])], set(), 0
    while frontier:
        world = frontier.pop()
        waits = [each for each in world.open if each not in world.refused]
        if not world.open and not world.to_come:
            ends += 1
        if waits:
            assert world.can_go_on() or ("pass", None) in world.events(), world.state()
        for event in world.events():
            other = deepcopy(world)
            other.happen(event)
            state = other.state()
            if state not in known:
                known.add(state)
                frontier.append(other)
    assert ends > 0


NEEDS = st.builds(
    Need,
    engine=st.sampled_from(["", "A", "B", "C"]),
    engine_bytes=st.integers(0, 40),
    work_bytes=st.integers(0, 6),
    hold_bytes=st.integers(0, 3),
    wanted=st.integers(1, 40),
    piece=st.sampled_from([None, 1, 3, 8]),
)


HOLDS = st.dictionaries(st.integers(0, 11), st.integers(0, 200), max_size=4)


@given(st.integers(20, 300), st.lists(NEEDS, min_size=1, max_size=5), HOLDS, st.data())
def test_any_number_of_tenants_comes_and_goes(budget, needs, holds, data):
    sizes = {}
    needs = [replace(each, engine_bytes=sizes.setdefault(each.engine, each.engine_bytes) if each.engine else 0)
             for each in needs]  # fmt: skip
    names = data.draw(st.lists(st.sampled_from(range(len(needs))), max_size=12))
    world = World(budget, {f"{place}": each for place, each in enumerate(needs)}, [f"{each}" for each in names], holds)
    world.loaded.add("")
    for _ in range(400):
        events = list(world.events())
        useful = [each for each in events if each[0] != "pass"] or events
        if not useful:
            break
        world.happen(useful[data.draw(st.integers(0, len(useful) - 1))])
    while world.open or world.to_come or world.pending:  # and then everyone is served
        useful = [each for each in world.events() if each[0] not in ("group", "pass")]
        groups = [each for each in world.events() if each[0] == "group"
                  and deepcopy(world.machine).take(each[1], 1, 0.0) is not None]  # fmt: skip
        world.happen((useful + groups or [("pass", None)])[0])
    world.now += IDLE_S + 1
    world.carry_out(world.machine.tick(world.now))
    world.now += GONE_S + 1
    world.carry_out(world.machine.tick(world.now))
    while world.pending:
        world.happen(("obey", world.pending[0]))
    assert world.machine.used_bytes() == 0
    assert not world.machine._tenants


def test_a_request_that_takes_too_much_ends_its_tenants_others_with_the_reason():
    machine = Admission(100)
    machine.ask(1, "a", Need("", 0, 0, 1, 4), 0.0)
    assert machine.take(1, 8, 0.0) == 4
    assert machine.ask(2, "a", Need("", 0, 0, 40, 4), 0.0) == [Refuse(1, 120), Refuse(2, 120)]
    assert machine.take(1, 4, 0.0) is None
    machine.done(2, 0.0)
    machine.done(1, 0.0)
    assert Wake(3) in machine.ask(3, "a", Need("", 0, 0, 1, 4), 0.0)
    assert machine.take(3, 4, 0.0) == 4


def test_large_samples_count_as_long_as_their_request_is_open():
    machine = Admission(300)
    machine.ask(1, "a", Need("", 0, 0, 100, 4), 0.0)
    machine.ask(2, "a", Need("", 0, 0, 1, 4), 0.0)
    assert machine.take(1, 4, 0.0) == 1, "small ones that came later say nothing of these"
    machine.give(1, 1, 0.0)
    machine.done(1, 0.0)
    assert machine.take(2, 4, 0.0) == 4


def test_who_waits_is_told_its_place():
    machine = Admission(100)
    for number, name in enumerate("abc"):
        machine.ask(number, name, Need(name, 70, 1, 1, 4), 0.0)
    assert machine.is_in(0)
    assert [machine.place(1), machine.place(2)] == [(1, 2), (2, 2)]


def test_a_newcomer_shrinks_groups_and_comes_in_when_the_memory_is_really_back():
    machine = Admission(100, idle_s=IDLE_S, gone_s=GONE_S)
    need = Need("A", 10, 2, 0, 40)
    machine.ask(1, "a", need, 0.0)
    machine.measured(1, need, 0.0)
    assert machine.take(1, 99, 0.0) == 40
    machine.ask(2, "b", Need("B", 10, 2, 0, 40), 0.0)
    assert not machine.is_in(2), "the engine of the first keeps what a group of 40 rows takes"
    assert machine.give(1, 40, 0.0) == [Wake(1), Shrink("A")] or not machine.is_in(2)
    assert Wake(2) in machine.shrunk("A", 0.0)
    assert machine.is_in(2)
    assert machine.take(1, 99, 0.0) == machine.take(2, 99, 0.0) == 20


def test_who_is_alone_may_hold_more_than_its_due():
    machine = Admission(60)
    machine.ask(1, "a", Need("", 0, 0, 1, 10), 0.0)
    assert [machine.take(1, 10, 0.0) for _ in range(7)] == [10] * 6 + [None]
    machine.ask(2, "b", Need("", 0, 0, 1, 10), 0.0)
    assert not machine.is_in(2)
    for _ in range(GROUPS):
        machine.give(1, 10, 0.0)
    assert machine.take(1, 10, 0.0) is None
    assert machine.take(2, 10, 0.0) == 10


def test_an_errand_leaves_at_once():
    machine = Admission(100)
    machine.ask(1, "probe", Need("", 90, 0, 0, 1), 0.0, errand=True)
    machine.ask(2, "job", Need("", 20, 0, 1, 1), 0.0)
    assert not machine.is_in(2)
    assert Wake(2) in machine.done(1, 0.0)
    assert machine.is_in(2)


def test_an_idle_engine_goes_only_when_somebody_lacks_memory():
    machine = Admission(100, idle_s=IDLE_S, gone_s=GONE_S)
    need = Need("A", 60, 1, 1, 4)
    machine.ask(1, "a", need, 0.0)
    machine.measured(1, need, 0.0)
    machine.done(1, 0.0)
    assert machine.tick(IDLE_S + 1) == []
    assert Unload("A") in machine.ask(2, "b", Need("B", 60, 1, 1, 4), IDLE_S + 2)
    assert machine.may_unload("A")
    assert Wake(2) in machine.unloaded("A", IDLE_S + 3)

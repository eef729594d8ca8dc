"""Sums in the network, explored: every history of small worlds, long random ones of larger worlds."""

from copy import copy
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headwater.core.agree import is_settled, settle
from headwater.core.slots import (
    ALL,
    FOREIGN,
    Ask,
    Done,
    Drop,
    Keep,
    Multicast,
    Need,
    Result,
    Send,
    Switch,
    Take,
    Total,
    Wait,
    Worker,
    runs,
)

OLD, JOB = 1, 2
GARBAGE = -(10**9)  # whatever takes this in is found out


def value(worker, block, piece):
    return 10 ** (3 * worker) * (1 + 10 * block + piece)


class World:
    """Workers, a switch, and a network that holds messages until it delivers, doubles or loses them."""

    def __init__(self, num_workers, num_slots, sizes, *, losses=0, doubles=0, lates=0, old=(), restarts=0, relay=False):
        self.num_workers, self.num_slots, self.sizes = num_workers, num_slots, tuple(sizes)
        self.budget = {"lose": losses, "double": doubles, "late": lates, "restart": restarts}
        self.relay = relay  # a leaf: its sums come later, from the root
        self.net = [("data", OLD, *each) for each in old]
        self.start(JOB)

    def start(self, job):
        self.job = job
        self.switch = Switch(job, self.num_workers, self.num_slots)
        self.workers = [Worker(job, self.num_slots) for _ in range(self.num_workers)]
        self.unsent = set(range(self.num_workers))
        self.parts = {}  # (slot, worker, piece) → value, as the aggregator's memory
        self.sums = {}  # (slot, set) → values
        self.rings = [{} for _ in range(self.num_workers)]  # (slot, piece) → value
        self.got = [{} for _ in range(self.num_workers)]  # block → values
        self.owed = []  # totals that the root has not answered

    def expected(self, block):
        return tuple(sum(value(w, block, p) for w in range(self.num_workers)) for p in range(self.sizes[block]))

    def events(self):
        found = [("submit", worker) for worker in sorted(self.unsent)]
        for place in range(len(self.net)):
            if self.net[place] in self.net[:place]:
                continue  # the same as one before
            found.append(("deliver", place))
            found += [(what, place) for what in ("lose", "double") if self.budget[what]]
        found += [("late", w) for w in range(self.num_workers) if self.budget["late"] and self.workers[w].num_out]
        found += [("root", block) for block in self.owed]
        if self.budget["restart"] and not self.unsent:
            found.append(("restart", 0))
        return found

    def happen(self, event):
        what, which = event
        if what in self.budget:
            self.budget = {**self.budget, what: self.budget[what] - 1}
        if what == "submit":
            self.unsent.remove(which)
            self.carry_out(which, self.workers[which].submit(self.sizes))
        elif what == "late":
            self.carry_out(which, self.workers[which].late())
        elif what == "lose":
            self.net.pop(which)
        elif what == "double":
            self.deliver(self.net[which])
        elif what == "deliver":
            self.deliver(self.net.pop(which))
        elif what == "root":
            self.owed.remove(which)
            self.sum_up(which)
        elif what == "restart":  # a worker came back, so all begin anew; what is under way stays under way
            self.start(self.job + 1)
        self.check()

    def deliver(self, message):
        kind, job, worker, block, *rest = message
        if kind == "data":
            mask, num_pieces = rest
            decisions = self.switch.arrived(job, worker, block, mask, num_pieces)
            self.serve(decisions, job)
        elif kind == "ask":
            self.serve(self.switch.asked(job, worker, block, rest[0]), job)
        else:
            machine = self.workers[worker]
            if kind == "result":
                mask, num_pieces, payload = rest
                self.carry_out(worker, machine.result(job, block, mask, num_pieces), dict(payload))
            else:
                heard = machine.needed if kind == "need" else machine.waiting
                self.carry_out(worker, heard(job, block, rest[0]))

    def serve(self, decisions, job):
        """What the aggregator does."""
        for decision in decisions:
            match decision:
                case Take(worker, block, mask):
                    for piece in pieces(mask):
                        what = value(worker, block, piece) if job == self.job else GARBAGE
                        self.parts[block % self.num_slots, worker, piece] = what
                case Total(block):
                    if self.relay:
                        self.owed.append(block)
                    else:
                        self.sum_up(block)
                case Multicast(block):
                    for worker in range(self.num_workers):
                        self.send_result(worker, block, ALL)
                case Result(worker, block, mask):
                    self.send_result(worker, block, mask)
                case Need(worker, block, mask):
                    self.net.append(("need", self.job, worker, block, mask))
                case Wait(worker, block, workers):
                    self.net.append(("wait", self.job, worker, block, workers))
                case Drop(reason):
                    assert (reason == FOREIGN) == (job != self.job)

    def sum_up(self, block):
        slot, version = block % self.num_slots, block // self.num_slots % 2
        everyone = range(self.num_workers)
        self.sums[slot, version] = tuple(
            sum(self.parts[slot, worker, piece] for worker in everyone) for piece in range(self.sizes[block])
        )
        before = block - 2 * self.num_slots
        assert before < 0 or all(before in got for got in self.got), "its set is overwritten, and somebody lacks it"
        self.serve(self.switch.finished(block), self.job)

    def send_result(self, worker, block, mask):
        assert self.switch.holds(block)
        total = self.sums[block % self.num_slots, block // self.num_slots % 2]
        for piece in range(len(total)):
            if mask >> piece & 1:
                self.net.append(("result", self.job, worker, block, 1 << piece, len(total), ((piece, total[piece]),)))

    def carry_out(self, worker, decisions, payload=None):
        """What a worker does."""
        for decision in decisions:
            match decision:
                case Send(block, mask):
                    assert self.workers[worker].is_done(block - self.num_slots)
                    for piece in pieces(mask):
                        self.net.append(("data", self.job, worker, block, 1 << piece, self.sizes[block]))
                case Ask(block, have):
                    self.net.append(("ask", self.job, worker, block, have))
                case Keep(block, mask):
                    for piece in pieces(mask):
                        self.rings[worker][block % self.num_slots, piece] = payload[piece]
                case Done(block):
                    assert block not in self.got[worker], "delivered twice"
                    ring = self.rings[worker]
                    self.got[worker][block] = tuple(
                        ring[block % self.num_slots, piece] for piece in range(self.sizes[block])
                    )
                    assert self.got[worker][block] == self.expected(block)

    def check(self):
        """What holds at every moment; above all, that workers could go on without the switch, with the same bits."""
        for machine, got in zip(self.workers, self.got, strict=True):
            assert machine.num_out <= self.num_slots
            assert all(machine.is_done(block) == (block in got) for block in range(machine.submitted))
        assert self.switch.num_open <= self.num_slots
        reports = [machine.done for machine in self.workers]
        blocks = range(len(self.sizes))
        for report, got in zip(reports, self.got, strict=True):
            assert all(is_settled(block, report) == (block in got) for block in blocks)
        steps, done = settle(reports)
        for step in steps:  # the bits are still in its buffer of that slot
            held = self.rings[step.source]
            found = [held.get((step.block % self.num_slots, piece)) for piece in range(self.sizes[step.block])]
            assert tuple(found) == self.expected(step.block)
        for got in self.got:
            assert set(got) | {step.block for step in steps} == {block for block in blocks if is_settled(block, done)}
        for machine in self.workers:
            assert all(block < machine.submitted for block in range(max(done) + 1)), "or it could not be added up"

    def goes_on_to_the_end(self):
        """The network is fair from now on."""
        for worker in sorted(self.unsent):
            self.happen(("submit", worker))
        for _ in range(500):
            while self.net or self.owed:
                self.happen(("deliver", 0) if self.net else ("root", self.owed[0]))
            if all(len(got) == len(self.sizes) for got in self.got):
                return
            for worker in range(self.num_workers):
                self.carry_out(worker, self.workers[worker].late())
        raise AssertionError("it hangs")

    def state(self):
        """All that decides what can happen; stamps count by their order alone."""
        switch = self.switch
        return (tuple(sorted(self.net)), tuple(self.budget.values()), tuple(self.unsent), tuple(self.owed), self.job,
                str((switch._block, switch._full, switch._got, switch._arrived, switch._finished)),
                tuple(sorted(self.parts.items())), tuple(sorted(self.sums.items())),
                *((tuple(each._sizes), tuple(each._last), each._doublings, each.awaited,
                   tuple((block, flight.have, flight.passed) for block, flight in each._flights.items()))
                  for each in self.workers))  # fmt: skip


def pieces(mask):
    return [piece for first, count in runs(mask) for piece in range(first, first + count) if piece < 3]


def another(world):
    """One as this is, to go another way."""
    other = copy(world)
    for name in ("net", "unsent", "parts", "sums", "owed"):
        setattr(other, name, copy(getattr(world, name)))
    other.rings, other.got = [dict(each) for each in world.rings], [dict(each) for each in world.got]
    other.switch = copy(world.switch)
    for name in ("_full", "_arrived", "_finished"):
        setattr(other.switch, name, [list(pair) for pair in getattr(world.switch, name)])
    other.switch._block = list(world.switch._block)
    other.switch._got = [[list(each) for each in pair] for pair in world.switch._got]
    other.workers = [copy(each) for each in world.workers]
    for each in other.workers:
        each._sizes, each._last = dict(each._sizes), list(each._last)
        each._flights = {block: copy(flight) for block, flight in each._flights.items()}
    return other


SMALL = {
    "one slot, loss": World(2, 1, [1, 1, 1], losses=1, lates=1),
    "one slot, doubles": World(2, 1, [1, 1, 1], doubles=2),
    "one slot, both": World(2, 1, [1, 1], losses=1, doubles=1, lates=1),
    "pieces, loss": World(2, 1, [2, 1], losses=1, lates=1),
    "two slots, loss": World(2, 2, [1, 1, 1], losses=1),
    "an old job": World(2, 1, [1, 1], doubles=1, old=[(0, 0, 1, 1), (1, 1, 1, 1)]),
    "a restart": World(2, 1, [1, 1], restarts=1, lates=1),
    "a leaf": World(2, 1, [1, 1, 1], losses=1, lates=1, relay=True),
}
LARGER = {
    "one slot, both": World(2, 1, [1, 1], losses=1, doubles=1, lates=2),
    "two slots": World(2, 2, [1, 1, 1], losses=1, lates=1),
    "an old job": World(2, 1, [1, 1, 1], doubles=1, lates=1, old=[(0, 0, 1, 1), (1, 1, 1, 1)]),
    "a restart": World(2, 1, [1, 1], losses=1, restarts=1, lates=1),
    "three workers": World(3, 1, [1, 1], losses=1, lates=1),
}


def explore(world, most_states, every):
    """All histories, up to so many states; whether that was all of them, and how many there are. From one in `every`
    on, the network is fair, and all has to be delivered."""
    frontier, known = [world], set()
    while frontier and len(known) < most_states:
        following = []
        for each in frontier:
            for event in each.events():
                other = another(each)
                other.happen(event)
                if (state := other.state()) not in known:
                    known.add(state)
                    following.append(other)
                    if len(known) % every == 0:
                        another(other).goes_on_to_the_end()
        frontier = following
    return not frontier, len(known)


@pytest.mark.parametrize("name", SMALL)
def test_every_history_of_a_small_world_keeps_the_promises(name):
    is_whole, num_states = explore(SMALL[name], 20_000, every=20)
    assert is_whole
    assert num_states > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_a_hundred_thousand_states_of_larger_worlds_keep_the_promises(name):
    is_whole, num_states = explore(LARGER[name], 100_000, every=100)
    assert is_whole or num_states >= 100_000


class AnyHistory(RuleBasedStateMachine):
    """Long random histories of larger worlds."""

    @initialize(num_workers=st.integers(1, 4), num_slots=st.integers(1, 4), relay=st.booleans(),
                sizes=st.lists(st.integers(1, 3), min_size=1, max_size=12))  # fmt: skip
    def begin(self, num_workers, num_slots, sizes, relay):
        old = [(worker, block, 1, sizes[block]) for worker in range(num_workers) for block in range(min(2, len(sizes)))]
        self.world = World(num_workers, num_slots, sizes, losses=200, doubles=200, lates=200, restarts=1, old=old,
                           relay=relay)  # fmt: skip

    @rule(data=st.data(), times=st.integers(1, 8))
    def something_happens(self, data, times):
        for _ in range(times):
            if events := self.world.events():
                weights = [event for event in events if event[0] != "restart"] or events
                chosen = events if data.draw(st.integers(0, 20)) == 0 else weights
                self.world.happen(data.draw(st.sampled_from(chosen)))

    @rule()
    def the_network_is_fair_and_all_is_delivered(self):
        another(self.world).goes_on_to_the_end()

    @invariant()
    def promises_hold(self):
        if hasattr(self, "world"):
            self.world.check()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def test_results_clock_the_stream():
    worker = Worker(JOB, 2)
    assert worker.submit([1] * 5) == (Send(0, 1), Send(1, 1))
    assert worker.result(JOB, 1, 1, 1)[1:3] == (Done(1), Send(3, 1)), "each slot by itself"
    assert worker.result(JOB, 0, 1, 1)[1:] == (Done(0), Send(2, 1))
    assert worker.done == (0, 1)


def test_what_later_blocks_overtake_is_asked_for_without_a_time_out():
    worker = Worker(JOB, 8)
    worker.submit([1] * 8)
    assert not any(isinstance(each, Ask) for block in (1, 2) for each in worker.result(JOB, block, 1, 1))
    assert worker.result(JOB, 3, 1, 1)[-1] == Ask(0, 0)
    assert not any(isinstance(each, Ask) for block in (4, 5, 6) for each in worker.result(JOB, block, 1, 1)), "once"


def test_a_sum_that_came_in_part_is_asked_for_as_soon_as_another_is_whole():
    worker = Worker(JOB, 4)
    worker.submit([2, 1])
    worker.result(JOB, 0, 0b01, 2)
    assert worker.result(JOB, 1, 1, 1)[-1] == Ask(0, 0b01)


def test_whoever_asks_in_vain_waits_twice_as_long_each_time_and_no_longer_once_something_comes():
    worker = Worker(JOB, 1)
    worker.submit([2])
    waits = [worker.patience for _ in range(9) if worker.late() == (Ask(0, 0),)]
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64, 64]
    worker.result(JOB, 0, 1, 2)
    assert worker.patience == 1


def test_only_lost_pieces_travel_again():
    switch, worker = Switch(JOB, 2, 1), Worker(JOB, 1)
    worker.submit([4])
    switch.arrived(JOB, 0, 0, 0b1011, 4)
    (need,) = switch.asked(JOB, 0, 0, 0)
    assert need == Need(0, 0, 0b0100)
    assert worker.needed(JOB, 0, need.pieces) == (Send(0, 0b0100),)
    assert switch.arrived(JOB, 0, 0, 0b0100, 4) == (Take(0, 0, 0b0100),)
    assert switch.asked(JOB, 0, 0, 0) == (Wait(0, 0, 0b10),), "and who is waited for is said"


def test_a_packet_of_another_job_or_size_or_worker_changes_nothing():
    switch = Switch(JOB, 2, 2)
    assert switch.arrived(OLD, 0, 0, 1, 1) == (Drop("foreign"),)
    assert switch.arrived(JOB, 2, 0, 1, 1) == (Drop("foreign"),)
    assert switch.arrived(JOB, 0, 4, 1, 1) == (Drop("early"),)
    switch.arrived(JOB, 0, 0, 1, 1)
    assert switch.arrived(JOB, 1, 0, 1, 2) == (Drop("misfit"),)
    assert switch.arrived(JOB, 1, 2, 1, 1) == (Drop("early"),)


@given(st.integers(0, ALL))
def test_runs_are_the_pieces(mask):
    found = [piece for first, count in runs(mask) for piece in range(first, first + count)]
    assert found == [piece for piece in range(32) if mask >> piece & 1]
    starts = [first for first, _ in runs(mask)]
    assert all(later - early >= 2 for early, later in pairwise(starts))

"""Both ends work, every chunk comes once, and nothing is left in the middle."""

from copy import copy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.core.dispatch import Assign, Deliver, Keep, Stop
from headwater.core.prongs import TwoEnded, meeting_point, next_share, visits
from headwater.core.share import SHARES

WORKERS = ("own", "node", "other")


class World:
    """A two-ended epoch, the workers around it, and what the loop has seen."""

    def __init__(self, num_chunks, per_worker, workers, failures=2):
        self.machine = TwoEnded(num_chunks, own="own", per_worker=per_worker, max_failures=failures)
        self.num_chunks, self.per_worker, self.workers = num_chunks, per_worker, workers
        self.up, self.ghosts, self.kept, self.seen, self.taken = set(), set(), {}, [], 0
        self.out = {worker: set() for worker in workers}
        self.stopped = False

    def apply(self, decisions, worker=None):
        for decision in decisions:
            match decision:
                case Assign(worker_, chunk):
                    assert worker_ in self.up
                    assert chunk not in self.kept
                    self.out[worker_].add(chunk)
                    assert len(self.out[worker_]) <= self.per_worker
                    held, most = self.holds(worker_)
                    assert held <= most, "given more than its side has room for"
                    assert sum(chunk in self.out[name] for name in self.up) <= 2, "out on more than two workers"
                case Keep(chunk):
                    assert chunk not in self.kept, "kept twice"
                    self.kept[chunk] = worker
                case Deliver(chunk):
                    ready = [each for each in self.kept if each not in self.seen]
                    far = [each for each in ready if self.kept[each] != "own"]
                    assert chunk in (far or [min(ready)]), "the storage side's come first, then the lowest"
                    assert len(self.seen) == self.taken, "delivered before the loop wanted it"
                    self.seen.append(chunk)
                case Stop():
                    self.stopped = True
        self.check()

    def check(self):
        assert len(set(self.seen)) == len(self.seen), "twice"
        left = self.num_chunks - len(self.seen)
        if self.up and left and not self.stopped and self.taken == len(self.seen):
            assert any(self.out[worker] for worker in self.up), "nobody works though there is work"

    def holds(self, worker):
        """Chunks that this worker's side has out, or made and not passed on."""
        side = ({"own"} if worker == "own" else set(self.workers) - {"own"}) & self.up
        kept = [by for chunk, by in self.kept.items() if chunk not in self.seen and (by == "own") == (worker == "own")]
        return sum(len(self.out[each]) for each in side) + len(kept), (self.per_worker + 1) * len(side)

    def events(self):
        for worker in self.workers:
            if worker not in self.up:
                yield ("up", worker)
            else:
                yield ("down", worker)
                for chunk in self.out[worker]:
                    yield ("finish", worker, chunk)
                    yield ("fail", worker, chunk)
                    yield ("outage", worker, chunk)
        for worker, chunk in self.ghosts:
            yield ("ghost", worker, chunk)
        if self.taken < len(self.seen):
            yield ("take",)
        yield ("late",)

    def happen(self, event):
        machine = self.machine
        match event:
            case ("up", worker):
                self.up.add(worker)
                self.apply(machine.node_up(worker))
            case ("down", worker):
                self.up.remove(worker)
                self.ghosts |= {(worker, chunk) for chunk in self.out[worker]}
                self.out[worker] = set()
                self.apply(machine.node_down(worker))
            case ("finish", worker, chunk):
                self.out[worker].remove(chunk)
                self.apply(machine.finished(worker, chunk), worker)
            case ("ghost", worker, chunk):
                self.ghosts.remove((worker, chunk))
                self.out[worker].discard(chunk)
                self.apply(machine.finished(worker, chunk), worker)
            case ("fail" | "outage" as kind, worker, chunk):
                self.out[worker].remove(chunk)
                self.apply(machine.failed(worker, chunk, "test", counts=kind == "fail"))
            case ("late",):
                self.apply(machine.late())
            case ("take",):
                self.taken += 1
                self.apply(machine.taken())

    def state(self):
        machine = {key: repr(value) for key, value in vars(self.machine).items()}
        return repr((sorted(self.up), sorted(self.ghosts), self.out, self.kept, self.seen, self.taken, machine))


def another(world):
    """One as this is, to go another way."""
    other = copy(world)
    other.machine = copy(world.machine)
    for each in (other, other.machine):
        for name, value in vars(each).items():
            if isinstance(value, set | list):
                setattr(each, name, value.copy())
            elif isinstance(value, dict):
                setattr(each, name, {key: v.copy() if isinstance(v, set) else v for key, v in value.items()})
            elif name in ("_here", "_there"):
                setattr(each, name, type(value)(value.workers.copy(), value.kept.copy()))
    return other


@pytest.mark.parametrize(("num_chunks", "per_worker", "num_workers", "depth"),
                         [(3, 1, 2, 7), (4, 2, 2, 5), (3, 1, 3, 6), pytest.param(3, 1, 2, 8, marks=pytest.mark.slow),
                          pytest.param(4, 2, 2, 7, marks=pytest.mark.slow)])  # fmt: skip
def test_every_history_of_a_small_world_keeps_the_promises(num_chunks, per_worker, num_workers, depth):
    frontier, known = [World(num_chunks, per_worker, WORKERS[:num_workers])], set()
    for _ in range(depth):
        following = []
        for world in frontier:
            for event in () if world.stopped else world.events():
                other = another(world)
                other.happen(event)
                if (state := other.state()) not in known:
                    known.add(state)
                    following.append(other)
        frontier = following
    assert len(known) > 100


class AnyHistory(RuleBasedStateMachine):
    """Long random histories of larger worlds."""

    def __init__(self):
        super().__init__()
        self.world = World(20, 2, WORKERS, failures=100)

    @rule(data=st.data())
    def something_happens(self, data):
        self.world.happen(data.draw(st.sampled_from(sorted(self.world.events()))))

    @precondition(lambda self: self.world.up)
    @rule()
    def workers_stay_up_and_the_epoch_ends(self):
        world = another(self.world)
        while world.taken < world.num_chunks:
            world.happen(next(event for event in world.events() if event[0] in ("finish", "take")))
        assert world.machine.done
        assert sorted(world.seen) == list(range(world.num_chunks))

    @invariant()
    def promises_hold(self):
        self.world.check()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def play(num_chunks, own_s, node_s, step_s, per_worker=3, dies_at=None):
    """Virtual time: seconds of an epoch, and who made what. `dies_at`: the node answers nothing from then on."""
    machine = TwoEnded(num_chunks, own="own", per_worker=per_worker)
    cost = {"own": own_s, "node": node_s}
    queues, ends = {name: [] for name in cost}, {}
    now, free_at, seen, made = 0.0, None, [], {}

    def apply(decisions):
        nonlocal free_at
        for decision in decisions:
            match decision:
                case Assign(worker, chunk):
                    queues[worker].append(chunk)
                    ends.setdefault(worker, now + cost[worker])
                case Deliver(chunk):
                    seen.append(chunk)
                    free_at = now + step_s

    apply(machine.node_up("own", "node"))
    while not machine.done or free_at is not None:
        if dies_at is not None and now >= dies_at:
            dies_at = None
            queues["node"], _ = [], ends.pop("node", None)
            apply(machine.node_down("node"))
        worker = min(ends, key=ends.get, default=None)
        if free_at is not None and (worker is None or free_at <= ends[worker]):
            now, free_at = free_at, None
            apply(machine.taken())
            continue
        now = ends.pop(worker)
        chunk = queues[worker].pop(0)
        if queues[worker]:
            ends[worker] = now + cost[worker]
        made[chunk] = worker
        apply(machine.finished(worker, chunk))
    return now, seen, made


@pytest.mark.parametrize("own_s", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("node_s", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("step_s", [0.01, 0.4, 2.0])
def test_the_epoch_is_as_fast_as_both_sides_and_the_step_allow(own_s, node_s, step_s):
    num_chunks = 200
    taken_s, seen, made = play(num_chunks, own_s, node_s, step_s)
    bound_s = num_chunks * max(step_s, 1 / (1 / own_s + 1 / node_s))
    assert sorted(seen) == list(range(num_chunks))
    assert taken_s <= 1.03 * bound_s + 3 * (own_s + node_s) + step_s, (
        "where they meet, each has three chunks of its own"
    )
    here = [chunk for chunk in made if made[chunk] == "own"]
    assert sorted(here) == list(range(len(here))), "the trainer's are the head, the storage side's the tail"


def test_a_dead_storage_side_leaves_its_end_to_the_trainer():
    _, seen, made = play(100, 1.0, 0.5, 0.1, dies_at=10.0)
    assert sorted(seen) == list(range(100))
    assert set(made.values()) == {"own", "node"}


def test_a_crawling_node_does_not_hold_up_the_end():
    machine = TwoEnded(2, own="own", per_worker=1)
    assert machine.node_up("own", "node") == [Assign("own", 0), Assign("node", 1)]
    machine.finished("own", 0)
    machine.taken()
    assert machine.late() == [Assign("own", 1)]
    assert Deliver(1) in machine.finished("own", 1)
    assert machine.done


def test_what_fails_on_one_side_goes_to_the_other():
    machine = TwoEnded(2, own="own", per_worker=1)
    machine.node_up("own", "node")
    assert machine.failed("own", 0, "403", counts=False) == []
    assert Assign("node", 0) in machine.finished("node", 1)


@given(st.integers(1, 500), st.floats(0, 1), st.integers(1, 64))
def test_moving_towards_each_other_visits_every_entry_once(num_entries, share, grain):
    ids = np.random.default_rng(num_entries).permutation(num_entries)
    meeting = meeting_point(num_entries, share, grain)
    found = visits(ids, meeting)
    assert sorted(found) == list(range(num_entries))
    assert (found[:meeting] == ids[:meeting]).all()
    assert meeting == num_entries or found[meeting] == ids[-1]
    assert abs(meeting - share * num_entries) <= grain


@given(st.floats(0, 1), st.floats(0.1, 4), st.floats(0, 0.9), st.floats(0.1, 8), st.sampled_from(SHARES))
def test_meeting_points_come_nearer_to_the_shortest_epoch_and_stay_there(step_s, own_s, receive, node_s, share):
    """The loop does every step, its own share of the rows, and takes the others from the wire, all on one core."""

    def sides(share):
        return step_s + share * own_s + (1 - share) * receive * own_s, (1 - share) * node_s

    best = min(max(sides(step / 1000)) for step in range(1000) if SHARES[0] <= step / 1000 <= SHARES[-1])
    taken = [max(sides(share))]
    for _ in range(60):
        share = next_share(share, *sides(share))
        taken.append(max(sides(share)))
    assert taken[-1] <= 1.03 * best
    assert all(after <= before * (1 + 1e-9) for before, after in pairwise(taken))


@given(st.integers(1, 3000), st.sampled_from(SHARES), st.integers(1, 400))
def test_both_sides_have_something_to_do_where_there_are_two_steps(num_entries, share, grain):
    meeting = meeting_point(num_entries, share, grain)
    if num_entries >= 2 * grain:
        assert 0 < meeting < num_entries

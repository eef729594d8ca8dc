"""Chunks reach the trainer once each and in order, whatever nodes do."""

from copy import copy
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater.core import dispatch
from headwater.core.dispatch import Assign, Deliver, Dispatch, Keep, Stop
from headwater.core.rhythm import KNOWN, LATE_S, OVERDUE, Rhythm, late_after_s
from headwater.core.share import is_own, more_ahead

NODES = ("a", "b")


class World:
    """A dispatch, the nodes around it, and what the trainer has seen."""

    def __init__(self, num_chunks, window, per_node, failures=2, able=None, is_own=None, tail=None, grows=False):
        """With `is_own`, b is the trainer's own node, and has one chunk at once; "none" if it helps out only. Where it
        grows, a second node that comes makes the window one wider."""
        self.helps, is_own = is_own == "none", None if is_own == "none" else is_own
        own = {"own": "b", "is_own": is_own, "own_out": 1} if is_own or self.helps else {}
        self.most = {"a": per_node, "b": 1 if own else per_node}
        self.machine = Dispatch(num_chunks, window=window, per_node=per_node, max_failures=failures, able=able,
                                tail=tail, **own)  # fmt: skip
        self.tail = tail or (num_chunks, 1)
        self.is_own, self.failed = is_own, set()
        self.able = able or (lambda chunk: NODES)
        self.num_chunks, self.window, self.per_node = num_chunks, window, per_node
        self.wider = window + 1 if grows else window
        self.up, self.ghosts, self.kept, self.seen, self.taken = set(), set(), [], [], 0
        self.out = {node: set() for node in NODES}
        self.in_a_row = dict.fromkeys(NODES, 0)  # failures
        self.stopped = self.overdue = False

    def apply(self, decisions):
        for decision in decisions:
            match decision:
                case Assign(node, chunk):
                    assert node in self.up
                    assert node in self.able(chunk)
                    tried = chunk in self.out["a"] or chunk in self.failed or self.in_a_row["a"] >= dispatch.FAILING
                    tried |= self.overdue and len(self.out["a"]) == self.per_node and self.taken == len(self.seen)
                    if self.is_own is not None and node == "b" and "a" in self.up and not tried:
                        assert self.is_own(chunk), "the trainer's own node took what others are for"
                    if self.helps and node == "b" and "a" in self.up:
                        ahead = len(self.kept) - self.taken
                        assert ahead <= self.per_node, "the trainer's own node works while others keep it supplied"
                    assert chunk not in self.out[node]
                    assert chunk in self.within(), "handed out beyond the window"
                    self.out[node].add(chunk)
                    assert len(self.out[node]) <= self.most[node]
                    assert sum(chunk in self.out[name] for name in self.up) <= 2, "out on more than two nodes"
                case Keep(chunk):
                    self.kept.append(chunk)
                case Deliver(chunk):
                    self.seen.append(chunk)
                case Stop(reason):
                    assert not any(reason.startswith(f"chunk {chunk} ") for chunk in self.kept), "it was done"
                    self.stopped = True
        self.check()

    def within(self):
        """Chunks that may be handed out by now."""
        start, window = self.tail
        head = range(min(start, self.taken + self.window))
        return {*head, *range(start, min(self.num_chunks, max(start, self.taken) + window))}

    def check(self):
        assert self.seen == list(range(len(self.seen))), "out of order or twice"
        assert len(set(self.kept)) == len(self.kept), "kept twice"
        waiting = self.within() - set(self.kept)
        if any(self.up & set(self.able(chunk)) for chunk in waiting) and not self.stopped:
            assert any(self.out[node] for node in self.up), "nobody works though there is work"

    def events(self):
        """Every event that could happen next."""
        for node in NODES:
            if node not in self.up:
                yield ("up", node)
            else:
                yield ("down", node)
                for chunk in self.out[node]:
                    yield ("finish", node, chunk)
                    yield ("fail", node, chunk)
                    yield ("outage", node, chunk)
        for node, chunk in self.ghosts:
            yield ("late", node, chunk)
        if self.taken < len(self.seen):
            yield ("take",)
        yield ("late",)
        yield ("overdue",)

    def happen(self, event):
        match event:
            case ("up", node):
                self.up.add(node)
                if len(self.up) == len(NODES) and self.wider > self.window:
                    self.window = self.wider
                    self.machine.widen(self.wider)
                self.apply(self.machine.node_up(node))
            case ("down", node):
                self.up.remove(node)
                self.ghosts |= {(node, chunk) for chunk in self.out[node]}
                self.out[node], self.in_a_row[node] = set(), 0
                self.apply(self.machine.node_down(node))
            case ("finish", node, chunk):
                self.overdue = False
                self.in_a_row[node] = 0
                self.out[node].remove(chunk)
                self.apply(self.machine.finished(node, chunk))
            case ("late", node, chunk):
                self.ghosts.remove((node, chunk))
                self.overdue = False
                self.in_a_row[node] = 0
                self.out[node].discard(chunk)
                self.apply(self.machine.finished(node, chunk))
            case ("fail", node, chunk):
                self.failed.add(chunk)
                self.in_a_row[node] += 1
                self.out[node].remove(chunk)
                self.apply(self.machine.failed(node, chunk, "test"))
            case ("outage", node, chunk):
                self.failed.add(chunk)
                self.in_a_row[node] += 1
                self.out[node].remove(chunk)
                self.apply(self.machine.failed(node, chunk, "test", counts=False))
            case ("late",):
                self.overdue = False
                self.apply(self.machine.late())
            case ("overdue",):
                self.overdue = True
                self.apply(self.machine.late(overdue=True))
            case ("take",):
                self.taken += 1
                self.apply(self.machine.taken())

    def state(self):
        machine = {key: repr(value) for key, value in vars(self.machine).items() if key not in ("_able", "_is_own")}
        return repr((sorted(self.up), sorted(self.ghosts), self.out, self.kept, self.seen, self.taken, machine))


def another(world):
    """One as this is, to go another way. deepcopy would look into every number, which takes most of the time here."""
    other = copy(world)
    other.machine = copy(world.machine)
    for fields in (vars(other), vars(other.machine)):
        for name, value in fields.items():
            if isinstance(value, set | list):
                fields[name] = value.copy()
            elif isinstance(value, dict):
                fields[name] = {key: each.copy() if isinstance(each, set) else each for key, each in value.items()}
    return other


def own_disks(chunk):
    return NODES[chunk % 2 :]


def every_other(chunk):
    return chunk % 2 == 0


def the_first(chunk):
    return chunk == 0


@pytest.mark.parametrize(
    ("able", "is_own", "slow", "tail"),
    [(None, None, 2.0, None), (own_disks, None, 2.0, None), (None, every_other, 2.0, None), (None, None, 0.0, None),
     (own_disks, None, 0.0, None), (None, the_first, 2.0, (1, 1)), (None, "none", 2.0, None)],
    ids=["all", "own disks", "own node", "all, and everybody seems slow", "own disks, and everybody seems slow",
         "two ends", "own node that helps out"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("num_chunks", "window", "per_node", "depth"),
    [
        (3, 2, 1, 6),
        (3, 2, 2, 5),
        (2, 1, 1, 6),
        pytest.param(3, 2, 2, 6, marks=pytest.mark.slow),
        pytest.param(3, 2, 1, 7, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, 8, marks=pytest.mark.slow),  # and all that is shorter
    ],
)
def test_every_history_of_a_small_world_keeps_the_promises(
    num_chunks, window, per_node, depth, slow, able, is_own, tail, monkeypatch
):
    monkeypatch.setattr(dispatch, "SLOW", slow)
    explore(World(num_chunks, window, per_node, able=able, is_own=is_own, tail=tail), depth)


def test_every_history_in_which_the_window_grows_keeps_the_promises():
    explore(World(4, 1, 2, grows=True), 6)


def test_a_wider_window_hands_out_more_at_once_and_a_narrower_one_changes_nothing():
    machine = Dispatch(10, window=2, per_node=4)
    assert machine.node_up("a") == [Assign("a", 0), Assign("a", 1)]
    machine.widen(6)
    assert machine.node_up("b") == [Assign("b", 2), Assign("b", 3), Assign("a", 4), Assign("b", 5)]
    machine.widen(1)
    assert machine.finished("a", 0) == [Keep(0), Deliver(0)]
    assert machine.taken() == [Assign("a", 6)]


def explore(world, depth):
    """Every history of so many events."""
    frontier, known = [world], set()
    for _ in range(depth):
        following = []
        for world in frontier:
            for event in world.events():
                if world.stopped:
                    continue
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
        self.world = World(20, 5, 2, failures=100)

    @rule(data=st.data())
    def something_happens(self, data):
        self.world.happen(data.draw(st.sampled_from(sorted(self.world.events()))))

    @precondition(lambda self: self.world.up)
    @rule()
    def nodes_stay_up_and_the_epoch_ends(self):
        world = another(self.world)
        while len(world.seen) < world.num_chunks or world.taken < world.num_chunks:
            event = next(e for e in world.events() if e[0] in ("finish", "take"))
            world.happen(event)
        assert world.machine.done
        assert world.machine.num_out == 0 or world.ghosts

    @invariant()
    def promises_hold(self):
        self.world.check()


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_faster_node_gets_more_chunks():
    machine = Dispatch(30, window=30, per_node=1)
    work = {d.node: d.chunk for d in machine.node_up("slow") + machine.node_up("fast")}
    count = {"slow": 0, "fast": 0}
    for tick in range(1, 100):
        for node, period in (("slow", 3), ("fast", 1)):
            if node in work and tick % period == 0:
                count[node] += 1
                decisions = machine.finished(node, work.pop(node))
                work |= {d.node: d.chunk for d in decisions if isinstance(d, Assign)}
    assert count["slow"] + count["fast"] == 30
    assert 2 * count["slow"] < count["fast"] < 4 * count["slow"]


def chunks_per_s(speeds, num_chunks=600, per_node=3, change=None, share=0.0, paces=None):
    """Virtual time: nodes work on one chunk after the other, `speeds` chunks a second; the trainer takes at once.

    With a share, the node called own is the trainer's. `paces` goes from epoch to epoch.
    """
    paces = {} if paces is None else paces
    machine = Dispatch(num_chunks, window=(per_node + 1) * len(speeds) + 1 + more_ahead(share), per_node=per_node,
                       own="own" if share else None, is_own=partial(is_own, share=share), paces=paces)  # fmt: skip
    queues, ends, now, rhythm = {node: [] for node in speeds}, {}, 0.0, Rhythm()

    def apply(decisions):
        for decision in decisions:
            match decision:
                case Assign(node, chunk):
                    queues[node].append(chunk)
                    if node not in ends:
                        ends[node] = now + 1 / speeds[node]
                case Deliver():
                    apply(machine.taken())

    apply(machine.node_up(*speeds))
    while not machine.done:
        node = min(ends, key=ends.get)
        if ends[node] > now + rhythm.late_after_s:
            now += rhythm.late_after_s
            out = sum(len(queue) for name, queue in queues.items() if name != "own")
            apply(machine.late(rhythm.are_overdue(now, out)))
            continue
        now = ends.pop(node)
        rhythm.replied(now, is_own=node == "own")
        chunk = queues[node].pop(0)
        if queues[node]:
            ends[node] = now + 1 / speeds[node]
        out = sum(len(queue) for name, queue in queues.items() if name != "own")
        apply(machine.finished(node, chunk, rhythm.are_overdue(now, out)))
        if change is not None and now >= change[0]:
            speeds, change = change[1], None
    paces.update(machine.paces)
    return num_chunks / now


@pytest.mark.parametrize("num_nodes", [2, 3, 6])
@pytest.mark.parametrize("speed", [1.0, 0.5, 0.25, 0.1, 0.01])
@pytest.mark.parametrize("per_node", [1, 3, 8])
def test_a_slow_node_costs_no_more_than_what_it_can_not_do(num_nodes, speed, per_node):
    """At most its whole share is lost, never that of the others; some more for the beginning and the end."""
    speeds = {"slow": speed, **{f"fast-{number}": 1.0 for number in range(num_nodes - 1)}}
    rate = chunks_per_s(speeds, per_node=per_node)
    assert rate >= 0.93 * (num_nodes - 1)
    assert rate >= 0.85 * sum(speeds.values())


def test_a_slow_node_is_found_out_once_and_not_in_every_epoch():
    speeds, paces = {"slow": 0.1, **{f"fast-{number}": 1.0 for number in range(5)}}, {}
    rates = [chunks_per_s(speeds, num_chunks=30, paces=paces) for _ in range(20)]
    assert rates[0] < 0.9 * 5, "otherwise there is nothing to show"
    assert min(rates[1:]) >= 0.93 * 5


def test_a_node_that_was_slow_gets_work_again_in_later_epochs():
    paces, fast = {}, dict.fromkeys("abc", 1.0)
    chunks_per_s({**fast, "a": 0.02}, num_chunks=30, paces=paces)
    rates = [chunks_per_s(fast, num_chunks=30, paces=paces) for _ in range(12)]
    assert rates[-1] >= 0.95 * 3


@pytest.mark.parametrize("num_nodes", [1, 3])
@pytest.mark.parametrize("share", [1 / 16, 3 / 16, 0.5, 13 / 16])
def test_a_share_that_fits_the_speeds_has_both_sides_busy(share, num_nodes):
    speeds = {"own": share * num_nodes / (1 - share), **{f"node-{number}": 1.0 for number in range(num_nodes)}}
    assert chunks_per_s(speeds, share=share) >= 0.95 * sum(speeds.values())


def made_by_own(node_per_s, own_per_s, loop_per_s, num_chunks=400):
    """Of so many chunks, how many the trainer's own node makes where it helps out; and chunks a second."""
    machine = Dispatch(num_chunks, window=20, per_node=3, own="own")
    rates = {"node": node_per_s, "own": own_per_s}
    queues, ends, made, ready, now = {"node": [], "own": []}, {}, {"node": 0, "own": 0}, 0, 0.0

    def apply(decisions):
        nonlocal ready
        for decision in decisions:
            match decision:
                case Assign(node, chunk):
                    queues[node].append(chunk)
                    ends.setdefault(node, now + 1 / rates[node])
                case Deliver():
                    ready += 1
        if ready and "loop" not in ends:
            ends["loop"] = now + 1 / loop_per_s

    apply(machine.node_up("node", "own"))
    while ends:
        who = min(ends, key=ends.get)
        now = ends.pop(who)
        if who == "loop":
            ready -= 1
            apply(machine.taken())
            continue
        chunk = queues[who].pop(0)
        made[who] += 1
        if queues[who]:
            ends[who] = now + 1 / rates[who]
        apply(machine.finished(who, chunk))
    return made["own"], num_chunks / now


def test_an_own_node_rests_while_the_others_keep_the_trainer_supplied():
    own, rate = made_by_own(node_per_s=3.0, own_per_s=3.0, loop_per_s=1.0)
    assert own <= 4, "the first chunks, of which nobody knows yet"
    assert rate >= 0.98


def test_an_own_node_does_what_is_missing_where_the_others_are_not_enough():
    own, rate = made_by_own(node_per_s=1.0, own_per_s=3.0, loop_per_s=2.0)
    assert rate >= 0.97 * 2.0
    assert 0.45 <= own / 400 <= 0.55


def test_both_sides_are_busy_where_the_trainer_wants_more_than_both_make():
    _, rate = made_by_own(node_per_s=1.0, own_per_s=0.5, loop_per_s=10.0)
    assert rate >= 0.95 * 1.5


def test_an_own_node_that_is_slower_than_planned_leaves_its_chunks_to_the_others():
    assert chunks_per_s({"own": 0.01, "node": 1.0}, share=0.5) >= 0.85


@pytest.mark.parametrize("speed", [0.1, 0.01])
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_nodes_that_crawl_leave_their_chunks_to_the_own_node(speed, num_nodes):
    nodes = {f"node-{number}": 1 / num_nodes for number in range(num_nodes)}
    slow = {"own": 1.0, **{name: speed * rate for name, rate in nodes.items()}}
    assert chunks_per_s({"own": 1.0, **nodes}, num_chunks=1000, share=0.5, change=(50.0, slow)) >= 0.8


def test_a_node_that_lives_and_never_replies_leaves_its_end_to_the_own_node():
    machine = Dispatch(40, window=8, per_node=2, own="own", is_own=lambda chunk: chunk < 10, tail=(10, 4))
    given = [each.chunk for each in machine.node_up("node", "own") if each.node == "own"]
    for _ in range(1000):
        decisions = machine.finished("own", given.pop(0), overdue=True) if given else machine.late(overdue=True)
        for decision in decisions:
            if isinstance(decision, Deliver):
                decisions += machine.taken()
        given += [each.chunk for each in decisions if isinstance(each, Assign) and each.node == "own"]
    assert machine.done


def test_what_fails_on_the_own_node_goes_to_another():
    machine = Dispatch(2, window=2, per_node=2, own="own", is_own=lambda chunk: chunk == 1)
    assert machine.node_up("node", "own") == [Assign("node", 0), Assign("own", 1)]
    assert machine.failed("own", 1, "403", counts=False) == [Assign("node", 1)]


def test_nodes_are_overdue_when_all_they_have_should_have_come_twice():
    rhythm = Rhythm()
    assert not rhythm.are_overdue(1e6, 1), "nothing is known yet: an engine may be loading"
    for number in range(20):
        rhythm.replied(10.0 + number, is_own=False)
        rhythm.replied(10.0 + number / 2, is_own=True)
    assert not rhythm.are_overdue(29 + 2 * OVERDUE, num_out=2)
    assert rhythm.are_overdue(29.1 + 2 * OVERDUE, num_out=2)
    for number in range(20):
        rhythm.replied(100.0 + 50 * number, is_own=False)
    assert rhythm.are_overdue(1050.1 + 2 * OVERDUE, num_out=2), "they crawl, and are measured by what they once did"


def test_nodes_that_answer_at_once_are_not_overdue_at_once():
    rhythm = Rhythm()
    for _ in range(KNOWN):
        rhythm.replied(5.0, is_own=False)
    assert not rhythm.are_overdue(5.0 + LATE_S[0], num_out=3)


@given(st.integers(2, 10_000), st.floats(1e-4, 100))
def test_while_nothing_comes_the_clock_goes_on_about_as_fast_as_replies_came(num_replies, every_s):
    found = late_after_s(num_replies, (num_replies - 1) * every_s)
    assert 0.05 <= found <= 1
    assert found == pytest.approx(min(max(2 * every_s, 0.05), 1))
    assert late_after_s(1, 0.0) == 1, "nothing is known yet: an engine may be loading"


def test_a_node_that_fails_again_and_again_is_left_out_for_a_while_and_then_tried():
    machine = Dispatch(40, window=40, per_node=1, own="own", is_own=lambda chunk: chunk % 2 == 1)
    machine.node_up("node", "own")
    for _ in range(dispatch.FAILING):
        (given,) = machine.out_on("own")
        machine.failed("own", given, "403", counts=False)
    left_out = 0
    while not machine.out_on("own") and left_out < 40:
        (given,) = machine.out_on("node")
        machine.finished("node", given)
        left_out += 1
    assert 3 <= left_out < 20


def test_an_own_node_is_given_two_chunks_at_once_however_many_others_have():
    machine = Dispatch(16, window=16, per_node=8, own="own", is_own=lambda chunk: chunk % 2 == 1, own_out=2)
    given = machine.node_up("node", "own")
    assert [each.chunk for each in given if each.node == "own"] == [1, 3]
    assert [each.chunk for each in given if each.node == "node"] == list(range(0, 16, 2))
    assert machine.finished("own", 1)[1:] == [Assign("own", 5)]


def test_both_ends_are_worked_on_at_once_and_the_tail_no_further_than_its_window():
    machine = Dispatch(12, window=2, per_node=8, own="own", is_own=lambda chunk: chunk < 6, tail=(6, 4))
    given = machine.node_up("node", "own")
    assert given == [Assign("own", 0), Assign("own", 1), *(Assign("node", chunk) for chunk in range(6, 10))]
    assert machine.finished("node", 6) == [Keep(6)], "it waits for the head, and makes room for nothing"
    assert machine.finished("own", 0) == [Keep(0), Deliver(0)]
    assert machine.taken() == [Assign("own", 2)]


def test_who_has_the_tail_and_dies_leaves_it_to_the_trainer_once_its_head_is_done():
    machine = Dispatch(4, window=4, per_node=4, own="own", is_own=lambda chunk: chunk < 2, tail=(2, 4))
    machine.node_up("node", "own")
    assert machine.node_down("node") == []
    assert machine.finished("own", 0)[:2] == [Keep(0), Deliver(0)]
    given = machine.taken() + machine.finished("own", 1)
    assert {each.chunk for each in given if isinstance(each, Assign)} <= {2, 3}
    for chunk in (2, 3):
        machine.finished("own", chunk)
    assert machine.done


def test_at_the_pace_of_both_sides_an_own_node_takes_any_chunk_and_no_more_at_once_than_it_may():
    machine = Dispatch(16, window=16, per_node=8, own="own", own_out=2)
    given = machine.node_up("node", "own")
    assert [each.chunk for each in given if each.node == "own"] == [1, 3]
    assert [each.chunk for each in given if each.node == "node"] == [0, 2, 4, 5, 6, 7, 8, 9]
    assert machine.finished("own", 1)[1:] == [Assign("own", 10)]


def test_an_own_node_that_could_do_more_than_its_share_does_not():
    assert chunks_per_s({"own": 100.0, "node": 1.0}, share=0.5) <= 2.1


def test_equal_nodes_waste_nothing():
    assert chunks_per_s(dict.fromkeys("abcdef", 1.0)) >= 0.98 * 6


def test_a_node_that_is_fast_again_gets_work_again():
    speeds = {"a": 1.0, "b": 0.02}
    rate = chunks_per_s(speeds, num_chunks=2000, change=(100.0, {"a": 1.0, "b": 1.0}))
    assert rate > 1.6


def test_a_chunk_that_keeps_failing_stops_the_epoch_with_its_reason():
    machine = Dispatch(1, window=1, per_node=1, max_failures=2)
    machine.node_up("a")
    assert machine.failed("a", 0, "no such model") == [Assign("a", 0)]
    (stop,) = machine.failed("a", 0, "no such model")
    assert "failed 2 times" in stop.reason
    assert "no such model" in stop.reason


def test_failures_that_do_not_count_never_stop_the_epoch():
    machine = Dispatch(1, window=1, per_node=1, max_failures=2)
    machine.node_up("a")
    for _ in range(10):
        assert machine.failed("a", 0, "503", counts=False) == [Assign("a", 0)]
    assert Deliver(0) in machine.finished("a", 0)


def test_a_failed_chunk_goes_to_another_node_first():
    machine = Dispatch(1, window=1, per_node=1)
    machine.node_up("a")
    machine.node_up("b")
    assert machine.failed("a", 0, "damaged") == [Assign("b", 0)]


def test_a_node_that_never_replies_does_not_hold_up_the_end():
    machine = Dispatch(4, window=9, per_node=2)
    given = [d.chunk for node in "ab" for d in machine.node_up(node) if d.node == "b"]
    for _ in range(200):
        decisions = machine.finished("b", given.pop()) if given else machine.late()
        for decision in list(decisions):
            if isinstance(decision, Deliver):
                decisions += machine.taken()
        given += [d.chunk for d in decisions if isinstance(d, Assign) and d.node == "b"]
    assert machine.done, "b is idle, and a has the rest for ever"

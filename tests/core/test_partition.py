"""Every history of a step: nothing is applied twice or halfway, whoever dies when, and nodes are told what they may be
told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.partition import (
    MAX_UNDER_WAY,
    Backward,
    Collect,
    Drop,
    Finish,
    Forward,
    Join,
    Moments,
    Replica,
    RolledBack,
    Step,
    Suffix,
    deal,
    merged,
    micro_bounds,
)
from headwater.errors import ConfigError

VERSION = 7


class World:
    """A step with the nodes around it. `history` is a list of choices among what may happen next; each replays it."""

    def __init__(self, parts, depth, trains, norms, deaths, history):
        self.parts = [frozenset(part) for part in parts]
        self.step = Step(self.parts, depth=depth, trains=trains)
        self.depth, self.trains = depth, trains
        self.norms_left = {node: norms for part in self.parts for node in part}
        self.round = dict.fromkeys(self.norms_left, 0)
        self.joined = 0
        self.deaths_left = deaths
        self.replicas = {node: Replica(version=VERSION) for node in self.norms_left}
        self.inbox = {node: [] for node in self.norms_left}
        self.computing = None
        self.suffixed, self.back, self.grads = [], [], []
        self.ends = []
        self.carry_out(self.step.begin())
        for choice in history:
            self.happen(self.choices()[choice])

    def carry_out(self, decisions):
        for decision in decisions:
            assert not self.ends or isinstance(decision, Drop | RolledBack), "after the end"
            match decision:
                case Forward(node, micro):
                    self.replicas[node].forward(1, VERSION, micro)
                    self.inbox[node].append(("rows", micro))
                case Backward(node, micro):
                    self.replicas[node].backward(1, micro)
                    self.back.append((node, micro))
                case Collect(node):
                    self.replicas[node].collect(1)
                    self.inbox[node].append(("grads",))
                case Suffix(micro):
                    assert self.computing is None
                    self.computing = micro
                case Join(number):
                    assert number == self.joined
                    self.joined += 1
                case Drop(node):
                    self.replicas[node].drop()
                    self.inbox[node].clear()
                case Finish():
                    self.ends.append("finished")
                case RolledBack(node):
                    self.ends.append("rolled back")

    def choices(self):
        """What may happen next: a node says something, the suffix ends, a node dies."""
        found = []
        for node, inbox in self.inbox.items():
            waits = self.round[node] > self.joined
            if self.norms_left[node] and inbox and inbox[0][0] == "rows" and not waits:
                found.append(("norm", node))
            elif inbox and not waits:
                found.append(("say", node))
        if self.computing is not None:
            found.append(("suffixed",))
        if self.deaths_left and not self.ends:
            found += [("die", node) for node in self.inbox]
        return found

    def happen(self, choice):
        match choice:
            case ("norm", node):
                self.norms_left[node] -= 1
                number, self.round[node] = self.round[node], self.round[node] + 1
                self.carry_out(self.step.norm(node, number))
            case ("say", node):
                said = self.inbox[node].pop(0)
                if said[0] == "rows":
                    self.carry_out(self.step.rows(node, said[1]))
                else:
                    self.grads.append(node)
                    self.carry_out(self.step.grads(node))
            case ("suffixed",):
                self.suffixed.append(self.computing)
                micro, self.computing = self.computing, None
                self.carry_out(self.step.suffixed(micro))
            case ("die", node):
                self.deaths_left -= 1
                self.inbox[node].clear()
                self.carry_out(self.step.lost(node))

    def check(self):
        under_way = dict.fromkeys(self.inbox, 0)
        for node, replica in self.replicas.items():
            under_way[node] = len(replica._forward) - len(replica._backward)
            assert not self.trains or under_way[node] <= self.depth
        if not self.choices():
            assert len(self.ends) == 1, "it hangs"
        if self.ends == ["finished"]:
            assert self.suffixed == list(range(len(self.parts)))
            if self.trains:
                assert sorted(self.back) == sorted((node, m) for m, part in enumerate(self.parts) for node in part)
                assert sorted(self.grads) == sorted(self.inbox)
            assert all(replica.step is None or not self.trains for replica in self.replicas.values())
        if self.ends == ["rolled back"]:
            living = [each for each in self.replicas.values() if each.step is None]
            assert len(living) >= len(self.replicas) - 1, "somebody still holds a part of it"


@pytest.mark.parametrize(
    ("parts", "depth", "trains", "norms", "deaths"),
    [
        ([{0, 1}, {0, 1}, {0, 1}], 2, True, 0, 1),
        ([{0, 1}, {1}, {0}], 2, True, 0, 1),
        ([{0}, {0}], 3, True, 0, 1),
        ([{0, 1}, {0, 1}], 1, False, 0, 1),
        ([{0, 1, 2}], 1, True, 2, 1),
        ([{0, 1}], 2, True, 3, 2),
    ],
)
def test_a_step_happens_once_or_not_at_all_in_every_history(parts, depth, trains, norms, deaths):
    pending, seen, num_ended = [[]], 0, 0
    while pending:
        history = pending.pop()
        world = World(parts, depth, trains, norms, deaths, history)
        world.check()
        seen += 1
        num_ended += bool(world.ends)
        if not world.ends:
            pending += [[*history, number] for number in range(len(world.choices()))]
    assert seen > 5
    assert num_ended


def test_an_abandoned_step_is_dropped_everywhere_and_stays_so():
    step = Step([frozenset({0, 1})], depth=1, trains=True)
    step.begin()
    assert step.abandon() == [Drop(0), Drop(1)]
    assert step.rows(0, 0) == step.lost(1) == step.abandon() == []


def test_rows_that_nobody_asked_for_are_refused():
    step = Step([frozenset({0})], depth=1, trains=True)
    step.begin()
    for node, micro in ((1, 0), (0, 1)):
        with pytest.raises(ConfigError, match="nobody asked for"):
            step.rows(node, micro)


def test_a_replica_takes_a_version_over_as_a_whole_or_not_at_all():
    replica = Replica()
    replica.stage(3, -1)
    with pytest.raises(ConfigError):  # half of it is no version
        replica.forward(1, 3, 0)
    replica.drop()
    assert replica.version == -1
    replica.stage(4, -1)
    replica.commit(4)
    replica.forward(1, 4, 0)
    with pytest.raises(ConfigError, match="in the middle of a step"):
        replica.stage(5, 4)


@pytest.mark.parametrize("told", [
    lambda replica: replica.forward(1, VERSION + 1, 0),  # weights that it has not got
    lambda replica: replica.backward(1, 0),
    lambda replica: replica.collect(1),
    lambda replica: replica.commit(9),
    lambda replica: replica.stage(9, 3),  # changes to another version than it has
    lambda replica: replica.stage(VERSION, VERSION),
])  # fmt: skip
def test_a_replica_refuses_what_is_out_of_order(told):
    with pytest.raises(ConfigError):
        told(Replica(version=VERSION))


def test_a_replica_holds_a_bounded_number_of_micro_batches():
    replica = Replica(version=VERSION)
    for micro in range(MAX_UNDER_WAY):
        replica.forward(1, VERSION, micro)
    with pytest.raises(ConfigError, match="under way"):
        replica.forward(1, VERSION, MAX_UNDER_WAY)


@given(st.integers(1, 600), st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(any))
def test_every_row_is_dealt_once_and_by_shares(num_rows, shares):
    dealt = deal(num_rows, dict(enumerate(shares)))
    assert sorted(row for rows in dealt.values() for row in rows.tolist()) == list(range(num_rows))
    for node, rows in dealt.items():
        assert abs(len(rows) - num_rows * shares[node] / sum(shares)) <= 1.001


@given(st.integers(1, 100), st.integers(1, 4), st.randoms())
def test_rows_go_to_who_holds_them(num_rows, num_nodes, random):
    holders = [{random.randrange(num_nodes), random.randrange(num_nodes)} for _ in range(num_rows)]
    dealt = deal(num_rows, dict.fromkeys(range(num_nodes), 1.0), lambda node, row: node in holders[row])
    assert sorted(row for rows in dealt.values() for row in rows.tolist()) == list(range(num_rows))
    assert all(node in holders[row] for node, rows in dealt.items() for row in rows.tolist())


def test_nodes_without_a_share_make_everything_when_they_alone_are_left():
    assert {node: rows.tolist() for node, rows in deal(4, {1: 0.0, 2: 0.0}).items()} == {1: [0, 1], 2: [2, 3]}


@given(st.integers(1, 1000), st.integers(1, 64))
def test_micro_batches_are_a_batch(num_rows, num_micro):
    bounds = micro_bounds(num_rows, num_micro)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_rows
    assert all(
        start < stop == after for (start, stop), (after, _) in zip(bounds, [*bounds[1:], (num_rows, 0)], strict=True)
    )
    assert max(b - a for a, b in bounds) - min(b - a for a, b in bounds) <= 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.floats(-1e4, 1e4))
def test_moments_of_parts_are_those_of_the_whole(counts, seed, offset):
    generator = np.random.default_rng(seed)
    parts = [generator.normal(offset, 1, (count, 3)) for count in counts]
    found = merged([Moments(len(each), each.mean(0), ((each - each.mean(0)) ** 2).sum(0)) for each in parts])
    whole = np.concatenate(parts)
    assert found.count == len(whole)
    np.testing.assert_allclose(found.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.variance, whole.var(0), rtol=1e-9, atol=1e-11)

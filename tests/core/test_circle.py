"""Every history of some steps whose gradients nodes add up among themselves: a sum that is taken is the sum of that
step, of all its nodes, whoever loses whom in the middle of what."""

import copy
from itertools import pairwise

import pytest

from headwater.core.circle import AGAIN_S, GATHER_WITHIN_S, MOST_AGAIN_S, Circle, Gather
from headwater.core.partition import Add, Backward, Collect, Drop, Finish, Forward, Replica, RolledBack, Step, Suffix

NODES = (0, 1)
NUM_STEPS = 3


class Node:
    """What a node does with what it is told, in order; as `node.session` and `node.circle` do it."""

    def __init__(self):
        self.inbox, self.replica = [], Replica(version=0)
        self.place = None  # the number of its circle
        self.adding = None  # (step, passes): what it has given and has no sum for
        self.given = 0  # how often, in this circle


class World:
    """A trainer, two nodes, an aggregator. `faults` may still happen: somebody loses somebody, or a step is dropped."""

    def __init__(self, faults):
        self.circle, self.nodes, self.faults = Circle(), [Node() for _ in NODES], faults
        self.outbox = []  # of nodes to the trainer, each node's in order
        self.jobs = {}  # by number: what each node has given, in order
        self.met = {}  # by number: who has joined
        self.attempt = self.num_done = 0
        self.step, self.number, self.suffix = None, -1, False
        self.rows, self.sums, self.in_network = {}, {}, 0
        self.begin()

    # The trainer

    def begin(self):
        self.attempt += 1
        wanted = self.circle.look(dict.fromkeys(NODES, 0), float(self.attempt * 1000))
        if isinstance(wanted, Gather):
            for node in wanted.nodes:
                self.nodes[node].inbox.append(("gather", wanted.number))
        self.number, self.sums = self.circle.number, {}
        self.step = Step([frozenset(NODES)], depth=1, trains=True, circle=self.circle.members)
        self.carry_out(self.step.begin())

    def carry_out(self, decisions):
        for each in decisions:
            match each:
                case Forward(node, _):
                    self.nodes[node].inbox.append(("forward", self.attempt))
                case Suffix(_):
                    self.suffix = True
                case Backward(node, _):
                    self.nodes[node].inbox.append(("backward", self.attempt))
                case Add(node, passes):
                    if passes:
                        self.circle.begins()
                    self.nodes[node].inbox.append(("add", self.attempt, self.number, passes))
                case Collect(node):
                    self.nodes[node].inbox.append(("collect", self.attempt))
                case Drop(node):
                    self.nodes[node].inbox.append(("drop",))
                case Finish():
                    found = self.sums
                    if "all" in found:
                        self.in_network += 1
                        assert found["all"] == dict.fromkeys(NODES, self.attempt), "it is no sum of this step"
                    else:
                        assert found == dict.fromkeys(NODES, self.attempt)
                    self.num_done += 1
                    if self.num_done < NUM_STEPS:
                        self.begin()
                case RolledBack(_):
                    raise AssertionError

    def hear(self, node):
        place = next(place for place, (who, _) in enumerate(self.outbox) if who == node)
        said = self.outbox.pop(place)[1]
        if said[0] == "met":
            self.circle.met(node, said[1])
        elif said[0] == "apart":
            if self.circle.apart(node, said[1], float(self.attempt * 1000)) and said[1] == self.number:
                self.carry_out(self.step.apart(node))
        elif said[1] != self.attempt or self.num_done == NUM_STEPS:
            return
        elif said[0] == "rows":
            self.carry_out(self.step.rows(node, 0))
        elif said[0] == "grads":
            self.sums[node] = said[1]
            self.carry_out(self.step.grads(node))
        elif said[0] == "sum":
            decisions = self.step.summed(node)
            self.sums = {"all": said[2]}
            self.circle.added()
            self.carry_out(decisions)

    # Nodes, and what they meet on

    def leave(self, number):
        node = self.nodes[number]
        if node.place is not None:
            self.jobs[node.place]["ended"] = True
        node.place = node.adding = None

    def work(self, number):
        node = self.nodes[number]
        said = node.inbox.pop(0)
        match said:
            case ("gather", circle):
                self.leave(number)
                node.place, node.given = circle, 0
                self.met.setdefault(circle, set()).add(number)
                self.jobs.setdefault(circle, {"ended": False, **{each: [] for each in NODES}})
                if self.met[circle] == set(NODES):
                    self.outbox += [(each, ("met", circle)) for each in NODES]
            case ("forward", step):
                node.replica.forward(step, 0, 0)
                self.outbox.append((number, ("rows", step)))
            case ("backward", step):
                node.replica.backward(step, 0)
            case ("add", step, circle, passes):
                node.replica.add(step)
                if node.place != circle:
                    self.leave(number)
                    self.outbox.append((number, ("apart", circle)))
                else:
                    node.adding = (step, passes)
                    self.jobs[circle][number].append(step)
                    node.given += 1
            case ("collect", step):
                node.replica.collect(step)
                self.outbox.append((number, ("grads", step)))
            case ("drop",):
                node.replica.drop()

    def has_sum(self, number):
        node = self.nodes[number]
        return all(len(self.jobs[node.place][each]) >= node.given for each in NODES)

    # What may happen next

    def choices(self):
        found = []
        if self.num_done == NUM_STEPS:
            return found
        for number, node in enumerate(self.nodes):
            if node.adding is None:
                found += [("work", number)] if node.inbox else []
                if node.inbox and node.inbox[0][0] == "add" and ("drop",) in node.inbox:
                    found.append(("skip", number))
            else:
                job = self.jobs[node.place]
                if self.has_sum(number):  # a sum may still come when the job has ended: it was on its way
                    found.append(("added", number))
                if job["ended"] or any(each[0] in ("drop", "collect", "gather") for each in node.inbox):
                    found.append(("give up", number))
                elif self.faults:
                    found.append(("fails", number))
            if any(who == number for who, _ in self.outbox):
                found.append(("hear", number))
            if self.faults and node.place is not None and node.adding is None:
                found.append(("cut", number))
        if self.suffix:
            found.append(("suffixed",))
        if self.faults and self.attempt and not self.step.ended:
            found.append(("abandon",))
        return found

    def happen(self, choice):
        match choice:
            case ("work", number):
                self.work(number)
            case ("skip", number):  # it was in the middle of its backward pass, and looked for a word from the trainer
                inbox = self.nodes[number].inbox
                del inbox[: inbox.index(("drop",))]
                self.work(number)
            case ("hear", number):
                self.hear(number)
            case ("added", number):
                node = self.nodes[number]
                step, passes = node.adding
                whole = {each: self.jobs[node.place][each][node.given - 1] for each in NODES}
                node.adding = None
                if passes:
                    self.outbox.append((number, ("sum", step, whole)))
            case ("give up", number) | ("fails", number):
                self.faults -= choice[0] == "fails"
                circle = self.nodes[number].place
                self.leave(number)
                self.outbox.append((number, ("apart", circle)))
            case ("cut", number):  # between sums, which it finds out when it is told to add up
                self.faults -= 1
                self.leave(number)
            case ("suffixed",):
                self.suffix = False
                self.carry_out(self.step.suffixed(0))
            case ("abandon",):
                self.faults -= 1
                self.suffix = False
                self.carry_out(self.step.abandon())
                self.begin()

    def key(self):
        nodes = [(node.inbox, vars(node.replica), node.place, node.adding, node.given) for node in self.nodes]
        trainer = (vars(self.circle), vars(self.step), self.sums, self.suffix, self.attempt, self.num_done)
        return repr((nodes, self.outbox, self.jobs, self.met, trainer, self.faults))


@pytest.mark.parametrize("faults", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sum_that_is_taken_is_that_of_the_step_in_every_history(faults):
    pending, seen, ended, in_network = [World(faults)], set(), 0, set()
    while pending:
        world = pending.pop()
        choices = world.choices()
        if not choices:
            assert world.num_done == NUM_STEPS, "it hangs"
            ended += 1
            in_network.add(world.in_network)
        for choice in choices:
            other = copy.deepcopy(world)
            other.happen(choice)
            if (key := other.key()) not in seen:
                seen.add(key)
                pending.append(other)
    assert ended
    assert max(in_network) >= NUM_STEPS - 1, "they meet in the first step"
    assert faults or in_network == {NUM_STEPS - 1}


def test_nobody_adds_up_before_all_have_met():
    circle = Circle()
    assert circle.look({0: 7, 3: 8}, 0.0) == Gather(1, (0, 3))
    assert circle.members == frozenset()
    circle.met(3, 1)
    assert circle.members == frozenset()
    circle.met(0, 1)
    assert circle.members == {0, 3}
    assert circle.look({0: 7, 3: 8}, 1.0) is None


def test_one_node_meets_nobody():
    assert Circle().look({4: 1}, 0.0) is None


def together(now=0.0):
    circle = Circle()
    wanted = circle.look({0: 1, 1: 2}, now)
    for node in wanted.nodes:
        circle.met(node, wanted.number)
    return circle


@pytest.mark.parametrize("sessions", [{0: 1}, {0: 1, 1: 3}, {0: 1, 1: 2, 2: 5}], ids=str)
def test_another_session_ends_it_and_the_next_is_tried_at_once(sessions):
    circle = together()
    wanted = circle.look(sessions, 1.0)
    assert circle.members == frozenset()
    assert wanted == (Gather(2, tuple(sessions)) if len(sessions) > 1 else None)


def test_a_sum_that_has_not_come_ends_it():
    circle = together()
    circle.begins()
    assert circle.look({0: 1, 1: 2}, 5.0) is None
    assert circle.members == frozenset()
    assert circle.look({0: 1, 1: 2}, 5.0 + AGAIN_S) == Gather(2, (0, 1))


def test_where_it_fails_again_and_again_it_is_tried_less_and_less_often_until_a_sum_has_come():
    circle, now, waits = Circle(), 0.0, []
    for _ in range(8):
        while (wanted := circle.look({0: 1, 1: 2}, now)) is None:
            now += AGAIN_S / 2
        waits.append(now)
        assert circle.apart(1, wanted.number, now)
        assert not circle.apart(0, wanted.number, now), "that is no news"
    gaps = [after - before for before, after in pairwise(waits)]
    assert gaps == sorted(gaps)
    assert gaps[0] == AGAIN_S
    assert gaps[-1] == MOST_AGAIN_S
    wanted = circle.look({0: 1, 1: 2}, now + MOST_AGAIN_S)
    for node in wanted.nodes:
        circle.met(node, wanted.number)
    circle.begins()
    circle.added()
    circle.apart(0, wanted.number, 1000.0)
    assert circle.look({0: 1, 1: 2}, 1000.0 + AGAIN_S) is not None


def test_who_says_nothing_is_not_waited_for_for_ever():
    circle = Circle()
    assert circle.look({0: 1, 1: 2}, 0.0) is not None
    circle.met(0, 1)
    assert circle.look({0: 1, 1: 2}, GATHER_WITHIN_S + 1) is None
    assert circle.look({0: 1, 1: 2}, GATHER_WITHIN_S + 1 + AGAIN_S) == Gather(2, (0, 1))


def test_what_is_said_of_an_earlier_one_counts_for_nothing():
    circle = Circle()
    circle.look({0: 1, 1: 2}, 0.0)
    circle.met(0, 0)
    circle.met(1, 1)
    assert circle.members == frozenset()
    assert not circle.apart(0, 0, 0.0)

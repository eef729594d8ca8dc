"""Samples go through a node's stages once each, in bounded buffers, whatever order work finishes in."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.ring import Decode, Infer, Read, Ring, Send


class Stages:
    """A ring and the work it has asked for."""

    def __init__(self, num_samples, slots):
        self.ring = Ring(num_samples, slots=slots)
        self.slots, self.num_samples = slots, num_samples
        self.work, self.reads, self.good, self.inferred, self.sent = [], [], set(), [], []
        self.bad, self.begun = set(), []

    def apply(self, decisions):
        for decision in decisions:
            self.work.append(decision)
            match decision:
                case Read(sample):
                    self.reads.append(sample)
                case Infer(group):
                    members = set(self.ring.samples_of(group))
                    assert members <= self.good | self.bad
                    assert members & self.good
                    self.inferred.append(group)
        assert len(set(self.reads)) == len(self.reads)
        assert len(set(self.inferred)) == len(self.inferred)
        open_groups = {self.ring.group_of(s) for s in self.reads} - set(self.sent)
        hopeless = {g for g in open_groups if set(self.ring.samples_of(g)) <= self.bad}
        assert len(open_groups - hopeless) <= self.slots
        assert bool(self.work or self.ring.may_begin) != self.ring.done

    def events(self, sizes):
        if self.ring.may_begin:
            yield from (("begin", rows) for rows in sizes)
        for item in self.work:
            match item:
                case Read() | Decode():
                    yield ("ok", item)
                    yield ("bad", item)
                case _:
                    yield ("ok", item)

    def happen(self, event):
        outcome, item = event
        if outcome == "begin":
            self.begun.append(item)
            self.apply(self.ring.begin(item))
            return
        self.work.remove(item)
        if outcome == "bad":
            self.bad.add(item.sample)
            self.apply(self.ring.bad(item.sample))
            return
        match item:
            case Read(sample):
                self.apply(self.ring.read(sample))
            case Decode(sample):
                self.good.add(sample)
                self.apply(self.ring.decoded(sample))
            case Infer(group):
                self.apply(self.ring.inferred(group))
            case Send(group):
                self.sent.append(group)
                self.apply(self.ring.sent(group))

    def check_end(self):
        assert self.ring.done
        assert sorted(self.reads) == list(range(self.num_samples))
        assert self.good | self.bad == set(range(self.num_samples))
        assert set(self.sent) == {self.ring.group_of(sample) for sample in self.good}
        groups = [self.ring.samples_of(group) for group in range(len(self.begun))]
        assert [sample for group in groups for sample in group] == list(range(self.num_samples))
        assert [len(group) for group in groups[:-1]] == self.begun[:-1]
        assert len(groups[-1]) <= self.begun[-1]


@pytest.mark.parametrize(("num_samples", "sizes", "slots"), [(3, (2,), 1), (3, (1, 2), 2), (4, (2,), 2)])
def test_every_order_of_events_ends_with_every_good_row_sent_once(num_samples, sizes, slots):
    frontier, known, ends = [Stages(num_samples, slots)], set(), 0
    while frontier:
        stages = frontier.pop()
        if stages.ring.done:
            stages.check_end()
            ends += 1
        for event in stages.events(sizes):
            other = deepcopy(stages)
            other.happen(event)
            state = repr((sorted(map(repr, other.work)), sorted(other.good), sorted(other.bad), sorted(other.sent),
                          other.begun))  # fmt: skip
            if state not in known:
                known.add(state)
                frontier.append(other)
    assert ends > 4


@given(st.integers(1, 40), st.integers(1, 4), st.data())
def test_any_size_and_any_order_works(num_samples, slots, data):
    stages = Stages(num_samples, slots)
    while not stages.ring.done:
        events = list(stages.events(range(1, 10)))
        stages.happen(events[data.draw(st.integers(0, len(events) - 1))])
    stages.check_end()

"""Prefetched bags: whatever steps come between, what is used is what a fresh question would have brought."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.ahead import MOST, Ahead, Take

VECTORS = 4
sets = st.sets(st.integers(0, VECTORS - 1), min_size=1)
events = st.lists(st.one_of(st.tuples(st.just("stage"), sets, st.booleans()), st.tuples(st.just("step"), sets),
                            st.tuples(st.just("take"), st.integers(0, 9))), max_size=40)  # fmt: skip


class Node:
    """Vectors as the versions that changed them last; a bag is known by those of its vectors."""

    def __init__(self):
        self.version, self.changed = 0, [0] * VECTORS

    def step(self, vectors):
        self.version += 1
        for each in vectors:
            self.changed[each] = self.version

    def pooled(self, bags, since):
        """{bag: what it is now}, of those that have a vector that changed since."""
        return {place: tuple(self.changed[each] for each in sorted(bag)) for place, bag in enumerate(bags)
                if since < 0 or any(self.changed[each] > since for each in bag)}  # fmt: skip


@given(events)
def test_a_batch_gets_what_a_fresh_question_brings(happened):
    node, ahead, batches, known = Node(), Ahead(0), {}, {}
    for number, (what, *more) in enumerate(happened):
        if what == "stage":
            bags = [more[0], {min(more[0])}]
            staged = ahead.stage(number, pooled=more[1])
            assert staged == (len(batches) < MOST)
            if staged:
                batches[number], known[number] = bags, node.pooled(bags, -1) if more[1] else {}
        elif what == "step":
            bring = ahead.step()
            node.step(more[0])
            assert (bring is None) == (not batches)
            if bring is not None:
                assert bring.number == min(batches)
                known[bring.number] |= node.pooled(batches[bring.number], bring.since)
        elif batches:
            number = sorted(batches)[more[0] % len(batches)]
            told, bags = ahead.take(number), batches.pop(number)
            if not isinstance(told, Take):
                known[number] |= node.pooled(bags, told.since)
            assert known.pop(number) == node.pooled(bags, -1)
        assert ahead.version == node.version

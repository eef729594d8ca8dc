"""Reads over a link that others need, too: as many as fill it, and no more."""

import heapq
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.reads import CROWDED_S, Reads

SIZE = 25_000


class Played:
    """Reads of one size over a link that carries one in `link_s`, each after the store's `answer_s`."""

    def __init__(self, most=16):
        self.machine, self._under_way, self._now, self._free_at = Reads(most), [], 0.0, 0.0

    def run(self, link_s, answer_s, num_reads=3000):
        """How many were under way at most times, in the second half; and how busy the link was then."""
        usual, begun, half_at = Counter(), 0, 0.0
        for done in range(num_reads):
            while len(self._under_way) < self.machine.at_once:
                self._free_at = max(self._free_at, self._now + answer_s) + link_s
                heapq.heappush(self._under_way, (self._free_at, self._now))
            self._now, since = heapq.heappop(self._under_way)
            at_once = self.machine.took(self._now - since, SIZE)
            if 2 * done >= num_reads:
                begun, half_at = begun + 1, half_at or self._now
                usual[at_once] += 1
        return usual.most_common(1)[0][0], begun * link_s / (self._now - half_at)


@given(st.lists(st.tuples(st.floats(0, 60), st.integers(0, 10**9)), max_size=300), st.integers(1, 64))
def test_there_are_always_some_and_never_too_many(taken, most):
    machine = Reads(most)
    for seconds, num_bytes in taken:
        assert min(4, most) <= machine.took(seconds, num_bytes) <= most


@given(st.lists(st.floats(0, CROWDED_S), max_size=300))
def test_reads_that_are_answered_soon_are_never_held_back(taken):
    machine = Reads(16)
    assert all(machine.took(seconds, SIZE) == 16 for seconds in taken)


@pytest.mark.parametrize("mbit_per_s", [2, 10])
def test_on_a_thin_link_a_few_fill_it(mbit_per_s):
    at_once, busy = Played().run(link_s=SIZE * 8 / (mbit_per_s * 1e6), answer_s=0.002)
    assert at_once == 4
    assert busy > 0.95


@pytest.mark.parametrize("answer_s", [0.06, 0.1, 1.0])
def test_a_store_that_takes_long_to_answer_is_asked_by_many(answer_s):
    at_once, busy = Played().run(link_s=0.001, answer_s=answer_s)
    assert at_once == 16
    assert busy > 0.9 * min(1.0, 16 * 0.001 / (answer_s + 0.001))


def test_once_the_store_is_what_takes_long_there_are_more():
    """Four were enough for a thin link; on a fast one, four readers of a slow store are too few."""
    played = Played()
    assert played.run(link_s=0.1, answer_s=0.002)[0] == 4
    assert played.run(link_s=0.001, answer_s=0.1)[0] == 16
    assert played.run(link_s=0.1, answer_s=0.002)[0] == 4

"""Reads over a link that others need, too: as many as fill it, and no more."""

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.reads import CROWDED_S, Reads


def played(link_s, answer_s, num_reads=2000, most=16):
    """Reads of one size over a link that carries one in `link_s`, each after the store's `answer_s`.

    How many were under way at once in the end, and how busy the link was in the last half.
    """
    machine, under_way = Reads(most), []
    now, free_at, begun, done, carried_s = 0.0, 0.0, 0, 0, 0.0
    half_at = None
    while done < num_reads:
        while len(under_way) < machine.at_once and begun < num_reads:
            free_at = max(free_at, now + answer_s) + link_s
            heapq.heappush(under_way, (free_at, now))
            begun += 1
        now, since = heapq.heappop(under_way)
        machine.took(now - since)
        done += 1
        if done > num_reads // 2:
            half_at = now if half_at is None else half_at
            carried_s += link_s
    return machine.at_once, carried_s / (now - half_at)


@given(st.lists(st.floats(0, 60), max_size=200), st.integers(1, 64))
def test_there_are_always_some_and_never_too_many(taken, most):
    machine = Reads(most)
    for seconds in taken:
        assert min(4, most) <= machine.took(seconds) <= most


@given(st.lists(st.floats(0, CROWDED_S), max_size=200))
def test_reads_that_are_answered_soon_are_never_held_back(taken):
    machine = Reads(16)
    assert all(machine.took(seconds) == 16 for seconds in taken)


@pytest.mark.parametrize("mbit_per_s", [2, 10])
def test_on_a_thin_link_a_few_fill_it(mbit_per_s):
    at_once, busy = played(link_s=25_000 * 8 / (mbit_per_s * 1e6), answer_s=0.002)
    assert at_once == 4
    assert busy > 0.95


def test_a_store_that_takes_long_to_answer_is_asked_by_many():
    at_once, _ = played(link_s=0.002, answer_s=0.1)
    assert at_once == 16
    assert played(link_s=0.02, answer_s=0.1)[1] > 0.95


@pytest.mark.parametrize("alone_s", [0.01, 0.02, 0.1])
def test_once_the_link_is_free_again_there_are_more(alone_s):
    machine = Reads(16)
    assert [machine.took(alone_s), *(machine.took(50 * alone_s) for _ in range(100))][-1] == 4
    assert [machine.took(alone_s) for _ in range(60)][-1] == 16


def test_one_quick_read_long_ago_is_forgotten():
    """Such as of a very small sample."""
    machine = Reads(16)
    machine.took(0.001)
    for _ in range(20_000):
        machine.took(0.1)
    assert machine.at_once == 16

"""Rows are named by everything that determines them, and what is kept stays within its budget."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater.core.amount import num_bytes
from headwater.core.cache import Keeping, Shelf, draw_epoch, row_key
from headwater.core.index import ABSENT, Index, place
from headwater.core.spec import TensorSpec
from headwater.errors import ConfigError

BOUNDARY = (TensorSpec("a", (4,), "float32"),)
SHELF = Shelf("s3://photos", "t" * 64, "p" * 64, ("a",), BOUNDARY, "fp32", "fp16", "maker 1", None)
texts = st.text(max_size=4)
digests = st.sampled_from(["0" * 64, "1" * 64])
specs = st.builds(TensorSpec, st.sampled_from(["a", "b"]), st.sampled_from([(), (1,), (1, 1)]),
                  st.sampled_from(["float32", "uint8"]))  # fmt: skip
shelves = st.builds(
    Shelf,
    url=texts,
    transforms=digests,
    prefix=st.none() | digests,
    outputs=st.none() | st.lists(texts, max_size=2).map(tuple),
    boundary=st.lists(specs, min_size=1, max_size=2).map(tuple),
    precision=st.sampled_from(["fp32", "int8"]),
    codec=st.sampled_from(["raw", "fp16"]),
    maker=texts,
    draw=st.none() | st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
samples = st.tuples(texts, st.integers(0, 3), st.integers(-1, 3), texts, st.integers(0, 3))


@given(shelves, samples, shelves, samples)
def test_requests_that_differ_in_anything_that_determines_a_row_never_share_a_key(one, sample, other, another):
    same = one == other and sample[:4] == another[:4] and (one.draw is None or sample[4] == another[4])
    assert (row_key(one, *sample) == row_key(other, *another)) == same


@given(samples, samples)
def test_samples_of_a_shelf_that_differ_never_share_a_key(one, other):
    assert (row_key(SHELF, *one) == row_key(SHELF, *other)) == (one[:4] == other[:4])


@pytest.mark.parametrize(
    "change",
    [{"url": "s3://photo"}, {"transforms": "u" * 64}, {"prefix": None}, {"prefix": "q" * 64}, {"outputs": None},
     {"outputs": ("b",)}, {"boundary": (TensorSpec("a", (2, 2), "float32"),)}, {"precision": "int8"}, {"codec": "raw"},
     {"maker": "maker 2"}, {"draw": (0, 0)}],
)  # fmt: skip
def test_a_shelf_that_differs_in_one_thing_is_another_shelf(change):
    assert replace(SHELF, **change).name != SHELF.name


def test_the_sample_id_counts_only_where_it_is_drawn_for():
    drawn = replace(SHELF, draw=(0, 0))
    assert row_key(SHELF, "k", 0, -1, "e", 1) == row_key(SHELF, "k", 0, -1, "e", 2)
    assert row_key(drawn, "k", 0, -1, "e", 1) != row_key(drawn, "k", 0, -1, "e", 2)


def test_with_views_the_draws_come_round_again():
    assert [draw_epoch(epoch, 3) for epoch in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [draw_epoch(epoch, 0) for epoch in range(4)] == [0, 1, 2, 3]


class Kept(RuleBasedStateMachine):
    """Jobs that use, add and push out, in any order, beside a model that remembers everything."""

    BUDGET = 20

    def __init__(self):
        super().__init__()
        self.keeping = Keeping(self.BUDGET)
        self.held, self.used, self.began = {}, {}, {}
        self.now = 0

    def tick(self):
        self.now += 1
        return self.now

    def begin(self, job):
        self.began.setdefault(job, self.tick())

    @rule(job=st.sampled_from("abc"))
    def ask(self, job):
        self.keeping.asked(job)
        self.begin(job)

    @rule(segment=st.integers(0, 5))
    def use(self, segment):
        self.keeping.used(segment)
        if segment in self.held:
            self.used[segment] = self.tick()

    @rule(segment=st.integers(0, 5), rows=st.integers(1, 6), row_bytes=st.integers(1, 25), job=st.sampled_from("abc"))
    def add(self, segment, rows, row_bytes, job):
        self.ask(job)
        self.use(segment)  # as whoever adds to it does first
        room = self.keeping.room(rows, row_bytes, job)
        idle = sorted((each for each in self.held if self.used[each] < self.began[job]), key=self.used.__getitem__)
        assert list(room.drop) == idle[: len(room.drop)], "the least recently used, and none that somebody uses"
        free = self.BUDGET - sum(self.held.values())
        without_the_last = free + sum(self.held[each] for each in room.drop[:-1])
        assert not room.drop or without_the_last < room.num_rows * row_bytes, "one too many was pushed out"
        all_idle = free + sum(self.held[each] for each in idle)
        assert room.num_rows == min(rows, all_idle // row_bytes), "as many as there could be room for"
        for each in room.drop:
            del self.held[each], self.used[each]
        if room.num_rows:
            self.keeping.grown(segment, room.num_rows * row_bytes)
            self.held[segment] = self.held.get(segment, 0) + room.num_rows * row_bytes
            self.used[segment] = self.tick()

    @invariant()
    def within_its_budget(self):
        assert self.keeping.num_bytes == sum(self.held.values()) <= self.BUDGET


TestKept = Kept.TestCase


def test_of_a_data_set_larger_than_the_budget_a_part_is_served_in_every_epoch():
    """Where "least recently used" alone would serve nothing at all."""
    keeping, held, hits = Keeping(50), set(), []
    for _ in range(3):
        hits.append(0)
        for row in range(100):  # each a segment of its own
            if row in held:
                keeping.used(row)
                hits[-1] += 1
            elif keeping.room(1, 1, "job").num_rows:
                keeping.grown(row, 1)
                held.add(row)
    assert hits == [0, 50, 50]


def test_the_next_job_takes_the_room_of_the_last():
    keeping = Keeping(10)
    assert keeping.room(10, 1, "old").num_rows == 10
    keeping.grown(1, 10)
    assert keeping.room(1, 1, "old").num_rows == 0
    assert keeping.room(1, 1, "new").drop == (1,)


def test_a_smaller_budget_drops_what_was_used_longest_ago():
    keeping = Keeping(10)
    for segment in (3, 1, 2):
        keeping.found(segment, 4)
    assert keeping.shrink() == (3,)
    assert keeping.num_bytes == 8


def test_what_is_given_back_was_used_longest_ago_and_is_enough():
    keeping = Keeping(10)
    for segment, size in ((3, 4), (1, 3), (2, 2)):
        keeping.found(segment, size)
    keeping.used(3)
    assert keeping.give_back(4) == (1, 2)
    assert keeping.num_bytes == 4
    assert keeping.give_back(100) == (3,)
    assert keeping.give_back(100) == ()
    assert keeping.num_bytes == 0


class Indexed(RuleBasedStateMachine):
    """An index beside a dict."""

    def __init__(self):
        super().__init__()
        self.index, self.known, self.sizes = Index(), {}, {}

    @rule(hashes=st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), segment=st.integers(0, 3),
          many=st.booleans())  # fmt: skip
    def add(self, hashes, segment, many):
        if many:  # so many that they are merged at once
            hashes = [*hashes, *range(10_000, 15_000)]
        position = self.sizes.get(segment, 0)
        self.index.add(np.array(hashes, np.uint64), segment, position)
        self.known |= {each: place(segment, position + number) for number, each in enumerate(hashes)}
        self.sizes[segment] = position + len(hashes)

    @rule(hashes=st.lists(st.integers(0, 30), max_size=3))
    def forget(self, hashes):
        self.index.forget(np.array(hashes, np.uint64))
        for each in hashes:
            self.known.pop(each, None)

    @rule(segment=st.integers(0, 3))
    def drop(self, segment):
        self.index.drop(segment)
        self.known = {each: at for each, at in self.known.items() if at >> 32 != segment}

    @invariant()
    def finds_what_is_there(self):
        asked = [*range(31), 12_345]
        found = self.index.find(np.array(asked, np.uint64)).tolist()
        assert found == [self.known.get(each, ABSENT) for each in asked]


TestIndexed = Indexed.TestCase


@pytest.mark.parametrize(
    ("text", "expected"), [("10GB", 10**10), ("0", 0), ("1.5 MiB", 3 << 19), ("7", 7), ("2kb", 2000)]
)
def test_amounts_are_read_as_people_write_them(text, expected):
    assert num_bytes(text, "--cache-size") == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "10 pounds", "1e9", "10GBs"])
def test_other_amounts_are_errors_that_say_what_is_wanted(text):
    with pytest.raises(ConfigError, match=r"--cache-size is .*such as 10GB"):
        num_bytes(text, "--cache-size")

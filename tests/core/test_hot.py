"""Vectors in memory: each has one slot, dirty ones stay, those used longest ago go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.hot import Hot

events = st.lists(st.tuples(st.sampled_from(["ask", "ask", "train", "clean"]),
                            st.sets(st.integers(0, 40), min_size=1, max_size=6)), max_size=60)  # fmt: skip


@given(st.integers(6, 16), events)
def test_a_place_has_one_slot_and_dirty_ones_stay(capacity, happened):
    hot, slot_of, dirty, now, used = Hot(capacity), {}, set(), 0, {}
    for what, wanted in happened:
        now += 1
        places = np.array(sorted(wanted))
        if what == "clean":
            hot.clean(hot.dirty()[1])
            dirty.clear()
            continue
        slots = hot.find(places)
        assert [slot_of.get(place, -1) for place in places.tolist()] == slots.tolist()
        found = {place for place in wanted if place in slot_of}
        used |= dict.fromkeys(found, now)
        missing = places[slots < 0]
        free = capacity - len(slot_of)
        fits = len(missing) <= capacity - len((dirty & set(slot_of)) | found)
        assert hot.room(len(missing)) == (len(missing) <= free or fits)
        held = {int(hot._places[slot]): slot for slot in np.flatnonzero(hot._places >= 0)}
        gone = set(slot_of) - set(held)
        assert not gone & (dirty | found)
        stayed = set(held) - dirty - found
        assert not gone or not stayed or max(used[each] for each in gone) <= min(used[each] for each in stayed)
        slot_of = held
        if len(missing) <= capacity - len(slot_of):
            taken = hot.take(missing)
            slot_of |= dict(zip(missing.tolist(), taken.tolist(), strict=True))
            used |= dict.fromkeys(missing.tolist(), now)
        if what == "train":
            own = [place for place in places.tolist() if place in slot_of]
            hot.touch(np.array([slot_of[place] for place in own], np.int64))
            dirty |= set(own)
        assert len(set(slot_of.values())) == len(slot_of) == hot.num_held <= capacity
        assert hot.dirty()[0].tolist() == sorted(dirty)


def test_popular_places_stay_in_memory():
    generator = np.random.default_rng(0)
    hot, found, asked = Hot(1000), 0, 0
    for _ in range(300):
        places = np.unique(np.minimum(generator.zipf(1.2, 400), 10**9))
        slots = hot.find(places)
        found, asked = found + (slots >= 0).sum(), asked + len(places)
        if hot.room((slots < 0).sum()):
            hot.take(places[slots < 0])
    assert found / asked > 0.4  # of distinct ones; the tail is new each time

"""Threads are shared by time, not by task, and nothing is lost on the way."""

from hypothesis import given
from hypothesis import strategies as st

from headwater.core.fair import LAG_S, Fair
from headwater.core.places import Places

TENANTS = st.lists(st.integers(1, 50).map(lambda ms: ms / 100), min_size=1, max_size=5)  # seconds of a task


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2)), max_size=40))
def test_nothing_is_lost_and_the_urgent_and_the_old_come_first(puts):
    queue = Fair()
    for number, (tenant, urgency) in enumerate(puts):
        queue.put(tenant, urgency, (tenant, urgency, number))
    assert len(queue) == len(puts)
    found = []
    while queue:
        turn, task = queue.take()
        queue.took(turn, 1.0)
        found.append(task)
    assert sorted(found) == sorted((tenant, urgency, number) for number, (tenant, urgency) in enumerate(puts))
    for name in "ab":
        own = [task[1:] for task in found if task[0] == name]
        assert own == sorted(own)


@given(TENANTS, st.integers(1, 4))
def test_who_always_has_something_to_do_gets_as_much_time_as_the_others(lengths, threads):
    queue, had = Fair(), [0.0] * len(lengths)
    for place in range(len(lengths)):
        for _ in range(threads):
            queue.put(str(place), 0, None)
    running = []  # (when it ends, whose, its turn)
    now = 0.0
    for _ in range(400):
        while len(running) < threads and queue:
            turn, _ = queue.take()
            place = int(turn.tenant)
            running.append((now + lengths[place], place, turn))
        now, place, turn = running.pop(running.index(min(running, key=lambda each: each[:2])))
        queue.took(turn, lengths[place])
        had[place] += lengths[place]
        queue.put(str(place), 0, None)
    assert max(had) - min(had) <= 2 * threads * max(lengths)


def test_nobody_saves_up_time_while_it_has_nothing_to_do():
    queue = Fair()
    for _ in range(100):
        queue.put("busy", 0, "busy")
        queue.took(queue.take()[0], 1.0)
    queue.put("late", 0, "late")
    queue.took(queue.take()[0], 1.0)
    for _ in range(100):
        queue.put("busy", 0, "busy")
        queue.took(queue.take()[0], 1.0)
    order = []
    for name in ["late", "busy"] * 9:
        queue.put(name, 0, name)
    while queue:
        turn, task = queue.take()
        order.append(task)
        queue.took(turn, 1.0)
    assert order[:10].count("late") <= 5 + LAG_S


def test_names_of_those_who_left_don_t_pile_up():
    queue = Fair()
    for number in range(1000):
        queue.put(f"job {number}", 0, None)
        queue.took(queue.take()[0], 1.0)
    assert len(queue._accounts) < 10


@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4), st.integers(1, 20))
def test_time_is_given_by_weight(weights, length_ms):
    queue, had = Fair(), [0.0] * len(weights)
    for place, weight in enumerate(weights):
        queue.put(str(place), 0, None, weight)
    for _ in range(2000):
        turn, _ = queue.take()
        place = int(turn.tenant)
        queue.took(turn, length_ms / 1e3)
        had[place] += length_ms / 1e3
        queue.put(str(place), 0, None, weights[place])
    shares = [each / weight for each, weight in zip(had, weights, strict=True)]
    assert max(shares) - min(shares) <= 2 * length_ms / 1e3 / min(weights)


def test_a_place_whose_tasks_never_end_holds_up_no_other():
    queue = Fair(Places(2, are_several=True))
    for _ in range(5):
        queue.put("a", 0, "hangs", place="dead")
    hanging = [queue.take() for _ in range(2)]
    assert not queue.may
    queue.put("a", 0, "read", place="alive")
    queue.put("b", 0, "read", place="alive")
    for _ in range(2):
        assert queue.may
        turn, task = queue.take()
        assert task == "read"
        queue.took(turn, 1.0)
    assert not queue.may
    queue.took(hanging[0][0], 1.0)
    assert queue.may

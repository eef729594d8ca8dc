"""Each sample once an epoch, in an order that (fingerprint, seed, epoch) fixes, however a run is cut up and resumed."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.order import Order
from headwater.data.samples import Samples
from headwater.data.wire import Bad
from headwater.errors import BadSampleError, ConfigError, DataError
from headwater.train.loader import Loader
from headwater.train.reply import Reply
from headwater.train.source import Opened


def listing(num_samples):
    keys = [f"{number:05d}.jpg" for number in range(num_samples)]
    labels = [number % 3 for number in range(num_samples)]
    return Samples.build("file:///x", ("a", "b", "c"), keys=keys, sizes=[1] * num_samples,
                         etags=[""] * num_samples, labels=labels)  # fmt: skip


def first_tensors(parts, ids):
    return [row for part in parts for row in part[0].tolist()]


class Source:
    """Replies whose one tensor is the sample's id; `bad` samples have no row. `plans` says how many rows a chunk has
    under each plan; the next takes over after as many chunks as `switches` says."""

    def __init__(self, bad=(), plans=(5,), switches=()):
        self.bad, self.plans, self.switches = frozenset(bad), plans, dict(switches)
        self.version, self.asked, self.num_chunks = 0, [], 0

    prongs = ("ordered", 0.0)

    def finished(self, start, end):
        pass

    def stepped(self, start, end):
        pass

    def step_clock(self):
        return lambda num_rows: None

    def open_any(self, epoch, batches):
        """The last first, as a storage side that is faster than the trainer would have it."""
        self.asked.append([ids.tolist() for ids in batches])
        version, finish = self.version, first_tensors
        return Opened(version, self.any_replies(version, batches), finish)

    def any_replies(self, version, batches):
        for index in reversed(range(len(batches))):
            for reply in self.replies(version, batches[index], len(batches[index])):
                yield replace(reply, chunk=index)
            if version != self.version:
                return

    def open(self, epoch, ids, head=None, is_whole=False):
        self.asked.append(ids.tolist())
        version = self.version
        return Opened(version, self.replies(version, ids, self.plans[version]), first_tensors)

    def replies(self, version, ids, rows):
        for start in range(0, len(ids), rows):
            if version != self.version:
                return
            part = ids[start : start + rows]
            good = np.array([sample not in self.bad for sample in part], bool)
            missing = tuple(Bad(int(sample), f"{sample}.jpg", "broken") for sample in part[~good][::-1])
            yield Reply(good, [part[good].copy()], missing)
            self.num_chunks += 1
            self.version = max(self.version, self.switches.get(self.num_chunks, 0))


def loader(num_samples, batch_size=4, rank=0, world=1, bad=(), chunk_rows=5, on_bad="raise", drop_last=False, seed=3,
           source=None):  # fmt: skip
    return Loader(listing(num_samples), source or Source(bad, (chunk_rows,)), batch_size=batch_size, seed=seed,
                  shuffle=True, drop_last=drop_last, rank=rank, world=world, on_bad_sample=on_bad)  # fmt: skip


def order_of(num_samples, epoch, seed=3):
    return Order(num_samples, listing(num_samples).fingerprint, seed).epoch(epoch).tolist()


sizes = {"num_samples": st.integers(1, 90), "batch_size": st.integers(1, 20), "chunk_rows": st.integers(1, 30)}


@given(**sizes)
def test_an_epoch_is_the_order_in_batches_with_its_labels(num_samples, batch_size, chunk_rows):
    one = loader(num_samples, batch_size, chunk_rows=chunk_rows)
    for epoch in range(2):
        batches = list(one)
        assert [sample for x, _ in batches for sample in x] == order_of(num_samples, epoch)
        assert [label for _, y in batches for label in y.tolist()] == [s % 3 for x, _ in batches for s in x]
        assert [len(x) for x, _ in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert len(batches) == len(one)


@given(**sizes, data=st.data(), skip=st.booleans(), world=st.integers(1, 3))
def test_plans_that_take_over_in_the_middle_change_no_batch(num_samples, batch_size, chunk_rows, data, skip, world):
    """Nor what is reported as bad, nor when, whatever the chunks of the plans and the moments of the switches are."""
    num_samples = max(num_samples, world)
    bad = data.draw(st.frozensets(st.integers(0, num_samples - 1), max_size=num_samples // 4))
    plans = (chunk_rows, *data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)))
    moments = sorted(data.draw(st.lists(st.integers(1, 12), min_size=len(plans) - 1, max_size=len(plans) - 1)))
    options = {"bad": bad, "on_bad": "skip" if skip else "raise", "world": world}

    def run(source):
        one = loader(num_samples, batch_size, source=source, **options)
        seen = []
        try:
            seen += ((x, y.tolist(), one.state_dict(), list(one.skipped)) for x, y in one)
        except DataError as error:
            seen.append(str(error))
        return seen, one.skipped

    source = Source(bad, plans, zip(moments, range(1, len(plans)), strict=True))
    assert run(source) == run(Source(bad, (chunk_rows,)))


def test_a_switch_asks_again_for_less_than_a_batch_of_what_was_delivered():
    source = Source(plans=(5, 7), switches={2: 1})
    list(loader(40, 4, source=source))
    first, second = source.asked
    assert len(first) == 40
    assert second == first[8:], "two batches of 4 of the first ten rows are used; the other two rows come again"


@given(**sizes, world=st.integers(1, 6))
def test_trainers_share_an_epoch_without_loss_or_overlap(num_samples, batch_size, chunk_rows, world):
    if num_samples < world:
        return
    parts = [list(loader(num_samples, batch_size, rank, world, chunk_rows=chunk_rows)) for rank in range(world)]
    assert len({len(batches) for batches in parts}) == 1, "somebody would wait for ever"
    seen = [sample for batches in parts for x, _ in batches for sample in x]
    assert sorted(seen) == list(range(num_samples))


@given(**sizes, data=st.data())
def test_resume_and_resume_and_resume_visit_exactly_what_was_left(num_samples, batch_size, chunk_rows, data):
    """Each leg runs on another number of trainers and with another batch size."""
    state, seen, epochs = None, [], 2
    for _ in range(200):
        left = num_samples if state is None else num_samples - state["position"]
        world = data.draw(st.integers(1, min(4, left)))
        size = data.draw(st.sampled_from([batch_size, batch_size + 1]))
        ranks = [loader(num_samples, size, rank, world, chunk_rows=chunk_rows) for rank in range(world)]
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
        steps = data.draw(st.integers(0, 4))
        iterators = [iter(each) for each in ranks]
        for _ in range(steps):
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                break
            seen += [sample for x, _ in batches for sample in x]
        states = [each.state_dict() for each in ranks]
        assert all(each == states[0] for each in states)
        if steps or state is not None:
            state = states[0]
        if state is not None and state["epoch"] == epochs:
            break
    else:
        return  # the draws stood still; nothing to check at the end
    assert seen == [sample for epoch in range(epochs) for sample in order_of(num_samples, epoch)]


@given(**sizes, data=st.data())
def test_skipped_samples_leave_full_batches_and_are_listed(num_samples, batch_size, chunk_rows, data):
    bad = data.draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples - 1))
    one = loader(num_samples, batch_size, bad=bad, chunk_rows=chunk_rows, on_bad="skip")
    batches = [x for x, _ in one]
    assert [sample for x in batches for sample in x] == [s for s in order_of(num_samples, 0) if s not in bad]
    assert all(len(x) == batch_size for x in batches[:-1])
    assert {skipped.sample for skipped in one.skipped} == bad


@given(**sizes, data=st.data())
def test_a_run_that_skips_resumes_where_it_stood(num_samples, batch_size, chunk_rows, data):
    bad = data.draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples - 1))
    one = loader(num_samples, batch_size, bad=bad, chunk_rows=chunk_rows, on_bad="skip")
    iterator, seen = iter(one), []
    for _ in range(data.draw(st.integers(0, 5))):
        seen += next(iterator, ([], None))[0]
    state = one.state_dict()
    other = loader(num_samples, batch_size, bad=bad, chunk_rows=chunk_rows, on_bad="skip")
    other.load_state_dict(state)
    if state["epoch"] == 0:
        seen += [sample for x, _ in other for sample in x]
    assert seen == [s for s in order_of(num_samples, 0) if s not in bad]


def test_a_bad_sample_stops_the_run_where_it_stands_and_names_the_way_out():
    bad = order_of(20, 0)[9]
    one = loader(20, 4, bad=[bad], chunk_rows=4)
    iterator = iter(one)
    assert len([next(iterator) for _ in range(2)]) == 2
    with pytest.raises(BadSampleError, match='on_bad_sample="skip"'):
        next(iterator)
    assert one.state_dict()["position"] == 8


def test_with_several_trainers_a_skip_shortens_one_batch_and_nobody_waits():
    bad = [order_of(24, 0)[1]]
    parts = [list(loader(24, 4, rank, 2, bad=bad, on_bad="skip")) for rank in range(2)]
    assert [len(x) for x, _ in parts[0]] == [3, 4, 4]
    assert [len(x) for x, _ in parts[1]] == [4, 4, 4]


def test_a_trainer_left_with_nothing_says_so_instead_of_hanging_the_others():
    bad = order_of(8, 0)[:2]
    with pytest.raises(DataError, match="unreadable"):
        list(loader(8, 2, 0, 2, bad=bad, on_bad="skip"))


def test_each_iter_is_a_new_epoch_even_after_a_break():
    one = loader(12, 4)
    for _ in one:
        break
    assert [s for x, _ in one for s in x] == order_of(12, 1)


def test_the_state_inside_the_loop_counts_the_batch_at_hand():
    one = loader(12, 4)
    positions = [one.state_dict()["position"] for _ in one]
    assert positions == [4, 8, 0]
    assert one.state_dict()["epoch"] == 1


def test_an_old_iterator_does_not_move_a_loaded_position():
    one = loader(12, 4)
    old = iter(one)
    next(old)
    one.load_state_dict({**one.state_dict(), "position": 8})
    next(old)
    assert one.state_dict()["position"] == 8
    assert [s for x, _ in one for s in x] == order_of(12, 0)[8:]


def test_announcing_a_resumed_epoch_does_not_rewind_it():
    one = loader(12, 4)
    one.load_state_dict({**one.state_dict(), "position": 8})
    one.set_epoch(0)
    assert [s for x, _ in one for s in x] == order_of(12, 0)[8:]
    one.set_epoch(5)
    assert [s for x, _ in one for s in x] == order_of(12, 5)


def test_drop_last_leaves_out_the_rest_and_the_state_goes_on_to_the_next_epoch():
    one = loader(10, 4, drop_last=True)
    assert [len(x) for x, _ in one] == [4, 4]
    assert one.state_dict()["epoch"] == 1
    assert [s for x, _ in one for s in x] == order_of(10, 1)[:8]


@pytest.mark.parametrize("position", [0, 4, 8, 9])
def test_what_drop_last_leaves_out_is_not_asked_for(position):
    source = Source()
    one = loader(10, 4, drop_last=True, source=source)
    one.load_state_dict({**one.state_dict(), "position": position})
    assert [s for x, _ in one for s in x] == source.asked[0]


@pytest.mark.parametrize("change", [{"seed": 9}, {"fingerprint": "x"}, {"num_samples": 7}, {"shuffle": False}])
def test_a_state_of_another_run_is_refused_with_what_differs(change):
    one = loader(12, 4)
    with pytest.raises(ConfigError, match=next(iter(change))):
        one.load_state_dict({**one.state_dict(), **change})


@pytest.mark.parametrize("state", [{}, None, [], {"epoch": 1}])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ConfigError, match="not a loader's state"):
        loader(12, 4).load_state_dict(state)


@pytest.mark.parametrize(("epoch", "position"), [(-1, 0), (0, -1), (0, 13), ("0", 0), (0, 1.5)])
def test_a_place_that_does_not_exist_is_refused(epoch, position):
    one = loader(12, 4)
    with pytest.raises(ConfigError, match="no place"):
        one.load_state_dict({**one.state_dict(), "epoch": epoch, "position": position})


def test_workers_of_a_data_loader_are_refused_with_the_way_out():
    from torch.utils.data import DataLoader

    with pytest.raises(ConfigError, match="num_workers=0"):
        list(DataLoader(loader(12, 4), batch_size=None, num_workers=1))
    assert [s for x, _ in DataLoader(loader(12, 4), batch_size=None) for s in x] == order_of(12, 0)


def test_a_data_set_without_one_readable_sample_is_an_error_not_an_empty_epoch():
    with pytest.raises(DataError, match="none of the 6 samples can be read; the first"):
        list(loader(6, 2, bad=range(6), on_bad="skip"))


def two_ended(strategy, share=0.5, **options):
    source = Source(**options)
    source.prongs = (strategy, share)
    return source


def test_an_epoch_with_two_ends_is_the_head_and_then_the_tail_backwards():
    order = Order(20, listing(20).fingerprint, 3).epoch(0).tolist()
    found = [sample for batch, _ in loader(20, source=two_ended("mte")) for sample in batch]
    meeting = 8  # half of five batches of four, in whole ones
    assert found == order[:meeting] + order[meeting:][::-1]


@given(st.sampled_from(["mte", "wrr"]), st.integers(1, 40), st.integers(1, 3), st.integers(0, 30), st.floats(0, 1))
def test_every_sample_comes_once_however_an_epoch_is_gone_through_and_wherever_it_is_resumed(
    strategy, num_samples, world, stop_after, share
):
    if num_samples < world:
        return
    seen = []
    for rank in range(world):
        first = loader(num_samples, rank=rank, world=world, source=two_ended(strategy, share))
        batches = iter(first)
        for _ in range(stop_after):
            if (batch := next(batches, None)) is None:
                break
            seen += batch[0]
        state = first.state_dict()
        batches.close()
        if state["epoch"]:
            continue
        other = loader(num_samples, rank=rank, world=world, source=two_ended(strategy, 1 - share))
        other.load_state_dict(state)
        assert other.state_dict() == state
        rest = list(other)
        assert len(rest) == first.num_steps_left()
        seen += [sample for batch, _ in rest for sample in batch]
    assert sorted(seen) == list(range(num_samples))


def test_mte_resumes_in_the_order_of_the_run_that_was_saved_whatever_the_share_is_now():
    whole = [batch for batch, _ in loader(22, source=two_ended("mte", 0.5))]
    first = loader(22, source=two_ended("mte", 0.5))
    batches = iter(first)
    begun = [next(batches)[0] for _ in range(3)]
    other = loader(22, source=two_ended("mte", 0.9))
    other.load_state_dict(first.state_dict())
    assert begun + [batch for batch, _ in other] == whole


@pytest.mark.parametrize("epochs", [0, 1])
def test_mte_meets_where_the_saved_run_would_have_met_in_the_epoch_after(epochs):
    first = loader(22, source=two_ended("mte", 0.5))
    for _ in range(epochs):
        for _ in first:
            pass
    other = loader(22, source=two_ended("mte", 0.9))
    other.load_state_dict(first.state_dict())
    assert [batch for batch, _ in other] == [batch for batch, _ in first]


def test_a_meeting_point_that_was_saved_is_for_one_epoch_and_for_mte_alone():
    state = loader(22, source=two_ended("mte", 0.5)).state_dict()
    assert state["meeting"] == 12
    one = loader(22, source=two_ended("mte", 0.9))
    one.load_state_dict(state)
    for _ in one:
        pass
    assert one.state_dict()["meeting"] == 20
    plain = loader(22)
    plain.load_state_dict(state)
    assert [batch for batch, _ in plain] == [batch for batch, _ in loader(22)]


def test_what_is_left_of_an_epoch_before_says_nothing_of_the_next():
    first = loader(20, source=two_ended("wrr"))
    begun = iter(first)
    for _ in range(3):
        next(begun)
    stale = {**first.state_dict(), "epoch": 1, "position": 0}
    one = loader(20, source=two_ended("wrr"))
    one.load_state_dict(stale)
    assert sorted(sample for batch, _ in one for sample in batch) == list(range(20))


def test_wrr_goes_on_with_what_is_left_when_another_plan_takes_over():
    source = two_ended("wrr", plans=(5, 5), switches={2: 1})
    found = [sample for batch, _ in loader(20, source=source) for sample in batch]
    assert sorted(found) == list(range(20))
    assert len(source.asked) == 2
    assert len(source.asked[1]) == 3


def test_the_middle_of_an_epoch_under_wrr_is_one_trainers_own():
    first = loader(20, rank=0, world=2, source=two_ended("wrr"))
    next(iter(first))
    with pytest.raises(ConfigError, match="as many trainers"):
        loader(20, rank=1, world=2, source=two_ended("wrr")).load_state_dict(first.state_dict())


@pytest.mark.parametrize("left", [[[0, 4], [2, 6]], [[3, 3]], [[0, 99]], "abc", [[1]]])
def test_a_state_whose_rest_is_no_part_of_the_samples_is_refused(left):
    first = loader(20, source=two_ended("wrr"))
    next(iter(first))
    with pytest.raises(ConfigError, match="left is not"):
        first.load_state_dict({**first.state_dict(), "left": left})


def test_wrr_skips_bad_samples_and_a_batch_of_nothing_else():
    source = two_ended("wrr", bad={4, 5, 6, 7, 9})
    one = Loader(listing(12), source, batch_size=4, seed=0, shuffle=False, drop_last=False, rank=0, world=1,
                 on_bad_sample="skip")  # fmt: skip
    assert sorted(sample for batch, _ in one for sample in batch) == [0, 1, 2, 3, 8, 10, 11]
    assert {each.sample for each in one.skipped} == {4, 5, 6, 7, 9}

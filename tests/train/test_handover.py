"""Rows that are left in a folder which both sides see: the same batches, nothing over the wire, nothing left behind."""

import os
from dataclasses import replace

import pytest
import torch
from tests.train.test_prongs import batches, start
from tests.train.test_prongs import rows as rows_of

from headwater.core.plan import FILE, near_plan
from headwater.core.spec import TensorSpec
from headwater.data import handover, wire
from headwater.data.handover import Handed, Inbox, Outbox
from headwater.errors import ConfigError, DamagedError, PlanError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "hand-over"


@pytest.fixture
def expected(pictures):
    with start(pictures, "inline") as job:
        return batches(job)


def files(folder):
    return [name for name in os.listdir(folder) if name.endswith("rows")]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for (x, y), (other, labels) in zip(found, wanted, strict=True):
        assert torch.equal(x, other)
        assert torch.equal(y, labels)


def test_batches_are_the_same_and_no_row_crosses_the_wire(pictures, start_node, folder, expected):
    node = start_node(pictures, options=("--hand-over", str(folder), "--cache-size", "0"))
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(job.cuts[0], chunk_rows=4, node_batch=2, hand_over=FILE))
        before = job._source._setting.clients[0].received_bytes
        assert_same(batches(job), expected)
        assert job._source._setting.clients[0].received_bytes - before < job._source.row_bytes
        assert "handed over as files" in job.describe()
    assert files(folder) == []


def test_a_planned_job_takes_the_folder_where_it_sees_it(pictures, start_node, folder, expected, moments):
    node = start_node(pictures, options=("--hand-over", str(folder)))
    with start(pictures, [node.address], plan="auto", cut=None, prongs="ordered") as job:
        assert job.plan.hand_over == FILE
        assert_same(batches(job), expected)


def test_rows_that_a_node_kept_come_as_files_too(pictures, start_node, folder):
    node = start_node(pictures, options=("--hand-over", str(folder), "--cache-size", "1GB"))
    with start(pictures, [node.address], views=1) as job:
        job.adopt(near_plan(job.cuts[0], chunk_rows=4, node_batch=4, hand_over=FILE))
        first = batches(job)
        before = job._source._setting.clients[0].received_bytes
        again = batches(job)
        assert job._source._setting.clients[0].received_bytes - before < job._source.row_bytes
        assert rows_of(first) == rows_of(again)


def test_a_node_that_comes_back_where_the_trainer_does_not_see_its_folder_sends_rows_over_the_wire(
    pictures, start_node, folder, expected
):
    node = start_node(pictures, options=("--hand-over", str(folder), "--cache-size", "0"))
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(job.cuts[0], chunk_rows=4, node_batch=4, hand_over=FILE))
        (mark,) = folder.glob(".headwater-mark-*")
        mark.write_text("of another machine")
        (client,) = job._source._setting.clients
        client.prepare()  # as the feed does once a node is back
        before = client.received_bytes
        assert_same(batches(job), expected)
        assert client.received_bytes - before > len(job.samples) * job._source.row_bytes


def test_a_folder_that_the_trainer_does_not_see_is_refused_before_any_work(pictures, start_node, folder):
    node = start_node(pictures, options=("--hand-over", str(folder)))
    with start(pictures, [node.address]) as job:
        (mark,) = folder.glob(".headwater-mark-*")
        mark.write_text("of another machine")
        with pytest.raises(PlanError, match="in a folder that this machine sees"):
            job.adopt(near_plan(job.cuts[0], hand_over=FILE))


def test_rows_that_were_damaged_on_their_way_are_made_again(pictures, start_node, folder, expected, monkeypatch):
    node = start_node(pictures, options=("--hand-over", str(folder), "--cache-size", "0"))
    take, spoiled = Inbox.take, []

    def damaged(self, handed, boundary):
        if not spoiled:
            spoiled.append(handed)
            path = self._folder / handed.name
            data = bytearray(path.read_bytes())
            data[7] ^= 1
            path.write_bytes(data)
        return take(self, handed, boundary)

    monkeypatch.setattr(Inbox, "take", damaged)
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(job.cuts[0], chunk_rows=4, node_batch=4, hand_over=FILE))
        assert_same(batches(job), expected)
    assert spoiled


def test_more_rows_than_were_asked_for_are_refused_before_they_are_read(
    pictures, start_node, folder, expected, monkeypatch
):
    node = start_node(pictures, options=("--hand-over", str(folder), "--cache-size", "0"))
    unpack, take, lied, read = wire.unpack_handed, Inbox.take, [], []

    def more(said):
        handed = unpack(said)
        if handed is None or lied:
            return handed
        lied.append(replace(handed, ids=handed.ids * 1000))
        return lied[0]

    def noted(self, handed, boundary):
        read.append(handed)
        return take(self, handed, boundary)

    monkeypatch.setattr(wire, "unpack_handed", more)
    monkeypatch.setattr(Inbox, "take", noted)
    with start(pictures, [node.address]) as job:
        job.adopt(near_plan(job.cuts[0], chunk_rows=4, node_batch=4, hand_over=FILE))
        assert_same(batches(job), expected)
    assert lied[0] not in read


SPECS = (TensorSpec("a", (5, 3), "float32"), TensorSpec("b", (), "uint8"))


def rows(count):
    import numpy as np

    rng = np.random.default_rng(count)
    return np.arange(count), [rng.random((count, 5, 3), np.float32), rng.integers(0, 255, count).astype(np.uint8)]


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_what_is_left_is_what_is_taken_and_then_it_is_gone(folder, count):
    outbox = Outbox(folder)
    inbox = Inbox.found(outbox.to_json())
    ids, tensors = rows(count)
    handed = Handed.from_json(outbox.leave(ids, tensors, SPECS).to_json())
    found_ids, found = inbox.take(handed, SPECS)
    assert found_ids.tolist() == ids.tolist()
    assert all((one == other).all() for one, other in zip(found, tensors, strict=True))
    assert files(folder) == []
    outbox.close()
    assert os.listdir(folder) == []


def test_what_nobody_takes_is_taken_away_and_what_is_too_much_takes_the_wire(folder, monkeypatch):
    outbox = Outbox(folder)
    monkeypatch.setattr(handover, "MOST_BYTES", 3 * 8192)
    handed = [outbox.leave(*rows(4), SPECS) for _ in range(4)]
    assert [each is not None for each in handed] == [True, True, True, False]
    monkeypatch.setattr(handover, "KEEP_S", -1.0)
    (folder / ".headwater-mark-of-a-dead-node").write_text("x")
    outbox.sweep()
    assert os.listdir(folder) == []
    assert outbox.leave(*rows(4), SPECS) is not None
    monkeypatch.undo()
    Outbox.sweep(outbox)
    assert len(files(folder)) == 1
    other = Inbox(folder)
    with pytest.raises(DamagedError, match="can't be read"):
        other.take(handed[0], SPECS)


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: os.symlink("/etc/hostname", path), os.mkdir])
def test_what_is_no_file_in_the_folder_is_not_read(folder, made):
    folder.mkdir()
    made(folder / "x.headwater-rows")
    with pytest.raises(DamagedError, match="can't be read"):
        Inbox(folder).take(Handed("x.headwater-rows", (1,), 0), SPECS)


def link(path):
    path.with_name("other").write_text("y")
    path.symlink_to("other")


def without_end(path):
    path.write_text("y")
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("made", [os.mkfifo, os.mkdir, link, without_end])
def test_a_mark_that_no_node_left_is_not_believed(folder, made):
    folder.mkdir()
    made(folder / ".headwater-mark-x")
    assert Inbox.found({"folder": str(folder), "mark": ".headwater-mark-x", "secret": "y"}) is None


@pytest.mark.parametrize("told", [None, {}, {"folder": "/", "mark": "../x", "secret": "y"}, {"folder": 1}, "x"])
def test_a_node_that_tells_of_no_folder_or_another_is_not_believed(told):
    assert Inbox.found(told) is None


@pytest.mark.parametrize(
    "said",
    [None, [], ["../a.headwater-rows", [1], 2], ["a", [1], 2], ["\0.headwater-rows", [1], 2],
     ["\ud800.headwater-rows", [1], 2], ["a.headwater-rows", "x", 2], ["a.headwater-rows", [2**63], 2],
     ["a.headwater-rows", [-1], 2], ["a.headwater-rows", [1], 2.0]],
)  # fmt: skip
def test_a_file_that_no_node_names_so_is_refused(said):
    with pytest.raises(DamagedError, match="a file of rows"):
        Handed.from_json(said)


def test_a_folder_that_can_not_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--hand-over"):
        Outbox(tmp_path / "file" / "folder")

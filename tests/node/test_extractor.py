"""From samples to rows: bad ones reported, errors passed on, work bounded, and all of it dropped with its reader."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from headwater.core.spec import TensorSpec
from headwater.core.turns import Turns
from headwater.data import extract
from headwater.data.extract import SLOTS, Extractor
from headwater.data.store import open_store
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.errors import ChangedError, HeadwaterError


@pytest.fixture
def extractor():
    extractor = Extractor(2, 4)
    yield extractor
    extractor.close()


@pytest.fixture
def copies(pictures, tmp_path):
    """Three pictures of our own, free to be damaged."""
    folder = tmp_path / "copies"
    for name in ("a/000.jpg", "b/001.jpg", "c/002.jpg"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes((pictures / name).read_bytes())
    return folder


def eventually(holds, within_s=20):
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)


def idle(extractor):
    return not extractor._readers._tasks and not extractor._compute._tasks


def rows_of(extractor, chunk, run=None):
    parts = list(extractor.rows(open_store(chunk.extraction.url), chunk, run))
    return [int(i) for part in parts for i in part.ids], {bad.sample: bad for part in parts for bad in part.bad}


@pytest.mark.parametrize("node_batch", [1, 2, 50])
def test_every_sample_has_a_row_or_a_reason(extractor, copies, chunk_of, node_batch):
    chunk = chunk_of(folder=copies, node_batch=node_batch)
    whole = (copies / "b/001.jpg").read_bytes()
    (copies / "b/001.jpg").write_bytes(b"x" * len(whole))
    (copies / "c/002.jpg").unlink()
    chunk = chunk_of_same(chunk, etags=False)
    ids, bad = rows_of(extractor, chunk)
    assert ids == [0]
    assert bad[1].key == "b/001.jpg"
    assert "not a picture" in bad[1].reason
    assert "list the data again" in bad[2].reason


def chunk_of_same(chunk, etags):
    """The chunk again, without the etags, as of a store that has none."""
    return replace(chunk, samples=tuple(ref if etags else replace(ref, etag="") for ref in chunk.samples))


def test_a_sample_larger_than_its_ticket_says_is_not_read(extractor, copies, chunk_of):
    chunk = chunk_of_same(chunk_of(folder=copies), etags=False)
    assert rows_of(extractor, chunk)[0] == [0, 1, 2]
    small = replace(chunk, samples=tuple(replace(ref, size=ref.size - 1) for ref in chunk.samples))
    with pytest.raises(ChangedError, match=r"has changed since it was listed: has [\d,]+ bytes, listed with [\d,]+;"):
        rows_of(extractor, small)


def test_groups_without_a_good_sample_hold_no_buffer(extractor, copies, chunk_of):
    for path in copies.rglob("*.jpg"):
        path.write_bytes(b"broken")
    chunk = chunk_of(folder=copies, node_batch=1)
    passage = extract._Passage(extractor, open_store(chunk.extraction.url), chunk, None, None, extract.Open(1), 1.0)
    assert [len(part.bad) for part in passage.parts(lambda: False)] == [3]
    assert passage._buffers == {}


def test_many_groups_without_a_good_sample_all_come_to_an_end(extractor, copies, chunk_of):
    """Whichever thread finds a group's last bad sample: its slot is free, and the next group begins."""
    for path in copies.rglob("*.jpg"):
        path.write_bytes(b"no picture")
    chunk = chunk_of(folder=copies, node_batch=2)
    samples = tuple(replace(chunk.samples[number % 3], id=number) for number in range(60))
    for _ in range(20):
        ids, bad = rows_of(extractor, replace(chunk, samples=samples))
        assert (ids, len(bad)) == ([], 60)


def test_a_file_replaced_after_the_listing_is_an_error(extractor, copies, chunk_of):
    chunk = chunk_of(folder=copies)
    (copies / "a/000.jpg").write_bytes((copies / "b/001.jpg").read_bytes() + b"more")
    with pytest.raises(ChangedError, match=r"a/000.jpg.*start a new job"):
        rows_of(extractor, chunk)


def test_an_unforeseen_error_reaches_the_reader(extractor, chunk_of):
    def explode(rows):
        raise ZeroDivisionError("inside")

    with pytest.raises(HeadwaterError, match="unexpected ZeroDivisionError: inside"):
        rows_of(extractor, chunk_of(), explode)
    eventually(lambda: idle(extractor))


def test_an_abandoned_stream_is_dropped(extractor, chunk_of):
    stream = extractor.rows(open_store(chunk_of().extraction.url), chunk_of(node_batch=2), None)
    next(stream)
    stream.close()
    eventually(lambda: idle(extractor))
    before = extractor.busy.to_json()["num_rows"]
    assert rows_of(extractor, chunk_of())[0] != []
    assert extractor.busy.to_json()["num_rows"] == before + 50


def test_a_reader_who_does_not_read_holds_up_at_most_the_slots(extractor, chunk_of):
    stream = extractor.rows(open_store(chunk_of().extraction.url), chunk_of(node_batch=4), None)
    next(stream)
    eventually(lambda: extractor.busy.to_json()["num_rows"] >= 4 * SLOTS and idle(extractor))
    assert extractor.busy.to_json()["num_rows"] == 4 * SLOTS
    stream.close()


def test_a_long_silence_is_broken_by_signs_of_life(extractor, chunk_of, monkeypatch):
    """A gRPC server hangs up on a client that pings for 30 s without hearing anything."""
    monkeypatch.setattr(extract, "SIGN_OF_LIFE_S", 0.0)
    go_on = threading.Event()

    def slow(rows):
        go_on.wait(20)
        return [np.zeros((len(rows), 3), np.float32)]

    chunk = chunk_of(prefix="0" * 64, node_batch=50)
    assert chunk.extraction.boundary == (TensorSpec("mean", (3,), "float32"),)
    stream = extractor.rows(open_store(chunk.extraction.url), chunk, slow)
    assert [len(next(stream).ids) for _ in range(2)] == [0, 0]
    go_on.set()
    assert sum(len(part.ids) for part in stream) == 50


def test_cancelled_streams_free_their_turns_on_a_node(node, client, raw, chunk_of, never):
    """More streams than turns, each left after its first batch."""
    import pyarrow.flight as flight

    from headwater.node.service import MAX_CHUNKS

    ticket = flight.Ticket(chunk_of(node_batch=1).dumps())
    for _ in range(MAX_CHUNKS + 4):
        reader = raw.do_get(ticket)
        reader.read_chunk()
        reader.cancel()
        del reader
    assert client.rows(chunk_of(), never).good.all()
    eventually(lambda: idle(node._extractor) and node._turns.num_working(time.monotonic()) == 0)


def test_a_trainer_that_stops_reading_holds_up_nobody_else(node, client, raw, chunk_of, never):
    """As one that is stopped by Ctrl-Z: its connection lives, and takes nothing more."""
    import pyarrow.flight as flight

    node._turns = Turns(2, stalled_s=0.5)
    large = chunk_of(
        node_batch=1, transforms=Transforms([Resize((512, 512)), ToFloat()])
    )  # 40 MB: more than fits a pipe
    stopped = [raw.do_get(flight.Ticket(large.dumps())) for _ in range(2)]
    for reader in stopped:
        reader.read_chunk()
    eventually(lambda: idle(node._extractor))
    assert client.rows(chunk_of(), never).good.all()
    count = 1 + sum(len(item.data) for item in stopped[0])
    assert count == 50
    stopped[1].cancel()


@pytest.mark.parametrize("at_once", [None, 1, 2, 50])
def test_floats_are_made_piece_by_piece_and_are_those_of_the_whole(extractor, copies, chunk_of, at_once):
    chunk = chunk_of(folder=copies, transforms=Transforms([Resize((8, 8)), ToFloat()]), node_batch=3)
    sizes = []

    def give_back(rows):  # not a copy: the memory is used again for the next piece
        sizes.append(len(rows))
        return [rows]

    store = open_store(chunk.extraction.url)
    (part,) = (part for part in extractor.rows(store, chunk, give_back, at_once=at_once) if len(part.ids))
    list(extractor.rows(store, chunk, give_back, at_once=at_once))
    assert max(sizes) == min(at_once or 3, 3)
    for ref, row in zip(chunk.samples, part.tensors[0], strict=True):
        assert (row == chunk.extraction.transforms.apply((copies / ref.key).read_bytes(), ref.key)).all()

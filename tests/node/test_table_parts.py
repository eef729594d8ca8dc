"""A part of a table on a node's disk: whole after every kind of ending, small while untouched, and not to be misled."""

import errno
import json
import os
import shutil
import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.access import Grant, Quota
from headwater.core.bags import Bags
from headwater.core.form import to_json
from headwater.core.table import TableSpec, initial
from headwater.data.tablewire import bags_arrays, pack, unpack
from headwater.data.wire import PROTOCOL
from headwater.errors import ConfigError, DamagedError, HeadwaterError, RefusedError
from headwater.node import steplog
from headwater.node.part import Part
from headwater.node.tables import Tables

SPEC = TableSpec(300, 4, "float64", "rowwise_adagrad")
CACHE = 1 << 20


def step(version, spec=SPEC, settled=None):
    generator, settled = np.random.default_rng(version), version - 1 if settled is None else settled
    bags = Bags(generator.integers(0, spec.num_embeddings, 12), np.full(4, 3))
    header = {"what": "step", "version": version, "settled": settled, "number": version, "lr": 0.1}
    return pack(header, {"grads": generator.normal(size=(4, 4)), **bags_arrays(bags)})


def everything(part):
    return part.read("a", np.arange(SPEC.num_embeddings))[:, [0, 1, 2, 3, 5]]  # without the mark


def made(folder, **more):
    folder.mkdir(parents=True)
    part = Part(folder, more.pop("cache_bytes", CACHE), (SPEC, 0))
    part.open("a")
    return part


@pytest.fixture
def versions(tmp_path):
    """What the table is after each of 12 steps."""
    part = made(tmp_path / "reference")
    found = [everything(part)]
    for version in range(1, 13):
        part.step("a", step(version))
        found.append(everything(part))
    part.close()
    return found


def test_a_log_cut_short_anywhere_has_whole_steps(tmp_path, versions):
    """As a kill in the middle of writing leaves it: at each byte of the last record, and at some of all others."""
    part = made(tmp_path / "part")
    ends = [part.log.num_bytes]
    for version in range(1, 5):
        part.step("a", step(version))
        ends.append(part.log.num_bytes)
    part.close()
    whole = (tmp_path / "part" / "log").read_bytes()
    for cut in [*range(0, ends[3], 41), *range(ends[3], ends[4] + 1, 7)]:
        (tmp_path / "part" / "log").write_bytes(whole[:cut])
        again = Part(tmp_path / "part", CACHE)
        assert again.once.version == sum(end <= cut for end in ends[1:])
        np.testing.assert_array_equal(everything(again), versions[again.once.version])
        again.close()


def test_a_damaged_record_and_what_follows_never_happened(tmp_path, versions):
    part = made(tmp_path / "part")
    for version in range(1, 4):
        part.step("a", step(version))
    middle = part.log.num_bytes // 2
    part.close()
    data = bytearray((tmp_path / "part" / "log").read_bytes())
    data[middle] ^= 1
    (tmp_path / "part" / "log").write_bytes(data)
    again = Part(tmp_path / "part", CACHE)
    assert again.once.version == 1
    np.testing.assert_array_equal(everything(again), versions[1])
    again.close()


class Killed(BaseException):
    pass


MOMENTS = [
    "_reserve",
    "_write_journal",
    "_write_records",
    "_write_seats",
    "_write_head",
    "_sync_folder",
    "fdatasync",
    "unlink",
]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("is_after", [False, True])
def test_a_checkpoint_that_was_killed_is_finished_or_did_not_happen(tmp_path, versions, monkeypatch, moment, is_after):
    part = made(tmp_path / "part")
    for version in range(1, 8):
        part.step("a", step(version))
    home = {"fdatasync": os, "unlink": type(tmp_path)}.get(moment, Part)
    real = getattr(home, moment)

    def killed(*given, **more):
        if is_after:
            real(*given, **more)
        raise Killed

    monkeypatch.setattr(home, moment, killed)
    with pytest.raises(Killed):
        part.settle("a")
    monkeypatch.undo()
    left = tmp_path / "left"  # as the kernel has the files then
    shutil.copytree(tmp_path / "part", left)
    part.close()
    again = Part(left, CACHE)
    assert again.once.version == 7
    np.testing.assert_array_equal(everything(again), versions[7])
    again.step("a", step(8))
    np.testing.assert_array_equal(everything(again), versions[8])
    again.close()


def test_steps_between_checkpoints_and_restarts_are_the_same_steps(tmp_path, versions):
    part = made(tmp_path / "part")
    for version in range(1, 13):
        part.step("a", step(version))
        if version % 5 == 0:
            part.settle("a")
        if version % 3 == 0:
            part.close()
            part = Part(tmp_path / "part", CACHE)
        np.testing.assert_array_equal(everything(part), versions[version])
    part.back("a", 10)
    np.testing.assert_array_equal(everything(part), versions[10])
    with pytest.raises(RefusedError, match="can go back to 10 at most"):
        part.back("a", 9)
    part.close()


def test_a_step_that_comes_twice_is_done_once_and_one_too_early_is_refused(tmp_path, versions):
    part = made(tmp_path / "part")
    for version in (1, 1, 2, 1, 2):
        part.step("a", step(version))
    np.testing.assert_array_equal(everything(part), versions[2])
    with pytest.raises(RefusedError, match="is at version 2, and step 4 came"):
        part.step("a", step(4))
    with pytest.raises(RefusedError, match="another trainer"):
        part.step("b", step(3))
    part.close()


def test_a_table_of_ten_gigabytes_takes_no_room_until_it_is_trained(tmp_path):
    spec = TableSpec(20_000_000, 128)
    (tmp_path / "part").mkdir()
    part = Part(tmp_path / "part", CACHE, (spec, 0))
    part.open("a")
    far = np.array([0, 7, 19_999_999])
    np.testing.assert_array_equal(part.read("a", far)[:, :128], initial(spec, far))
    assert os.stat(tmp_path / "part" / "vectors").st_size > 10e9
    assert part.about()["disk_bytes"] < 1e5
    header = {"what": "step", "version": 1, "settled": 0, "number": 1, "lr": 0.1}
    part.step("a", pack(header, {"grads": np.ones((3, 128), np.float32), **bags_arrays(Bags(far, np.ones(3, int)))}))
    part.settle("a")
    assert part.about()["disk_bytes"] < 1e5
    where, on = part.trained("a", 0, 100)
    assert (where.tolist(), on) == (far.tolist(), None)
    part.close()


def test_with_little_memory_the_numbers_are_the_same(tmp_path, versions):
    part = made(tmp_path / "part", cache_bytes=1)  # 64 vectors of 300
    for version in range(1, 13):
        part.step("a", step(version))
    np.testing.assert_array_equal(everything(part), versions[12])
    assert part.once.checkpoint > 0  # there was no room for more that is not on the disk
    part.close()


def test_a_trainer_that_settles_nothing_gets_no_more_memory(tmp_path):
    part = made(tmp_path / "part", cache_bytes=1)
    with pytest.raises(RefusedError, match="wait for other parts"):
        _ = [part.step("a", step(version, settled=0)) for version in range(1, 20)]
    assert part.hot.capacity == 64
    version, held = part.once.version, everything(part)
    part.close()
    again = Part(tmp_path / "part", 1)  # and what it did do is there
    assert again.once.version == version
    np.testing.assert_array_equal(everything(again), held)
    again.close()


def test_what_was_trained_is_told_in_pieces(tmp_path):
    part = made(tmp_path / "part")
    for version in range(1, 4):
        part.step("a", step(version))
    whole, on = part.trained("a", 0, 1000)
    assert on is None
    found, start = [], 0
    while start is not None:
        where, start = part.trained("a", start, 5)
        assert len(where) <= 5
        found += where.tolist()
    assert found == whole.tolist()
    part.close()


def call(tables, header, arrays=None, tenant="anyone", grant=None):
    about = {"table": "t", "part": 0, "lease": "a"}
    return [unpack(each) for each in tables.call(pa.py_buffer(pack({**about, **header}, arrays)), tenant, grant)]


def opening(spec=SPEC, **more):
    return {"what": "open", "spec": to_json(spec), "make": True, "cache_bytes": 0, **more}


def test_tables_are_refused_where_there_is_no_folder_or_no_room_for_them(tmp_path):
    with pytest.raises(RefusedError, match="--tables"):
        call(Tables(None), opening())
    tables = Tables(tmp_path, 10**9, 10**7)
    with pytest.raises(RefusedError, match="--table-size"):
        call(tables, opening(TableSpec(10**8, 64)))
    grant = Grant("small", "0" * 64, quota=Quota(max_table_bytes=100))
    with pytest.raises(RefusedError, match="its quota is"):
        call(tables, opening(), tenant="small", grant=grant)
    assert list(tmp_path.iterdir()) == []
    tables.close()


def test_tenants_have_tables_of_their_own(tmp_path):
    tables = Tables(tmp_path, 10**9, 10**8)
    call(tables, opening(), tenant="one")
    with pytest.raises(RefusedError, match="unknown table"):
        call(tables, {"what": "about"}, tenant="two")
    call(tables, {"what": "drop"}, tenant="two")
    assert call(tables, {"what": "about"}, tenant="one")[0][0]["version"] == 0
    tables.close()


@pytest.mark.parametrize(
    ("header", "arrays", "said"),
    [
        ({"what": "open", "spec": {"num_embeddings": -1, "dim": 2}}, None, "num_embeddings"),
        ({"what": "open", "spec": 3}, None, "must be an object"),
        ({"table": "../up"}, None, "must be a name"),
        ({"part": -1}, None, "part is -1"),
        ({"what": "stage", "number": 1}, {"ids": np.array([999]), "lengths": np.array([1])}, "has 300 vectors"),
        ({"what": "stage", "number": 1}, {"ids": np.array([1, 2]), "lengths": np.array([1])}, "don't fit"),
        ({"what": "stage", "number": 1}, {"ids": np.array([1.5]), "lengths": np.array([1])}, "whole numbers"),
        ({"what": "step", "version": 1, "settled": 0, "number": 9, "lr": 0.1},
         {"grads": np.ones((1, 4))}, "unknown batch"),
        ({"what": "step", "version": 1, "settled": 0, "number": 1, "lr": 1e300},
         {"ids": np.array([1]), "lengths": np.array([1]), "grads": np.ones((1, 4))}, "lr is"),
        ({"what": "step", "version": 1, "settled": 5, "number": 1, "lr": 0.1}, None, "settled"),
        ({"what": "put", "version": 1, "settled": 0},
         {"places": np.array([2, 1]), "records": np.ones((2, 6))}, "ascend"),
        ({"what": "read"}, {"places": np.array([-1])}, "places -1"),
        ({"what": "grow", "num_embeddings": 2}, None, "can't shrink"),
        ({"what": "grow", "num_embeddings": 2**62}, None, "num_embeddings"),
        ({"what": "grow", "num_embeddings": 10**9}, None, "--table-size"),
        # Lengths whose sum runs over to the number of ids: NumPy would write behind its arrays.
        ({"what": "step", "version": 1, "settled": 0, "number": 1, "lr": 0.1},
         {"ids": np.array([0, 1]), "lengths": np.array([2**63 - 1, 2**63 - 1, 4]), "grads": np.ones((3, 4))},
         "don't fit"),
        ({"what": "drop", "lease": "b"}, None, "another trainer"),
        ({"what": "fly"}, None, "'fly'"),
    ],
)  # fmt: skip
def test_strange_messages_are_refused_and_change_nothing(tmp_path, header, arrays, said):
    tables = Tables(tmp_path, 10**9, 10**8)
    call(tables, opening())
    with pytest.raises((ConfigError, RefusedError), match=said):
        call(tables, {"what": "about", **header}, arrays)
    about = call(tables, {"what": "about"})[0][0]
    assert (about["version"], about["log_bytes"]) == (0, 0)
    tables.close()


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_bytes_of_any_kind_are_a_message_or_a_plain_error(noise, place, value):
    right = bytearray(pack({"what": "x"}, {"ids": np.arange(5)}))
    right[place % len(right)] = value
    for data in (noise, bytes(right), bytes(right[: place % len(right)])):
        try:
            unpack(data)
        except HeadwaterError:
            continue


def test_memory_is_given_to_tables_as_long_as_there_is_some(tmp_path):
    tables = Tables(tmp_path, 10**12, 4 << 20)
    large = TableSpec(10**6, 64)
    for number in range(2):
        call(tables, {**opening(large), "table": f"t{number}"})
    with pytest.raises(RefusedError, match="--table-memory"):
        _ = [call(tables, {**opening(large), "table": f"t{number}"}) for number in range(2, 9)]
    call(tables, {"what": "close", "table": "t0"})
    call(tables, {**opening(large), "table": "t9"})
    tables.close()


def test_a_batch_whose_vectors_would_fill_the_memory_is_refused(tmp_path):
    tables, wide = Tables(tmp_path, 10**9, 10**8), TableSpec(64, 1 << 14, "float64")
    call(tables, opening(wide))
    ids = np.zeros(1 << 14, np.int64)
    with pytest.raises(ConfigError, match="use smaller batches"):
        call(tables, {"what": "stage", "number": 1}, {"ids": ids, "lengths": np.array([len(ids)])})
    tables.close()


def test_a_table_grows_within_its_tenants_quota(tmp_path):
    tables, grant = Tables(tmp_path, 10**9, 10**8), Grant("small", "0" * 64, quota=Quota(max_table_bytes=100_000))
    call(tables, opening(), tenant="small", grant=grant)
    call(tables, {"what": "grow", "num_embeddings": 1_000}, tenant="small", grant=grant)
    with pytest.raises(RefusedError, match="its quota is"):
        call(tables, {"what": "grow", "num_embeddings": 10_000}, tenant="small", grant=grant)
    tables.close()


def test_what_a_killed_drop_has_left_is_no_part_of_a_new_table(tmp_path):
    part = made(tmp_path / "part")
    for version in range(1, 4):
        part.step("a", step(version))
    part.settle("a")
    part.step("a", step(4))
    part.close()
    (tmp_path / "part" / "table.json").unlink()  # what goes first
    again = Part(tmp_path / "part", CACHE, (SPEC, 0))
    again.open("a")
    assert again.once.version == 0
    np.testing.assert_array_equal(everything(again)[:, :4], initial(SPEC, np.arange(SPEC.num_embeddings)))
    again.close()


def test_who_waited_for_a_part_that_was_closed_is_told_so(tmp_path):
    """Its files' numbers may be other files' by then."""
    part = made(tmp_path / "part")
    part.step("a", step(1))
    part.close()
    for late in (lambda: part.step("a", step(2)), lambda: part.open("b"), lambda: part.pooled("a", 1, 1, -1),
                 lambda: part.stage("a", 1, Bags(np.array([1]), np.array([1])))):  # fmt: skip
        with pytest.raises(RefusedError, match="open the table again"):
            late()
    part.log.sync()  # of a step that was done before
    part.close()


def test_steps_that_are_never_settled_do_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("headwater.node.part.LOG_BYTES", 2_000)
    part = made(tmp_path / "part")
    while part.log.num_bytes <= 8_000:
        part.step("a", step(part.once.version + 1, settled=0))
    with pytest.raises(RefusedError, match="all parts have"):
        part.step("a", step(part.once.version + 1, settled=0))
    assert part.log.num_bytes < 10_000
    part.open("b")  # the way out: who opens the table makes its parts meet
    part.settle("b")
    part.step("b", step(part.once.version + 1))
    part.close()


ODD = {
    "places beside it": ({}, {"places": np.arange(2)}),
    "as many arrays as there may be": ({}, {f"more{number}": np.arange(1) for number in range(7)}),
    "words that take more room as JSON": ({"more": "\u20ac" * 10_000}, {}),
}


@pytest.mark.parametrize("odd", ODD)
def test_whatever_a_step_has_beside_it_can_be_read_again(tmp_path, odd):
    """It names bags that were staged, so that it is written anew for the log."""
    part = made(tmp_path / "part")
    part.stage("a", 7, Bags(np.array([1, 5, 5]), np.array([2, 1])))
    header, arrays = ODD[odd]
    said = {"protocol": PROTOCOL, "what": "step", "version": 1, "settled": 0, "number": 7, "lr": 0.1, **header}
    arrays = {"grads": np.ones((2, 4)), **arrays}
    said["arrays"] = [[name, each.dtype.name, list(each.shape)] for name, each in arrays.items()]
    head = json.dumps(said, ensure_ascii=False).encode()
    part.step("a", struct.pack("<I", len(head)) + head + b"".join(each.tobytes() for each in arrays.values()))
    after = everything(part)
    part.close()
    again = Part(tmp_path / "part", CACHE)
    assert again.once.version == 1
    np.testing.assert_array_equal(everything(again), after)
    again.close()


def test_a_checkpoint_of_steps_that_had_nothing_here_is_written(tmp_path):
    """As one of several parts has them."""
    part = made(tmp_path / "part")
    nothing = Bags(np.empty(0, np.int64), np.empty(0, np.int64))
    header = {"what": "step", "version": 1, "settled": 0, "number": 1, "lr": 0.1}
    part.step("a", pack(header, {"grads": np.empty((0, 4)), **bags_arrays(nothing)}))
    part.settle("a")
    part.close()
    again = Part(tmp_path / "part", CACHE)
    assert (again.once.version, again.once.checkpoint) == (1, 1)
    again.close()


def test_a_step_that_is_too_long_with_its_bags_is_refused_before_it_is_done(tmp_path, monkeypatch):
    part = made(tmp_path / "part")
    part.stage("a", 7, Bags(np.arange(200), np.ones(200, int)))
    header = {"what": "step", "version": 1, "settled": 0, "number": 7, "lr": 0.1}
    message = pack(header, {"grads": np.ones((200, 4))})
    monkeypatch.setattr("headwater.data.tablewire.MAX_MESSAGE_BYTES", len(message) + 100)
    with pytest.raises(ConfigError, match="with its bags"):
        part.step("a", message)
    assert (part.once.version, part.log.num_bytes) == (0, 0)
    part.close()


def test_a_part_that_can_not_be_opened_leaves_no_file_open(tmp_path):
    part = made(tmp_path / "part")
    part.step("a", step(1))
    part.settle("a")
    part.close()
    (tmp_path / "part" / "journal").write_bytes(b"short")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(DamagedError, match="journal is damaged"):
            Part(tmp_path / "part", CACHE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_table_that_is_too_large_leaves_nothing_behind(tmp_path):
    tables = Tables(tmp_path, 2**60, 10**8)
    with pytest.raises(RefusedError, match="more nodes"):
        call(tables, opening(TableSpec(2**33, 4)))
    call(tables, opening())
    tables.close()


@pytest.fixture
def fail_once(monkeypatch):
    """fail_once(): the next sync of data fails as Linux tells of it: once, and then all is well."""
    real, left = os.fdatasync, []

    def sync(file):
        if left:
            left.pop()
            raise OSError(errno.EIO, "Input/output error")
        real(file)

    monkeypatch.setattr(os, "fdatasync", sync)
    return lambda: left.append(True)


def test_what_the_disk_failed_to_keep_is_never_confirmed_nor_what_comes_behind_it(tmp_path, versions, fail_once):
    part = made(tmp_path / "part")
    part.step("a", step(1))
    part.sync()
    part.step("a", step(2))
    fail_once()
    for _ in range(2):  # the second time the kernel would say that all is well
        with pytest.raises(RefusedError, match=r"failed to keep the last one \(Input/output error\), which is not"):
            part.sync()
    for late in (lambda: part.step("a", step(3)), lambda: part.settle("a"), lambda: part.back("a", 1)):
        with pytest.raises(RefusedError, match="open the table again"):
            late()
    part.step("a", step(2))  # said twice: it has been done, and can't be confirmed
    with pytest.raises(RefusedError, match="look at that disk"):
        part.sync()
    part.close()
    again = Part(tmp_path / "part", CACHE)
    assert again.once.version == 1
    for version in (2, 3):
        again.step("a", step(version))
        again.sync()
    np.testing.assert_array_equal(everything(again), versions[3])
    again.close()


def test_a_trainer_that_opens_a_table_again_goes_on_from_what_its_disk_has_kept(tmp_path, fail_once):
    tables, header = Tables(tmp_path, 10**9, 10**8), {"what": "step", "settled": 0, "number": 1, "lr": 0.1}
    arrays = {"ids": np.array([1]), "lengths": np.array([1]), "grads": np.ones((1, 4))}
    call(tables, opening())
    call(tables, {**header, "version": 1}, arrays)
    fail_once()
    with pytest.raises(RefusedError, match="failed to keep"):
        call(tables, {**header, "version": 2}, arrays)
    assert call(tables, opening())[0][0]["version"] == 1
    call(tables, {**header, "version": 2}, arrays)
    assert call(tables, {"what": "about"})[0][0]["version"] == 2
    tables.close()


def test_a_step_that_a_killed_node_did_not_sync_is_synced_before_it_is_confirmed(tmp_path, monkeypatch):
    part = made(tmp_path / "part")
    part.step("a", step(1))
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "part", left)  # a kill
    part.close()
    synced, real = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (synced.append(os.readlink(f"/proc/self/fd/{file}")), real(file)))
    again = Part(left, CACHE)
    again.step("a", step(1))  # the trainer, which was not answered, says it again
    again.sync()
    assert str(left / "log") in synced
    again.close()


def test_a_new_log_is_in_its_folder_before_a_step_is_taken_into_it(tmp_path, monkeypatch):
    part, done = made(tmp_path / "part"), []
    part.step("a", step(1))
    real = steplog.sync_folder
    monkeypatch.setattr(steplog, "sync_folder", lambda folder: (done.append(sorted(folder.glob("log*"))), real(folder)))
    part.log.turn()
    assert done == [[tmp_path / "part" / "log", tmp_path / "part" / "log.old"]]
    part.close()


def test_a_log_that_can_not_be_turned_goes_on_as_it_was(tmp_path, versions, monkeypatch):
    part = made(tmp_path / "part")
    part.step("a", step(1))

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(steplog, "sync_folder", full)
    with pytest.raises(RefusedError, match="No space left"):
        part.settle("a")
    monkeypatch.undo()
    part.step("a", step(2))
    part.sync()
    part.close()
    again = Part(tmp_path / "part", CACHE)
    np.testing.assert_array_equal(everything(again), versions[2])
    again.close()


def test_a_checkpoint_of_scattered_vectors_changes_no_neighbour_and_touches_no_other_page(tmp_path):
    """Pages that lie side by side are written together, with the vectors between those that were trained."""
    spec, generator, expected = TableSpec(200_000, 4, "float64"), np.random.default_rng(0), {}
    (tmp_path / "part").mkdir()
    part = Part(tmp_path / "part", 1 << 24, (spec, 0))
    part.open("a")
    for version in range(1, 5):
        near, far = generator.integers(0, 2000, 300), generator.integers(0, 200_000, 300)
        where = np.unique(np.concatenate([near, far, list(expected)[::7]]).astype(np.int64))
        records = generator.normal(size=(len(where), 5))
        part.step("a", pack({"what": "put", "version": version, "settled": version - 1},
                            {"places": where, "records": records}))  # fmt: skip
        part.settle("a")
        expected |= dict(zip(where.tolist(), records[:, :4], strict=True))
    part.close()
    again = Part(tmp_path / "part", 1 << 24)
    again.open("a")
    where = np.arange(200_000)
    wanted = initial(spec, where)
    wanted[list(expected)] = list(expected.values())
    np.testing.assert_array_equal(again.read("a", where)[:, :4], wanted)
    seat_pages = len({place * 4 // 4096 for place in expected})
    assert again.about()["disk_bytes"] <= (seat_pages + len(expected) * 40 / 4096 + 2) * 4096
    again.close()


def test_a_checkpoint_stands_back_for_a_call_that_is_under_way_unless_that_waits_for_it(tmp_path, versions):
    part = made(tmp_path / "part")
    for version in range(1, 4):
        part.step("a", step(version))
    with part._working():
        part._checkpoint(anyway=True)
        assert part._writing.is_alive()
        part._finish()
    assert part.once.checkpoint == part._on_disk == 3
    part.close()
    again = Part(tmp_path / "part", CACHE)
    np.testing.assert_array_equal(everything(again), versions[3])
    again.close()


def test_what_a_batch_would_take_is_measured_without_changing_anything(tmp_path, versions):
    part = made(tmp_path / "part")
    part.step("a", step(1))
    for ids in (np.arange(0, 300, 7), np.zeros(9, np.int64), np.empty(0, np.int64)):
        said = part.measure("a", Bags(ids, np.ones(len(ids), np.int64)))
        assert set(said) == {"id_s", "vector_s", "disk_s", "cold_s", "outside"}
        assert all(each >= 0 for each in said.values())
    assert part.once.version == 1
    assert not (tmp_path / "part" / "probe").exists()
    np.testing.assert_array_equal(everything(part), versions[1])
    part.close()

"""Rows that were kept are served as they were made, or not at all, whatever happens to node, disk and files."""

import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.core import codecs
from headwater.core.cache import Shelf
from headwater.core.spec import TensorSpec
from headwater.data.transforms import HorizontalFlip, Resize, ToFloat, Transforms
from headwater.node import cache as cache_module
from headwater.node import rowfiles
from headwater.node.cache import Cache
from headwater.node.serve import MAX_FILES
from headwater.node.service import Node
from headwater.train.client import NodeClient
from headwater.train.embedded import EmbeddedNode

RANDOM = Transforms([Resize((8, 8)), HorizontalFlip(0.5), ToFloat()])
ROW_BYTES = 12 + rowfiles.HEAD_BYTES + rowfiles.HASH_BYTES  # three floats, and what a record has besides


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "rows"


@pytest.fixture
def start(pictures, state, folder, tried_before):
    """start(): a node that keeps rows, and a client of it; the one before is stopped."""
    running = []

    def stop():
        for client, node in running:
            client.close()
            node.stop(5)
        running.clear()

    def start(budget=10**7, where=folder):
        stop()
        node = Node("grpc://127.0.0.1:0", (str(pictures),), state=state, num_threads=2, cache=Cache(where, budget),
                    is_wary=False)  # fmt: skip
        client = NodeClient(f"grpc://127.0.0.1:{node.port}")
        running.append((client, node))
        return node, client

    yield start
    stop()


@pytest.fixture
def prefix(start, build, tmp_path):
    """A prefix that every node here has."""
    path = tmp_path / "mean.onnx"
    path.write_bytes(build.model())
    digest = build.digest(path.read_bytes())
    start()[1].upload(digest, path)
    return digest


def ask(node, client, chunk):
    """(rows, how many of them were kept ones)"""
    before = node.cache.to_json()["num_cache_hits"]
    reply = client.rows(chunk, threading.Event())
    node.cache.wait(20)
    assert reply.good.all()
    return reply.tensors[0], node.cache.to_json()["num_cache_hits"] - before


@pytest.mark.parametrize("codec", sorted(codecs.CODECS))
def test_kept_rows_are_those_that_were_made(start, prefix, chunk_of, codec):
    node, client = start()
    chunk = chunk_of(prefix, codec=codec)
    made, hits = ask(node, client, chunk)
    assert hits == 0
    kept, hits = ask(node, client, chunk)
    assert hits == 50
    np.testing.assert_array_equal(kept, made)
    assert node.hello()["busy"]["num_rows"] == 50
    assert node.hello()["busy"]["num_cache_misses"] == 50


def test_pixels_are_kept_too_and_in_any_order(start, chunk_of):
    node, client = start()
    chunk = chunk_of()
    made, _ = ask(node, client, chunk)
    other = replace(chunk, samples=chunk.samples[::-1])
    kept, hits = ask(node, client, other)
    assert hits == 50
    np.testing.assert_array_equal(kept[::-1], made)


def test_what_is_there_is_sent_and_the_rest_is_made(start, chunk_of):
    node, client = start()
    chunk = chunk_of()
    ask(node, client, replace(chunk, samples=chunk.samples[10:25]))
    _, hits = ask(node, client, chunk)
    assert hits == 15
    assert node.hello()["busy"]["num_rows"] == 50


def test_a_sample_without_an_etag_is_made_every_time(start, chunk_of):
    node, client = start()
    chunk = chunk_of()
    chunk = replace(chunk, samples=tuple(replace(ref, etag="") if ref.id % 2 else ref for ref in chunk.samples))
    made, _ = ask(node, client, chunk)
    kept, hits = ask(node, client, chunk)
    assert hits == 25
    np.testing.assert_array_equal(kept, made)


def test_a_bad_sample_stays_bad(start, chunk_of, pictures):
    node, client = start()
    chunk = chunk_of()
    broken = replace(chunk.samples[3], key=chunk.samples[3].key + "x")
    chunk = replace(chunk, samples=(*chunk.samples[:3], broken, *chunk.samples[4:]))
    for hits in (0, 49):
        before = node.cache.to_json()["num_cache_hits"]
        reply = client.rows(chunk, threading.Event())
        node.cache.wait(20)
        assert [bad.sample for bad in reply.bad] == [3]
        assert node.cache.to_json()["num_cache_hits"] - before == hits


def test_other_draws_and_other_transforms_have_rows_of_their_own(start, chunk_of):
    node, client = start()
    first = chunk_of(transforms=RANDOM)
    for change, hits in (({}, 0), ({}, 50), ({"epoch": 1}, 0), ({"seed": 1}, 0), ({"epoch": 1}, 50)):
        assert ask(node, client, replace(first, **change))[1] == hits
    assert ask(node, client, chunk_of())[1] == 0


def test_who_measures_gets_fresh_rows_and_leaves_none(start, chunk_of):
    node, client = start()
    chunk = chunk_of()
    ask(node, client, replace(chunk, reuse=False))
    assert node.cache.to_json()["cache_bytes"] == 0
    ask(node, client, chunk)
    assert ask(node, client, replace(chunk, reuse=False))[1] == 0


def test_rows_survive_a_restart(start, prefix, chunk_of):
    chunk = chunk_of(prefix)
    made, _ = ask(*start(), chunk)
    kept, hits = ask(*start(), chunk)
    assert hits == 50
    np.testing.assert_array_equal(kept, made)


def test_many_requests_at_once(start, prefix, chunk_of):
    node, client = start()
    chunk = chunk_of(prefix, node_batch=4)
    expected = chunk_of(prefix)
    expected, _ = ask(node, client, replace(expected, reuse=False))
    wrong = []

    def work(number):
        for turn in range(5):
            order = np.random.default_rng(number * 10 + turn).permutation(50)[: 30 + number]
            reply = client.rows(replace(chunk, samples=tuple(chunk.samples[i] for i in order)), threading.Event())
            if not np.array_equal(reply.tensors[0], expected[order]):
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    node.cache.wait(20)
    assert node.cache.to_json()["cache_bytes"] == 50 * ROW_BYTES


# Files that are not what they were


def files(folder, kind):
    return sorted(folder.glob(f"*/*.{kind}"))


def test_a_flipped_bit_is_found_wherever_it_is(start, prefix, chunk_of, folder):
    chunk = chunk_of(prefix)
    made, _ = ask(*start(), chunk)
    (rows,), (keys,) = files(folder, "rows"), files(folder, "keys")
    record = rows.stat().st_size // 50
    for path, at in [(rows, 7 * record), (rows, 8 * record + 5), (rows, 10 * record - 1), (keys, 8 * 30)]:
        data = bytearray(path.read_bytes())
        data[at] ^= 0x10
        path.write_bytes(data)
        node, client = start()
        kept, hits = ask(node, client, chunk)
        assert hits == 49
        np.testing.assert_array_equal(kept, made)
        assert ask(node, client, chunk)[1] == 50, "it was made again, and kept"


def test_damage_is_found_while_the_node_runs(start, prefix, chunk_of, folder, caplog):
    node, client = start()
    chunk = chunk_of(prefix)
    made, _ = ask(node, client, chunk)
    (rows,) = files(folder, "rows")
    with rows.open("r+b") as file:
        file.truncate(rows.stat().st_size // 2)
    kept, hits = ask(node, client, chunk)
    assert hits == 25
    np.testing.assert_array_equal(kept, made)
    assert caplog.text.count("damaged") == 1


@pytest.mark.parametrize(("rows_cut", "keys_cut", "hits"), [(1, 0, 49), (0, 1, 49), (0, 8 * 50, 0), (100, 100, 37)])
def test_what_is_cut_short_is_cut_off(start, prefix, chunk_of, folder, rows_cut, keys_cut, hits):
    chunk = chunk_of(prefix)
    made, _ = ask(*start(), chunk)
    start(budget=0)
    for kind, cut in (("rows", rows_cut), ("keys", keys_cut)):
        (path,) = files(folder, kind)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - cut)
    node, client = start()
    kept, found = ask(node, client, chunk)
    assert found == hits
    np.testing.assert_array_equal(kept, made)
    assert ask(node, client, chunk)[1] == 50


def test_what_a_kill_left_behind_whole_rows_is_cut_off_before_the_budget_is_spent(start, prefix, chunk_of, folder):
    ask(*start(), chunk_of(prefix))
    start(budget=0)
    for kind, tail in (("rows", 1000), ("keys", 5)):
        (path,) = files(folder, kind)
        with path.open("ab") as file:
            file.write(bytes(tail))
    node, client = start()
    sizes = [path.stat().st_size for kind in ("rows", "keys") for path in files(folder, kind)]
    assert sum(sizes) == node.cache.to_json()["cache_bytes"] == 50 * ROW_BYTES
    assert ask(node, client, chunk_of(prefix))[1] == 50


def test_a_cache_of_another_version_is_removed(start, prefix, chunk_of, folder, caplog):
    chunk = chunk_of(prefix)
    ask(*start(), chunk)
    start(budget=0)
    (folder / "format").write_text("headwater-rows 0")
    (folder / "keep-me.txt").write_text("not ours")
    node, client = start()
    assert "another version (headwater-rows 0, this is headwater-rows 1)" in caplog.text
    assert ask(node, client, chunk)[1] == 0
    assert (folder / "keep-me.txt").exists()


def test_a_shelf_under_another_name_is_never_served(start, prefix, chunk_of, folder):
    """As of rows for another key: every row says whose it is."""
    chunk = chunk_of(prefix)
    other = replace(chunk, extraction=replace(chunk.extraction, outputs=("mean",)))
    ask(*start(), chunk)
    mine = {path.parent for path in files(folder, "rows")}
    ask(*start(), other)
    start(budget=0)
    (ours,), (theirs,) = mine, {path.parent for path in files(folder, "rows")} - mine
    ours.rename(folder / "x")
    theirs.rename(ours)
    (folder / "x").rename(theirs)
    node, client = start()
    assert ask(node, client, chunk)[1] == 0
    assert ask(node, client, other)[1] == 0


@pytest.mark.parametrize(
    "about", ["", "{", "[]", '{"record_bytes": "x"}', '{"record_bytes": 5}', '{"record_bytes": 33}']
)
def test_a_shelf_that_does_not_say_what_it_is_is_made_anew(start, prefix, chunk_of, folder, about):
    chunk = chunk_of(prefix)
    ask(*start(), chunk)
    start(budget=0)
    (path,) = folder.glob("*/about")
    path.write_text(about)
    node, client = start()
    assert ask(node, client, chunk)[1] == 0
    assert ask(node, client, chunk)[1] == 50


# Room


def test_the_budget_is_kept_and_a_part_is_served(start, prefix, chunk_of, folder, caplog):
    budget = 30 * ROW_BYTES
    node, client = start(budget)
    chunk = chunk_of(prefix)
    ask(node, client, chunk)
    assert "the cache is full" in caplog.text
    for _ in range(2):
        assert ask(node, client, chunk)[1] == 30
        assert sum(path.stat().st_size for kind in ("rows", "keys") for path in files(folder, kind)) <= budget
    assert caplog.text.count("the cache is full") == 1


def test_the_next_job_takes_the_room_and_the_oldest_rows_go(start, prefix, chunk_of, folder):
    budget = 64 * ROW_BYTES
    node, client = start(budget)
    old, new = chunk_of(prefix), replace(chunk_of(), job="next")
    ask(node, client, old)
    ask(node, client, new)  # pixels: 192 bytes a row
    kept = sum(path.stat().st_size for kind in ("rows", "keys") for path in files(folder, kind))
    assert 0 < kept == node.cache.to_json()["cache_bytes"] <= budget
    assert ask(node, client, new)[1] > 0
    start(budget // 4)
    assert sum(path.stat().st_size for kind in ("rows", "keys") for path in files(folder, kind)) <= budget // 4


def test_a_budget_smaller_than_a_row_keeps_nothing_and_says_so(start, prefix, chunk_of, caplog):
    node, client = start(ROW_BYTES - 1)
    ask(node, client, chunk_of(prefix))
    assert ask(node, client, chunk_of(prefix))[1] == 0
    assert f"a row takes {ROW_BYTES} bytes" in caplog.text


def test_a_full_disk_turns_keeping_off_and_not_the_job(start, prefix, chunk_of, folder, monkeypatch, caplog):
    node, client = start()
    chunk = chunk_of(prefix)
    real, written = os.pwrite, []

    def pwrite(file, data, offset):
        if sum(written) > 300:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(real(file, data[:100], offset))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", pwrite)
    made, _ = ask(node, client, chunk)
    assert caplog.text.count("No space left on device") == 1
    assert ask(node, client, chunk)[1] < 50
    monkeypatch.undo()
    kept, _ = ask(*start(), chunk)
    np.testing.assert_array_equal(kept, made)


def mounted(folder, size):
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"needs to mount a small disk: {done.stderr.strip()}")


def test_a_disk_that_is_really_full(start, prefix, chunk_of, tmp_path, caplog):
    folder = tmp_path / "disk"
    mounted(folder, "128k")
    try:
        node, client = start(10**6, folder)
        chunk = chunk_of(transforms=Transforms([Resize((32, 32)), ToFloat()]))
        made, _ = ask(node, client, chunk)
        kept, hits = ask(node, client, chunk)
        assert 0 < hits < 50
        np.testing.assert_array_equal(kept, made)
        assert caplog.text.count("no rows are kept") == 1
        assert shutil.disk_usage(folder).free >= 10**6 // cache_module.SEGMENTS, "some was given back"
        start(0)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("kind", ["a file", "below a file", "nowhere"])
def test_a_folder_that_can_not_be_used_is_said_and_done_without(start, prefix, chunk_of, tmp_path, caplog, kind):
    (tmp_path / "file").write_text("x")
    where = {"a file": tmp_path / "file", "below a file": tmp_path / "file/rows", "nowhere": Path("/proc/rows")}[kind]
    node, client = start(10**7, where)
    assert "name another folder (--cache-dir)" in caplog.text
    assert ask(node, client, chunk_of(prefix))[1] == 0
    assert ask(node, client, chunk_of(prefix))[1] == 0


def test_two_nodes_never_share_a_folder(start, prefix, chunk_of, folder, caplog):
    node, client = start()
    second = Cache(folder, 10**7)
    assert f"another node uses {folder}" in second.why_off
    assert second.look_up(chunk_of(prefix), "maker") is None
    second.close()
    ask(node, client, chunk_of(prefix))
    assert ask(node, client, chunk_of(prefix))[1] == 50


def test_a_slow_disk_holds_nothing_up(start, prefix, chunk_of, monkeypatch):
    """What waits to be written is bounded; the rest is not kept, and the job goes on."""
    go_on = threading.Event()
    real = os.pwrite
    monkeypatch.setattr(cache_module, "QUEUE_BYTES", 200)
    monkeypatch.setattr(os, "pwrite", lambda *args: go_on.wait(20) and real(*args))
    node, client = start()
    reply = client.rows(chunk_of(prefix, node_batch=4), threading.Event())
    assert reply.good.all()
    assert node.cache.to_json()["num_cache_unkept"] > 0
    go_on.set()
    node.cache.wait(20)
    assert 0 < ask(node, client, chunk_of(prefix))[1] < 50


# Many shelves


def shelf_of(number):
    """A shelf as of the draws of this epoch; a row has its key four times."""
    return Shelf("u", "t", None, None, (TensorSpec("a", (4,), "float32"),), "fp32", "raw", "m", (0, number))


def keys_of(first, count):
    return np.stack([np.arange(first, first + count), np.full(count, 7)], axis=1).astype("<u8")


def add(cache, shelf, first, count):
    keys = keys_of(first, count)
    cache.keep(shelf, keys, [np.repeat(keys[:, :1].astype(np.float32), 4, axis=1)], "job")


def keep(cache, shelf, first, count):
    add(cache, shelf, first, count)
    cache.wait(20)


def kept(cache, shelf, first, count):
    """How many of these rows there are; they are what they should be."""
    keys, found = keys_of(first, count), 0
    for numbers, (rows,) in cache.pieces(shelf, keys):
        assert (rows == keys[numbers, :1]).all()
        found += len(numbers)
    return found


def num_open(folder):
    """Files in this folder that this process has open."""
    paths = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            paths.append(os.readlink(entry))
    return sum(path.startswith(str(folder)) for path in paths)


def test_files_of_shelves_that_nobody_uses_are_closed_and_no_row_is_lost(folder, monkeypatch):
    monkeypatch.setattr(cache_module, "MAX_OPEN", 3)
    cache = Cache(folder, 10**7)
    for turn in range(2):  # the second time rows are added to files that were closed
        for number in range(10):
            keep(cache, shelf_of(number), 1 + 5 * turn, 5)
            assert num_open(folder) <= 2 * 3 + 1, "two a shelf, and the lock"
    assert [kept(cache, shelf_of(number), 1, 10) for number in range(10)] == [10] * 10
    assert num_open(folder) <= 2 * 3 + 1
    cache.close()


def test_a_shelf_that_rows_are_added_to_is_not_opened_a_second_time(folder, monkeypatch):
    """Its end would be cut off under the one who writes."""
    monkeypatch.setattr(cache_module, "MAX_OPEN", 1)
    cache, ended = Cache(folder, 10**7), threading.Event()
    for number in range(4):
        keep(cache, shelf_of(number), 1, 1)

    def read():
        while not ended.is_set():
            for number in range(4):
                kept(cache, shelf_of(number), 1, 1)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(100):
        keep(cache, shelf_of(turn % 2), 2 + 20 * (turn // 2), 20)
    ended.set()
    for thread in threads:
        thread.join()
    assert [kept(cache, shelf_of(number), 1, 1001) for number in range(2)] == [1001] * 2
    assert cache.to_json()["num_cache_damaged"] == 0
    cache.close()


def test_a_full_disk_gets_back_what_was_used_longest_ago(folder, monkeypatch):
    cost = 16 + rowfiles.HEAD_BYTES + rowfiles.HASH_BYTES
    cache = Cache(folder, 64 * 5 * cost)  # segments of five rows
    for number in range(4):
        keep(cache, shelf_of(number), 1, 5)
    assert kept(cache, shelf_of(0), 1, 5) == 5

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    keep(cache, shelf_of(4), 1, 5)
    assert "No space left on device" in cache.why_off
    assert [kept(cache, shelf_of(number), 1, 5) for number in range(5)] == [5, 0, 5, 5, 0]
    assert cache.to_json()["cache_bytes"] == 3 * 5 * cost
    cache.close()


def test_a_full_cache_is_told_of_although_rows_were_dropped_for_a_slow_disk_before(folder, monkeypatch, caplog):
    go_on, real = threading.Event(), os.pwrite
    monkeypatch.setattr(cache_module, "QUEUE_BYTES", 1)
    monkeypatch.setattr(os, "pwrite", lambda *args: go_on.wait(20) and real(*args))
    cache = Cache(folder, 10 * (16 + rowfiles.HEAD_BYTES + rowfiles.HASH_BYTES))
    add(cache, shelf_of(0), 1, 5)
    add(cache, shelf_of(0), 6, 5)
    assert cache.to_json()["num_cache_unkept"] == 5
    go_on.set()
    cache.wait(20)
    assert "the cache is full" not in caplog.text
    for first in (11, 31):
        keep(cache, shelf_of(0), first, 20)
    assert caplog.text.count("the cache is full") == 1
    assert cache.to_json()["num_cache_unkept"] == 5 + 35
    cache.close()


def test_a_folder_is_taken_over_from_a_node_that_has_ended(chunk_of, folder, monkeypatch, caplog):
    monkeypatch.setattr(cache_module, "TRY_EVERY_S", 0.0)
    first = Cache(folder, 10**7)
    keep(first, shelf_of(0), 1, 5)
    second = Cache(folder, 10**7)
    assert second.look_up(chunk_of(), "maker") is None
    first.close()
    assert second.look_up(chunk_of(), "maker") is not None
    assert second.why_off is None
    keep(second, shelf_of(0), 6, 5)
    assert kept(second, shelf_of(0), 1, 10) == 10
    second.close()
    assert second.look_up(chunk_of(), "maker") is None, "not after its own end"
    assert caplog.text.count("no rows are kept") == 1
    assert f"rows are kept in {folder} from now on" in caplog.text


def test_a_folder_that_is_in_use_is_not_asked_for_all_the_time(chunk_of, folder, monkeypatch):
    monkeypatch.setattr(cache_module, "TRY_EVERY_S", 3600.0)
    first, second = Cache(folder, 10**7), Cache(folder, 10**7)
    first.close()
    monkeypatch.setattr(second, "_begin", lambda: pytest.fail("it was asked for just now"))
    assert second.look_up(chunk_of(), "maker") is None
    second.close()


def test_the_first_of_several_folders_that_is_free_is_taken(folder):
    others = [folder.with_name("rows-2"), folder.with_name("rows-3")]
    caches = [Cache(folder, 10**7, others) for _ in range(4)]
    assert [cache.folder.name for cache in caches] == ["rows", "rows-2", "rows-3", "rows"]
    assert [cache.why_off is None for cache in caches] == [True, True, True, False]
    caches[1].close()
    again = Cache(folder, 10**7, others)
    assert again.folder.name == "rows-2"
    for cache in (*caches, again):
        cache.close()


def test_nodes_beside_two_scripts_both_keep_rows(pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    nodes, clients = [EmbeddedNode(str(pictures), 1, 10**6) for _ in range(2)], []
    try:
        clients += [NodeClient(node.address, node.access) for node in nodes]
        assert [client.hello()["busy"]["cache_budget_bytes"] for client in clients] == [10**6] * 2
    finally:
        for each in (*clients, *nodes):
            each.close()
    assert sorted(path.name for path in (tmp_path / "headwater/node").glob("rows*")) == ["rows", "rows-2"]


def test_a_node_may_open_as_many_files_as_the_system_allows(pictures, start_node, tmp_path):
    few = ("sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")
    node = start_node(pictures, options=("--state", str(tmp_path)), wrap=few)
    (line,) = [line for line in Path(f"/proc/{node.process.pid}/limits").read_text().splitlines() if "files" in line]
    now, most = (int(number) for number in line.split()[3:5])
    assert now == min(most, MAX_FILES)


# kill -9

WRITER = """
import sys, numpy as np
from pathlib import Path
from headwater.core.cache import Shelf
from headwater.core.spec import TensorSpec
from headwater.node.cache import Cache
shelf = Shelf("u", "t", None, None, (TensorSpec("a", (500,), "float32"),), "fp32", "raw", "m", None)
cache = Cache(Path(sys.argv[1]), 10**9)
assert cache.why_off is None, cache.why_off
for number in range(10**6):
    first = number * 16 + 1
    keys = np.stack([np.arange(first, first + 16), np.full(16, 7)], axis=1).astype("<u8")
    rows = np.repeat(np.arange(first, first + 16, dtype=np.float32)[:, None], 500, axis=1)
    cache.keep(shelf, keys, [rows], "job")
    cache.wait(20)
    print(first + 15, flush=True)
"""


def test_what_a_killed_node_had_kept_is_served_and_whole(folder):
    shelf = Shelf("u", "t", None, None, (TensorSpec("a", (500,), "float32"),), "fp32", "raw", "m", None)
    least = 0
    for turn in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(20 + 30 * turn):
            said = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)  # while it writes the next ones
        process.wait()
        process.stdout.close()
        least = max(least, said)
        cache = Cache(folder, 10**9)
        keys = np.stack([np.arange(1, least + 1), np.full(least, 7)], axis=1).astype("<u8")
        found = {}
        for numbers, (rows,) in cache.pieces(shelf, keys):
            assert (rows == keys[numbers, :1].astype(np.float32)).all()
            found |= dict.fromkeys(numbers.tolist())
        assert len(found) == least
        assert cache.to_json()["num_cache_damaged"] == 0
        cache.close()


def test_a_killed_node_goes_on_where_it_was(pictures, start_node, chunk_of, tmp_path, folder):
    options = ("--state", str(tmp_path / "s"), "--cache-dir", str(folder), "--cache-size", "10MB")
    chunk, hits = chunk_of(), []
    for _ in range(2):
        node = start_node(pictures, options=options)
        client = NodeClient(node.address)
        client.rows(chunk, threading.Event())
        while (busy := client.hello()["busy"])["cache_bytes"] < 50 * (192 + ROW_BYTES - 12):
            pass
        hits.append(busy["num_cache_hits"])
        client.close()
        node.kill()
    assert hits == [0, 50]


def test_it_says_what_it_keeps_and_where(pictures, start_node, tmp_path):
    node = start_node(pictures, options=("--state", str(tmp_path), "--cache-size", "5MB"))
    said = node.process.stdout.readline()
    assert f"rows are kept in {tmp_path}/rows, at most 0.005 GB" in said
    second = start_node(pictures, options=("--state", str(tmp_path)))
    assert "rows are not kept: another node uses" in second.process.stdout.readline()
    third = start_node(pictures, options=("--state", str(tmp_path), "--cache-size", "0"))
    assert "rows are not kept: the size it may have is 0" in third.process.stdout.readline()


def test_the_default_is_ten_gigabytes_or_half_of_what_is_free(folder, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    for free, budget in ((10**12, 10**10), (10**9, 5 * 10**8)):
        monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path, free=free: usage(10**12, 0, free))
        cache = Cache(folder)
        assert cache.to_json()["cache_budget_bytes"] == budget
        cache.close()


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.WARNING)

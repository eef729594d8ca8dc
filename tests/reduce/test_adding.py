"""Sums by real processes over real TCP and UDP: right, the same bits on all and in two runs, whatever is lost."""

import contextlib
import json
import os
import resource
import select
import socket
import sys
import threading
import time
import zlib

import numpy as np
import pytest
from tests.reduce.processes import KEY, results

from headwater.errors import AggregatorGoneError, ConfigError, JoinRefusedError, ReduceError, WorkerGoneError
from headwater.reduce import Reducer
from headwater.reduce.aggregator import Aggregator
from headwater.reduce.connection import BLOCK_HEAD
from headwater.reduce.control import address, proof
from headwater.reduce.joining import Ticket, connect, join

ARRAYS = [[1, "float32"], [300_000, "float32"], [70_001, "float64"], [25_000, "float16"], [0, "float32"],
          [11_200, "float32"], [11_201, "float32"], [5_000, "int64"]]  # fmt: skip
LANES = pytest.mark.parametrize("lane", ["tcp", "udp"])
BOUNDS = {"float32": 1e-6, "float64": 1e-15, "float16": 1e-3, "int64": 0.0}


def run(workers, switch, num_workers, arrays=ARRAYS, **options):
    return results(workers("adding.py", [
        {"switch": switch, "rank": rank, "num_workers": num_workers, "arrays": arrays, **options}
        for rank in range(num_workers)]))  # fmt: skip


def check(found, arrays=ARRAYS):
    assert all(each["digests"] == found[0]["digests"] for each in found), "all have the same bits"
    for error, (_, dtype) in zip(found[0]["errors"], arrays, strict=True):
        assert error <= BOUNDS[dtype]


def test_sums_are_right_and_the_same_bits_on_all_workers_and_in_both_lanes_and_in_two_runs(start, workers):
    aggregator = start("--workers", "3")
    first, second, packets = (run(workers, aggregator.address, 3, lane=lane) for lane in ("tcp", "tcp", "udp"))
    check(first)
    assert first[0]["digests"] == second[0]["digests"] == packets[0]["digests"]
    assert aggregator.stop()[-1]["event"] == "stopped"


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_lost_doubled_and_reordered_packets_change_no_bit(shared, workers, share):
    arrays = [[1, "float32"], [200_000, "float32"], [20_000, "float64"]]
    plain = run(workers, shared, 2, arrays, job="plain")
    faulty = run(workers, shared, 2, arrays, job="faulty", lane="udp",
                 fault={"loss": share, "double": share, "reorder": share})  # fmt: skip
    check(faulty, arrays)
    assert faulty[0]["digests"] == plain[0]["digests"]
    assert min(each["lost"] for each in faulty) > 5
    assert max(each["doubled"] for each in faulty) > 0
    assert min(each["counts"]["asked"] for each in faulty) > 0


def test_two_jobs_at_once_with_other_sizes_and_numbers_of_workers(shared, workers):
    jobs = [workers("adding.py", [
        {"switch": shared, "rank": rank, "num_workers": num_workers, "arrays": arrays, "job": job,
         "seed": seed}
        for rank in range(num_workers)]) for job, num_workers, arrays, seed in
        (("small", 2, [[50_000, "float32"]] * 4, 1), ("large", 3, [[400_000, "float32"]], 2))]  # fmt: skip
    for found, arrays in zip(map(results, jobs), ([[50_000, "float32"]] * 4, [[400_000, "float32"]]), strict=True):
        check(found, arrays)


def test_integers_with_block_exponents_are_as_good_as_floats(shared, workers):
    arrays = [[120_000, "float32"], [10, "float32"]]
    packets = run(workers, shared, 3, arrays, integers=True, lane="udp",
                  fault={"loss": 0.02, "double": 0, "reorder": 0})  # fmt: skip
    check(packets, arrays)
    check(run(workers, shared, 3, arrays, integers=True), arrays)


@LANES
def test_two_racks_behind_a_root_add_up_to_one_job(start, workers, lane):
    root = start("--workers", "2")
    leaves = [start("--workers", "2", "--root", root.address, "--place", f"{place}/2") for place in range(2)]
    arrays = [[100_000, "float64"], [3, "float64"]]
    fault = {"loss": 0.02, "double": 0.01, "reorder": 0.01} if lane == "udp" else None
    found = results(workers("adding.py", [
        {"switch": leaf.address, "rank": rank, "num_workers": 2, "arrays": arrays, "seed": 5, "lane": lane,
         "times": 2, "fault": fault}
        for leaf in leaves for rank in range(2)]))  # fmt: skip
    check(found, arrays)  # both racks have the same ranks, so the whole is twice the sum of one


class Pair:
    """Two workers in threads of this process, on a real aggregator."""

    def __init__(self, address, **options):
        self.made = [None, None]
        threads = [threading.Thread(target=self._join, args=(rank, address, options)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def _join(self, rank, address, options):
        self.made[rank] = Reducer(address, rank=rank, num_workers=2, key=KEY, **options)

    def both(self, call):
        """What each thread's call gave or raised."""
        found = [None, None]

        def one(rank):
            try:
                found[rank] = call(rank, self.made[rank])
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        return found


@pytest.fixture
def pair(shared, request):
    made = []

    def begin(address=shared, **options):
        made.append(Pair(address, **{"job": f"pair-{zlib.crc32(request.node.name.encode())}", **options}))
        return made[-1]

    yield begin
    for each in made:
        for reducer in each.made:
            reducer.close()


@LANES
def test_an_aggregator_that_is_killed_is_an_error_on_all(start, pair, lane):
    aggregator = start()
    two = pair(aggregator.address, lane=lane)
    aggregator.kill()
    found = two.both(lambda rank, reducer: reducer.all_reduce(np.ones(10, np.float32)))
    assert all(isinstance(each, AggregatorGoneError) for each in found), found


@LANES
def test_a_worker_that_goes_without_a_word_is_an_error_on_the_others(pair, lane):
    two = pair(lane=lane)
    two.made[1]._joined.close()  # as the kernel does when its process is killed
    with pytest.raises(WorkerGoneError, match="worker 1 of job 'pair-"):
        two.made[0].all_reduce(np.ones(10, np.float32))


@LANES
def test_a_worker_that_leaves_is_an_error_only_for_what_it_takes_no_part_in(pair, lane):
    two = pair(lane=lane)
    found = two.both(lambda rank, reducer: (reducer.all_reduce(np.ones(10, np.float32)), rank and reducer.close()))
    assert all(each[0].tolist() == [2.0] * 10 for each in found)
    with pytest.raises(WorkerGoneError, match="worker 1 has left"):
        two.made[0].all_reduce(np.ones(10, np.float32))


@LANES
def test_a_worker_that_does_not_come_is_named_after_the_time_out(pair, lane):
    two = pair(timeout_s=1.0, lane=lane)
    with pytest.raises(WorkerGoneError, match="worker 1 has not sent"):
        two.made[0].all_reduce(np.ones(10, np.float32))


@LANES
def test_workers_that_add_up_different_things_are_told_what(pair, lane):
    found = pair(lane=lane).both(lambda rank, reducer: reducer.all_reduce(np.ones(10 + rank, np.float32)))
    assert all(type(each) is ReduceError and "40 bytes of fp32 of worker 0 and 44 bytes" in str(each) for each in found)


def test_workers_that_add_up_other_numbers_of_pieces_are_told_as_well(pair):
    found = pair(lane="udp").both(lambda rank, reducer: reducer.all_reduce(np.ones(10 + 5000 * rank, np.float32)))
    assert all(type(each) is ReduceError and "pieces of worker" in str(each) for each in found), found


def test_strangers_and_packets_of_an_earlier_start_are_dropped_and_counted(start, pair):
    aggregator = start()
    old, new = (pair(aggregator.address, session=session, lane="udp") for session in "12")
    host, port = aggregator.address.split(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for _ in range(5):
            stranger.sendto(bytes(1416), (host, int(port)))
    for reducer in old.made:  # whose wires are nobody's any more
        reducer.stream.wire.send(bytes(24))
    found = new.both(lambda rank, reducer: reducer.all_reduce(np.full(1000, rank + 1.0, np.float32)))
    assert all((each == 3).all() for each in found)
    for reducer in new.made:
        reducer.close()
    assert aggregator.stop()[-1]["dropped_foreign"] >= 5


def hold_sums(reducer):
    """Begin a sum that takes more than a window, and take nothing of it."""
    return reducer.begin(np.ones(1_000_000, np.float32))


def go_on(reducer, call):
    while not call.is_done:
        reducer.pump(0.1)


def test_a_worker_that_stops_reading_holds_up_its_job_alone_and_is_named(shared, pair):
    stuck, others = pair(timeout_s=1.5), pair(job="others")
    hold_sums(stuck.made[1])
    with pytest.raises(WorkerGoneError, match="worker 1 has not sent"):
        stuck.made[0].all_reduce(np.ones(1_000_000, np.float32))
    found = others.both(lambda rank, reducer: reducer.all_reduce(np.ones(1_000_000, np.float32)))
    assert all((each == 2).all() for each in found)


def test_an_array_whose_sum_did_not_come_is_as_it_was(start, pair):
    aggregator = start()
    two = pair(aggregator.address, timeout_s=1.0)
    array = np.arange(1_000_000, dtype=np.float32)
    call = two.made[0].begin(array)
    hold_sums(two.made[1])
    with pytest.raises(WorkerGoneError):
        go_on(two.made[0], call)
    stream = two.made[0].stream
    for block in range(call.first, call.stop):
        start_at, stop = call.span(block)
        added = array[start_at:stop] - np.arange(start_at, stop, dtype=np.float32)
        assert (added == (1 if stream.machine.is_done(block) else 0)).all(), "a whole sum or none"
    assert 0 < stream.num_done < call.num_blocks


def test_one_bucket_is_done_before_others_have_begun_the_next(pair):
    """What is awaited at once ends with a bucket: a worker may wait for it before it begins the next."""
    two = pair(timeout_s=5.0)

    def in_turn(rank, reducer):
        first, second = np.ones(20_000, np.float32), np.ones(200_000, np.float32)
        calls = [reducer.begin(first)]
        if rank == 0:
            calls.append(reducer.begin(second))
        go_on(reducer, calls[0])
        if rank == 1:
            calls.append(reducer.begin(second))
        go_on(reducer, calls[1])
        return first[0], second[0]

    assert two.both(in_turn) == [(2, 2), (2, 2)]


@LANES
def test_the_last_sum_of_each_slot_is_kept_though_its_array_is_written_over(pair, lane):
    def one(rank, reducer):
        array = np.arange(100_000, dtype=np.float32)
        reducer.all_reduce(array)
        wanted = array.copy()
        array[:] = -1
        size = reducer.layout.block_bytes // 4
        blocks = [wanted[start : start + size] for start in range(0, len(wanted), size)]
        return all((reducer.held(number).view(np.float32)[: len(block)] == block).all()
                   for number, block in enumerate(blocks))  # fmt: skip

    assert pair(lane=lane).both(one) == [True, True]


def test_a_connection_for_blocks_needs_the_key_and_is_taken_once(start, pair):
    aggregator = start()
    two = pair(aggregator.address)
    host, port = aggregator.address.split(":")
    job_id = two.made[0]._joined.job_id
    for key in ("another-key-altogether", KEY):  # a stranger who saw the start; and one worker too many
        ticket = Ticket("pair", "", 0, 2, key=key.encode())
        with pytest.raises(AggregatorGoneError, match="refused its connection"):
            connect((host, int(port)), ticket, job_id, time.monotonic() + 10)
    found = two.both(lambda rank, reducer: reducer.all_reduce(np.ones(10, np.float32)))
    assert all((each == 2).all() for each in found)
    for reducer in two.made:
        reducer.close()
    assert aggregator.stop()[-1]["dropped_foreign"] == 2


def test_a_stranger_who_says_half_a_character_is_refused_and_ends_nothing(start):
    aggregator = start()
    host, port = aggregator.address.split(":")
    said = {"join": "a", "session": "", "rank": 0, "workers": 1, "weight": 1, "port": 0, "lane": "tcp",
            "nonce": "\ud800", "proof": "x"}  # fmt: skip
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.sendall(json.dumps(said).encode() + b"\n")
        heard = b"".join(iter(lambda: stranger.recv(4096), b""))
    assert b"the key is not one of this aggregator's" in heard
    with Reducer(aggregator.address, rank=0, num_workers=1, key=KEY) as reducer:
        assert reducer.all_reduce(np.ones(3, np.float32)).tolist() == [1, 1, 1]


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_strangers_who_say_nothing_keep_no_worker_out(start):
    aggregator = start()
    resource.prlimit(aggregator.process.pid, resource.RLIMIT_NOFILE, (40, 40))
    host, port = aggregator.address.split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection((host, int(port)), 10))
        with Reducer(aggregator.address, rank=0, num_workers=1, key=KEY, join_s=5.0) as reducer:
            assert reducer.all_reduce(np.ones(3, np.float32)).tolist() == [1, 1, 1]


@contextlib.contextmanager
def files_allowed(soft):
    """So many may be open here, and in processes that are started meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_an_aggregator_may_have_as_many_files_open_as_the_system_allows(start):
    """It is started where a shell allows few."""
    with files_allowed(256) as most:
        aggregator = start()
    assert resource.prlimit(aggregator.process.pid, resource.RLIMIT_NOFILE)[0] == min(most, 65_536)


def test_a_worker_may_have_more_files_open_than_select_takes(shared):
    with files_allowed(2048), contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.dup(1))
        with Reducer(shared, rank=0, num_workers=1, key=KEY, job="many-files") as reducer:
            assert reducer.stream.wire.fileno() > 1024
            assert reducer.all_reduce(np.ones(3, np.float32)).tolist() == [1, 1, 1]


def test_a_leaf_takes_no_more_memory_than_its_own(start, pair):
    """Its root's slots are too many for it, which its workers are told, and the root's other jobs don't notice."""
    root = start()
    leaf = start("--memory", "1MB", "--root", root.address, "--place", "0/1")
    with pytest.raises(AggregatorGoneError, match=r"11 slots of its root; of 1,000,000 \(--memory\)"):
        join(address(leaf.address, "switch"), Ticket("small", "", 0, 1, key=KEY.encode()), 30)
    assert (pair(root.address).both(lambda _, each: each.all_reduce(np.ones(3)))[1] == 2).all()


def test_more_sums_may_have_come_than_the_kernel_takes_places_for(start, pair):
    two, count = pair(start("--window", "128MiB").address), 700

    def one(rank, reducer):
        calls = [reducer.begin(np.ones(1, np.float32)) for _ in range(count)]
        reducer.stream.wire.wake_at(count * (BLOCK_HEAD.size + 4))
        assert select.select([reducer.stream.wire], [], [], 30)[0]  # all of them are here
        for call in calls:
            go_on(reducer, call)
        return sum(float(call.values[0]) for call in calls)

    assert two.both(one) == [2 * count] * 2


def test_what_is_no_block_ends_the_job_it_came_for(shared, pair):
    two, others = pair(), pair(job="others")
    two.made[1].stream.wire.sock.send(b"x" * 1000)
    found = two.both(lambda rank, reducer: reducer.all_reduce(np.ones(10, np.float32)))
    assert all(type(each) is ReduceError and "no block" in str(each) for each in found), found
    assert all((each == 2).all() for each in others.both(lambda _, each: each.all_reduce(np.ones(10, np.float32))))


def test_workers_of_one_job_take_one_lane(start):
    address, found = start().address, []

    def join(rank, lane):
        try:
            Reducer(address, rank=rank, num_workers=2, key=KEY, lane=lane, join_s=1.0)
        except (JoinRefusedError, AggregatorGoneError) as error:
            found.append(error)

    threads = [threading.Thread(target=join, args=each) for each in enumerate(("tcp", "udp"))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    refused = next(each for each in found if isinstance(each, JoinRefusedError))
    assert len(found) == 2
    assert "give all workers the same lane=" in str(refused)


def test_another_key_is_refused_with_the_way_out(shared):
    with pytest.raises(JoinRefusedError, match="--key-file"):
        Reducer(shared, rank=0, num_workers=1, key="another-key-altogether")


def test_a_job_of_another_size_than_the_aggregator_is_for_is_refused(start):
    with pytest.raises(JoinRefusedError, match="jobs of 4"):
        Reducer(start("--workers", "4").address, rank=0, num_workers=2, key=KEY)


def test_a_rank_that_is_there_already_is_refused(shared, pair):
    pair(job="taken")
    with pytest.raises(JoinRefusedError, match="has a worker 0 already"):
        Reducer(shared, rank=0, num_workers=2, key=KEY, job="taken")


def test_a_rank_beyond_those_of_a_job_that_runs_is_refused(shared, pair):
    pair(job="two")
    with pytest.raises(JoinRefusedError, match="runs with 2 workers, and this one says that it is number 5 of 9"):
        Reducer(shared, rank=5, num_workers=9, key=KEY, job="two")


def test_who_says_goodbye_and_joins_behind_it_takes_nobodys_place(shared, pair):
    host, port = shared.split(":")
    with socket.create_connection((host, int(port))) as sock:
        hello = json.loads(sock.makefile().readline())
        facts = {"nonce": "n", "join": "left", "session": "", "rank": 0, "workers": 2, "weight": 1, "lane": "tcp",
                 "port": 0}  # fmt: skip
        said = {**facts, "proof": proof(KEY.encode(), "join", hello["nonce"], *facts.values())}
        sock.sendall(json.dumps({"leave": "done"}).encode() + b"\n" + json.dumps(said).encode() + b"\n")
        assert sock.recv(1) == b""
    two = pair(job="left")
    assert all((each == 2).all() for each in two.both(lambda _, reducer: reducer.all_reduce(np.ones(3, np.float32))))


def test_nobody_there_is_said_with_a_command():
    with pytest.raises(AggregatorGoneError, match="headwater reduce --listen"):
        Reducer("127.0.0.1:9", rank=0, num_workers=2, key=KEY)


@pytest.mark.parametrize(("array", "options", "says"), [
    (np.ones(3, np.uint8), {}, "float32, float64"),
    (np.ones(3, np.int32), {"mean": True}, "divide"),
    (np.ones((4, 4), np.float32)[:, 1:], {}, "contiguous"),
    (np.ones(3, np.float64), {"integers": True}, "float32"),
])  # fmt: skip
def test_what_can_not_be_added_up_is_said_before_anything_is_sent(shared, array, options, says):
    with (
        Reducer(shared, rank=0, num_workers=1, key=KEY) as alone,
        pytest.raises(ConfigError, match=says),
    ):
        alone.all_reduce(array, **options)


def test_an_aggregator_that_has_ended_may_be_told_to_stop():
    """Its files are closed by then, and their numbers may be others'."""
    made = Aggregator(("127.0.0.1", 0))
    thread = threading.Thread(target=made.run)
    thread.start()
    made.stop()
    thread.join()
    made.stop()

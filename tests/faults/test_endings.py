"""However a run ends, nothing is left: no thread, no process, no file."""

import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from headwater.data import wire
from headwater.errors import ConfigError, NodeError, RefusedError
from headwater.train.client import NodeClient


def test_breaking_out_of_the_loop_leaves_no_thread(near, pictures, our_threads, eventually):
    job = near(pictures)
    for _ in job.loader:
        break
    eventually(lambda: not our_threads())
    job.close()


def test_closing_a_job_ends_an_iterator_that_somebody_still_holds(near, pictures, our_threads, eventually):
    job = near(pictures)
    iterator = iter(job.loader)
    next(iterator)
    job.close()
    eventually(lambda: not our_threads())
    with pytest.raises(ConfigError, match="the job was closed while its loader was in use"):
        list(iterator)
    with pytest.raises(ConfigError, match="the job is closed"):
        next(iter(job.loader))


def test_a_closed_job_of_the_hosts_own_threads_leaves_none(near, pictures, our_threads, eventually):
    from headwater.core.plan import Plan

    job = near(pictures, plan=Plan(chunk_rows=4, node_batch=4))
    iterator = iter(job.loader)
    next(iterator)
    job.close()
    eventually(lambda: not our_threads())


def test_an_iterator_found_by_the_garbage_collector_leaves_no_thread(near, pictures, our_threads, eventually):
    job = near(pictures)
    iterator = iter(job.loader)
    next(iterator)
    cycle = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()
    eventually(lambda: not our_threads())


def test_a_loader_that_outlives_its_job_still_works(near, pictures, model, ids_of, alive):
    import headwater as hw
    from headwater.data.transforms import Resize, ToFloat

    loader = hw.near(model, pictures, transforms=[Resize((32, 32)), ToFloat()], plan=None).loader
    gc.collect()
    assert sorted(ids_of(loader)) == list(range(50))


def embedded_pid(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def test_an_embedded_node_ends_with_its_job(near, pictures, alive):
    before = set(embedded_pid(os.getpid()))
    job = near(pictures)
    (node,) = set(embedded_pid(os.getpid())) - before
    assert alive(node)
    job.close()
    assert not alive(node)


def test_an_embedded_node_ends_also_while_a_forked_process_holds_its_input(pictures, monkeypatch):
    """A forked worker of another DataLoader inherits the pipe whose end the node waits for."""
    from headwater.train.embedded import EmbeddedNode

    for _ in range(5):  # told as soon as it is up, when a signal may reach any of its threads
        node = EmbeddedNode(str(pictures))
        held = os.dup(node._process.stdin.fileno())  # what a fork does to it
        monkeypatch.setattr(node._process, "kill", lambda: pytest.fail("it did not end by itself"))
        node.close()
        os.close(held)
        assert node._process.returncode == 0


def test_an_embedded_node_answers_to_nobody_but_whoever_started_it(pictures):
    from headwater.train.client import NodeClient
    from headwater.train.embedded import EmbeddedNode

    node = EmbeddedNode(str(pictures))
    stranger, ours = NodeClient(node.address), NodeClient(node.address, node.access)
    try:
        assert ours.hello()["roots"]
        with pytest.raises(RefusedError, match="token"):
            stranger.hello()
        assert node.access.token not in repr(node.access)
    finally:
        for each in (stranger, ours, node):
            each.close()


def test_an_embedded_node_that_says_nothing_is_given_up(pictures, monkeypatch, alive):
    from headwater.train import embedded

    monkeypatch.setattr(embedded, "START_WITHIN_S", 0.01)
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(embedded.subprocess, "Popen", Popen)
    with pytest.raises(NodeError, match=r"within 0\.01 s; .*headwater serve"):
        embedded.EmbeddedNode(str(pictures))
    assert not alive(started[0].pid)


SCRIPT = """
import sys, time
from headwater.train.embedded import EmbeddedNode
node = EmbeddedNode(sys.argv[1])
print(node.pid, flush=True)
time.sleep(300)
"""


def test_an_embedded_node_dies_with_a_trainer_that_is_killed(pictures, alive, eventually):
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, str(pictures)], stdout=subprocess.PIPE, text=True)
    with trainer:
        node = int(trainer.stdout.readline())
        assert alive(node)
        trainer.kill()
    eventually(lambda: not alive(node))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("busy", [False, True])
def test_a_signal_ends_a_node_also_in_the_middle_of_a_stream(number, busy, start_node, pictures):
    import pyarrow.flight as flight

    from headwater.data.layouts import list_samples
    from headwater.data.transforms import Resize, Transforms
    from headwater.data.wire import Chunk, Extraction

    node = start_node(pictures, options=("--drain-s", "0.5"))
    with flight.connect(node.address) as client:
        if busy:  # large rows, and a reader who has stopped reading: the node waits for room in the stream
            large = Transforms([Resize((2000, 2000))])
            samples = list_samples(str(pictures))
            want = Extraction(samples.url, large, None, (large.pixel_spec,), node_batch=1)
            reader = client.do_get(flight.Ticket(Chunk(want, "j", 0, 0, 0, tuple(samples.take(range(50)))).dumps()))
            reader.read_chunk()
        node.process.send_signal(number)
        assert node.process.wait(timeout=30) == 0
    assert "Traceback" not in node.process.stderr.read()


def test_a_feed_does_not_wait_for_a_node_that_stopped_answering(start_node, near, pictures, monkeypatch, our_threads):
    """SIGSTOP: the connection stands, and nothing comes. Closing must not hang on it."""
    from headwater.train import feed

    monkeypatch.setattr(feed, "END_WITHIN_S", 0.5)
    node = start_node(pictures)
    job = near(pictures, [node.address], chunk_rows=2, prefetch=1)
    iterator = iter(job.loader)
    next(iterator)
    node.process.send_signal(signal.SIGSTOP)
    closing = threading.Thread(target=iterator.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    node.kill()


def test_a_client_that_is_closed_while_it_reads_raises_and_returns(start_node, pictures):
    node = start_node(pictures)
    client = NodeClient(node.address)
    assert client.hello()["protocol"] == wire.PROTOCOL
    node.kill()
    client.close()

"""A store that fails for a while, and data that moves: the epoch goes on, or ends with the reason."""

import shutil
import threading
import time

import numpy as np
import pytest

from headwater.core import rhythm
from headwater.errors import HeadwaterError, StoreError, UnreachableError
from headwater.train import feed
from headwater.train.reply import Reply


class Failing:
    """A worker whose store says no for a while."""

    name = "failing"
    is_waiting = False
    rows_came_s = 0.0

    def __init__(self, times, error=StoreError):
        self.times, self.error, self.asked = times, error, 0

    def prepare(self):
        pass

    def rows(self, chunk, stopped):
        self.asked += 1
        if self.asked <= self.times:
            raise self.error("503 Slow Down")
        return Reply(np.ones(1, bool), [np.full(1, chunk)], ())

    def stop(self, stopped):
        pass


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(feed, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(feed, "LONGEST_PAUSE_S", 0.02)


def run(worker, num_chunks=3, patience_s=60.0):
    found = feed.Feed({worker.name: worker}, num_chunks, lambda index, name: index, per_worker=1, patience_s=patience_s)
    return [int(reply.tensors[0][0]) for reply in found]


def test_a_store_that_fails_more_often_than_a_node_may_is_waited_for(quick, caplog):
    assert run(Failing(12)) == [0, 1, 2]
    assert "chunk 0 will be tried again in" in caplog.text
    assert "503 Slow Down" in caplog.text


def test_a_store_that_stays_away_ends_the_epoch_when_patience_does(quick):
    worker = Failing(10**9)
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"chunk 0 was tried \d+ times .* on failing: 503 Slow Down"):
        run(worker, patience_s=0.3)
    assert worker.asked > 3
    assert time.monotonic() - begin < 30


def test_what_nobody_foresaw_on_a_node_is_tried_again_a_few_times(quick):
    assert run(Failing(2, HeadwaterError)) == [0, 1, 2]
    with pytest.raises(HeadwaterError, match="failed 3 times"):
        run(Failing(3, HeadwaterError))


def test_a_job_closed_in_a_pause_ends_at_once(monkeypatch):
    monkeypatch.setattr(feed, "FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(feed, "LONGEST_PAUSE_S", 600.0)
    worker = Failing(10**9)
    opened = feed.Feed({worker.name: worker}, 1, lambda index, name: index, per_worker=1, patience_s=3600.0)
    while not worker.asked:
        time.sleep(0.001)
    opened.close()
    assert not any(thread.is_alive() for thread in opened._threads)


def test_a_folder_that_a_link_leads_to_may_be_swapped_between_jobs(pictures, start_node, near, tmp_path):
    for version, less in (("v1", 0), ("v2", 20)):
        shutil.copytree(pictures, tmp_path / version)
        for path in sorted((tmp_path / version).rglob("*.jpg"))[:less]:
            path.unlink()
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "v1")
    node = start_node(tmp_path)
    assert sum(len(y) for _, y in near(link, [node.address]).loader) == 50
    link.unlink()
    link.symlink_to(tmp_path / "v2")
    assert sum(len(y) for _, y in near(link, [node.address]).loader) == 30


class Silent(Failing):
    """A worker that lives, and sends nothing."""

    name = "silent"

    def rows(self, chunk, stopped):
        stopped.wait(60)
        raise UnreachableError("stopped")


def test_nodes_that_live_and_send_nothing_end_the_epoch_after_a_long_while(monkeypatch, caplog):
    monkeypatch.setattr(rhythm, "late_after_s", lambda *seen: 0.01)
    with pytest.raises(HeadwaterError, match=r"no rows have come for .* can they read the data"):
        run(Silent(0), patience_s=0.02)
    assert "silent has chunks 0" in caplog.text


def test_a_chunk_may_take_any_time_as_long_as_rows_of_it_come(monkeypatch):
    monkeypatch.setattr(rhythm, "late_after_s", lambda *seen: 0.001)
    looked = threading.Semaphore(0)

    class Slow(Failing):
        """One whose rows come one by one, the whole chunk after fifty looks at it."""

        @property
        def rows_came_s(self):
            looked.release()
            return time.monotonic()

        def rows(self, chunk, stopped):
            for _ in range(50):
                assert looked.acquire(timeout=60)
            return super().rows(chunk, stopped)

    assert run(Slow(0), patience_s=1e-9) == [0, 1, 2]


def test_a_node_that_is_back_need_not_wait_for_one_that_is_not(monkeypatch):
    monkeypatch.setattr(feed, "RETRY_EVERY_S", 0.01)
    back = threading.Event()

    class Gone(Failing):
        def prepare(self):
            back.wait(60)  # as long as it takes to send it a large file
            raise UnreachableError("still away")

    class Back(Failing):
        def prepare(self):
            back.set()

    workers = {"gone": Gone(10**9, UnreachableError), "back": Back(1, UnreachableError)}
    found = feed.Feed(workers, 3, lambda index, name: index, per_worker=1, patience_s=60.0)
    assert len(list(found)) == 3
    assert back.is_set()

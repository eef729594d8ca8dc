"""A store that fails for a while, and data that moves: the epoch goes on, or ends with the reason."""

import re
import shutil
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from headwater.core import rhythm
from headwater.data.layouts import list_samples
from headwater.data.store import open_store
from headwater.data.transforms import Resize, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import HeadwaterError, StoreError, UnreachableError
from headwater.train import feed
from headwater.train.host import HostWorker
from headwater.train.reply import Heard, Reply

PIXELS = Transforms([Resize((8, 8))])


class Failing:
    """A worker whose store says no for a while."""

    name = "failing"

    def __init__(self, times, error=StoreError):
        self.times, self.error, self.asked = times, error, 0

    def prepare(self):
        pass

    def heard(self, chunk):
        return None

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


class Watched(Failing):
    """A worker that has something heard of its chunks, and a clock that only it moves on."""

    def __init__(self, monkeypatch, num_rows=50):
        super().__init__(0)
        self.now, self.num_rows, self.under_way, self.looks = 1000.0, num_rows, {}, threading.Semaphore(0)
        monkeypatch.setattr(rhythm, "late_after_s", lambda *seen: 0.001)
        monkeypatch.setattr(feed, "time", SimpleNamespace(monotonic=lambda: self.now))

    def heard(self, chunk):
        self.looks.release()
        return self.under_way.get(chunk)

    def pass_s(self, seconds):
        """Until the loop has looked what is heard after that."""
        self.now += seconds
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have looked at the clock before
            assert self.looks.acquire(timeout=60)

    def rows(self, chunk, stopped):
        self.under_way[chunk] = heard = Heard(self.num_rows)
        self.work_on(chunk, heard, stopped)
        del self.under_way[chunk]
        if stopped.is_set():
            raise UnreachableError("stopped")
        return super().rows(chunk, stopped)


class Slow(Watched):
    """One whose rows come one by one, each after 59 seconds."""

    def work_on(self, chunk, heard, stopped):
        for number in range(self.num_rows):
            self.pass_s(59)
            heard.num_came, heard.came_s = number + 1, self.now


def test_a_chunk_may_take_any_time_as_long_as_rows_of_it_come_and_is_told_of(monkeypatch, caplog):
    assert run(Slow(monkeypatch)) == [0, 1, 2]
    told = r"the loop has waited for 118 s, and rows still come: [12] of 50 rows of chunk 0 are here from failing"
    assert re.search(told, caplog.text)
    assert "no rows have come" not in caplog.text


def test_rows_of_other_chunks_are_no_help_to_a_loop_that_wants_this_one(monkeypatch, caplog):
    class Half(Slow):
        """One whose first chunk hangs, while rows of the other go on and on."""

        def work_on(self, chunk, heard, stopped):
            while not stopped.is_set():
                if chunk == 0:
                    stopped.wait(60)
                else:
                    self.now += 1
                    heard.num_came, heard.came_s = heard.num_came + 1, self.now
                    stopped.wait(0.0001)

    worker = Half(monkeypatch)
    found = feed.Feed({"half": worker}, 2, lambda index, name: index, per_worker=2, patience_s=60.0)
    with pytest.raises(HeadwaterError, match=r"no rows have come for .* can they read the data"):
        list(found)
    assert "half has chunks 0, 1" in caplog.text


def test_who_waits_by_a_nodes_own_word_may_wait_for_as_long_as_it_takes(monkeypatch):
    class Waiting(Watched):
        def work_on(self, chunk, heard, stopped):
            heard.waits_for = "quota"
            for _ in range(20):
                self.pass_s(300)
            heard.waits_for = ""

    assert run(Waiting(monkeypatch)) == [0, 1, 2]


def test_a_disk_that_hangs_is_noticed_though_another_chunk_waits_for_a_quota(monkeypatch):
    class Half(Watched):
        def work_on(self, chunk, heard, stopped):
            heard.waits_for = "quota" if chunk else ""
            while not stopped.wait(0.0001):
                self.now += 1

    found = feed.Feed({"half": Half(monkeypatch)}, 2, lambda index, name: index, per_worker=2, patience_s=60.0)
    with pytest.raises(HeadwaterError, match="no rows have come for"):
        list(found)


def test_what_waits_no_longer_is_given_the_whole_patience_again_and_no_more(monkeypatch):
    class Hung(Watched):
        def work_on(self, chunk, heard, stopped):
            heard.waits_for = "memory"
            self.pass_s(10_000)
            heard.waits_for = ""
            self.pass_s(500)
            self.now += 200
            stopped.wait(60)

    with pytest.raises(HeadwaterError, match="no rows have come for 700 s"):
        run(Hung(monkeypatch))


def test_no_patience_with_nodes_that_are_gone_is_some_with_those_that_answer(monkeypatch):
    class Late(Watched):
        def work_on(self, chunk, heard, stopped):
            self.pass_s(500)

    assert run(Late(monkeypatch), patience_s=0) == [0, 1, 2]


def test_threads_of_this_process_that_hang_are_not_called_nodes(monkeypatch):
    class Here(HostWorker):
        def __init__(self):
            pass

        def heard(self, chunk):
            return None

        def rows(self, chunk, stopped):
            stopped.wait(60)
            raise UnreachableError("stopped")

    monkeypatch.setattr(rhythm, "late_after_s", lambda *seen: 0.01)
    with pytest.raises(HeadwaterError, match=r"though threads of this process are at work; .* hangs\)\?$"):
        run(Here(), patience_s=0.02)


def test_what_this_process_decodes_counts_before_a_group_is_whole(pictures, monkeypatch):
    samples = list_samples(str(pictures))
    want = Extraction(samples.url, PIXELS, None, (PIXELS.pixel_spec,), node_batch=4)
    chunk, seen = Chunk(want, "job", 0, 0, 0, tuple(samples.take(range(8)))), []
    host = HostWorker(open_store(samples.url), 1)
    rows = host._extractor.rows

    def watched(*args, note, **options):
        def noted(*what):
            note(*what)
            seen.append((host.heard(chunk).num_came, host.heard(chunk).came_s > 0))

        for part in rows(*args, note=noted, **options):
            yield part
            seen.append((host.heard(chunk).num_came, "part"))

    monkeypatch.setattr(host._extractor, "rows", watched)
    assert host.rows(chunk, threading.Event()).good.all()
    assert seen[0] == (0, True)
    assert [came for came, what in seen if what == "part"][-1] == 8
    assert host.heard(chunk) is None
    host.close()


def test_a_lone_node_that_is_long_in_getting_ready_is_told_of(monkeypatch, caplog):
    class Back(Watched):
        """Away at first; then it takes long to send it what it lacks."""

        def prepare(self):
            for _ in range(1000):
                self.now += 100
                if "what comes next waits for failing, which is being made ready" in caplog.text:
                    return
                threading.Event().wait(0.01)

        def work_on(self, chunk, heard, stopped):
            self.asked += 1
            if self.asked == 1:
                raise UnreachableError("gone")

    monkeypatch.setattr(feed, "RETRY_EVERY_S", 0.001)
    assert run(Back(monkeypatch)) == [0, 1, 2]
    assert "which is being made ready" in caplog.text


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


def test_a_lone_node_that_was_gone_for_a_moment_may_be_gone_again_later_in_the_epoch(monkeypatch):
    class Twice(Watched):
        """Away when the first rows are wanted, and an hour later once more, each time until it has been asked twice."""

        num_asked = 0

        def prepare(self):
            self.num_asked += 1
            if self.num_asked % 2:
                raise UnreachableError("still away")

        def work_on(self, chunk, heard, stopped):
            if chunk in self.gone_at:
                self.gone_at.remove(chunk)
                self.now += 3600
                raise UnreachableError("gone")

    monkeypatch.setattr(feed, "RETRY_EVERY_S", 0.01)
    worker = Twice(monkeypatch)
    worker.gone_at = [0, 2]
    assert run(worker) == [0, 1, 2]
    assert worker.num_asked == 4


def test_patience_ends_although_a_node_is_made_ready_again_and_again_in_vain(monkeypatch):
    class Vain(Watched):
        """It takes a while to send it what it lacks, and then its disk is full."""

        num_asked = 0

        def prepare(self):
            self.num_asked += 1
            if self.num_asked < 100:
                self.now += 20
                threading.Event().wait(0.02)  # so that it is seen to come
                raise UnreachableError("its disk is full")

        def work_on(self, chunk, heard, stopped):
            if self.num_asked < 100:
                raise UnreachableError("gone")

    monkeypatch.setattr(feed, "RETRY_EVERY_S", 0.001)
    with pytest.raises(UnreachableError, match=r"no node has answered for 60 s\. its disk is full"):
        run(Vain(monkeypatch))

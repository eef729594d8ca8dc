"""Threads that take tasks: no more at once than allowed, and none is forgotten."""

import threading

from headwater.data.pool import Pool


def test_no_more_run_at_once_than_allowed_and_all_are_done():
    pool, lock, going, most, done = Pool(8, "test"), threading.Lock(), [0], [0], threading.Semaphore(0)

    def task() -> None:
        with lock:
            going[0] += 1
            most[0] = max(most[0], going[0])
        with lock:
            going[0] -= 1
        done.release()

    pool.allow(2)
    for _ in range(200):
        pool.submit(0, task)
    assert all(done.acquire(timeout=30) for _ in range(200))
    assert most[0] <= 2
    pool.close()


def test_who_waited_for_leave_begins_when_more_are_allowed():
    pool, begun, go_on = Pool(4, "test"), threading.Semaphore(0), threading.Event()

    def task() -> None:
        begun.release()
        go_on.wait(30)

    pool.allow(1)
    for _ in range(4):
        pool.submit(0, task)
    assert begun.acquire(timeout=30)
    assert not begun.acquire(blocking=False)
    pool.allow(4)
    assert all(begun.acquire(timeout=30) for _ in range(3))
    go_on.set()
    pool.close()

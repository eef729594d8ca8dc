"""A node that lives, and whose disk hangs: the step is given up there, and others go on without it."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from headwater.core.spec import TensorSpec
from headwater.data.parcel import Parcel
from headwater.errors import UnreachableError
from headwater.train.attempt import Attempt, LostError, Part, Work
from headwater.train.peer import SilentError
from headwater.train.replicas import Replicas

WORK = Work(torch.nn.Flatten(), (TensorSpec("x", (3,), "float32"),), (False,), None, "raw", lambda rows: rows, (),
            "mean", 1)  # fmt: skip


class Clock:
    """Five seconds pass whenever somebody waits for a word; `said` is what comes then."""

    def __init__(self, said=lambda now: None):
        self.now, self._said = 0.0, said

    def __call__(self):
        return self.now

    def get(self, timeout):
        self.now += 5.0
        if (found := self._said(self.now)) is None:
            raise queue.Empty
        return found


class Peer:
    """Beats all the time."""

    number, name, moved = 0, "grpc://store-1:8815", 0.0

    def __init__(self, clock):
        self._clock, self.sent = clock, []

    heard = property(lambda self: self._clock())

    def send(self, kind, about=None, arrays=None):
        self.sent.append(kind)

    def close(self):
        pass


def attempt(clock, peer, patience_s=60.0):
    parts = [{0: Part(np.arange(4), 1)}]
    return Attempt(1, WORK, {0: peer}, clock, parts, [torch.zeros(4)], lambda out, y: out.sum(), lambda: None,
                   patience_s, clock=clock)  # fmt: skip


def test_it_is_told_of_after_patience_and_lost_after_ten_times_that(caplog):
    clock = Clock()
    peer = Peer(clock)
    with pytest.raises(LostError, match=r"store-1.* answers, and has sent nothing of a step for 605 s.*that hangs"):
        attempt(clock, peer).run()
    assert clock.now == 605
    assert caplog.text.count("has sent nothing of a step for 65 s; it is waited for up to 600 s") == 1
    assert len(caplog.records) == 9
    assert peer.sent == ["forward"]


def test_no_patience_with_nodes_that_are_gone_is_some_with_one_that_answers():
    clock = Clock()
    with pytest.raises(LostError, match="has sent nothing of a step for 605 s"):
        attempt(clock, Peer(clock), patience_s=0).run()


def test_one_that_says_what_it_waits_for_is_waited_for():
    """A tenant's rows per second, say."""

    def said(now):
        if now >= 10_000:
            raise KeyboardInterrupt
        return (peer, Parcel("waiting", {"for": "rate"})) if now % 50 == 0 else None

    clock = Clock(said)
    peer = Peer(clock)
    with pytest.raises(KeyboardInterrupt):
        attempt(clock, peer).run()
    assert peer.sent == ["forward", "drop"]


def invite(replicas, needed=()):
    """Those that are asked then, and each is asked by a thread of its own."""
    replicas._invite(needed)
    for each in threading.enumerate():
        if each.name.startswith("join-"):
            each.join()


def test_one_that_was_silent_is_not_asked_again_soon_while_others_are_there_and_not_needed():
    replicas = Replicas([SimpleNamespace(name=name) for name in "ab"], {}, {}, patience_s=60.0)
    silent, other = (SimpleNamespace(number=number, name=name, close=lambda: None) for number, name in enumerate("ab"))
    invited = []
    replicas._join = invited.append
    replicas.peers = {0: silent, 1: other}
    replicas.lose(silent, SilentError("a hangs"))
    for needed, wanted in (((), []), ({0}, [0])):
        replicas._tried[0], replicas._joining = float("-inf"), set()
        invite(replicas, needed)
        assert invited == wanted
    replicas.lose(other, UnreachableError("b is gone"))
    replicas._tried, replicas._joining = [float("-inf")] * 2, set()
    invite(replicas)
    assert sorted(invited) == [0, 0, 1]

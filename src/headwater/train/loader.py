"""The loader: batches of rows and labels, in order, from anywhere in a run.

Owns `Loader` and its state. Each `iter()` is one epoch, as with a plain DataLoader; after `load_state_dict` the
next one goes on where the saved run stood. When the job goes over to another plan, so does the loader, between two
batches. In which order an epoch is gone through (`core.prongs`) is fixed when it begins.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from headwater.core.order import Dealing, Order
from headwater.core.prongs import MTE, WRR, Visit, meeting_point, visits
from headwater.data.samples import Samples
from headwater.data.wire import Bad
from headwater.errors import BadSampleError, ConfigError, DataError
from headwater.train.carry import Finish
from headwater.train.reply import Reply
from headwater.train.source import Opened

log = logging.getLogger(__name__)

STATE_VERSION = 1
Span = tuple[int, int]  # entries of the order, from the first to behind the last


class Source(Protocol):
    """Where rows come from: under one plan at a time, which `version` counts."""

    @property
    def version(self) -> int: ...

    def step_clock(self) -> Callable[[int], None]:
        """To be called with the number of rows of each batch that is handed out in an epoch."""

    def finished(self, start: float, end: float) -> None:
        """To be told from when to when a batch was made of its rows."""

    def stepped(self, start: float, end: float) -> None:
        """To be told when the loop was given a batch, and when it came for the next one."""

    @property
    def prongs(self) -> tuple[str, float]:
        """How the plan in use goes through an epoch, and the trainer's share of it."""

    def open(self, epoch: int, ids: np.ndarray, head: int | None = None, is_whole: bool = False) -> Opened:
        """The rows of these samples, in this order; the first `head` are the trainer's in an epoch with two ends, of
        which `is_whole` says that none was used before. Closing the iterator ends all work for it."""

    def open_any(self, epoch: int, batches: Sequence[np.ndarray]) -> Opened:
        """The rows of these batches of samples, each as one reply, in whatever order."""


@dataclass(frozen=True)
class Skipped:
    """A sample that was left out because it can't be read."""

    epoch: int
    sample: int
    key: str
    reason: str


class Loader(IterableDataset[tuple[Any, torch.Tensor]]):
    """Yields (x, labels) for each batch of an epoch: x goes into `job.model`, labels are an int64 tensor.

    Each `iter()` is the next epoch; `len` is its number of steps. x is `Rows`, or the model's input where it is cut in
    front of its first layer. `skipped` lists the samples that were left out. While it is iterated, it raises DataError
    (BadSampleError for a sample that can't be read, ChangedError for one that was replaced) and NodeError once a job's
    patience is at an end.
    """

    def __init__(
        self,
        samples: Samples,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        rank: int,
        world: int,
        on_bad_sample: str,
    ) -> None:
        if on_bad_sample not in ("raise", "skip"):
            raise ConfigError(f'on_bad_sample is {on_bad_sample!r}; it must be "raise" or "skip"')
        if not 0 <= rank < world:
            raise ConfigError(f"rank {rank} is not one of {world} trainers (0 to {world - 1})")
        self._samples = samples
        self._source = source
        self._order = Order(len(samples), samples.fingerprint, seed, shuffle)
        self._dealing = Dealing(len(samples), batch_size, world, drop_last)
        self._rank = rank
        self._skip_bad = on_bad_sample == "skip"
        self._epoch = -1  # of the latest iterator
        self._position = 0
        self._visit = Visit()  # of that epoch
        self._left: list[Span] | None = None  # under wrr: the batches that are not done, as entries of the order
        self._resume = False  # the next iterator goes on at (epoch, position)
        self._iterator = 0  # which iterator may move the position
        self.skipped: list[Skipped] = []

    def __len__(self) -> int:
        """Steps in a whole epoch; fewer come where bad samples are skipped, or after a resume."""
        return self._dealing.num_steps()

    def num_steps_left(self) -> int:
        """Steps from where the run stands to the end of that epoch."""
        state = self.state_dict()
        return len(state["left"]) if "left" in state else self._dealing.num_steps(state["position"])

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or about to begin."""
        return max(self._epoch, 0)

    @property
    def visit(self) -> Visit:
        """How the epoch under way is gone through; fixed since it began."""
        return self._visit

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` start this epoch, from its beginning."""
        if epoch < 0:
            raise ConfigError(f"epoch is {epoch}; it must be 0 or more")
        if not (self._resume and epoch == self._epoch):  # a framework that announces a resumed epoch must not rewind it
            self._epoch, self._position, self._resume = epoch, 0, True
            self._visit, self._left = Visit(), None

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, counting every batch that was handed out. The same on all trainers, but in the middle
        of an epoch under wrr, in which each has done others."""
        epoch, position = max(self._epoch, 0), self._position
        visit, left = self._visit, self._left
        if self._at_end(position) if left is None else not left:
            epoch, position, visit, left = epoch + 1, 0, Visit(), None
        more: dict[str, Any] = {}
        strategy, share = self._source.prongs
        if visit.meeting is not None and position:
            more["meeting"] = visit.meeting
        elif strategy == MTE and not position and self._dealing.world == 1:
            # Where the next epoch's would be, by rates that another run won't have; several trainers have several.
            more["meeting"] = self._meeting(share) if visit.meeting is None else visit.meeting
        if left is not None and position:
            more |= {"left": [list(span) for span in left], "place": [self._rank, self._dealing.world]}
        return {
            **more,
            "version": STATE_VERSION,
            "epoch": epoch,
            "position": position,
            "seed": self._order.seed,
            "shuffle": self._order.shuffle,
            "fingerprint": self._order.fingerprint,
            "num_samples": self._order.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; on any number of trainers, with any batch size and any plan. From the middle
        of an epoch under wrr, on as many trainers as there were."""
        mine = {name: value for name, value in self.state_dict().items() if name not in ("meeting", "left", "place")}
        if not isinstance(state, Mapping) or set(mine) - set(state):
            raise ConfigError(f"not a loader's state: it needs {', '.join(mine)}")
        faults = [
            f"{name} is {state[name]!r} in the state and {mine[name]!r} here"
            for name in ("version", "seed", "shuffle", "num_samples", "fingerprint")
            if state[name] != mine[name]
        ]
        if faults:
            raise ConfigError(
                "the state belongs to another run: " + "; ".join(faults) + "; "
                "use the same data, seed and shuffle as the run that was saved"
            )
        epoch, position = state["epoch"], state["position"]
        if type(epoch) is not int or type(position) is not int or epoch < 0 or not 0 <= position <= len(self._samples):
            raise ConfigError(f"epoch {epoch!r}, position {position!r} is no place in {len(self._samples)} samples")
        visit, left = self._read_visit(state)
        self._epoch, self._position, self._resume = epoch, position, True
        self._visit, self._left = visit, left
        self._iterator += 1  # an iterator from before no longer moves the position

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor]]:
        if get_worker_info() is not None:
            raise ConfigError("the loader prefetches by itself; use it directly, or in DataLoader with num_workers=0 "
                              "and batch_size=None")  # fmt: skip
        if not self._resume:
            self._epoch, self._position, self._left = self._epoch + 1, 0, None
        if self._position == 0:
            self._visit, self._left = self._begin(self._visit.meeting if self._resume else None), None
        self._resume = False
        self._iterator += 1
        if self._visit.strategy == WRR:
            spans = self._left if self._left is not None else self._spans()
            return self._in_any_order(self._epoch, spans, self._iterator)
        return self._batches(self._epoch, self._position, self._visit.meeting, self._iterator)

    def _meeting(self, share: float) -> int:
        return meeting_point(len(self._samples), share, self._dealing.batch_size * self._dealing.world)

    def _begin(self, saved: int | None) -> Visit:
        """How the plan in use goes through an epoch, under mte with the meeting point of a state that was loaded; all
        trainers go through it alike."""
        strategy, share = self._source.prongs
        if strategy != MTE:
            return Visit(strategy)
        dealing = self._dealing
        meeting = [self._meeting(share) if saved is None else saved]
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        if spread and dealing.world > 1 and torch.distributed.get_world_size() == dealing.world:
            torch.distributed.broadcast_object_list(meeting, src=0)  # each has measured rates of its own
        return Visit(MTE, meeting[0])

    def _read_visit(self, state: Mapping[str, Any]) -> tuple[Visit, list[Span] | None]:
        """How the epoch was gone through that this state is of; what it says is checked."""
        num_samples = len(self._samples)
        if (meeting := state.get("meeting")) is not None:
            if type(meeting) is not int or not 0 <= meeting <= num_samples:
                raise ConfigError(f"meeting {meeting!r} is no place in {num_samples} samples")
            return Visit(MTE, meeting), None
        if (told := state.get("left")) is None or not state["position"]:
            return Visit(), None
        place = [self._rank, self._dealing.world]
        if state.get("place") != place:
            raise ConfigError(
                f"the state is of the middle of an epoch under wrr, of trainer {state.get('place')} ([which, of how "
                f"many]); this is {place}: load each trainer's own state on as many trainers, or save between epochs"
            )
        try:
            left = [(int(start), int(stop)) for start, stop in told]
        except (TypeError, ValueError):
            raise ConfigError("left is not a list of pairs [start, stop]") from None
        bounds = [0, *(bound for span in left for bound in span), num_samples]
        if bounds != sorted(bounds) or any(start == stop for start, stop in left):
            raise ConfigError(f"left is not a list of parts of {num_samples} samples, one after the other")
        return Visit(WRR), left

    def _at_end(self, position: int) -> bool:
        left, full = self._dealing.num_samples - position, self._dealing.batch_size * self._dealing.world
        return left <= 0 or (self._dealing.drop_last and left < full)

    def _spans(self) -> list[Span]:
        """The entries of each of this trainer's batches in a whole epoch."""
        steps = self._dealing.steps()
        return [step.slice(self._rank, self._dealing.world) for step in steps]

    def _in_any_order(self, epoch: int, spans: list[Span], number: int) -> Iterator[tuple[Any, torch.Tensor]]:
        """Whole batches as they get ready, each once."""
        ids, any_batch = self._order.epoch(epoch), False
        stream = _AnyOrder(self._source, epoch, ids, spans)
        step_clock = self._source.step_clock()
        try:
            while (found := stream.take()) is not None:
                span, reply, finish = found
                for bad in reply.bad:
                    if not self._skip_bad:
                        raise _unreadable(bad)
                    self._note(epoch, bad)
                samples = ids[slice(*span)][reply.good]
                if number == self._iterator:
                    self._left = list(stream.left)
                    self._position = max(1, len(self._samples) - sum(stop - start for start, stop in stream.left))
                if not len(samples) and self._dealing.world > 1:
                    raise self._empty_handed(span[1] - span[0])
                short = len(samples) < self._dealing.batch_size
                if not len(samples) or (self._dealing.drop_last and self._dealing.world == 1 and short):
                    continue
                came = time.perf_counter()
                batch = finish([reply.tensors], samples), torch.from_numpy(self._samples.labels[samples])
                any_batch = True
                if self._dealing.world == 1:
                    step_clock(len(samples))
                given = time.perf_counter()
                self._source.finished(came, given)
                yield batch
                self._source.stepped(given, time.perf_counter())
            self._check_any(any_batch or len(spans) < len(self._spans()))
        finally:
            stream.close()

    def _empty_handed(self, count: int) -> DataError:
        return DataError(
            f"all {count} samples of trainer {self._rank} in this step are unreadable, and the other trainers can't "
            "wait for it; repair or remove them (loader.skipped lists them)"
        )

    def _check_any(self, any_batch: bool) -> None:
        if not any_batch and self.skipped:
            raise DataError(
                f"none of the {len(self._samples)} samples can be read; the first: {self.skipped[0].key}: "
                f"{self.skipped[0].reason}"
            )

    def _batches(
        self, epoch: int, position: int, meeting: int | None, number: int
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        begun_at, any_batch = position, False
        ids = self._order.epoch(epoch)
        if meeting is not None:
            ids = visits(ids, meeting)
        slices = self._slices(position)
        entries = np.concatenate([np.arange(*part) for part in slices] or [np.empty(0, np.int64)])
        stream = _Stream(self._source, epoch, ids, entries, meeting, position == 0, self._skip_bad,
                         partial(self._note, epoch))  # fmt: skip
        step_clock = self._source.step_clock()
        try:
            while (step := self._dealing.step_at(position)) is not None:
                if self._dealing.world == 1:
                    # Bad samples are made up for by the next ones, so batches stay full.
                    last = slices[-1][1]
                    rows = stream.take(self._dealing.batch_size, last)
                    full = rows is not None and len(rows.entries) == self._dealing.batch_size
                    position = int(rows.entries[-1]) + 1 if rows is not None and full else last
                    if rows is None or (self._dealing.drop_last and not full):
                        break
                else:
                    # Others take their share of the same step; filling up from the next one would visit rows twice.
                    start, stop = step.slice(self._rank, self._dealing.world)
                    rows = stream.take(stop - start, stop)
                    position = step.stop
                    if rows is None:
                        raise self._empty_handed(stop - start)
                samples, came = ids[rows.entries], time.perf_counter()
                batch = rows.finish(rows.parts, samples), torch.from_numpy(self._samples.labels[samples])
                if number == self._iterator:
                    self._position = position
                any_batch = True
                if self._dealing.world == 1:  # where others take part in a step, its time says nothing about this one
                    step_clock(len(samples))
                given = time.perf_counter()
                self._source.finished(came, given)
                yield batch
                self._source.stepped(given, time.perf_counter())
            if number == self._iterator:
                self._position = len(self._samples)
            self._check_any(any_batch or begun_at > 0)
        finally:
            stream.close()

    def _slices(self, position: int) -> list[tuple[int, int]]:
        """The entries of the order that this trainer will ask for."""
        if self._dealing.world > 1:
            return [step.slice(self._rank, self._dealing.world) for step in self._dealing.steps(position)]
        # With one trainer and skipping, full batches may reach beyond the last full step; otherwise nothing is asked
        # for that `drop_last` leaves out.
        left = self._dealing.num_samples - position
        dropped = left % self._dealing.batch_size if self._dealing.drop_last and not self._skip_bad else 0
        return [(position, self._dealing.num_samples - dropped)]

    def _note(self, epoch: int, bad: Bad) -> None:
        log.warning("skipped %s: %s", bad.key, bad.reason)
        self.skipped.append(Skipped(epoch, bad.sample, bad.key, bad.reason))


@dataclass(frozen=True)
class _Rows:
    entries: np.ndarray  # which entries of the order these rows are
    parts: Sequence[Sequence[np.ndarray]]  # arrays of rows, one part after the other; a piece has one
    finish: Finish


class _Stream:
    """Rows in order, to be taken in batches that know nothing of chunks.

    All rows of a batch come under one plan: what another plan has sent beyond the last whole batch is asked for again.
    """

    def __init__(
        self,
        source: Source,
        epoch: int,
        ids: np.ndarray,
        entries: np.ndarray,
        meeting: int | None,
        is_whole: bool,
        skip_bad: bool,
        note: Callable[[Bad], None],
    ) -> None:
        self._source = source
        self._is_whole = is_whole
        self._epoch = epoch
        self._ids = ids
        self._entries = entries
        self._meeting = meeting
        self._skip_bad = skip_bad
        self._note = note
        self._bad: dict[int, Bad] = {}  # by entry: those that no batch has passed yet
        self._pieces: deque[_Rows] = deque()
        self._handed = 0  # entries that batches have used up, bad ones included
        self._next = 0  # the first entry that no reply has covered yet
        self._opened = self._open()

    def take(self, num_rows: int, stop: int) -> _Rows | None:
        """The next rows, at most `num_rows`, of entries before `stop`; None if there are none."""
        if self._opened.version != self._source.version and not self._holds(num_rows, stop):
            self._reopen()
        taken: list[_Rows] = []
        missing = num_rows
        while missing:
            if not self._pieces:
                if self._next == len(self._entries) or self._entries[self._next] >= stop:
                    break
                if not self._fetch():
                    self._reopen()
                    taken, missing = [], num_rows
                continue
            piece = self._pieces[0]
            count = min(missing, int(np.searchsorted(piece.entries, stop)))
            if count:
                taken.append(_part(piece, slice(0, count)))
                missing -= count
            if count == len(piece.entries):
                self._pieces.popleft()
            else:
                self._pieces[0] = _part(piece, slice(count, None))
                break
        self._pass(stop if missing else int(taken[-1].entries[-1]) + 1)
        if not taken:
            return None
        if len(taken) == 1:
            return taken[0]
        parts = [part for rows in taken for part in rows.parts]
        return _Rows(np.concatenate([rows.entries for rows in taken]), parts, taken[0].finish)

    def close(self) -> None:
        _close(self._opened.replies)
        self._opened.close()  # a generator that never ran has nothing to close

    def _holds(self, num_rows: int, stop: int) -> bool:
        """Is a whole batch here already?"""
        here = sum(int(np.searchsorted(piece.entries, stop)) for piece in self._pieces)
        return here >= num_rows or (self._next < len(self._entries) and self._entries[self._next] >= stop)

    def _pass(self, stop: int) -> None:
        """All entries before `stop` are used up; only now do their bad ones count, whatever else a chunk brought."""
        self._handed = int(np.searchsorted(self._entries, stop))
        for entry in sorted(entry for entry in self._bad if entry < stop):
            bad = self._bad.pop(entry)
            if not self._skip_bad:
                raise _unreadable(bad)
            self._note(bad)

    def _open(self) -> Opened:
        """What no reply has covered yet."""
        entries = self._entries[self._next :]
        head = None if self._meeting is None else int(np.searchsorted(entries, self._meeting))
        return self._source.open(self._epoch, self._ids[entries], head, self._is_whole and self._next == 0)

    def _reopen(self) -> None:
        """Another plan has taken over: ask for everything again that no batch has used."""
        self.close()
        self._pieces.clear()
        self._bad.clear()
        self._next = self._handed
        self._opened = self._open()

    def _fetch(self) -> bool:
        """Get the next reply; False if another plan took over meanwhile."""
        reply = next(self._opened.replies, None)
        if reply is None:
            assert self._opened.version != self._source.version, "the rows ended too early"
            return False
        entries = self._entries[self._next : self._next + len(reply.good)]
        self._next += len(entries)
        if reply.bad:
            bad = {each.sample: each for each in reply.bad}
            self._bad |= {int(entry): bad[self._ids[entry]] for entry in entries[~reply.good]}
        if reply.good.any():
            self._pieces.append(_Rows(entries[reply.good], [reply.tensors], self._opened.finish))
        return True


class _AnyOrder:
    """Whole batches, whichever is ready; another plan goes on with those that are left."""

    def __init__(self, source: Source, epoch: int, ids: np.ndarray, spans: Sequence[Span]) -> None:
        self._source, self._epoch, self._ids = source, epoch, ids
        self._asked = list(spans)
        self.left = list(spans)
        self._opened = self._open()

    def take(self) -> tuple[Span, Reply, Finish] | None:
        """A batch's entries and rows; None once all were taken."""
        while self.left:
            if self._opened.version == self._source.version:
                reply = next(self._opened.replies, None)
                if reply is not None:
                    span = self._asked[reply.chunk]
                    self.left.remove(span)
                    return span, reply, self._opened.finish
                assert self._opened.version != self._source.version, "the rows ended too early"
            self.close()
            self._asked = list(self.left)
            self._opened = self._open()
        return None

    def close(self) -> None:
        _close(self._opened.replies)
        self._opened.close()

    def _open(self) -> Opened:
        return self._source.open_any(self._epoch, [self._ids[slice(*span)] for span in self._asked])


def _unreadable(bad: Bad) -> BadSampleError:
    return BadSampleError(bad.key, f'{bad.reason}; repair or remove it, or go on without it: on_bad_sample="skip"')


def _part(rows: _Rows, which: slice) -> _Rows:
    return _Rows(rows.entries[which], [[tensor[which] for tensor in part] for part in rows.parts], rows.finish)


def _close(iterator: Iterator[Reply]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()

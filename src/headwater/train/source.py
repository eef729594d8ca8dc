"""Where an epoch's rows come from under the plan in use, and how a job goes over to another plan.

Owns `Source`. Every plan gives the same rows in the same order, so a switch is: stop asking under the old plan, ask for
what was not handed out yet under the new one. The loader does that between two batches; see `Loader`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np

from headwater.core.cache import draw_epoch
from headwater.core.codecs import wire_row_bytes
from headwater.core.pieces import Pieces
from headwater.core.plan import FILE, PLACE, Plan
from headwater.core.precision import Deviation
from headwater.core.prongs import MTE, WRR, next_share, tail_bytes, tail_room
from headwater.core.share import is_own, more_ahead, own_out
from headwater.data.cores import usable_cores
from headwater.data.memory import available_bytes, memory_bytes
from headwater.data.wire import Chunk, Extraction
from headwater.errors import HeadwaterError
from headwater.model.near import NearModel
from headwater.train.carry import Carried, Carrier, Finish, Setting
from headwater.train.client import NodeClient
from headwater.train.feed import SILENT_TIMES, Feed
from headwater.train.inline import InlineWorker
from headwater.train.inorder import in_order
from headwater.train.own import OwnNode
from headwater.train.precision import deviation, spread_out
from headwater.train.reply import Reply, Worker
from headwater.train.trace import LOOP

log = logging.getLogger(__name__)

MIN_STEPS, MAX_STEPS = 3, 256  # whose times tell what a step takes; that are remembered


@dataclass(frozen=True)
class Opened:
    """The rows of some samples under one plan. `replies` ends early once another plan has taken over."""

    version: int
    replies: Iterator[Reply]
    finish: Finish  # makes of a batch's arrays and sample ids what the user's loop gets
    close: Callable[[], None] = lambda: None  # ends all work for it, begun or not


class Source:
    """Carries out one plan at a time. `adopt` may be called from any thread."""

    def __init__(self, setting: Setting, plan: Plan) -> None:
        self._setting = setting
        self._job, self._num_kinds = uuid.uuid4().hex, 0
        self._kind: Extraction | None = None
        self._lock = threading.RLock()  # the garbage collector may close an iterator anywhere, also in here
        self._adopting = threading.RLock()  # again by whoever holds the run
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self._closed = Event()
        self._coming: dict[str, float] = {}  # nodes that are made ready, and since when
        self._carrier = Carrier(setting, self._closed)
        self.rebalances = setting.rebalances  # whether a meeting point may follow the epoch before
        self._waiting_since: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)  # when one ended, seconds a row of it
        self._free = Event()  # cleared while nothing may be asked for
        self._free.set()
        self._carried = self._carrier.prepare(plan, 0)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._carried.plan

    @property
    def clients(self) -> tuple[NodeClient, ...]:
        """The nodes of the job at this moment."""
        return tuple(self._setting.clients)

    def welcome(self, client: NodeClient) -> bool:
        """Make a node ready that came while the job runs, and ask it for rows from then on, also in the epoch that is
        under way, which goes on meanwhile. False if the job was closed, or has such a node by now. Raises if the node
        can't be made ready: the run goes on without it.
        """
        self._coming[client.name] = time.monotonic()
        try:
            while True:
                carried = self._carried
                client.take_over(self._setting.clients[0])
                client.prepare()
                client.calibrate_again()
                if carried.plan.uses_storage:  # so that it has loaded the prefix before rows are waited for
                    self._ask_once(client, carried)
                if (joined := self._join(client, carried)) is not None:
                    return joined
        finally:
            del self._coming[client.name]

    def _come(self) -> list[str]:
        """The nodes that are being made ready, and not for so long that they are no longer worth a wait."""
        for_s = SILENT_TIMES * self._setting.patience_s
        return [name for name, since in list(self._coming.items()) if time.monotonic() - since < for_s]

    def _join(self, client: NodeClient, ready_for: Carried) -> bool | None:
        """None if a plan has taken over meanwhile that asks for something else."""
        with self._adopting, self._lock:
            if self._closed.is_set() or any(each.name == client.name for each in self._setting.clients):
                return False
            if self._carried.extraction != ready_for.extraction:
                return None
            self._setting.clients = (*self._setting.clients, client)
            if self._carried.plan.uses_storage:
                self._carried = replace(self._carried, workers={**self._carried.workers, client.name: client})
                for feed in list(self._feeds):
                    feed.join(client.name, client)
        return True

    def leave(self, client: NodeClient) -> bool:
        """A node that is gone for good; its chunks go to others. False if it is the only one: a job has at least one to
        wait for."""
        with self._adopting, self._lock:
            left = tuple(each for each in self._setting.clients if each is not client)
            if not left:
                return False
            self._setting.clients = left
            workers = {name: each for name, each in self._carried.workers.items() if each is not client}
            self._carried = replace(self._carried, workers=workers)
            for feed in list(self._feeds):
                feed.leave(client.name)
        return True

    @property
    def prongs(self) -> tuple[str, float]:
        """How the plan in use goes through an epoch, and this machine's share of it."""
        plan = self.plan  # another may take over at any time
        return plan.prongs, plan.host_share

    @property
    def row_bytes(self) -> int:
        """Of one row on the wire."""
        want = self._carried.extraction
        return wire_row_bytes(want.codec, want.boundary)

    @property
    def version(self) -> int:
        """Counts the plans."""
        return self._carried.version

    def deviation(self, plan: Plan, model: NearModel) -> Deviation:
        """How far this plan's rows are from those of full precision; measured on nodes."""
        given = self._setting
        want = self._carrier.prepare(plan, self.version).extraction
        return deviation(want, given.cuts[plan.cut], given.samples, given.seed, given.clients, model,
                         given.holdings)  # fmt: skip

    def adopt(self, plan: Plan, unless: Event | None = None, warm_s: float = 0.0) -> bool:
        """Go over to this plan from the next batch on; False if `unless` was set before that.

        For as long as `warm_s` the plan in use goes on while nodes load what the new one runs there. Raises, and goes
        on with the plan in use, if this one can't be carried out.
        """
        with self._adopting:
            self._carrier.check_open()
            carried = self._carrier.prepare(plan, self.version + 1)
            deadline = time.perf_counter() + warm_s
            for thread in self._warm(carried) if warm_s else ():
                thread.join(max(0.0, deadline - time.perf_counter()))
            with self._lock:
                if unless is not None and unless.is_set():
                    return False
                self._carried = carried
                feeds = list(self._feeds)
            for feed in feeds:
                feed.abandon()
        return True

    def warm(self) -> None:
        """Have the nodes begin to load what the plan runs there, so that the first rows come as soon as later ones."""
        self._warm(self._carried)

    def _ask_once(self, worker: Worker, carried: Carried) -> None:
        """A row, for which it has to load the prefix."""
        given = self._setting
        refs = spread_out(given.samples, 1, given.holdings, worker.name)
        worker.rows(Chunk(carried.extraction, "probe", given.seed, 0, 0, refs, reuse=False), self._closed)

    def _warm(self, carried: Carried) -> list[threading.Thread]:
        """A row from each node. What goes wrong with that is the feed's business, once rows are wanted."""
        if not carried.plan.has_prefix:
            return []

        def ask(worker: Worker) -> None:
            try:
                self._ask_once(worker, carried)
            except HeadwaterError as error:
                log.info("%s has not loaded the prefix yet: %s", worker.name, error)

        threads = [threading.Thread(target=ask, args=(worker,), name=f"warm-{name}", daemon=True)
                   for name, worker in carried.workers.items()]  # fmt: skip
        for thread in threads:
            thread.start()
        return threads

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is asked for inside this block, so that links can be measured; what is under way is dropped.

        Afterwards the loader goes on where it was, under the plan that is in use then; `adopt` works inside, too.
        """
        with self._adopting:
            try:
                with self._lock:
                    self._free.clear()
                    self._carried = replace(self._carried, version=self.version + 1)
                    feeds = list(self._feeds)
                for feed in feeds:
                    feed.abandon()
                yield
            finally:
                self._free.set()

    def waited_s(self) -> float:
        """How long the loop has waited for rows, up to now."""
        since = self._waiting_since
        return self._setting.counts.waited_s + (0.0 if since is None else time.perf_counter() - since)

    def step_clock(self) -> Callable[[int], None]:
        """To be called with the number of rows whenever the loop gets a batch; it notes what the one before took.

        The first batch of an epoch comes after whatever the loop did between two epochs, and is not noted.
        """
        counts, last = self._setting.counts, list[tuple[float, float, int]]()

        def got(num_rows: int) -> None:
            now = time.perf_counter()
            if last:
                since, waited_s, before = last.pop()
                with self._lock:
                    self._steps.append((now, (now - since - (counts.waited_s - waited_s)) / before))
            last.append((now, counts.waited_s, num_rows))

        return got

    def finished(self, start: float, end: float) -> None:
        """A batch was made of its rows."""
        if self._setting.trace is not None:
            self._setting.trace.add("finish", start, end, LOOP)

    def stepped(self, start: float, end: float) -> None:
        """The loop had a batch for so long."""
        if self._setting.trace is not None:
            self._setting.trace.add("step", start, end, LOOP)

    def loop_s(self, since: float) -> float | None:
        """What the loop took for a row since then, without waiting; None if that was too few steps.

        Of the step in the middle: a loop may now and then do something else between two batches.
        """
        with self._lock:
            found = sorted(s for at, s in self._steps if at > since)
        return found[len(found) // 2] if len(found) >= MIN_STEPS and found[len(found) // 2] > 0 else None

    @property
    def num_chunks(self) -> int:
        """Taken by the loop so far."""
        return self._setting.counts.num_chunks

    @property
    def num_rows(self) -> int:
        """Taken by the loop so far."""
        return self._setting.counts.num_rows

    @property
    def num_arrived(self) -> int:
        """Rows that have come so far, taken or not."""
        return self._setting.counts.num_arrived

    @property
    def is_open(self) -> bool:
        """Is somebody taking rows?"""
        with self._lock:
            feeds = list(self._feeds)
        return any(not feed.is_closed for feed in feeds)

    @property
    def read_bytes(self) -> int:
        """Of samples that were read here."""
        here = sum(host.read_bytes for host in list(self._carrier.hosts.values()))
        return here + sum(own.read_bytes for own in self.own_nodes())

    def own_nodes(self) -> list[OwnNode]:
        """The node beside this process, if there is one."""
        return [] if self._carrier.own is None else [self._carrier.own]

    @property
    def has_own(self) -> bool:
        """Whether a node beside this process was started."""
        return self._carrier.own is not None

    def own_busy(self) -> tuple[float, float] | None:
        """Of what makes rows here beside nodes: seconds of its threads, and rows it made; None if nothing does."""
        own, plan = self._carrier.own, self.plan
        if not plan.uses_own:
            return None
        if not plan.has_prefix:
            return self._carrier.hosts[True].made
        if own is None:
            return None
        try:
            said = own.hello()["busy"]
        except HeadwaterError:
            return None  # it ended, or is being started
        return float(said["decode_s"]) + float(said["infer_s"]), float(said["num_rows"])

    def open(self, epoch: int, ids: np.ndarray, head: int | None = None, is_whole: bool = False) -> Opened:
        """The rows of these samples, in this order. The first `head` are this machine's in an epoch that is gone
        through from both ends, and nodes begin with what comes behind them; what a whole epoch took says where the
        next one's ends should meet."""
        return self._open(lambda carried: self._stream(carried, epoch, ids, head, is_whole))

    def open_any(self, epoch: int, batches: Sequence[np.ndarray]) -> Opened:
        """The rows of these batches of samples, each as one reply, in whatever order they get ready."""
        return self._open(lambda carried: self._stream_any(carried, epoch, batches))

    def _open(self, stream: Callable[[Carried], tuple[Iterator[Reply], Callable[[], None]]]) -> Opened:
        while True:
            self._free.wait(timeout=0.1)
            with self._lock:
                self._carrier.check_open()
                if not self._free.is_set():
                    continue
                carried = self._carried
                replies, close = stream(carried)
            return Opened(carried.version, self._counted(replies), carried.finish, close)

    def close(self) -> None:
        """Wake whoever waits for rows, and let go of everything; the nodes' connections are not ours."""
        with self._lock:
            self._closed.set()
            feeds = list(self._feeds)
        for client in self._setting.clients:
            client.stop(self._closed)
        for feed in feeds:
            feed.close()
        self._carrier.close()

    def _stream(
        self, carried: Carried, epoch: int, ids: np.ndarray, head: int | None, is_whole: bool
    ) -> tuple[Iterator[Reply], Callable[[], None]]:
        plan, holdings = carried.plan, self._setting.holdings
        groups = holdings.groups[ids] if holdings is not None and holdings.is_split else None
        pieces = Pieces(len(ids), plan.chunk_rows, groups)
        chunk = self._chunks(carried, epoch, lambda index: ids[pieces.entries(index)])
        if carried.inline is not None:
            return self._inline(carried.inline, carried.version, chunk, len(pieces)), lambda: None
        options: dict[str, Any] = {}
        if holdings is not None and groups is not None:
            holders = [holdings.holders[groups[pieces.entries(index)[0]]] for index in range(len(pieces))]
            options = {"able": holders.__getitem__, "more_ahead": len(holdings.holders)}
        if plan.host_share:
            options = {"own": carried.own, "own_out": own_out(usable_cores())}
            options |= self._whose(carried, len(pieces), head)
        feed = self._feed(carried, len(pieces), chunk, **options)
        replies = iter(feed) if groups is None else in_order(iter(feed), pieces, ids)
        if is_whole and "tail" in options and self.rebalances and sum(options["tail"]) >= len(pieces):
            replies = self._balancing(carried, feed, replies, options["tail"][0], len(pieces))
        return replies, feed.close

    def _whose(self, carried: Carried, num_chunks: int, head: int | None) -> dict[str, Any]:
        """Which chunks are this machine's own, where both sides make some; and how many may wait for their turn."""
        plan = carried.plan
        if plan.prongs != MTE or head is None:  # an epoch that began in order ends so, whatever plan takes over
            found: dict[str, Any] = {"more_ahead": more_ahead(plan.host_share)}
            in_place = plan.split == PLACE and plan.prongs != WRR
            return found | ({"is_own": partial(is_own, share=plan.host_share)} if in_place else {})
        first, room = -(-head // plan.chunk_rows), self._room(carried)
        if num_chunks - first > room:
            log.warning("%d chunks at an epoch's end are the nodes', with memory for %d of them here; others are made "
                        "once the head is used up", num_chunks - first, room)  # fmt: skip

        def is_mine(index: int) -> bool:  # what does not fit is for both sides, once it is its turn
            return index < first or (index >= first + room and is_own(index, plan.host_share))

        return {"is_own": is_mine, "tail": (first, room)}

    def _stream_any(
        self, carried: Carried, epoch: int, batches: Sequence[np.ndarray]
    ) -> tuple[Iterator[Reply], Callable[[], None]]:
        chunk = self._chunks(carried, epoch, batches.__getitem__)
        if carried.inline is not None:
            return self._inline(carried.inline, carried.version, chunk, len(batches)), lambda: None
        from_both_ends = carried.plan.prongs == WRR  # another plan may have taken over, which goes in order
        options: dict[str, Any] = {"own": carried.own, "any_order": True} if from_both_ends else {}
        feed = self._feed(carried, len(batches), chunk, **options)
        return iter(feed), feed.close

    def _chunks(self, carried: Carried, epoch: int, part: Callable[[int], np.ndarray]) -> Callable[[int, str], Chunk]:
        """What makes the request for a chunk, whose samples `part` tells, to a worker."""
        given, holdings = self._setting, self._setting.holdings
        drawn = draw_epoch(epoch, given.views)
        tenant = self._tenant(carried.extraction)
        reuse = given.views > 0 or not given.pipeline.is_random  # draws that never come again are not worth keeping

        def chunk(index: int, worker: str) -> Chunk:
            samples = part(index)
            refs = given.samples.take(samples) if holdings is None else holdings.refs(worker, samples)
            return Chunk(carried.extraction, tenant, given.seed, drawn, index, tuple(refs), reuse,
                         trace=given.trace is not None, hand_over=carried.plan.hand_over == FILE)  # fmt: skip

        return chunk

    def _feed(self, carried: Carried, num_chunks: int, chunk: Callable[[int, str], Chunk], **options: Any) -> Feed:
        feed = Feed(carried.workers, num_chunks, chunk, per_worker=carried.plan.prefetch,
                    patience_s=self._setting.patience_s, arrived=self._note_arrival, paces=carried.paces,
                    coming=self._come, **options)  # fmt: skip
        self._feeds.add(feed)
        return feed

    def _room(self, carried: Carried) -> int:
        """Chunks of a tail that this machine may hold until the head is used up."""
        chunk_bytes = carried.plan.chunk_rows * sum(spec.row_bytes for spec in carried.extraction.boundary)
        mine = tail_bytes(memory_bytes(), available_bytes()) / self._setting.trainers
        return tail_room(mine, chunk_bytes, carried.plan.prefetch)

    def _balancing(
        self, carried: Carried, feed: Feed, replies: Iterator[Reply], first: int, num_chunks: int
    ) -> Iterator[Reply]:
        """The replies, whose tail begins with chunk `first`. Once the last is there, the next epoch meets where both
        sides would have ended this one together."""
        begun = ended = time.monotonic()
        waited_s = in_tail_s = 0.0
        try:
            for number in range(num_chunks):
                asked = time.monotonic()
                reply = next(replies, None)
                if reply is None:  # another plan has taken over
                    return
                if number > first:
                    in_tail_s += asked - ended
                if number >= first:
                    waited_s += time.monotonic() - asked
                ended = time.monotonic()
                if number == num_chunks - 1:  # nobody asks for more: what it takes is what others of the tail took
                    rest_s = in_tail_s / max(num_chunks - 1 - first, 1)
                    self._rebalance(carried, feed, first / num_chunks, ended - begun - waited_s + rest_s)
                yield reply
                del reply
        finally:
            _close(replies)

    def _rebalance(self, carried: Carried, feed: Feed, share: float, trainer_s: float) -> None:
        """The trainer would have been through with this epoch in so long, had the tail always been there."""
        storage_s = feed.tail_s
        if storage_s is None or not 0 < share < 1:
            return
        share = next_share(share, trainer_s, storage_s)
        with self._lock:
            if self.rebalances and self._carried.version == carried.version:
                self._carried = replace(self._carried, plan=replace(self._carried.plan, host_share=share))

    def _tenant(self, want: Extraction) -> str:
        """This job to a node's cache, which lets it push out only what nobody has used since it began.

        A plan that asks for other rows begins anew: nobody will ask for those of the plan before. What does not change
        a row does not count, nor does a pause (`held`): a job must not push out the rows that it still goes through.
        """
        kind = replace(want, node_batch=1, compression="none")
        if kind != self._kind:
            self._kind, self._num_kinds = kind, self._num_kinds + 1
        return f"{self._job}-{self._num_kinds}"

    def _note_arrival(self, reply: Reply) -> None:
        self._setting.counts.num_arrived += int(reply.good.sum())

    def _inline(
        self, worker: InlineWorker, version: int, chunk: Callable[[int, str], Chunk], num_chunks: int
    ) -> Iterator[Reply]:
        for index in range(num_chunks):
            if version != self.version:
                return
            yield replace(worker.rows(chunk(index, ""), Event()), chunk=index)

    def _counted(self, stream: Iterator[Reply]) -> Iterator[Reply]:
        counts = self._setting.counts
        try:
            while True:
                self._waiting_since = start = time.perf_counter()
                reply = next(stream, None)
                self._waiting_since = None
                end = time.perf_counter()
                counts.waited_s += end - start
                if self._setting.trace is not None:
                    self._setting.trace.add("wait", start, end, LOOP)
                if reply is None:
                    return
                counts.num_rows += int(reply.good.sum())
                counts.num_bytes += reply.num_bytes
                counts.num_chunks += 1
                yield reply
                del reply
        finally:
            _close(stream)


def _close(stream: Iterator[Reply]) -> None:
    """A generator, if it is one."""
    close = getattr(stream, "close", None)
    if close is not None:
        close()

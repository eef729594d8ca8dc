"""Where an epoch's rows come from under the plan in use, and how a job goes over to another plan.

Owns `Source`. Every plan gives the same rows in the same order, so a switch is: stop asking under the old plan, ask for
what was not handed out yet under the new one. The loader does that between two batches; see `Loader`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import torch

from headwater.core.cache import draw_epoch
from headwater.core.codecs import wire_row_bytes
from headwater.core.cut import Cut
from headwater.core.dispatch import Pace
from headwater.core.pieces import Pieces
from headwater.core.plan import FILE, PLACE, Plan, check
from headwater.core.precision import FULL, Deviation
from headwater.core.prongs import MTE, ORDERED, WRR, balanced
from headwater.core.share import is_own, more_ahead, own_out
from headwater.core.spec import Boundary
from headwater.core.tuning import wish
from headwater.data.cores import usable_cores
from headwater.data.holdings import Holdings
from headwater.data.memory import memory_bytes
from headwater.data.samples import Samples
from headwater.data.store import open_store
from headwater.data.transforms import Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import ConfigError, HeadwaterError, PlanError, UnreachableError
from headwater.model.capture import Captured
from headwater.model.near import NearModel, Rows
from headwater.model.ship import Shipped, cuts_to_ship, ship, shipped_before
from headwater.model.split import prefix_module
from headwater.progress import Progress
from headwater.train.client import NodeClient
from headwater.train.feed import Feed
from headwater.train.host import HostWorker
from headwater.train.inline import InlineWorker
from headwater.train.inorder import in_order
from headwater.train.own import OwnNode
from headwater.train.precision import calibrated, check_possible, deviation, spread_out
from headwater.train.reply import Reply, Worker
from headwater.train.trace import LOOP, Trace

log = logging.getLogger(__name__)

Finish = Callable[[list[np.ndarray], np.ndarray], Any]
MIN_STEPS, MAX_STEPS = 3, 256  # whose times tell what a step takes; that are remembered
TAIL_MEMORY = 0.25  # of this machine's, for rows of an epoch's tail that wait for the head to be used up


@dataclass
class Counts:
    """What a job has moved so far, and how long its loop stood waiting for it; measured."""

    num_rows: int = 0  # that the loop has taken
    num_arrived: int = 0  # that have come, taken or not
    num_bytes: int = 0  # requests and rows, as handed to the wire and before any compression there
    num_chunks: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class Opened:
    """The rows of some samples under one plan. `replies` ends early once another plan has taken over."""

    version: int
    replies: Iterator[Reply]
    finish: Finish  # makes of a batch's arrays and sample ids what the user's loop gets
    close: Callable[[], None] = lambda: None  # ends all work for it, begun or not


@dataclass(frozen=True)
class _Carried:
    """All that one plan needs to be carried out."""

    version: int
    plan: Plan
    extraction: Extraction
    finish: Finish
    workers: dict[str, Worker]
    inline: InlineWorker | None
    own: str | None = None  # of the workers: the trainer's own
    paces: dict[str, Pace] = field(default_factory=dict)  # of workers, from one epoch to the next


@dataclass
class Setting:
    """What a job's plans have in common. `shipped` serves several cuts; others are exported when they are asked for."""

    captured: Captured
    cuts: tuple[Cut, ...]
    pipeline: Transforms
    rest: list[Any]
    samples: Samples
    clients: Sequence[NodeClient]
    seed: int
    patience_s: float
    node_memory_bytes: int | None
    progress: Progress
    shipped: Shipped | None = None
    holdings: Holdings | None = None  # where nodes have disks of their own
    views: int = 0  # after so many epochs the random draws come round again; 0: never
    start_own: Callable[[], OwnNode] | None = None  # where the trainer can do what nodes do; they are elsewhere
    own: OwnNode | None = None  # one that runs already
    trace: Trace | None = None  # where it is noted what is done when
    trainers: int = 1  # of this job, on this machine: they share its cores and memory
    rebalances: bool = False  # whether a meeting point may follow the rates of the epoch before
    counts: Counts = field(default_factory=Counts)


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
        self._hosts: dict[bool, HostWorker] = {}  # this process's own threads: alone, and beside nodes
        self._own = setting.own
        for client in setting.clients:
            client.trace = setting.trace
        if setting.own is not None:
            setting.own.trace = setting.trace
        self._waiting_since: float | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)  # when one ended, seconds a row of it
        self._free = Event()  # cleared while nothing may be asked for
        self._free.set()
        self._carried = self._prepare(plan, 0)

    @property
    def plan(self) -> Plan:
        """The plan in use."""
        return self._carried.plan

    @property
    def prongs(self) -> tuple[str, float]:
        """How the plan in use goes through an epoch, and this machine's share of it."""
        return self.plan.prongs, self.plan.host_share

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
        want = self._prepare(plan, self.version).extraction
        return deviation(want, given.cuts[plan.cut], given.samples, given.seed, given.clients, model,
                         given.holdings)  # fmt: skip

    def adopt(self, plan: Plan, unless: Event | None = None, warm_s: float = 0.0) -> bool:
        """Go over to this plan from the next batch on; False if `unless` was set before that.

        For as long as `warm_s` the plan in use goes on while nodes load what the new one runs there. Raises, and goes
        on with the plan in use, if this one can't be carried out.
        """
        with self._adopting:
            self._check_open()
            carried = self._prepare(plan, self.version + 1)
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

    def _warm(self, carried: _Carried) -> list[threading.Thread]:
        """A row from each node. What goes wrong with that is the feed's business, once rows are wanted."""
        given = self._setting
        if not carried.plan.has_prefix:
            return []

        def ask(worker: Worker) -> None:
            refs = spread_out(given.samples, 1, given.holdings, worker.name)
            try:
                worker.rows(Chunk(carried.extraction, "probe", given.seed, 0, 0, refs, reuse=False), self._closed)
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
        return sum(host.read_bytes for host in self._hosts.values()) + sum(own.read_bytes for own in self.own_nodes())

    def own_nodes(self) -> list[OwnNode]:
        """The node beside this process, if there is one."""
        return [] if self._own is None else [self._own]

    @property
    def has_own(self) -> bool:
        """Whether a node beside this process was started."""
        return self._own is not None

    def own_busy(self) -> tuple[float, float] | None:
        """Of what makes rows here beside nodes: seconds of its threads, and rows it made; None if nothing does."""
        own = self._own
        if not self.plan.uses_own:
            return None
        if not self.plan.has_prefix:
            return self._hosts[True].made
        if own is None:
            return None
        try:
            said = own.hello()["busy"]
        except HeadwaterError:
            return None  # it ended, or is being started
        return float(said["decode_s"]) + float(said["infer_s"]), float(said["num_rows"])

    def open(self, epoch: int, ids: np.ndarray, head: int | None = None) -> Opened:
        """The rows of these samples, in this order. The first `head` are this machine's in an epoch that is gone
        through from both ends, and nodes begin with what comes behind them."""
        return self._open(lambda carried: self._stream(carried, epoch, ids, head))

    def open_any(self, epoch: int, batches: Sequence[np.ndarray]) -> Opened:
        """The rows of these batches of samples, each as one reply, in whatever order they get ready."""
        return self._open(lambda carried: self._stream_any(carried, epoch, batches))

    def _open(self, stream: Callable[[_Carried], tuple[Iterator[Reply], Callable[[], None]]]) -> Opened:
        while True:
            self._free.wait(timeout=0.1)
            with self._lock:
                self._check_open()
                if not self._free.is_set():
                    continue
                carried = self._carried
                replies, close = stream(carried)
            return Opened(carried.version, self._counted(replies), carried.finish, close)

    def close(self) -> None:
        """Wake whoever waits for rows, and let go of everything; the nodes' connections are not ours."""
        with self._lock:
            self._closed.set()
            feeds, hosts, own = list(self._feeds), list(self._hosts.values()), self._own
        for client in self._setting.clients:
            client.stop(self._closed)
        for feed in feeds:
            feed.close()
        for host in hosts:
            host.close()
        if own is not None:
            own.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ConfigError("the job is closed; start another one with hw.near")

    def _stream(
        self, carried: _Carried, epoch: int, ids: np.ndarray, head: int | None
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
        if "tail" in options and self._setting.rebalances and sum(options["tail"]) >= len(pieces):
            replies = self._balancing(carried, feed, replies)
        return replies, feed.close

    def _whose(self, carried: _Carried, num_chunks: int, head: int | None) -> dict[str, Any]:
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
        self, carried: _Carried, epoch: int, batches: Sequence[np.ndarray]
    ) -> tuple[Iterator[Reply], Callable[[], None]]:
        chunk = self._chunks(carried, epoch, batches.__getitem__)
        if carried.inline is not None:
            return self._inline(carried.inline, carried.version, chunk, len(batches)), lambda: None
        from_both_ends = carried.plan.prongs == WRR  # another plan may have taken over, which goes in order
        options: dict[str, Any] = {"own": carried.own, "any_order": True} if from_both_ends else {}
        feed = self._feed(carried, len(batches), chunk, **options)
        return iter(feed), feed.close

    def _chunks(self, carried: _Carried, epoch: int, part: Callable[[int], np.ndarray]) -> Callable[[int, str], Chunk]:
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

    def _feed(self, carried: _Carried, num_chunks: int, chunk: Callable[[int, str], Chunk], **options: Any) -> Feed:
        feed = Feed(carried.workers, num_chunks, chunk, per_worker=carried.plan.prefetch,
                    patience_s=self._setting.patience_s, arrived=self._note_arrival, paces=carried.paces,
                    **options)  # fmt: skip
        self._feeds.add(feed)
        return feed

    def _room(self, carried: _Carried) -> int:
        """Chunks of a tail that this machine may hold until the head is used up."""
        chunk_bytes = carried.plan.chunk_rows * sum(spec.row_bytes for spec in carried.extraction.boundary)
        mine = TAIL_MEMORY * memory_bytes() / self._setting.trainers
        return max(carried.plan.prefetch + 1, int(mine / chunk_bytes))

    def _balancing(self, carried: _Carried, feed: Feed, replies: Iterator[Reply]) -> Iterator[Reply]:
        """The replies; if all of them came, the next epoch's meeting point is where this one's rates would have met."""
        try:
            yield from replies
        finally:  # nobody asks for more once the last one is there
            rates = feed.rates
            here = rates.pop(carried.own or "", 0.0)
            share = balanced(here, sum(rates.values())) if feed.is_complete else None
            with self._lock:
                if share is not None and self._carried.version == carried.version:
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
            close = getattr(stream, "close", None)
            if close is not None:
                close()

    def _prepare(self, plan: Plan, version: int) -> _Carried:
        """Everything that can be wrong with a plan is found here, before any row is asked for."""
        given = self._setting
        check(plan, given.cuts, node_memory_bytes=given.node_memory_bytes)
        if given.rest and plan.has_prefix:
            raise rest_fault(plan.cut_name)
        if plan.uses_own and given.clients and given.start_own is None:
            raise PlanError(["the trainer shall make rows by itself (host_share, or a cut with the prefix on host) and "
                             "can't: its node is beside it anyway, the job was started with share=False, or the data "
                             "is on nodes' own disks"])  # fmt: skip
        if plan.hand_over == FILE and (blind := _blind(given.clients)):
            raise PlanError([f"hand_over is file, and {', '.join(blind)} leaves no rows in a folder that this machine "
                             "sees; start nodes with --hand-over FOLDER, or have rows come over the wire"])  # fmt: skip
        if not plan.has_prefix and plan.codec != "raw":
            warnings.warn(f"codec {plan.codec!r} has nothing to do: rows are pixels, which travel as they are",
                          stacklevel=2)  # fmt: skip
        if plan.has_prefix and (plan.precision != FULL or wish(plan.engine)[1]):
            if not given.clients:
                raise PlanError([f'nodes="inline" computes with PyTorch in fp32; the plan wants {plan.precision} and '
                                 f"the engine {plan.engine}"])  # fmt: skip
            check_possible(given.clients, plan.precision, plan.engine)
        cut = given.cuts[plan.cut]
        digest, outputs = None, None
        boundary: Boundary = (given.pipeline.pixel_spec,)
        shipped = None
        if plan.has_prefix:
            boundary = cut.boundary
            if given.clients:
                shipped = self._ship(cut, given.clients if plan.uses_storage else ())
                digest, outputs = shipped.digest, shipped.names_at(cut)
        extraction = Extraction(given.samples.url, given.pipeline, digest, boundary, plan.precision, plan.codec,
                                plan.compression, plan.node_batch, outputs, plan.engine)  # fmt: skip
        if digest is not None and plan.precision != FULL:
            with given.progress.step(f"calibrating the prefix for {plan.precision}"):
                extraction = calibrated(extraction, given.samples, given.seed, given.clients, given.holdings)
        inline, workers, own_name = None, dict[str, Worker](), None
        if not given.clients and plan.prongs != ORDERED:
            raise PlanError([f'nodes="inline" has one side only; prongs is {plan.prongs}'])
        if not given.clients:
            prefix = _torch_prefix(given.captured, cut) if plan.has_prefix else None
            inline = InlineWorker(open_store(given.samples.url), prefix)
        elif plan.uses_storage or plan.uses_own:
            workers = {client.name: client for client in given.clients} if plan.uses_storage else {}
            if plan.uses_own and plan.has_prefix:
                own = self._own_node(shipped)
                if wish(plan.engine)[1]:
                    check_possible([own], plan.precision, plan.engine)
                workers[OwnNode.name], own_name = own, OwnNode.name
            elif plan.uses_own:  # pixels need no engine: this process's own threads, and no copy over a wire
                host = self._host(beside_nodes=True)
                workers[host.name], own_name = host, host.name
        elif given.holdings is not None:
            raise PlanError(["the data is on the nodes' own disks, so the trainer can't read it by itself; read near "
                             "the data (a plan with read, decode and augment on storage)"])  # fmt: skip
        else:
            host = self._host(beside_nodes=False)
            workers = {host.name: host}
        finish = _finish(plan, given.pipeline, given.rest)
        return _Carried(version, plan, extraction, finish, workers, inline, own_name)

    def _host(self, *, beside_nodes: bool) -> HostWorker:
        """This process's own threads."""
        store = open_store(self._setting.samples.url)
        with self._lock:
            self._check_open()
            if beside_nodes not in self._hosts:
                threads = max(1, round(len(os.sched_getaffinity(0)) / self._setting.trainers))
                self._hosts[beside_nodes] = HostWorker(store, threads, beside_nodes=beside_nodes)
                self._hosts[beside_nodes].trace = self._setting.trace
            return self._hosts[beside_nodes]

    def _own_node(self, shipped: Shipped | None) -> OwnNode:
        """The node beside this process, which has this file."""
        given = self._setting
        assert given.start_own is not None
        if self._own is None:
            with given.progress.step("starting a node beside the trainer"):
                started = given.start_own()
                started.trace = given.trace
            with self._lock:
                if not self._closed.is_set():
                    self._own = started
            if self._own is None:
                started.close()
                self._check_open()
        assert self._own is not None
        if shipped is not None:
            self._own.needs(shipped.digest, shipped.path)
        self._own.prepare()
        return self._own

    def _ship(self, cut: Cut, clients: Sequence[NodeClient]) -> Shipped:
        """The file that has this cut, on each of these nodes."""
        given = self._setting
        shipped = given.shipped
        if shipped is None or cut.index not in shipped.cuts:
            shipped = None
            with contextlib.suppress(UnreachableError):  # a node that is away can't say what it has
                shipped = self._shipped_before(cut)
        if shipped is None:
            with given.progress.step(f"exporting the prefix up to {cut.name}"):
                shipped = ship(given.captured, cut)
        away = []
        for client in clients:
            client.needs(shipped.digest, shipped.path)
            try:
                if not client.has_prefix():
                    with given.progress.step(f"sending the prefix ({shipped.num_bytes / 1e6:.1f} MB) to {client.name}"):
                        client.prepare()
            except UnreachableError as error:  # the feed asks it again and again, and sends the file when it is back
                log.info("%s gets its prefix later: %s", client.name, error)
                away.append(error)
        if away and len(away) == len(clients):
            raise away[0]
        return shipped

    def _shipped_before(self, cut: Cut) -> Shipped | None:
        """The file of an earlier job that planned for itself, if it has this cut and every node has the file."""
        given = self._setting
        limits = [int(client.hello()["max_upload_bytes"]) for client in given.clients]
        offered = cuts_to_ship(given.cuts, limits)
        shipped = shipped_before(given.captured, *offered) if cut in offered else None
        if shipped is None:
            return None
        for client in given.clients:
            client.needs(shipped.digest, shipped.path)
        return shipped if all(client.has_prefix() for client in given.clients) else None


def _blind(clients: Sequence[NodeClient]) -> list[str]:
    """The nodes that answer, and leave no rows in a folder that this machine sees."""
    found = []
    for client in clients:
        with contextlib.suppress(UnreachableError):  # it is asked again when it is back
            if not client.finds_folder():
                found.append(client.name)
    return found


def rest_fault(cut: str | int) -> ConfigError:
    return ConfigError(f"cut {cut!r} needs all transforms near the data, but some of them stay on the trainer; cut at "
                       "'input', or leave out the transforms that the warning names")  # fmt: skip


def _torch_prefix(captured: Captured, cut: Cut) -> Callable[[np.ndarray], Sequence[np.ndarray]]:
    module = prefix_module(captured, cut)
    device = captured.example[0].device

    def run(rows: np.ndarray) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [tensor.cpu().numpy() for tensor in module(torch.from_numpy(rows).to(device))]

    return run


def _finish(plan: Plan, pipeline: Transforms, rest: list[Any]) -> Finish:
    """How a batch's arrays become what the user's loop gets."""
    if plan.has_prefix:
        return lambda tensors, ids: Rows(
            tuple(torch.from_numpy(tensor) for tensor in tensors), plan.cut, torch.from_numpy(ids)
        )
    if not rest:
        return lambda tensors, ids: torch.from_numpy(pipeline.finish(tensors[0]))

    def run_rest(tensors: list[np.ndarray], ids: np.ndarray) -> torch.Tensor:
        from PIL import Image

        done = []
        for pixels in tensors[0]:
            value: Any = torch.from_numpy(pipeline.finish(pixels)) if pipeline.is_float else Image.fromarray(pixels)
            for step in rest:
                value = step(value)
            done.append(value)
        return torch.stack(done)

    return run_rest

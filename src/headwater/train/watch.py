"""Watches a run: when it goes otherwise than planned, plans again; where that may pay, links are measured first.

Owns the clock and the counters around `core.replan`, which decides. Windows are long enough for a few chunks; a
decision is carried out between two batches (`Source.held`, `Source.adopt`), and the batches stay what they were.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from headwater.core.cost import Estimate, estimate
from headwater.core.cut import Cut
from headwater.core.loads import JobSize, Pricing, upload_s
from headwater.core.plan import FILE, PACE, PLACE, WIRE, Plan
from headwater.core.profile import Profile
from headwater.core.prongs import MTE, ORDERED
from headwater.core.replan import Replan, Replanner, Window, worth_switching
from headwater.core.rig import Link, Rig
from headwater.core.search import carried, placement, search, suited_split
from headwater.core.share import SHARES
from headwater.data.wire import MAX_BLOB_BYTES
from headwater.errors import HeadwaterError
from headwater.train.client import NodeClient
from headwater.train.source import Source
from headwater.train.wirecosts import measure_port

log = logging.getLogger(__name__)

POLL_S = 0.5
WINDOW_S = 2.0
CHUNKS = 4  # a window is at least as long as so many should take
MEASURE_S = 0.5  # of each direction of a link, with nothing else on it
TRY_AFTER_S, TRY_AT_MOST_EVERY_S = 20.0, 600.0  # a link that got slow is tried; each time in vain, half as often
SHARED = 1.5  # nodes that make so many times the rows that come here make some for others
WARM_S = 10.0  # that a new plan may wait for nodes to load what it runs there, while the old one goes on
AGAIN_S = 10.0  # until what could not be decided when nodes came or went is tried again
TRY_S = 0.25  # what a slow link carries in so long is sent over it to see whether it still takes so long


@dataclass(frozen=True)
class Switch:
    """A plan that took over during a run."""

    why: tuple[str, ...]
    before: Plan
    after: Plan
    num_rows: int  # that the run had taken by then


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment."""

    at: float
    num_chunks: int
    waited_s: float
    received: dict[str, int]
    read_bytes: int
    num_arrived: int
    busy: dict[str, tuple[float, float, float]]  # per node: compute-seconds, rows made, rows sent from its cache
    own: tuple[float, float] | None = None  # of the node beside the trainer: compute-seconds, rows made


class Watch:
    """One thread beside a job that planned for itself."""

    def __init__(
        self,
        source: Source,
        clients: Sequence[NodeClient],
        cuts: Sequence[Cut],
        profile: Profile,
        rig: Rig,
        size: JobSize,
        codecs: tuple[str, ...],
        measure_here: Callable[[], tuple[Link | None, float | None]],
        check_cut: Callable[[int], None] = lambda index: None,
        precisions: tuple[str, ...] = ("fp32",),
        file_bytes: int = 0,
        prongs: str = ORDERED,
        hand_over: str = WIRE,
        may_grow: bool = False,
    ) -> None:
        """`check_cut` raises if what is in front of a cut is no longer what it was when the job began.

        `file_bytes` has the file that serves all cuts; nodes that lack it are sent it. `prongs` is how plans that take
        over go through an epoch, where both sides make rows; `hand_over` how pixels come from nodes; `may_grow` whether
        nodes may join.
        """
        self._source = source
        self._clients = tuple(clients)
        self._cuts = tuple(cuts)
        self._profile = profile
        self._size = replace(size, num_epochs=1)
        self._codecs = codecs
        self._precisions = precisions
        self._measure_here = measure_here
        self._check_cut = check_cut
        self._try_every_s = TRY_AFTER_S
        self._try_at = 0.0
        # Of each node: its threads, as many as go with the part of its cores that is this trainer's.
        hellos = {client.name: client.hello() for client in clients}
        self._threads = {
            device.name: int(hellos[device.name]["num_threads"]) * device.cores / float(hellos[device.name]["cores"])
            for device in rig.nodes
        }
        self._file_bytes = file_bytes
        self._prongs, self._hand_over, self._may_grow = prongs, hand_over, may_grow
        self._missing = self._without_file()
        self._replanner = self._watched(rig)
        self._believed = rig
        self._version = -1
        self._begun = 0
        self._news: tuple[str, ...] = ()  # of nodes that came or went, until something is decided
        self._news_at = 0.0
        self._stopped = threading.Event()
        self.switches: list[Switch] = []
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._stopped), name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; it may be in the middle of a measurement, and changes nothing any more."""
        self._stopped.set()

    def look(self, before: _Reading | None) -> _Reading | None:
        """One look at the counters; the reading that the next window starts from."""
        if not self._source.is_open:
            self._version = -1
            return None
        if self._source.clients != self._clients:
            self._renew(self._source.clients)
        if self._news and time.perf_counter() >= self._news_at:
            self._news_at = time.perf_counter() + AGAIN_S
            self._decide(Replan(self._replanner.rig, self._news, of_links=False))
            self._news = ()
            return None
        if self._source.version != self._version:
            self._version, self._begun = self._source.version, self._source.num_chunks
            return None
        if before is None:
            # Until the first chunk is there, nodes load engines and pipes fill: that says nothing about rates.
            return self._read() if self._source.num_chunks > self._begun else None
        if time.perf_counter() - before.at < self._window_s():
            return before
        now = self._read()
        if self._source.plan != self._replanner.plan:  # its ends meet elsewhere since the last epoch
            self._replanner.rebalanced(self._source.plan)
            return now
        for decision in self._replanner.window(self._window(before, now)) or self._try():
            before_it = len(self.switches)
            self._decide(decision)
            if len(self.switches) > before_it or not self._is_lowered:
                self._try_every_s = TRY_AFTER_S
            self._try_at = time.perf_counter() + self._try_every_s
            return None
        return now

    def _watched(self, rig: Rig) -> Replanner:
        """What looks at the plan in use from here on."""
        return Replanner(self._source.plan, self._cuts, self._profile, rig, batch_size=self._size.batch_size)

    def _renew(self, clients: tuple[NodeClient, ...]) -> None:
        """Nodes have come or gone: the rig is another one, and so may be the plan. One that came is taken for what the
        first one is: a fleet's nodes are alike, and what is not is seen soon."""
        rig = self._replanner.rig
        known = dict(zip([device.name for device in rig.nodes], zip(rig.nodes, rig.links, strict=True), strict=True))
        first, link = rig.nodes[0], rig.links[0]
        there = [known.get(client.name, (replace(first, name=client.name), link)) for client in clients]
        self._threads = {device.name: self._threads.get(device.name, self._threads[first.name]) for device, _ in there}
        came = [client.name for client in clients if client.name not in known]
        went = [name for name in known if all(client.name != name for client in clients)]
        # The trainer's port is known to carry what one link did; that it carries more is seen once it does.
        port = rig.trainer_link or (link if len(there) > 1 else None)
        rig = replace(rig, nodes=tuple(device for device, _ in there), links=tuple(each for _, each in there),
                      trainer_link=port)  # fmt: skip
        self._clients, self._version, self._believed = clients, -1, rig
        self._replanner = self._watched(rig)
        why = [f"{', '.join(names)} {what}" for names, what in ((came, "joined"), (went, "left")) if names]
        self._news, self._news_at = (*self._news, *why), 0.0

    def _try(self) -> list[Replan]:
        """Is a link or the trainer fast again that got slow? Beside the run, which asks little of it."""
        lowered = self._replanner.lowered()
        if not self._is_lowered or time.perf_counter() < self._try_at:
            return []
        self._try_at = time.perf_counter() + self._try_every_s
        self._try_every_s = min(2 * self._try_every_s, TRY_AT_MOST_EVERY_S)
        rates = {}
        for client in self._clients:
            if client.name in lowered:
                num_bytes = min(int(lowered[client.name] * TRY_S) + 1, MAX_BLOB_BYTES)
                start = time.perf_counter()
                try:
                    client.download(num_bytes)
                except HeadwaterError:
                    continue  # away: the feed's business
                rates[client.name] = num_bytes / (time.perf_counter() - start)
        speed = self._measure_here()[1] if self._replanner.is_trainer_lowered else None
        return self._replanner.tried(rates, speed)

    @property
    def _is_lowered(self) -> bool:
        return bool(self._replanner.lowered()) or self._replanner.is_trainer_lowered

    def _window_s(self) -> float:
        each = estimate(self._source.plan, self._cuts, self._profile, self._replanner.rig, self._size)
        return max(WINDOW_S, CHUNKS * self._source.plan.chunk_rows * each.steady_s)

    def _read(self) -> _Reading:
        busy = {}
        if self._source.plan.uses_storage:
            for client in self._clients:
                try:
                    said = client.hello()["busy"]
                    busy[client.name] = (float(said["decode_s"]) + float(said["infer_s"]), float(said["num_rows"]),
                                         float(said.get("num_cache_hits", 0)))  # fmt: skip
                except (HeadwaterError, KeyError):
                    continue  # away, or behind a link that is full: what it sends still counts
        return _Reading(
            time.perf_counter(),
            self._source.num_chunks,
            self._source.waited_s(),
            {client.name: client.received_bytes for client in self._clients},
            self._source.read_bytes,
            self._source.num_arrived,
            busy,
            self._source.own_busy(),
        )

    def _window(self, before: _Reading, now: _Reading) -> Window:
        taken_s = now.at - before.at
        waited = min(1.0, max(0.0, (now.waited_s - before.waited_s) / taken_s))
        num_chunks = now.num_chunks - before.num_chunks
        # In the head of an epoch from both ends every row is made here, in its tail none: neither is what was planned.
        loop_s = None if self._source.plan.prongs == MTE else self._source.loop_s(before.at)
        rates: dict[str, Any] = {"loop_s": loop_s, "own_s": _own_s(before, now),
                                 "own_share": _own_share(before, now)}  # fmt: skip
        if not self._source.plan.uses_storage:
            read = (now.read_bytes - before.read_bytes) / taken_s
            return Window(num_chunks, waited, store_bytes_per_s=read, **rates)
        carried = {name: (now.received[name] - before.received[name]) / taken_s for name in now.received}
        if self._source.plan.hand_over == FILE or self._source.plan.prongs == MTE:
            carried = {}  # rows come another way, or nodes are done with what there is room for
        there = now.busy.keys() & before.busy.keys()
        made = {name: rate for name in there if (rate := self._made(name, before, now)) is not None}
        plan = self._source.plan
        from_nodes = (now.num_arrived - before.num_arrived) * (1 - (rates["own_share"] or 0.0))
        more = SHARED * from_nodes + plan.chunk_rows * plan.prefetch * len(there)
        if sum(now.busy[name][1] - before.busy[name][1] for name in there) > more:
            made = {}  # they make rows for others, too, which may cost more or less than ours
        return Window(num_chunks, waited, carried, made, **rates)

    def _made(self, name: str, before: _Reading, now: _Reading) -> float | None:
        """Rows a second that the node's cores could make, from how long its threads took for those they made."""
        busy_s, rows, kept = (late - early for late, early in zip(now.busy[name], before.busy[name], strict=True))
        if rows < 1 or busy_s <= 0:
            return None
        if kept:  # what it makes beside kept rows comes in small groups, which cost more a row than planned
            return None
        return self._replanner.node_rows_per_s(name, busy_s / rows, self._threads[name])

    def _decide(self, decision: Replan) -> None:
        """Go over to another plan if one pays, or if the one in use needs more memory than there is by now; where
        links changed, as they are with nothing else on them.

        Measuring links stops the run for a while, so it is done only if another plan may pay. If it can't be done, or
        the plan can't be adopted, nothing was decided, and the change is seen again.
        """
        before, rig, reasons = self._source.plan, decision.rig, decision.why
        why = "; ".join(reasons)
        adopted = before
        try:
            rig, there = self._ask_nodes(rig)
            if too_much := self._too_much(before, rig):
                reasons = (*reasons, *too_much)
                why = "; ".join(reasons)
            if too_much or self._may_pay(before, rig) or self._is_scarce(before, rig):
                with self._source.held() if decision.of_links else contextlib.nullcontext():
                    rig = self._measure(rig, there) if decision.of_links else rig
                    now, best = self._compare(before, rig)
                    then = before
                    pays = not alike(best.plan, before) and worth_switching(now, best)
                    if pays or (too_much and best.plan != before):
                        then = best.plan
                    elif self._is_scarce(before, rig):
                        then, best = replace(before, split=PLACE), now
                    if then != before:
                        self._check_cut(then.cut)  # again: it may have begun to learn meanwhile
                        warm_s = 0.0 if decision.of_links else WARM_S
                        if not self._source.adopt(then, unless=self._stopped, warm_s=warm_s):
                            return
                        adopted = then
        except HeadwaterError as error:
            log.info("%s; nothing could be done about it yet: %s", why, error)
            self._replanner.withdraw()
            raise
        self._replanner.believe(rig)
        self._believed = rig
        self._replanner.adopted(adopted)
        if adopted == before:
            log.info("%s; the plan stays", why)
            return
        self.switches.append(Switch(reasons, before, adopted, self._source.num_rows))
        log.warning("%s: going over to another plan (%s, cut at %s), an estimated %.3g times as fast", why,
                    placement(adopted), adopted.cut_name,
                    now.epoch_s / best.epoch_s)  # fmt: skip

    def _may_pay(self, plan: Plan, rig: Rig) -> bool:
        """Whether measuring could lead to another plan.

        It could if a link is faster than it was thought to be: how much faster, a run that does not fill it can't tell.
        And a link that got slower may or may not share its way with the store's: both are looked at.
        """
        apart = replace(rig, store_link=self._believed.store_link, trainer_link=self._believed.trainer_link)
        return _has_faster_link(self._believed, rig) or any(
            worth_switching(*self._compare(plan, each)) for each in (rig, apart)
        )

    def _too_much(self, plan: Plan, rig: Rig) -> tuple[str, ...]:
        """Of every device that does not have the memory for this plan any more."""
        return estimate(plan, self._cuts, self._profile, rig, self._size).faults

    def _is_scarce(self, plan: Plan, rig: Rig) -> bool:
        """Whether a link has become so thin that the trainer's share has to be kept to."""
        if plan.split != PACE:
            return False
        return suited_split(Pricing(self._cuts, self._profile, rig, self._size), plan) == PLACE

    def _compare(self, plan: Plan, rig: Rig) -> tuple[Estimate, Estimate]:
        """What the plan takes on this rig, and what the best one takes there."""
        size = replace(self._size, setup_s=upload_s(rig, self._missing, self._file_bytes),
                       starts_own=not self._source.has_own)  # fmt: skip
        # All trainers go through an epoch alike, so what was asked for stays, whatever one of them would rather do.
        found = search(self._open_cuts(), self._profile, rig, size, codecs=self._codecs, precisions=self._precisions,
                        shared=self._prongs != ORDERED, prongs=self._prongs, may_grow=self._may_grow)  # fmt: skip
        # Where timing decides, the share is what it comes to.
        shares = [replace(plan, host_share=share) for share in SHARES] if plan.is_share_open else [plan]
        every = [estimate(each, self._cuts, self._profile, rig, self._size) for each in shares]
        return min(every, key=lambda each: each.total_s), carried(found.best, self._prongs, self._hand_over)

    def _without_file(self) -> list[str]:
        """The nodes that answer and don't have the file of all cuts."""
        found = []
        for client in self._clients:
            with contextlib.suppress(HeadwaterError):  # away for now; the feed asks it again and again
                if not client.has_prefix():
                    found.append(client.name)
        return found

    def _open_cuts(self) -> tuple[Cut, ...]:
        """Those with nothing in front of them that has begun to learn: under an earlier cut, that is allowed."""
        found: list[Cut] = []
        for cut in self._cuts:
            try:
                self._check_cut(cut.index)
            except HeadwaterError as error:
                log.info("cuts from %s on are left out: %s", cut.name, error)
                break
            found.append(cut)
        return tuple(found)

    def _measure(self, rig: Rig, there: set[str]) -> Rig:
        """Links of the nodes that are there, port, the way to the store and this machine, with nothing else on them."""
        links, measured = [], []
        for client, known in zip(self._clients, rig.links, strict=True):
            found = known
            with contextlib.suppress(HeadwaterError):  # away for now; the feed asks it again and again
                if client.name in there:
                    found = Link(*client.measure_link(MEASURE_S))
                    measured.append((client, found))
            links.append(found)
        # A store that this machine can't read is not asked again and again while the run stands still.
        store, speed = self._measure_here() if rig.trainer_reads else (None, None)
        if store is None and rig.trainer_reads:
            store = rig.store_link  # a store that does not answer for the moment is no reason to give it up
        port = rig.trainer_link
        if len(measured) > 1:
            port = measure_port([client for client, _ in measured], [link for _, link in measured])
        trainer = rig.trainer
        if speed is not None and not self._source.plan.uses_storage:  # of decoding, which is most of what it does then
            trainer = replace(trainer, speed=speed)
        return replace(rig, links=tuple(links), trainer=trainer, trainer_link=port, store_link=store,
                       trainer_reads=store is not None or rig.trainer_reads)  # fmt: skip

    def _ask_nodes(self, rig: Rig) -> tuple[Rig, set[str]]:
        """The rig with the nodes' memory as it is now (it may be less, where a cgroup holds them), and who answers."""

        def ask(client: NodeClient) -> tuple[int, bool] | None:
            try:
                return int(client.hello()["memory_bytes"]), client.has_prefix()
            except HeadwaterError:
                return None  # away for now

        with ThreadPoolExecutor(len(self._clients)) as pool:
            answers = dict(zip([client.name for client in self._clients], pool.map(ask, self._clients), strict=True))
        there = {name: each for name, each in answers.items() if each is not None}
        self._missing = [name for name, (_, has_file) in there.items() if not has_file]
        nodes = [replace(each, memory_bytes=there[each.name][0]) if each.name in there else each for each in rig.nodes]
        return replace(rig, nodes=tuple(nodes)), set(there)


def _own_s(before: _Reading, now: _Reading) -> float | None:
    """What the threads of the node beside the trainer took for a row; None if it made none, or was started anew."""
    if before.own is None or now.own is None:
        return None
    busy_s, rows = (late - early for late, early in zip(now.own, before.own, strict=True))
    return busy_s / rows if rows >= 1 and busy_s > 0 else None


def _own_share(before: _Reading, now: _Reading) -> float | None:
    """Of the rows that came; None if there is no node beside the trainer, or it was started anew."""
    if before.own is None or now.own is None or now.num_arrived <= before.num_arrived or now.own[1] < before.own[1]:
        return None
    return min(1.0, (now.own[1] - before.own[1]) / (now.num_arrived - before.num_arrived))


def alike(one: Plan, other: Plan) -> bool:
    """Do these come to the same? Where timing decides, the share that was expected does not matter."""
    is_open = one.is_share_open and other.is_share_open
    return one == (replace(other, host_share=one.host_share) if is_open else other)


def _has_faster_link(before: Rig, after: Rig) -> bool:
    pairs = zip(before.links, after.links, strict=True)
    return any(now.down_bytes_per_s > then.down_bytes_per_s for then, now in pairs)


def _run(watch: weakref.ref[Watch], stopped: threading.Event) -> None:
    """Until the job is closed, or forgotten."""
    reading: _Reading | None = None
    while not stopped.wait(POLL_S):
        here = watch()
        if here is None:
            return
        try:
            reading = here.look(reading)
        except HeadwaterError as error:  # a node that is away is the feed's business; we look again later
            log.debug("nothing could be measured: %s", error)
            reading = None
        except Exception:
            log.exception("the run goes on with its plan, but is no longer watched")
            return
        del here

"""What a plan needs to be carried out: workers that are there, a prefix where it runs, a request to ask with.

Owns `Setting` (what a job's plans have in common) and `Carrier`, which makes a plan ready or says everything that is
wrong with it. When rows are asked for, and by which plan, is `train.source`'s business.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headwater.core.cut import Cut
from headwater.core.dispatch import Pace
from headwater.core.plan import FILE, Plan, check
from headwater.core.precision import FULL
from headwater.core.prongs import ORDERED
from headwater.core.spec import Boundary
from headwater.core.tuning import wish
from headwater.data.holdings import Holdings
from headwater.data.samples import Samples
from headwater.data.store import open_store
from headwater.data.transforms import Transforms
from headwater.data.wire import Extraction
from headwater.errors import ConfigError, PlanError, UnreachableError
from headwater.model.capture import Captured
from headwater.model.near import Rows
from headwater.model.ship import Shipped, cuts_to_ship, ship, shipped_before
from headwater.model.split import prefix_module
from headwater.progress import Progress
from headwater.train.client import NodeClient
from headwater.train.host import HostWorker
from headwater.train.inline import InlineWorker
from headwater.train.own import OwnNode
from headwater.train.precision import calibrated, check_possible
from headwater.train.reply import Worker
from headwater.train.trace import Trace

log = logging.getLogger(__name__)

# Of a batch's parts, one after the other and each the arrays of its rows, and of their samples' ids.
Finish = Callable[[Sequence[Sequence[np.ndarray]], np.ndarray], Any]


@dataclass
class Counts:
    """What a job has moved so far, and how long its loop stood waiting for it; measured."""

    num_rows: int = 0  # that the loop has taken
    num_arrived: int = 0  # that have come, taken or not
    num_bytes: int = 0  # requests and rows, as handed to the wire and before any compression there
    num_chunks: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True)
class Carried:
    """A plan that is ready."""

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


class Carrier:
    """Makes plans ready. Holds what several of them use: this process's own threads, and the node beside it."""

    def __init__(self, setting: Setting, closed: threading.Event) -> None:
        """Nothing is started any more once `closed` is set."""
        self._setting, self._closed = setting, closed
        self._lock = threading.RLock()  # the garbage collector may close the job anywhere, also in here
        self.hosts: dict[bool, HostWorker] = {}  # this process's own threads: alone, and beside nodes
        self.own = setting.own  # the node beside this process, if there is one
        for client in setting.clients:
            client.trace = setting.trace
        if setting.own is not None:
            setting.own.trace = setting.trace

    def close(self) -> None:
        """End what was started; `closed` is set."""
        with self._lock:
            hosts, own = list(self.hosts.values()), self.own
        for host in hosts:
            host.close()
        if own is not None:
            own.close()

    def check_open(self) -> None:
        if self._closed.is_set():
            raise ConfigError("the job is closed; start another one with hw.near")

    def prepare(self, plan: Plan, version: int) -> Carried:
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
        if plan.sends_input and given.pipeline.text is not None:
            raise PlanError([f"codec is {plan.codec} in front of the model, and tokens travel as they are; set codec "
                             "to raw"])  # fmt: skip
        if plan.sends_input and given.rest:
            raise PlanError([f"codec is {plan.codec} in front of the model, so nodes shall make the model's input; "
                             "some transforms stay on the trainer: set codec to raw"])  # fmt: skip
        if plan.has_prefix and (plan.precision != FULL or wish(plan.engine)[1]):
            if not given.clients:
                raise PlanError([f'nodes="inline" computes with PyTorch in fp32; the plan wants {plan.precision} and '
                                 f"the engine {plan.engine}"])  # fmt: skip
            check_possible(given.clients, plan.precision, plan.engine)
        cut = given.cuts[plan.cut]
        digest, outputs = None, None
        boundary: Boundary = (given.pipeline.output_spec if plan.sends_input else given.pipeline.pixel_spec,)
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
        return Carried(version, plan, extraction, finish, workers, inline, own_name)

    def _host(self, *, beside_nodes: bool) -> HostWorker:
        """This process's own threads."""
        store = open_store(self._setting.samples.url)
        with self._lock:
            self.check_open()
            if beside_nodes not in self.hosts:
                threads = max(1, round(len(os.sched_getaffinity(0)) / self._setting.trainers))
                self.hosts[beside_nodes] = HostWorker(store, threads, beside_nodes=beside_nodes)
                self.hosts[beside_nodes].trace = self._setting.trace
            return self.hosts[beside_nodes]

    def _own_node(self, shipped: Shipped | None) -> OwnNode:
        """The node beside this process, which has this file."""
        given = self._setting
        assert given.start_own is not None
        if self.own is None:
            with given.progress.step("starting a process for this machine's share"):
                started = given.start_own()
                started.trace = given.trace
            with self._lock:
                if not self._closed.is_set():
                    self.own = started
            if self.own is None:
                started.close()
                self.check_open()
        assert self.own is not None
        if shipped is not None:
            self.own.needs(shipped.digest, shipped.path)
        self.own.prepare()
        return self.own

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


def _torch_prefix(captured: Captured, cut: Cut) -> Callable[..., Sequence[np.ndarray]]:
    module = prefix_module(captured, cut)
    device = captured.example[0].device

    def run(*inputs: np.ndarray) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [tensor.cpu().numpy() for tensor in module(*(torch.from_numpy(each).to(device) for each in inputs))]

    return run


def _finish(plan: Plan, pipeline: Transforms, rest: list[Any]) -> Finish:
    """How a batch's arrays become what the user's loop gets."""
    if plan.has_prefix:
        return lambda parts, ids: Rows(
            tuple(torch.from_numpy(tensor) for tensor in _joined(parts)), plan.cut, torch.from_numpy(ids)
        )
    if pipeline.text is not None:  # of several inputs rows are made, which stand for all of them
        return lambda parts, ids: Rows(
            pipeline.inputs_of(torch.from_numpy(pipeline.finish(_joined(parts)[0]))), 0, torch.from_numpy(ids)
        )
    if plan.sends_input:
        return lambda parts, ids: torch.from_numpy(_joined(parts)[0])
    if not rest:
        return lambda parts, ids: torch.from_numpy(_floats(pipeline, [part[0] for part in parts]))

    def run_rest(parts: Sequence[Sequence[np.ndarray]], ids: np.ndarray) -> torch.Tensor:
        from PIL import Image

        done = []
        for pixels in itertools.chain.from_iterable(part[0] for part in parts):
            value: Any = torch.from_numpy(pipeline.finish(pixels)) if pipeline.is_float else Image.fromarray(pixels)
            for step in rest:
                value = step(value)
            done.append(value)
        return torch.stack(done)

    return run_rest


def _joined(parts: Sequence[Sequence[np.ndarray]]) -> Sequence[np.ndarray]:
    return parts[0] if len(parts) == 1 else [np.concatenate(each) for each in zip(*parts, strict=True)]


def _floats(pipeline: Transforms, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The model's floats of all pixels; these are not put side by side before, since that is one more copy."""
    if len(parts) == 1:
        return pipeline.finish(parts[0])
    floats = np.empty((sum(map(len, parts)), *pipeline.output_spec.shape), np.float32)
    start = 0
    for part in parts:
        pipeline.finish(part, floats[start : start + len(part)])
        start += len(part)
    return floats

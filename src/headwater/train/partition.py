"""Training with the first layers on nodes: the door, and the job that a user's loop drives.

Owns `partition`, `PartitionJob` and `Batch`. Nodes make the rows of their part of each batch, run the prefix and its
gradients; the rest of the model, its loss and the optimizer are here. The model's parameters are always those of the
last step that was finished: nodes have copies, and get what changed before they begin with the next batch.
"""

from __future__ import annotations

import logging
import os
import queue
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.bundle import TYPES
from headwater.core.cut import Cut, find_cut
from headwater.core.form import shown
from headwater.core.order import Dealing, Order
from headwater.core.partition import deal, micro_bounds
from headwater.core.partition_plan import CODECS, HERE, NETWORK, NODES, SUMS, TRAINER, PartitionPlan
from headwater.data.extract import Extractor
from headwater.data.holdings import Holdings
from headwater.data.layouts import root_of
from headwater.data.parcel import TRAINING
from headwater.data.pixels import pixels_of
from headwater.data.samples import Samples
from headwater.data.secrets import redact
from headwater.data.shards.manifest import check_transforms
from headwater.data.store import full_url, open_store
from headwater.data.transforms import Transforms
from headwater.data.wire import Chunk, Extraction, Listing
from headwater.errors import ConfigError, DamagedError, HeadwaterError, UnreachableError
from headwater.model.capture import Captured, capture
from headwater.model.flow import flow, uses_batch_statistics
from headwater.model.split import suffix_from
from headwater.model.trainable import trainable, trainable_cuts
from headwater.progress import Progress
from headwater.train.access import Access
from headwater.train.attempt import Attempt, LossFn, LostError, Part, Work
from headwater.train.circle import Meetings
from headwater.train.client import NodeClient
from headwater.train.embedded import EmbeddedNode
from headwater.train.job import PATIENCE_S, example_of, list_on, read_transforms
from headwater.train.own import PLACE
from headwater.train.partition_measure import choose
from headwater.train.peer import Peer
from headwater.train.replicas import Replicas, is_passing

log = logging.getLogger(__name__)

SYNC, FROZEN = "sync", "frozen"
CHECK_EVERY = 50  # steps between two comparisons of all replicas
REDUCTIONS = ("mean", "sum")
_FORMAT = 1  # of `state_dict`


class Batch:
    """One batch of the order: `ids` says which samples it has, `labels` what they are. `backward` trains on it."""

    def __init__(self, job: PartitionJob, epoch: int, start: int, stop: int, ids: np.ndarray) -> None:
        self.epoch = epoch
        self.start, self.stop = start, stop
        self.ids = ids
        self.labels = torch.from_numpy(job.samples.labels[ids]).to(job.device)
        self._job = job

    def __len__(self) -> int:
        return len(self.ids)

    def backward(self, loss_fn: LossFn) -> Tensor:
        """`loss_fn(output, labels)` of this batch, and its gradients, added to every parameter's `.grad`."""
        return self._job.backward(self, loss_fn)


class PartitionJob:
    """`steps` gives the batches, `backward` of a batch trains on it; `close` (or `with`) lets go of everything.

    model            the user's own, with the current weights
    plan, ranking    what is carried out; every plan that was considered, with its estimated seconds a step
    num_steps        steps that were finished
    num_rolled_back  steps that were begun, dropped everywhere and done again, because a node was lost
    num_added        steps whose gradients nodes added up among themselves
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        cuts: tuple[Cut, ...],
        cut: Cut,
        plan: PartitionPlan,
        samples: Samples,
        holdings: Holdings | None,
        transforms: Transforms,
        clients: Sequence[NodeClient],
        resources: ExitStack,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        reduction: str,
        patience_s: float,
        check_every: int,
        ranking: Sequence[tuple[float, PartitionPlan]] = (),
    ) -> None:
        self.model = model
        self.cuts = cuts
        self.plan = plan
        self.ranking = tuple(
            ranking
        )  # every plan that was considered, with its estimated seconds a step, the best first
        self.samples = samples
        self.device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self.num_steps = 0  # that were finished
        self.num_rolled_back = 0
        self._holdings = holdings
        self._transforms = transforms
        self._clients = clients
        self._seed = seed
        self._patience_s = patience_s
        self._check_every = check_every
        self._checked_at = 0
        self._order = Order(len(samples), samples.fingerprint, seed, shuffle)
        self._dealing = Dealing(len(samples), batch_size, 1, drop_last)
        self._epoch, self._position = 0, 0
        self._attempts = self._keys = 0
        self._fetched: dict[tuple[int, int], tuple[Any, list[dict[int, Part]]]] = {}
        whole = flow(captured)
        suffix = suffix_from(whole, cut.index, whole.alive(cut.index))
        prefix = trainable(captured, [cut]) if plan.place == NODES and cut.index else None
        # A suffix that looks at its whole batch at once must get it whole.
        looks = any(uses_batch_statistics(node) for node in captured.graph_module.graph.nodes)
        self.num_micro = 1 if looks or plan.place == TRAINER else plan.micro_batches
        needs = prefix.needs_grad[cut.name] if prefix is not None else (False,)
        if plan.sums == NETWORK and prefix is not None:
            learning = prefix.graph.learning(prefix.graph.ends[-1])
            if others := sorted({spec.dtype for spec in learning.values()} - set(TYPES)):
                raise ConfigError(f"sums in the network are of {' and '.join(TYPES)}; the first layers have weights of "
                                  f"{', '.join(others)}; use sums='trainer'")  # fmt: skip
        boundary = cut.boundary if prefix is not None else (transforms.pixel_spec,)
        self._work = Work(suffix, boundary, needs, prefix, plan.codec, self._assemble, _trained(model), reduction,
                          plan.depth)  # fmt: skip
        self._learning = [id(each) for each in self._work.trainable]
        self._dtype = captured.example[0].dtype
        if plan.sums == NETWORK and not self._work.trains:
            raise ConfigError(f"sums are to be made in the network, and all in front of {cut.name} is frozen; cut "
                              "later, or use sums='trainer'")  # fmt: skip
        self._meetings = Meetings() if plan.sums == NETWORK else None
        self._labels: Tensor | None = None
        # Of a part. Twice as many where nodes compute: what they reserve leaves out what operators need for a moment.
        max_rows = -(-(1 if prefix is None else 2) * batch_size // self.num_micro)
        about = {"training": TRAINING, "url": samples.url, "transforms": transforms.to_json(), "seed": seed,
                 "codec": plan.codec, "job": f"partition-{os.getpid()}", "max_rows": max_rows, "ahead": batch_size,
                 "depth": min(plan.depth, self.num_micro), "measure": 0,
                 "graph": None if prefix is None else prefix.graph.to_json()}  # fmt: skip
        tensors = {} if prefix is None else prefix.tensors
        self._replicas = Replicas(clients, tensors, about, patience_s)
        self._here: _Here | None = None
        self._ending = resources
        self._close = weakref.finalize(self, resources.close)
        if plan.place == TRAINER:
            self._here = _Here(samples, transforms, seed)
            resources.callback(self._here.close)
        else:
            resources.callback(self._replicas.close)
            self._replicas.open()

    @property
    def num_added(self) -> int:
        """Steps whose gradients nodes added up among themselves."""
        return 0 if self._meetings is None else self._meetings.num_added

    # The loop

    def steps(self) -> Iterator[Batch]:
        """The batches of the epoch that the job stands in, from where it stands; then the next call begins the next
        one."""
        order = self._order.epoch(self._epoch)
        epoch = self._epoch
        while self._epoch == epoch and (step := self._dealing.step_at(self._position)) is not None:
            yield Batch(self, epoch, step.start, step.stop, order[step.start : step.stop])
            if self._epoch == epoch and self._position == step.start:
                self._position = step.stop  # it was passed over
        if self._epoch == epoch:
            self._epoch, self._position = epoch + 1, 0

    def backward(self, batch: Batch, loss_fn: LossFn) -> Tensor:
        """Forwards and backwards through nodes and this process; the loss. Gradients are added to `.grad`.

        `loss_fn(output, labels)` is the mean or the sum over its rows, as `reduction` said. Either all of it happens,
        or nothing: when a node is lost, what was begun is dropped everywhere and done again by those who are there.
        """
        if [id(each) for each in _trained(self.model)] != self._learning:
            raise ConfigError("requires_grad of the model's parameters is not what it was when the job was made; make "
                              "another job, from `state_dict` of this one")  # fmt: skip
        since: float | None = None
        while True:
            with self._as_it_was() as settle:
                try:
                    loss = self._alone(batch, loss_fn) if self._here is not None else self._together(batch, loss_fn)
                    settle()
                    break
                except LostError as lost:
                    self.num_rolled_back += 1
                    self._fetched.clear()
                    self._replicas.lose(lost.peer, lost.why)
                    since = since or time.monotonic()
                    if not is_passing(lost.why) or time.monotonic() - since > self._patience_s:
                        raise lost.why from None
        self.num_steps += 1
        self._epoch, self._position = batch.epoch, batch.stop
        if (
            self._work.prefix is not None
            and self._check_every
            and self.num_steps - self._checked_at >= self._check_every
        ):
            self.check()
        return loss

    def _together(self, batch: Batch, loss_fn: LossFn) -> Tensor:
        peers = self._replicas.present()
        while missing := self._missing(batch.ids, peers):
            self._replicas.wait_for(missing)
            peers = self._replicas.present()
        if self._work.prefix is not None:
            self._replicas.note_changes()
            for peer in peers.values():
                self._replicas.bring_up(peer)
            if self._meetings is not None:
                self._meetings.look(peers)
        if any(
            key != (batch.epoch, batch.start) or found[0] != _signature(peers) for key, found in self._fetched.items()
        ):
            self._fetched.clear()  # made for a batch that was passed over, or for other nodes
            for peer in peers.values():
                peer.send("drop")
        parts = self._fetch(batch.epoch, batch.start, batch.ids, peers)
        self._fetched.pop((batch.epoch, batch.start), None)
        bounds = micro_bounds(len(batch), self.num_micro)
        self._attempts += 1
        attempt = Attempt(self._attempts, self._work, peers, self._replicas.events, parts,
                          [batch.labels[start:stop] for start, stop in bounds], loss_fn,
                          partial(self._fetch_next, batch, peers), self._patience_s, self._meetings)  # fmt: skip
        try:
            attempt.run()
        except BaseException:
            self._fetched.clear()
            raise
        attempt.apply()
        for peer, why in attempt.gone.values():  # who made nothing of this batch
            self._replicas.lose(peer, why)
        self.waited_s, self.suffix_s = attempt.waited_s, attempt.suffix_s
        return attempt.loss

    def _alone(self, batch: Batch, loss_fn: LossFn) -> Tensor:
        """Nothing moves: the whole model, here."""
        assert self._here is not None
        rows = self._here.take(batch.epoch, batch.start, batch.ids)
        if (after := self._after(batch)) is not None:
            self._here.fetch(*after)
        loss = loss_fn(self._work.suffix(*self._assemble([rows])), batch.labels)
        found = torch.autograd.grad(loss, list(self._work.trainable), allow_unused=True)
        for tensor, grad in zip(self._work.trainable, found, strict=True):
            if grad is not None:
                tensor.grad = grad if tensor.grad is None else tensor.grad + grad
        return loss.detach()

    def check(self) -> None:
        """Compare every replica of the prefix with the model, bit by bit. DamagedError names one that differs."""
        if self._work.prefix is None or self._here is not None:
            return
        peers = self._replicas.present()
        self._replicas.note_changes()
        for peer in peers.values():
            self._replicas.bring_up(peer)
            peer.send("check")
        wanted, left = self._replicas.checksum(), dict(peers)
        deadline = time.monotonic() + max(60.0, self._patience_s)
        while left:
            try:
                peer, said = self._replicas.events.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() > deadline:  # as one that dies in a step: the others go on
                    for peer in left.values():
                        self._replicas.lose(peer, UnreachableError(f"{peer.name} does not answer a check"))
                    left.clear()
                continue
            if self._replicas.peers.get(peer.number) is not peer:
                continue
            if isinstance(said, HeadwaterError):
                self._replicas.lose(peer, said)
                left.pop(peer.number, None)
                if not is_passing(said):
                    raise said
            elif said.kind in ("met", "apart") and self._meetings is not None:
                try:
                    self._meetings.heard(peer, said)
                except DamagedError as error:
                    self._replicas.lose(peer, error)
                    left.pop(peer.number, None)
            elif said.kind == "checked" and said.about.get("version") == peer.version:  # not of a check that was ended
                left.pop(peer.number, None)
                if said.about.get("sum") != wanted:
                    raise DamagedError(
                        f"the copy of the prefix on {peer.name} is not the model's, after step {self.num_steps}; what "
                        f"was trained since step {self._checked_at} may be wrong: go on from what was saved before. "
                        "(Weights that were changed through .data look like this, too: PyTorch does not tell of that)"
                    )
        self._checked_at = self.num_steps

    def sync(self) -> None:
        """Every node gets the model's weights as they are now, and is checked to have them. The model itself always has
        them: `model.state_dict()` needs no call before it."""
        self.check()

    # Which rows are made where

    def _fetch(self, epoch: int, start: int, ids: np.ndarray, peers: Mapping[int, Peer]) -> list[dict[int, Part]]:
        """Have nodes begin with the rows of a batch, if they have not yet; for each micro-batch who makes which."""
        if (kept := self._fetched.get((epoch, start))) is not None:
            return kept[1]
        found: list[dict[int, Part]] = []
        shares = {number: self.plan.share(number) for number in peers}
        for first, last in micro_bounds(len(ids), self.num_micro):
            rows = ids[first:last]
            parts = {}
            for node, places in self._deal(rows, shares).items():
                self._keys += 1
                refs = (self.samples.take(rows[places]) if self._holdings is None
                        else self._holdings.refs(self._clients[node].name, rows[places].tolist()))  # fmt: skip
                peers[node].send(
                    "fetch", {"key": self._keys, "epoch": epoch, "samples": [ref.to_json() for ref in refs]}
                )
                parts[node] = Part(places, self._keys)
            found.append(parts)
        self._fetched[epoch, start] = _signature(peers), found
        return found

    def _deal(self, ids: np.ndarray, shares: Mapping[int, float]) -> dict[int, np.ndarray]:
        holdings = self._holdings
        if holdings is None or not holdings.is_split:
            return deal(len(ids), shares)
        return deal(len(ids), shares, lambda node, row: holdings.rows[self._clients[node].name][ids[row]] >= 0)

    def _missing(self, ids: np.ndarray, peers: Mapping[int, Peer]) -> set[int]:
        """Nodes of which one has to be waited for: nobody else has some sample."""
        holdings = self._holdings
        if holdings is None or not holdings.is_split:
            return set()
        for group in np.unique(holdings.groups[ids]).tolist():
            able = {number for number, client in enumerate(self._clients) if client.name in holdings.holders[group]}
            if not able & set(peers):
                return able
        return set()

    def _after(self, batch: Batch) -> tuple[int, int, np.ndarray] | None:
        """The batch behind this one."""
        step = self._dealing.step_at(batch.stop)
        if step is not None:
            return batch.epoch, step.start, self._order.epoch(batch.epoch)[step.start : step.stop]
        if (first := self._dealing.step_at(0)) is not None:
            return batch.epoch + 1, 0, self._order.epoch(batch.epoch + 1)[: first.stop]
        return None

    def _fetch_next(self, batch: Batch, peers: Mapping[int, Peer]) -> None:
        if (after := self._after(batch)) is not None and not self._missing(after[2], peers):
            self._fetch(*after, peers)

    def _assemble(self, rows: list[np.ndarray]) -> list[Tensor]:
        """What the suffix takes, of rows as they come."""
        if self._work.prefix is None:
            rows = [self._transforms.finish(rows[0]) if rows[0].dtype == np.uint8 else rows[0]]
            return [torch.from_numpy(np.ascontiguousarray(rows[0])).to(self.device, self._dtype)]
        return [torch.from_numpy(each if each.flags.writeable else np.array(each)).to(self.device) for each in rows]

    @contextmanager
    def _as_it_was(self) -> Iterator[Callable[[], None]]:
        """Buffers of the model and the state of random numbers, put back unless what is yielded was called."""
        buffers = [(each, each.detach().clone()) for each in self.model.buffers()]
        random = torch.get_rng_state()
        settled = False

        def settle() -> None:
            nonlocal settled
            settled = True

        try:
            yield settle
        finally:
            if not settled:
                with torch.no_grad():
                    for buffer, before in buffers:
                        if not torch.equal(buffer, before):
                            buffer.copy_(before)
                torch.set_rng_state(random)

    # What is kept of it

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands; with the model's and the optimizer's own, all there is to a run."""
        return {"format": _FORMAT, "epoch": self._epoch, "position": self._position, "steps": self.num_steps,
                "seed": self._seed, "fingerprint": self.samples.fingerprint}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there: on any number of nodes, and at any cut."""
        if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
            said = shown(state.get("format") if isinstance(state, Mapping) else state)
            raise ConfigError(f"a state of format {said}; this version reads {_FORMAT}")
        for name, found in (("seed", self._seed), ("fingerprint", self.samples.fingerprint)):
            if state.get(name) != found:
                raise ConfigError(f"the state is of another {name} ({shown(state.get(name))}, here {found!r}); resume "
                                  "with the same data and seed")  # fmt: skip
        counts = [state.get(name) for name in ("epoch", "position", "steps")]
        if not all(type(each) is int and 0 <= each < 2**63 for each in counts):
            raise ConfigError("the state does not say where the job stood (epoch, position, steps); use one that "
                              "`state_dict` gave")  # fmt: skip
        self._epoch, self._position, steps = (int(each or 0) for each in counts)
        self.num_steps = self._checked_at = steps
        self._fetched.clear()
        for peer in self._replicas.peers.values():
            peer.send("drop")

    def save(self, path: str | os.PathLike[str], optimizer: Any = None, **more: Any) -> None:
        """The whole run in one file, at once or not at all: the model, where the job stands, the optimizer, and
        anything else that has a `state_dict` (a schedule, a scaler)."""
        parts = {"optimizer": optimizer, **more}
        state = {"model": self.model.state_dict(), "job": self.state_dict(), "random": torch.get_rng_state(),
                 **{name: each.state_dict() for name, each in parts.items() if each is not None}}  # fmt: skip
        target = Path(path)
        partial_file = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            torch.save(state, partial_file)
            os.replace(partial_file, target)
        except OSError as error:
            partial_file.unlink(missing_ok=True)
            raise ConfigError(f"the run can't be saved in {os.fspath(path)} ({error.strerror})") from None

    def load(self, path: str | os.PathLike[str], optimizer: Any = None, **more: Any) -> None:
        """The way back from `save`, into the same model and optimizer. ConfigError if the file can't be read, lacks one
        of them, or is of other data or another seed."""
        try:
            state = torch.load(path, weights_only=True, map_location=self.device)
        except OSError as error:
            raise ConfigError(f"{os.fspath(path)} can't be read ({error.strerror})") from None
        except Exception as error:  # torch's own, of a file that is damaged, or none of its
            raise _no_run(path, error) from error
        parts = {"optimizer": optimizer, **more}
        names = set(state) if isinstance(state, dict) else set()
        missing = [name for name, each in parts.items() if each is not None and name not in names]
        if missing or not {"model", "job", "random"} <= names:
            raise ConfigError(f"{os.fspath(path)} has no {', '.join(missing) or 'whole run'} in it; it has "
                              f"{', '.join(sorted(map(str, names)))[:500] or 'nothing that has a name'}")  # fmt: skip
        try:
            self.load_state_dict(state["job"])
            self.model.load_state_dict(state["model"])
            for name, each in parts.items():
                if each is not None:
                    each.load_state_dict(state[name])
            torch.set_rng_state(state["random"].cpu())
        except HeadwaterError:
            raise
        except Exception as error:
            raise _no_run(path, error) from error

    def describe(self) -> str:
        """In one line: what runs where."""
        return self.plan.describe(self._work.boundary, len(self._clients), self.num_micro)

    def close(self) -> None:
        """Hang up, and end the embedded node if there is one. The model stays as it is."""
        self._close()

    def __enter__(self) -> PartitionJob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Here:
    """Rows made in this process, one batch ahead."""

    def __init__(self, samples: Samples, transforms: Transforms, seed: int) -> None:
        self._samples = samples
        self._pattern = Chunk(
            Extraction(samples.url, transforms, None, (transforms.output_spec,)), "here", seed, 0, 0, ()
        )
        self._store = open_store(samples.url)
        self._extractor = Extractor(len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(1, "pixels")
        self._closed = False
        self._coming: dict[tuple[int, int], Future[np.ndarray]] = {}

    def fetch(self, epoch: int, start: int, ids: np.ndarray) -> None:
        if (epoch, start) not in self._coming:
            chunk = replace(self._pattern, epoch=epoch, samples=tuple(self._samples.take(ids)))
            self._coming[epoch, start] = self._pool.submit(pixels_of, self._extractor, lambda: self._store, chunk,
                                                           lambda: self._closed)  # fmt: skip

    def take(self, epoch: int, start: int, ids: np.ndarray) -> np.ndarray:
        self.fetch(epoch, start, ids)
        found = self._coming.pop((epoch, start)).result()
        self._coming = {key: each for key, each in self._coming.items() if key > (epoch, start)}
        return found

    def close(self) -> None:
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._extractor.close()


def partition(
    model: nn.Module,
    data: str | os.PathLike[str],
    *,
    transforms: Any,
    nodes: Sequence[str] | None = None,
    cut: str | int = "auto",
    batch_size: int = 32,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    batch_norm: str = SYNC,
    codec: str = "raw",
    micro_batches: int | None = None,
    shares: Sequence[float] | None = None,
    sums: str | None = None,
    plan: PartitionPlan | None = None,
    reduction: str = "mean",
    check_every: int = CHECK_EVERY,
    layout: str = "auto",
    path_column: str | int | None = None,
    label_column: str | int | None = None,
    patience_s: float = PATIENCE_S,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls_cert: str | os.PathLike[str] | None = None,
    tls_key: str | os.PathLike[str] | None = None,
) -> PartitionJob:
    """Train all of `model` on the pictures at `data`, its first layers on the nodes that have them.

    Returns a PartitionJob. ConfigError for arguments that make no sense or can't be had together, ModelError for a
    model that can't be captured, cut there or run on nodes, DataError and NodeError as for `near`; all before the first
    step.

        job = hw.partition(model, "s3://photos/train", nodes=[...], transforms=..., batch_size=512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(90):
            for batch in job.steps():
                optimizer.zero_grad()
                loss = batch.backward(cross_entropy)     # forwards and backwards, on nodes and here at once
                optimizer.step()                         # any optimizer: the model here is the one that is trained

    model          any module that torch.export can capture, in the modes it is in now; what nodes run of it must
                   consist of operators that they know. Parts may be frozen (requires_grad)
    data, transforms, batch_size, seed, shuffle, drop_last, layout, path_column, label_column   as for `near`
    patience_s, token, tls_ca, tls_cert, tls_key   as for `near`
    nodes          addresses; nodes that train need PyTorch (pip install 'headwater[node-train]'). None starts a node
                   beside this process, for a first try
    cut            where the model is divided: the name or index of a cut (`headwater cuts`), "input" to have pixels
                   made on the nodes and train here, "none" to move nothing; "auto" measures and takes the fastest of
                   them
    batch_norm     "sync": batch-norms in training mode use the statistics of the whole batch, as in one process;
                   "frozen": they use their running statistics, which stay as they are
    codec          how rows and their gradients travel: "raw" (exact), "fp16" or "bf16"
    micro_batches  in how many parts a batch goes through nodes and this process, at the same time; with batch-norms in
                   training mode always 1, as their statistics are those of the batch. Default: planned, or 4
    shares         what part of each batch each node makes; by default measured ("auto"), or equal
    sums           where nodes' gradients are added up: by the "trainer", or in the "network", on the aggregator that
                   nodes were given (`headwater serve --reduce`), so that the trainer's link carries one sum
    plan           a PartitionPlan fixes all of this
    reduction      what `loss_fn` does with a batch: "mean" over samples, or their "sum"
    check_every    steps between two comparisons of all replicas, bit by bit; 0 for none
    """
    if batch_norm not in (SYNC, FROZEN):
        raise ConfigError(f"batch_norm is {batch_norm!r}; it must be {SYNC!r} or {FROZEN!r}")
    if codec not in CODECS:
        raise ConfigError(f"codec {codec!r} is not one of {', '.join(CODECS)}, which training can do with")
    if sums is not None and sums not in SUMS:
        raise ConfigError(f"sums is {sums!r}; it must be one of {', '.join(SUMS)}")
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction is {reduction!r}; it must be one of {', '.join(REDUCTIONS)}")
    if nodes is not None and (isinstance(nodes, str) or not nodes):
        raise ConfigError(f"nodes is {nodes!r}; it must be a list of addresses, or None")
    given = {"token": token, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    if nodes is None and any(given.values()):
        raise ConfigError(f"{', '.join(name for name in given if given[name])} is for nodes of your own; name them")
    pipeline, rest = read_transforms(transforms)
    if rest:
        raise ConfigError("some transforms can't run near the data, and here the model begins there; use ones that can")
    if pipeline.text is not None:
        raise ConfigError("partition trains on pictures, and these transforms are of texts; keep what is frozen of the "
                          "model near them with headwater.near, or train it all here")  # fmt: skip
    url, progress = full_url(os.fspath(data)), Progress()
    with ExitStack() as stack:
        if nodes is None and (cut == "none" or (plan is not None and plan.place == TRAINER)):
            clients: list[NodeClient] = []
        elif nodes is None:
            node = EmbeddedNode(root_of(url), None, 0)
            stack.callback(node.close)
            clients = [NodeClient(node.address, node.access, PLACE)]
        else:
            access = Access.of(**given)
            clients = [NodeClient(address, access) for address in nodes]
        for client in clients:
            stack.callback(client.close)
            client.hello()
        with progress.step(f"listing {redact(url)}") as tick:
            samples, holdings = list_on(clients, Listing(url, layout, path_column, label_column), tick,
                                        patience_s)  # fmt: skip
        check_transforms(samples, pipeline)
        with progress.step("capturing the model"):
            example = tuple(each.to(_dtype(model)) for each in example_of(model, pipeline))
            with _norms_frozen(model) if batch_norm == FROZEN else _nothing():
                captured = capture(model, example)
            all_cuts = trainable_cuts(captured)
        ranking: list[tuple[float, PartitionPlan]] = []
        if plan is None and cut == "auto":
            plan, ranking = choose(captured, all_cuts, pipeline, samples, clients, holdings, batch_size=batch_size,
                                   seed=seed, codec=codec, micro_batches=micro_batches, sums=sums or HERE,
                                   progress=progress)  # fmt: skip
        elif plan is None:
            place = TRAINER if cut == "none" else NODES
            found = all_cuts[0] if cut == "none" else find_cut(all_cuts, cut)
            plan = PartitionPlan(place, found.index, found.name, codec, micro_batches or 4, sums=sums or HERE)
        elif sums is not None:
            plan = replace(plan, sums=sums)
        if shares is not None:
            plan = replace(plan, shares=tuple(float(each) for each in shares))
        plan.check(len(clients), len(all_cuts))
        if plan.sums == NETWORK and (lacking := [each.name for each in clients if not each.hello().get("adds_up")]):
            raise ConfigError(f"sums are to be made in the network, and {', '.join(lacking)} has no aggregator; give "
                              "all nodes the same one (headwater serve --reduce HOST:PORT), or use "
                              "sums='trainer'")  # fmt: skip
        if plan.place == TRAINER and holdings is not None and holdings.is_split:
            raise ConfigError("the pictures lie on nodes' own disks, so that they can't be read here; choose a cut")
        resources = stack.pop_all()
        try:
            return PartitionJob(model, captured, all_cuts, find_cut(all_cuts, plan.cut_index), plan, samples, holdings,
                                pipeline, clients, resources, batch_size=batch_size, seed=seed, shuffle=shuffle,
                                drop_last=drop_last, reduction=reduction, patience_s=patience_s,
                                check_every=check_every, ranking=ranking)  # fmt: skip
        except BaseException:  # nobody gets the job that would end them
            resources.close()
            raise


def _no_run(path: str | os.PathLike[str], error: Exception) -> ConfigError:
    return ConfigError(f"{os.fspath(path)} can't be used with this job ({type(error).__name__}: {str(error)[:300]}); "
                       "load what this model and optimizer have saved")  # fmt: skip


def _signature(peers: Mapping[int, Peer]) -> tuple[tuple[int, int], ...]:
    """Which sessions these are."""
    return tuple(sorted((number, id(peer)) for number, peer in peers.items()))


def _trained(model: nn.Module) -> list[Tensor]:
    return [each for each in model.parameters() if each.requires_grad]


def _dtype(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


@contextmanager
def _norms_frozen(model: nn.Module) -> Iterator[None]:
    """Batch-norms as in evaluation, for as long as the model is captured."""
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training]
    for each in norms:
        each.training = False
    try:
        yield
    finally:
        for each in norms:
            each.training = True


@contextmanager
def _nothing() -> Iterator[None]:
    yield

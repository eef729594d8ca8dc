"""One try at a step of partitioned training: what `core.partition.Step` decides, carried out.

Owns `Attempt`. Everything that it makes is kept apart (gradients, statistics, the loss) until `apply`; a try that ends
otherwise has touched nothing but buffers of the suffix, which whoever began it puts back.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.bundle import unbundle
from headwater.core.owed import GIVE_UP_TIMES, GivenUp, Owed
from headwater.core.partition import (
    Add,
    Backward,
    Collect,
    Decision,
    Drop,
    Finish,
    Forward,
    Join,
    Moments,
    RolledBack,
    Step,
    Suffix,
    merged,
)
from headwater.core.spec import Boundary
from headwater.data.parcel import Parcel, pack_rows, unpack_rows
from headwater.errors import DamagedError, HeadwaterError, UnreachableError
from headwater.model.trainable import Trainable
from headwater.train.circle import Meetings
from headwater.train.peer import SILENT_S, Event, Peer, SilentError
from headwater.train.reply import QUIET_S

log = logging.getLogger(__name__)

LossFn = Callable[[object, Tensor], Tensor]
Assemble = Callable[[list[np.ndarray]], list[Tensor]]


@dataclass(frozen=True)
class Part:
    """Rows of a micro-batch that one node makes: their places in it, and under which number it makes them."""

    places: np.ndarray
    key: int


@dataclass(frozen=True, eq=False)
class Work:
    """What every step does, whatever its batch."""

    suffix: nn.Module
    boundary: Boundary
    needs: tuple[bool, ...]  # which tensors of the boundary get gradients
    prefix: Trainable | None  # None: pixels cross
    codec: str
    assemble: Assemble  # from rows as they come to what the suffix takes
    trainable: Sequence[Tensor]  # by the suffix, or by the loss
    reduction: str
    depth: int

    @property
    def trains(self) -> bool:
        return any(self.needs)


class LostError(Exception):
    """A node has gone in the middle of it."""

    def __init__(self, peer: Peer, why: HeadwaterError) -> None:
        super().__init__(str(why))
        self.peer = peer
        self.why = why


class Attempt:
    """`parts[m][node]` are the rows of micro-batch m that a node makes; `labels[m]` are that micro-batch's."""

    def __init__(
        self,
        number: int,
        work: Work,
        peers: Mapping[int, Peer],
        events: queue.SimpleQueue[Event],
        parts: Sequence[Mapping[int, Part]],
        labels: Sequence[Tensor],
        loss_fn: LossFn,
        meanwhile: Callable[[], None],
        patience_s: float,
        meetings: Meetings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`number` is that of no other try. `meanwhile` is called once, when nodes have begun. A node that lives and
        gets nothing done is told of after `patience_s`, and lost after ten times that. With `meetings` nodes add up
        among themselves where they can."""
        self._number = number
        self._work = work
        self._peers = peers
        self._events = events
        self._parts = parts
        self._labels = labels
        self._loss_fn = loss_fn
        self._meanwhile = meanwhile
        self._quiet_s = patience_s or QUIET_S  # 0 is for nodes that are gone
        self._clock = clock
        self._owed = Owed(self._quiet_s)
        self._num_rows = sum(len(each) for each in labels)
        self._meetings, self._circle = meetings, -1 if meetings is None else meetings.number
        self._step = Step([frozenset(each) for each in parts], depth=work.depth, trains=work.trains,
                          circle=frozenset() if meetings is None else meetings.members)  # fmt: skip
        self._adding: set[int] = set()  # nodes that have begun to add up
        self._taking = {node for part in parts for node in part}
        self._rows: list[dict[int, list[np.ndarray]]] = [{} for _ in parts]
        self._back: list[list[np.ndarray]] = [[] for _ in parts]
        self._norms: dict[int, dict[int, Parcel]] = {}
        self._statistics: dict[int, Moments] = {}
        self._sums: dict[int, Mapping[str, np.ndarray]] = {}  # of each node, or of all of them by way of one
        self._grads: list[Tensor | None] = [None] * len(work.trainable)
        self.gone: dict[int, tuple[Peer, HeadwaterError]] = {}
        self.loss = torch.zeros(())
        self.waited_s = self.suffix_s = 0.0

    def run(self) -> None:
        """Until everything has come; LostError, or what went wrong, if it does not."""
        try:
            finished = self._carry_out(self._step.begin())
            self._meanwhile()
            while not finished:
                finished = self._carry_out(self._hear())
        except BaseException:  # a loss that can't be computed, Ctrl-C: nobody keeps anything of it
            self._carry_out(self._step.abandon())
            raise

    def apply(self) -> None:
        """The step has happened: gradients are added to the parameters', running statistics move on."""
        work = self._work
        for tensor, grad in zip(work.trainable, self._grads, strict=True):
            if grad is not None:
                _add(tensor, grad)
        if work.prefix is None:
            return
        sums: dict[str, np.ndarray] = {}
        for node in sorted(self._sums):  # in a fixed order, so that a run repeats bit by bit
            for name, each in self._sums[node].items():
                sums[name] = sums[name] + each if name in sums else each
        for name, each in sums.items():
            tensor = work.prefix.tensors[name]
            _add(tensor, torch.from_numpy(np.array(each)).to(tensor.device))
        with torch.no_grad():
            for number, found in self._statistics.items():
                norm = work.prefix.norms[number]
                unbiased = found.squares / max(1, found.count - 1)
                for running, value in ((norm.running_mean, found.mean), (norm.running_var, unbiased)):
                    if running is not None:
                        running.mul_(1 - norm.momentum).add_(torch.from_numpy(value).to(running), alpha=norm.momentum)
            for counter, by in work.prefix.counters:
                counter.add_(by)

    def _hear(self) -> list[Decision]:
        """What a node says next, and what follows from it."""
        start = time.perf_counter()
        while True:
            try:
                peer, said = self._events.get(timeout=1.0)
            except queue.Empty:
                if (silent := self._silent(self._clock())) is not None:
                    return self._lost(*silent)
                continue
            if self._peers.get(peer.number) is not peer:
                continue  # of a session that has ended
            self.waited_s += time.perf_counter() - start
            self._owed.heard(peer.number, self._clock())
            if isinstance(said, HeadwaterError):
                return self._lost(peer, said)
            try:
                return self._said(peer, said)
            except HeadwaterError as error:
                return self._lost(peer, DamagedError(f"{peer.name}: {error}"))

    def _silent(self, now: float) -> tuple[Peer, HeadwaterError] | None:
        """One that is not there any more, or does nothing any more."""
        for peer in self._peers.values():
            if now - peer.heard > SILENT_S:
                return peer, UnreachableError(f"{peer.name} has said nothing for {SILENT_S:g} s")
            self._owed.heard(peer.number, peer.moved)
        for each in self._owed.overdue(now):
            peer = self._peers[each.node]
            if isinstance(each, GivenUp):
                return peer, SilentError(f"{peer.name} answers, and has sent nothing of a step for {each.silent_s:.0f} "
                                         "s; can it read the data (a store or a disk that hangs)? Its log may say "
                                         "more")  # fmt: skip
            log.warning("%s answers, and has sent nothing of a step for %.0f s; it is waited for up to %g s", peer.name,
                        each.silent_s, GIVE_UP_TIMES * self._quiet_s)  # fmt: skip
        return None

    def _lost(self, peer: Peer, why: HeadwaterError) -> list[Decision]:
        self.gone[peer.number] = peer, why
        return self._step.lost(peer.number)

    def _said(self, peer: Peer, parcel: Parcel) -> list[Decision]:
        if parcel.kind in ("met", "apart"):
            return self._met(peer, parcel)
        if parcel.kind in ("committed", "dropped", "waiting") or parcel.about.get("step") != self._number:
            return []
        node = peer.number
        if parcel.kind == "rows":
            micro = parcel.number("micro", 0, len(self._parts) - 1)
            part = self._parts[micro].get(node)
            if part is None:
                raise DamagedError(f"rows of micro-batch {micro}, of which it makes none")
            codec = self._work.codec if self._work.prefix is not None else "raw"
            self._rows[micro][node] = unpack_rows(codec, self._work.boundary, parcel, len(part.places))
            self._owed.answered(node)
            return self._step.rows(node, micro)
        if parcel.kind == "norm":
            return self._norm(node, parcel)
        if parcel.kind == "grads":
            self._sums[node] = self._checked(parcel)
            self._owed.answered(node)
            return self._step.grads(node)
        if parcel.kind == "adding":
            return self._adds(node)
        if parcel.kind == "sum":
            return self._summed(node, parcel)
        raise DamagedError(f"a message of kind {parcel.kind[:40]!r}")

    def _met(self, peer: Peer, parcel: Parcel) -> list[Decision]:
        """What it says of a circle, whichever step it was in. Who is apart from this step's ends that for all."""
        if self._meetings is None:
            raise DamagedError(f"a message of kind {parcel.kind}, and nodes were not told to meet")
        if not self._meetings.heard(peer, parcel) or parcel.about.get("number") != self._circle:
            return []
        if self._adding == self._taking and self._step.awaits_sum:  # nobody owes that any more
            self._owed.answered(min(self._taking))
        return self._step.apart(peer.number)

    def _adds(self, node: int) -> list[Decision]:
        """It waits for the others from now on. Once all do, the sum is owed by whoever passes it on."""
        if node not in self._taking or node in self._adding or self._meetings is None:
            raise DamagedError("it adds up what nobody asked it to")
        self._adding.add(node)
        self._owed.answered(node)
        if self._adding == self._taking and self._step.awaits_sum:
            self._owed.asked(min(self._taking), self._clock())
        return []

    def _summed(self, node: int, parcel: Parcel) -> list[Decision]:
        """The sum of all nodes' gradients."""
        if self._work.prefix is None or self._meetings is None:
            raise DamagedError("a sum of all gradients that nobody asked for")
        graph = self._work.prefix.graph
        sums = unbundle(parcel.arrays, graph.learning(graph.ends[-1]))
        decisions = self._step.summed(node)
        self._sums = {node: sums}
        self._meetings.added()
        self._owed.answered(node)
        return decisions

    def _checked(self, parcel: Parcel) -> Mapping[str, np.ndarray]:
        prefix = self._work.prefix
        if prefix is None:
            raise DamagedError("gradients of a prefix, and no node has one")
        for name in parcel.arrays:
            if name not in prefix.graph.trained:
                raise DamagedError(f"gradients of {name[:80]!r}, which is not trained")
            parcel.array(name, prefix.graph.weights[name].shape, prefix.graph.weights[name].dtype)
        return parcel.arrays

    def _norm(self, node: int, parcel: Parcel) -> list[Decision]:
        number = parcel.number("round")
        found = self._moments(parcel)
        if len(self._taking) == 1:  # nobody waits for it
            self._note_statistics(found, parcel)
            return []
        self._norms.setdefault(number, {})[node] = parcel
        self._owed.holds(node)
        return self._step.norm(node, number)

    def _moments(self, parcel: Parcel) -> Moments:
        sums = parcel.arrays.get("sums")
        if sums is None or sums.ndim != 2 or len(sums) != 2 or sums.dtype.kind != "f":
            raise DamagedError("statistics came in another form")
        low = 1 if parcel.about.get("way") == "forward" else 0  # backwards, sums are only added up
        return Moments(parcel.number("count", low), sums[0].astype(np.float64), sums[1].astype(np.float64))

    def _note_statistics(self, found: Moments, parcel: Parcel) -> None:
        prefix = self._work.prefix
        if prefix is None:
            raise DamagedError("statistics of a prefix, and no node has one")
        number = parcel.number("norm", 0, len(prefix.norms) - 1)
        for running in (prefix.norms[number].running_mean, prefix.norms[number].running_var):
            if running is not None and found.mean.shape != tuple(running.shape):
                raise DamagedError(f"statistics of {len(found.mean):,} channels; the batch-norm has {len(running):,}")
        self._statistics[number] = found

    def _join(self, number: int) -> list[Decision]:
        """Add up what all nodes said in a round, in the order of nodes, and tell them."""
        said = self._norms.pop(number)
        try:
            return self._joined(number, said)
        except HeadwaterError as error:
            peer = self._peers[min(said)]
            return self._lost(peer, DamagedError(f"{peer.name}: {error}"))

    def _joined(self, number: int, said: Mapping[int, Parcel]) -> list[Decision]:
        first = said[min(said)]
        for node, parcel in said.items():
            for word in ("way", "norm"):
                if parcel.about.get(word) != first.about.get(word):
                    return self._lost(
                        self._peers[node], DamagedError(f"{self._peers[node].name} is at another batch-norm")
                    )
        parts = [self._moments(said[node]) for node in sorted(said)]
        if len({part.mean.shape for part in parts}) != 1:
            return self._lost(
                self._peers[min(said)], DamagedError("nodes' statistics have different numbers of channels")
            )
        dtype, about = first.arrays["sums"].dtype, {"step": self._number, "round": number}
        if first.about.get("way") == "forward":
            found = merged(parts)
            self._note_statistics(found, first)
            sums, about["count"] = np.stack([found.mean, found.variance]), found.count
        else:
            sums = np.stack([sum(part.mean for part in parts), sum(part.squares for part in parts)])
        for node in said:
            self._peers[node].send("norm", about, {"sums": sums.astype(dtype)})
            self._owed.goes_on(node, self._clock())
        return []

    def _carry_out(self, decisions: list[Decision]) -> bool:
        """True once the step is finished."""
        pending = list(decisions)
        while pending:
            match pending.pop(0):
                case Forward(node, micro):
                    about = {"step": self._number, "micro": micro, "key": self._parts[micro][node].key,
                             "version": self._peers[node].version if self._work.prefix is not None else 0,
                             "alone": len(self._taking) == 1, "passes": not self._work.trains}  # fmt: skip
                    self._peers[node].send("forward", about)
                    self._owed.asked(node, self._clock())
                case Suffix(micro):
                    self._suffix(micro)
                    pending += self._step.suffixed(micro)
                case Backward(node, micro):
                    self._send_back(node, micro)
                case Collect(node):
                    self._peers[node].send("collect", {"step": self._number})
                    self._owed.asked(node, self._clock())
                case Add(node, passes):
                    if passes and self._meetings is not None:
                        self._meetings.begins()
                    self._peers[node].send("add", {"step": self._number, "number": self._circle, "passes": passes})
                    self._owed.asked(node, self._clock())
                case Join(number):
                    pending += self._join(number)
                case Finish():
                    return True
                case Drop(node):
                    self._peers[node].send("drop")
                case RolledBack(node):
                    raise LostError(*self.gone[node])
        return False

    def _suffix(self, micro: int) -> None:
        start = time.perf_counter()
        labels, work = self._labels[micro], self._work
        inputs = work.assemble(self._gathered(micro))
        learning = [each.requires_grad_() for each, needs in zip(inputs, work.needs, strict=True) if needs]
        loss = self._loss_fn(work.suffix(*inputs), labels)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise TypeError(f"the loss must be a tensor with one number, not {loss!r:.80}")
        if work.reduction == "mean":
            loss = loss * (len(labels) / self._num_rows)
        found = torch.autograd.grad(loss, [*learning, *work.trainable], allow_unused=True)
        self.loss = self.loss.to(loss) + loss.detach()
        for each, tensor in zip(found[: len(learning)], learning, strict=True):
            grad = torch.zeros_like(tensor) if each is None else each
            self._back[micro].append(grad.detach().cpu().numpy())
        for place, grad_of in enumerate(found[len(learning) :]):
            if grad_of is not None:
                before = self._grads[place]
                self._grads[place] = grad_of if before is None else before + grad_of
        self.suffix_s += time.perf_counter() - start

    def _gathered(self, micro: int) -> list[np.ndarray]:
        """Rows of all nodes, each in its place."""
        rows, parts = self._rows[micro], self._parts[micro]
        self._rows[micro] = {}
        if len(rows) == 1:
            return next(iter(rows.values()))
        found = []
        for place, spec in enumerate(self._work.boundary):
            whole = np.empty((len(self._labels[micro]), *spec.shape), spec.dtype)
            for node, arrays in rows.items():
                whole[parts[node].places] = arrays[place]
            found.append(whole)
        return found

    def _send_back(self, node: int, micro: int) -> None:
        work = self._work
        places = self._parts[micro][node].places
        boundary = tuple(spec for spec, needs in zip(work.boundary, work.needs, strict=True) if needs)
        rows = [each[places] for each in self._back[micro]]
        scales = [_scale(each) if work.codec == "fp16" else 1.0 for each in rows]
        scaled = [
            each if scale == 1.0 else each * np.asarray(scale, each.dtype)
            for each, scale in zip(rows, scales, strict=True)
        ]
        about = {"step": self._number, "micro": micro, "scales": scales}
        self._peers[node].send("backward", about, pack_rows(work.codec, boundary, scaled))


def _scale(values: np.ndarray) -> float:
    """A power of two that brings gradients, which are often tiny, to where half precision has its digits."""
    largest = float(np.max(np.abs(values), initial=0.0))
    if not math.isfinite(largest) or largest == 0.0:
        return 1.0
    return 2.0 ** max(-100, min(100, 10 - math.frexp(largest)[1]))


def _add(tensor: Tensor, grad: Tensor) -> None:
    if tensor.grad is None:
        tensor.grad = grad.to(tensor.dtype).clone()
    else:
        tensor.grad.add_(grad)

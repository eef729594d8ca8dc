"""A table as its trainer sees it: parts on nodes, asked together, each until it has answered.

Owns `Table`, and `Line`, the thread that talks to one part: calls go out in order, and each is repeated while its node
is away. That is safe: a step that came twice is done once (`core.once`). What a node forgot when it was started again,
staged bags, is sent again.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from headwater.core.ahead import Ahead, Take
from headwater.core.bags import Bags
from headwater.core.form import from_json, to_json
from headwater.core.once import meeting
from headwater.core.table import TableSpec
from headwater.data import tablewire
from headwater.data.tablewire import ACTION, UNKNOWN_BATCH, bags_arrays, pack, unpack
from headwater.errors import ConfigError, DamagedError, HeadwaterError, NodeError, RefusedError, UnreachableError
from headwater.train.client import NodeClient

PATIENCE_S = 60.0  # for a node that is away
CLOSE_WITHIN_S = 5.0
_PAUSE_S = 0.1
READ_BYTES = 16 << 20  # of vectors, at a time

_Answer = tuple[dict[str, Any], dict[str, np.ndarray]]


@dataclass
class _Call:
    """`message` makes it; its argument says whether the node has forgotten the bags it is about."""

    message: Callable[[bool], bytes]
    answers: list[Future[_Answer]]
    bags: tuple[int, Bags] | None = None  # what to stage again, if that is not in the message
    is_step: bool = False  # what comes later counts on it


class Line:
    """One part of a table, on its node."""

    def __init__(self, client: NodeClient, table: str, part: int, lease: str, patience_s: float) -> None:
        self.client = client
        self.sent_bytes = self.received_bytes = 0
        self.num_repeats = 0  # calls that found the node away, each time
        self._about = {"table": table, "part": part, "lease": lease}
        self.patience_s = patience_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._fault: HeadwaterError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"table {table} {part}", daemon=True)
        self._thread.start()

    def message(self, header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> bytes:
        return pack({**self._about, **header}, arrays)

    def ask(
        self,
        message: Callable[[bool], bytes],
        num_answers: int = 1,
        bags: tuple[int, Bags] | None = None,
        *,
        is_step: bool = False,
    ) -> list[Future[_Answer]]:
        """What will be answered, in its turn."""
        call = _Call(message, [Future() for _ in range(num_answers)], bags, is_step)
        self._calls.put(call)
        return call.answers

    def now(self, header: dict[str, Any], arrays: dict[str, np.ndarray] | None = None) -> _Answer:
        """Ask, and wait."""
        return self.ask(lambda _: self.message(header, arrays))[0].result()

    def close(self) -> None:
        """When what was asked is answered, or at once if the node is away."""
        self._calls.put(None)
        self._closed.set()
        if threading.current_thread() is not self._thread:  # which may be who finds that nobody has the table any more
            self._thread.join()
        self.client.close()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if self._fault is not None:
                    raise self._fault
                self._persist(call)
            except BaseException as error:
                if call.is_step and self._fault is None:  # nothing more is said to the node
                    known = isinstance(error, HeadwaterError)
                    self._fault = error if known else NodeError(f"{type(error).__name__}: {error}")  # type: ignore[assignment]
                for answer in call.answers:
                    if not answer.done():
                        answer.set_exception(error)

    def _persist(self, call: _Call) -> None:
        since, forgot, restaged = time.monotonic(), False, False
        while True:
            try:
                self._once(call, forgot)
                return
            except UnreachableError as error:
                self.num_repeats += 1
                if time.monotonic() - since > self.patience_s or self._closed.wait(_PAUSE_S):
                    raise UnreachableError(f"{error} (waited {time.monotonic() - since:.0f} s; the step is not lost "
                                           "there: start the node again, and load your "
                                           "checkpoint)") from None  # fmt: skip
            except RefusedError as error:
                if UNKNOWN_BATCH not in str(error) or restaged:
                    raise
                forgot = restaged = True
                if call.bags is not None:
                    number, bags = call.bags
                    again = self.message({"what": "stage", "number": number}, bags_arrays(bags))
                    self._once(_Call(lambda _, again=again: again, [Future()]), False)  # type: ignore[misc]

    def _once(self, call: _Call, forgot: bool) -> None:
        body, count = call.message(forgot), 0
        self.sent_bytes += len(body)
        for count, data in enumerate(self.client.tell(ACTION, body), 1):
            self.received_bytes += len(data)
            if count > len(call.answers):
                break
            try:
                answer = unpack(data)
            except ConfigError as error:
                raise DamagedError(f"{self.client.name}: {error}") from None
            if not call.answers[count - 1].done():
                call.answers[count - 1].set_result(answer)
        if count != len(call.answers):
            raise DamagedError(f"{self.client.name} gave {count} answers about a table; {len(call.answers)} were due")


@dataclass
class Batch:
    """A batch's bags, as each part has them; and what is on its way of what they add up to."""

    number: int
    bags: Bags
    parts: list[tuple[Bags, np.ndarray]]  # of each part: by its places, and which of the bags these are
    known: list[np.ndarray | None] = field(default_factory=list)
    coming: list[list[Future[_Answer]]] = field(default_factory=list)  # of each part, in order


class Table:
    """The table `name`, made if it is not there. One trainer has it at a time: the last to open it."""

    def __init__(
        self,
        spec: TableSpec,
        name: str,
        clients: Sequence[NodeClient],
        cache_bytes: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> None:
        assert len(clients) == spec.num_parts
        self.name = name
        self.is_open = False  # and well
        self._numbers = itertools.count(1)
        lease = uuid.uuid4().hex
        self.lines = [Line(client, name, part, lease, patience_s) for part, client in enumerate(clients)]
        # Also when the process ends without it: a step that was begun, like a loop's last one, is not lost.
        self._hang_up = weakref.finalize(self, _close, self.lines)
        try:
            opened = self._all({"what": "open", "spec": to_json(spec), "make": True, "cache_bytes": cache_bytes})
            self.spec = self._spec_of(opened, spec)
            self.version = self._meet(opened)
        except BaseException:
            self.close()
            raise
        self.is_open = True
        self.ahead = Ahead(self.version)
        self._unsettled: list[Future[_Answer]] = []
        self._staged: dict[int, Batch] = {}

    def _meet(self, opened: list[dict[str, Any]]) -> int:
        """A trainer that ended in the middle of a step may have left parts one step apart."""
        with self._plain_answers():
            stands = [(tablewire.whole(about, "version"), tablewire.whole(about, "checkpoint")) for about in opened]
        target = meeting(stands)
        if target is None:
            raise RefusedError(f"the parts of table {self.name} are at versions {[each for each, _ in stands]} and "
                               "can't meet: files of one were replaced or lost; give the table another name, and load "
                               "a saved one into it")  # fmt: skip
        self.go_back(target)
        return target

    def _spec_of(self, told: Sequence[Mapping[str, Any]], ours: TableSpec) -> TableSpec:
        """The table as nodes have it: it may have grown, and is ours in everything else."""
        with self._plain_answers():
            found = from_json(TableSpec, told[0].get("spec"), f"the table {self.name}")
            if replace(found, num_embeddings=ours.num_embeddings) != ours:
                raise DamagedError(f"{self.lines[0].client.name} has another table {self.name} than was asked for")
        return found

    @contextmanager
    def _plain_answers(self) -> Iterator[None]:
        """What can't be used of an answer is the node's fault, not the caller's."""
        try:
            yield
        except ConfigError as error:
            names = ", ".join(line.client.name for line in self.lines)
            raise DamagedError(f"an answer about table {self.name} (from {names}) can't be used: {error}") from None

    def go_back(self, version: int) -> None:
        """All parts, to a version that each still knows."""
        self._all({"what": "back", "version": version})
        self.version = version
        self.ahead = Ahead(version)
        self._staged = {}

    def _all(self, header: dict[str, Any]) -> list[dict[str, Any]]:
        asked = [line.ask(lambda _, line=line: line.message(header))[0] for line in self.lines]  # type: ignore[misc]
        return [each.result()[0] for each in asked]

    # Reading

    def stage(self, bags: Bags, *, pooled: bool) -> bool:
        """Tell the parts what will be asked for next; whether there is room for it."""
        number = next(self._numbers)
        if not self.ahead.stage(number, pooled=pooled):
            return False
        self._staged[number] = self._send(number, bags, pooled)
        return True

    def unstage(self, bags: Bags) -> None:
        """They won't be asked for after all."""
        for number in [number for number, each in self._staged.items() if each.bags.equals(bags)][:1]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self._staged[number]
        self.ahead.take(number)

    def pooled(self, bags: Bags) -> tuple[Batch, np.ndarray]:
        """What these bags add up to now."""
        batch = next((each for each in self._staged.values() if each.bags.equals(bags)), None)
        if batch is None:
            batch = self._send(next(self._numbers), bags, True)
        else:
            for number in list(self._staged):  # what was staged before it was passed over, and won't be asked for
                if number == batch.number:
                    break
                self._forget(number)
            del self._staged[batch.number]
            what = self.ahead.take(batch.number)
            if not isinstance(what, Take):
                self._fetch(batch, what.since)
        found = ((which, self._gather(batch, part, coming))
                 for part, ((_, which), coming) in enumerate(zip(batch.parts, batch.coming, strict=True)))  # fmt: skip
        total = added_up(found, len(bags))
        batch.known, batch.coming = [], []
        return batch, total

    def _send(self, number: int, bags: Bags, pooled: bool) -> Batch:
        parts = [bags.of_part(part, self.spec.num_parts) for part in range(self.spec.num_parts)]
        batch = Batch(number, bags, parts, [None] * len(parts), [[] for _ in parts])
        asks = {"version": self.ahead.version, "since": -1} if pooled else {}
        header = {"what": "stage", "number": number, **asks}
        for line, (own, _), coming in zip(self.lines, parts, batch.coming, strict=True):
            if len(own):
                answers = line.ask(lambda _, line=line, own=own: line.message(header, bags_arrays(own)))  # type: ignore[misc]
                if pooled:
                    coming += answers
        return batch

    def _fetch(self, batch: Batch, since: int) -> None:
        header = {"what": "fetch", "number": batch.number, "version": self.ahead.version, "since": since}
        for line, (own, _), coming in zip(self.lines, batch.parts, batch.coming, strict=True):
            if len(own):
                coming += line.ask(lambda _, line=line: line.message(header), bags=(batch.number, own))  # type: ignore[misc]

    def _gather(self, batch: Batch, part: int, coming: list[Future[_Answer]], again: bool = False) -> np.ndarray:
        """What a part's bags add up to, put together from what came for one version after the other. `again`: it was
        asked for once more already."""
        own = batch.parts[part][0]
        known = np.empty((len(own), self.spec.dim), self.spec.dtype)
        complete = not len(own)
        for each in coming:
            header, arrays = each.result()
            if "missed" in header:  # the node was started again; what it forgot is asked for whole
                complete = False
                continue
            with self._plain_answers():
                which = tablewire.places(arrays, "which")
                vectors = tablewire.vectors_of(arrays, "vectors", (len(which), self.spec.dim), self.spec.dtype)
            if len(which) and (which.min() < 0 or which.max() >= len(own)):
                raise DamagedError(f"{self.lines[part].client.name} sent bags that were not asked for")
            known[which] = vectors
            complete = complete or len(which) == len(own)
        if not complete and again:
            raise DamagedError(f"{self.lines[part].client.name} does not send all bags that it was asked for")
        if not complete:
            line, header = self.lines[part], {"what": "fetch", "number": batch.number, "version": self.ahead.version,
                                              "since": -1}  # fmt: skip
            asked = line.ask(lambda _: line.message(header), bags=(batch.number, own))
            return self._gather(Batch(batch.number, own, [*batch.parts]), part, asked, again=True)
        return known

    # Training

    def train(self, batch: Batch, grads: np.ndarray, lr: float) -> None:
        """Begin a step: the gradients of the batch's pooled vectors go to the parts, which do the rest."""
        self.settle()
        settled, self.version = self.version, self.version + 1
        bring = self.ahead.step()
        header = {"what": "step", "version": self.version, "settled": settled, "number": batch.number, "lr": lr}
        brings = None if bring is None else self._staged[bring.number]
        for part, (line, (own, which)) in enumerate(zip(self.lines, batch.parts, strict=True)):
            more: dict[str, Any] = {}
            if bring is not None and brings is not None and len(brings.parts[part][0]):
                more = {"bring": {"number": bring.number, "since": bring.since, "soft": True}}
            some = grads if len(which) == len(grads) else grads[which]

            def message(forgot: bool, line: Line = line, own: Bags = own, more: Any = more, some: Any = some) -> bytes:
                bags = bags_arrays(own) if forgot or not len(own) else {}
                return line.message({**header, **more}, {"grads": some, **bags})

            answers = line.ask(message, 2 if more else 1, is_step=True)
            if more:
                assert brings is not None
                brings.coming[part].append(answers[0])
            self._unsettled.append(answers[-1])

    def settle(self) -> None:
        """Until all parts have confirmed the last step."""
        for each in self._unsettled:
            each.result()
        self._unsettled.clear()

    # The table as a whole

    def read(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Vectors, and what the optimizer keeps of them, by id."""
        self.settle()
        vectors = np.empty((len(ids), self.spec.dim), self.spec.dtype)
        state = np.zeros(len(ids), self.spec.dtype)
        most = max(1, READ_BYTES // self.spec.vector_bytes)
        for start in range(0, len(ids), most):
            some = ids[start : start + most]
            for part, line in enumerate(self.lines):
                own = np.flatnonzero(some % self.spec.num_parts == part)
                if len(own):
                    arrays = line.now({"what": "read"}, {"places": some[own] // self.spec.num_parts})[1]
                    columns = self.spec.dim + (2 if self.spec.state_bytes else 1)
                    with self._plain_answers():
                        records = tablewire.vectors_of(arrays, "records", (len(own), columns), self.spec.dtype)
                    vectors[start + own] = records[:, : self.spec.dim]
                    state[start + own] = records[:, self.spec.dim + 1] if self.spec.state_bytes else 0
        return vectors, state

    def write(self, ids: np.ndarray, vectors: np.ndarray, state: np.ndarray | None = None) -> None:
        """Values for these distinct vectors; each piece is a step."""
        spec, order = self.spec, np.argsort(ids)
        most = max(1, READ_BYTES // spec.vector_bytes)
        records = np.ones((len(ids), spec.dim + (2 if spec.state_bytes else 1)), spec.dtype)
        records[:, : spec.dim] = vectors
        if spec.state_bytes:
            records[:, spec.dim + 1] = 0 if state is None else state
        for start in range(0, len(ids), most):
            some = order[start : start + most]
            self.settle()
            settled, self.version = self.version, self.version + 1
            self.ahead.version = self.version
            header = {"what": "put", "version": self.version, "settled": settled}
            for part, line in enumerate(self.lines):
                own = some[ids[some] % spec.num_parts == part]
                arrays = {"places": ids[own] // spec.num_parts, "records": records[own]}
                self._unsettled += line.ask(partial(_put, line, header, arrays), is_step=True)
        self.settle()

    def about(self) -> list[dict[str, Any]]:
        """What each part says of itself."""
        return self._all({"what": "about"})

    def grow(self, num_embeddings: int) -> None:
        self.settle()
        said = self._all({"what": "grow", "num_embeddings": num_embeddings})
        self.spec = self._spec_of(said, self.spec)

    def drop(self) -> None:
        """The table is gone from its nodes."""
        self.settle()
        self._all({"what": "drop"})
        self.is_open = False

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Sent and received so far."""
        return sum(line.sent_bytes for line in self.lines), sum(line.received_bytes for line in self.lines)

    def close(self) -> None:
        """Let the nodes put it all on their disks, and hang up; where one is away, it has its log."""
        for line in self.lines:
            line.patience_s = min(line.patience_s, CLOSE_WITHIN_S)
        with contextlib.suppress(NodeError):
            if self.is_open:
                self.settle()
                self._all({"what": "close"})
        self.is_open = False
        self._hang_up()


def added_up(parts: Iterable[tuple[np.ndarray, np.ndarray]], num_bags: int) -> np.ndarray:
    """What bags come to, from which of them each part has, and what they come to there: one part after the other."""
    total: np.ndarray | None = None
    for which, vectors in parts:
        if total is None and len(which) == num_bags:
            total = vectors
            continue
        if total is None:
            total = np.zeros((num_bags, vectors.shape[1]), vectors.dtype)
        total[which] += vectors
    assert total is not None
    return total


def _close(lines: Sequence[Line]) -> None:
    for line in lines:
        line.patience_s = min(line.patience_s, CLOSE_WITHIN_S)
        line.close()


def _put(line: Line, header: dict[str, Any], arrays: dict[str, np.ndarray], forgot: bool) -> bytes:
    return line.message(header, arrays)

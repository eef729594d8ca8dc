"""A trainer's session on a node: batches' rows made here, up to a cut whose prefix may be trained here.

Owns `Session`: the messages, what they may ask for, and the memory that they take. Arithmetic is `node.training`'s,
which is imported when a prefix comes; where none does (the cut is in front of the model), pixels travel and torch is
not needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

from headwater.core.form import shown
from headwater.core.graph import End, PrefixGraph
from headwater.core.partition import MAX_UNDER_WAY
from headwater.core.plain import plain
from headwater.core.unpacked import VALUE_BYTES
from headwater.data.extract import SIGN_OF_LIFE_S, Extractor
from headwater.data.parcel import PLAIN, TRAINING, Parcel, Words
from headwater.data.pixels import MAX_AHEAD, Pixels
from headwater.data.samples import SampleRef
from headwater.data.store import Store
from headwater.data.transforms import Transforms
from headwater.data.wire import Chunk, Extraction, check_url
from headwater.errors import ConfigError, DamagedError, RefusedError
from headwater.node.circle import Aggregator, ApartError, Circle
from headwater.node.exchange import Exchange, GoneError
from headwater.node.meeting import DroppedError, Meeting
from headwater.node.rooms import Room

CODECS = ("raw", "fp16", "bf16")  # for what is trained; int8's error is too large for gradients
MAX_ROWS = 1 << 20
MAX_MEASURED_ROWS = 4096
REF_BYTES = 1024  # of a sample that was asked for: some texts and numbers
REF_VALUES = 16  # of these, at most; commas in names count, too
LOOK_S = 1.0  # how often who waits looks whether it is worth it still


class Host(Protocol):
    """What a session needs of its node."""

    num_threads: int

    def check_root(self, url: str) -> None: ...
    def store(self, url: str) -> Store: ...
    def job(self, name: str) -> str:
        """What the node calls a job that its trainer calls so."""

    def where(self, url: str) -> str:
        """The place (`core.places`) of what is read there."""

    def check_serving(self) -> None: ...
    def check_allowed(self) -> None:
        """RefusedError, unless the token that the session came with still allows it; its quota is that of now."""

    def place(self, waits: Callable[[], None]) -> AbstractContextManager[None]:
        """Among the tenant's streams; `waits` is called until there is one."""

    def room(self, num_bytes: int) -> Room: ...
    def pause_s(self, num_rows: int) -> float: ...
    def sent(self, num_rows: int, num_bytes: int) -> None:
        """Rows have gone to the trainer."""

    @property
    def aggregator(self) -> Aggregator | None:
        """Where nodes may add up among themselves, if the operator has named one."""

    @property
    def tenant(self) -> str: ...
    @property
    def max_weight_bytes(self) -> int: ...
    @property
    def weight(self) -> float:
        """Of the tenant among those that share the threads."""

    @property
    def extractor(self) -> Extractor: ...


@dataclass(frozen=True)
class Opened:
    """What a session is about."""

    pattern: Chunk  # of the samples to come
    graph: PrefixGraph | None
    end: End | None
    codec: str
    max_rows: int
    ahead_rows: int  # whose pixels it holds for what is to come
    depth: int
    num_measured: int  # rows to measure with; 0 for a session that trains

    @classmethod
    def of(cls, parcel: Parcel) -> Opened:
        if parcel.kind != "open" or parcel.about.get("training") != TRAINING:
            said = f"{shown(parcel.kind)}, training {shown(parcel.about.get('training'))}"
            raise ConfigError(f"a session begins with open, training {TRAINING}; this is {said}; install the same "
                              "version on both sides")  # fmt: skip
        about = parcel.about
        url, codec, job = (about.get(name) for name in ("url", "codec", "job"))
        if not isinstance(url, str) or not isinstance(job, str) or codec not in CODECS:
            raise ConfigError(f"a session is for a URL, a job, and a codec of {', '.join(CODECS)}; not {shown(about)}")
        check_url(url)
        transforms = Transforms.from_json(about.get("transforms"))
        graph = None if about.get("graph") is None else PrefixGraph.from_json(about["graph"])
        if graph is not None and len(graph.inputs) != 1:
            raise ConfigError(f"the prefix takes {len(graph.inputs)} inputs; nodes train those of one, a picture")
        if transforms.text is not None:
            raise ConfigError("a training session is about pictures, and these transforms are of texts")
        spec = transforms.pixel_spec if graph is None else transforms.output_spec
        pattern = Chunk(Extraction(url, transforms, None, (spec,)), job[:200], parcel.number("seed"), 0, 0, ())
        end = None if graph is None else graph.end(about.get("end", graph.ends[-1].name))
        max_rows = parcel.number("max_rows", 1, MAX_ROWS)
        ahead_rows = parcel.number("ahead", 1, MAX_ROWS) if "ahead" in about else max_rows
        return cls(pattern, graph, end, codec, max_rows, ahead_rows, parcel.number("depth", 1, MAX_UNDER_WAY),
                   parcel.number("measure", 0, MAX_MEASURED_ROWS))  # fmt: skip

    @property
    def most_rows(self) -> int:
        """Of one part of a batch."""
        return max(self.max_rows, self.num_measured)

    @property
    def pixel_bytes(self) -> int:
        """What its inputs take: those under way, and those for what is to come; and a message that asks for some."""
        most = max(self.ahead_rows, self.most_rows) + self.depth * self.most_rows
        asked_bytes = self.most_asked * REF_BYTES + self.fetch_words.max_values * VALUE_BYTES
        return most * self.pattern.extraction.boundary[0].row_bytes + asked_bytes

    @property
    def fetch_words(self) -> Words:
        """Of a message that asks for a part of a batch."""
        return Words(max(PLAIN.max_bytes, self.most_rows * REF_BYTES),
                     max(PLAIN.max_values, self.most_rows * REF_VALUES))  # fmt: skip

    @property
    def most_asked(self) -> int:
        """Samples that may be asked for and not forwarded yet: two batches, and a part."""
        return 2 * self.ahead_rows + self.most_rows


def _training() -> Any:
    """The part that needs torch."""
    try:
        return import_module("headwater.node.training.prefix")
    except ImportError as error:
        raise RefusedError("this node has no PyTorch, and only nodes with it can train a prefix: pip install "
                           f"'headwater[node-train]' there, or cut at the input ({error})") from None  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """A part of a batch to come."""

    epoch: int
    refs: tuple[SampleRef, ...]
    needs_pixels: bool  # not all that frozen layers make of it was kept

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(ref.id for ref in self.refs)


class Session:
    """One call of a trainer."""

    def __init__(self, exchange: Exchange, host: Host) -> None:
        self._exchange = exchange
        self._host = host
        self._prefix: Any = None
        self._meeting = Meeting(exchange, self._fetch)
        self._circle: Circle | None = None
        self._weight_bytes = 0
        self._asked: dict[int, _Asked] = {}  # by key
        self._told = float("-inf")  # when it was last said that something is waited for

    def run(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._host.place(lambda: self._waits("quota")))
            opened = Opened.of(self._exchange.take())
            url = opened.pattern.extraction.url
            self._host.check_root(url)
            chunk = replace(opened.pattern, job=self._host.job(opened.pattern.job))
            pixels = Pixels(self._host.extractor, lambda: self._host.store(url), chunk,
                            lambda: self._exchange.is_gone, self._host.weight, opened.ahead_rows,
                            self._host.where(url))  # fmt: skip
            stack.callback(pixels.close)
            self._pixels, self._opened = pixels, opened
            self._wait_for(stack.enter_context(self._host.room(self._need_bytes(opened))))
            if opened.graph is not None and not opened.num_measured:
                assert opened.end is not None
                self._prefix = _training().TrainedPrefix(opened.graph, opened.end, opened.codec, self._keeps(opened),
                                                         opened.depth, opened.max_rows)  # fmt: skip
                stack.callback(self._let_go)
                stack.callback(self._leave)
            self._exchange.admit({"fetch": opened.fetch_words})
            self._exchange.send(Parcel("ready"))
            while True:
                try:
                    self._do(self._exchange.take())
                except DroppedError:
                    self._drop()

    def _need_bytes(self, opened: Opened) -> int:
        """What the session takes of the node's memory at most."""
        if opened.graph is None:
            return opened.pixel_bytes
        training = _training()
        training.use_threads(self._host.num_threads)
        ends = opened.graph.ends if opened.num_measured else (opened.end,)  # what is measured runs to each of them
        rows, keeps = opened.num_measured or opened.max_rows, self._keeps(opened)
        most = max(training.need_bytes(opened.graph, end, rows, opened.depth, keeps) for end in ends)
        return opened.pixel_bytes + int(most)

    @staticmethod
    def _keeps(opened: Opened) -> bool:
        """Is a sample the same in each epoch, so that what is frozen need not see it again?"""
        return not opened.pattern.extraction.transforms.is_random and not opened.num_measured

    def _let_go(self) -> None:
        self._prefix = None

    def _leave(self) -> None:
        if self._circle is not None:
            self._circle.leave()

    def _wait_for(self, room: Room) -> None:
        """Until there is memory for it."""
        while not room.wait(0.25):
            self._waits("memory", room.place)

    def _waits(self, what: str, place: tuple[int, int] | None = None) -> None:
        """While the session waits for something: is it worth it still? The trainer is told what it is about."""
        if self._exchange.is_gone:
            raise GoneError
        self._host.check_serving()
        self._host.check_allowed()
        if time.monotonic() - self._told > SIGN_OF_LIFE_S:
            self._exchange.send(Parcel("waiting", {"for": what, "place": list(place or (0, 0))}))
            self._told = time.monotonic()

    def _pay(self, num_rows: int) -> None:
        """Wait until the tenant may have so many rows more, all of it: its rate counts on that."""
        left_s = self._host.pause_s(num_rows)
        while left_s > 0:
            self._waits("rate")
            slice_s = min(left_s, LOOK_S)
            if self._exchange.rest(slice_s):
                raise GoneError
            left_s -= slice_s

    def _do(self, parcel: Parcel) -> None:
        work = {"fetch": self._fetch, "forward": self._forward, "backward": self._backward, "collect": self._collect,
                "gather": self._gather, "add": self._add, "weights": self._weights, "commit": self._commit,
                "check": self._check, "measure": self._measure}.get(parcel.kind)  # fmt: skip
        if parcel.kind == "drop":
            self._drop()
            self._exchange.send(Parcel("dropped"))
        elif parcel.kind == "norm":
            pass  # the answer to a question of a step that was dropped
        elif work is None:
            raise DamagedError(f"a message of kind {shown(parcel.kind)}, which none has")
        else:
            work(parcel)

    def _drop(self) -> None:
        self._pixels.forget()
        self._asked.clear()
        self._weight_bytes = 0
        if self._prefix is not None:
            self._prefix.drop()

    def _fetch(self, parcel: Parcel) -> None:
        samples = parcel.about.get("samples")
        most = self._opened.most_rows
        if not isinstance(samples, list) or not 0 < len(samples) <= most:
            raise ConfigError(f"a part of a batch has 1 to {most} samples")
        asked = sum(len(each.refs) for each in self._asked.values())
        if asked + len(samples) > self._opened.most_asked:
            raise ConfigError(f"{asked:,} samples were asked for already; {self._opened.most_asked:,} at most are held")
        refs = tuple(SampleRef.from_json(each) for each in samples)
        key, ids = parcel.number("key"), tuple(ref.id for ref in refs)
        if key in self._asked or len(self._asked) >= MAX_AHEAD:
            raise ConfigError(f"{len(self._asked)} parts of batches are being made already, or {key} is one of them")
        epoch = parcel.number("epoch")
        self._host.check_allowed()
        self._pay(len(refs))
        self._pixels.weight = self._host.weight
        needs_pixels = self._prefix is None or not self._prefix.has_kept(ids)
        if needs_pixels:
            self._pixels.fetch(key, epoch, refs)
        self._asked[key] = _Asked(epoch, refs, needs_pixels)

    def _trains(self) -> Any:
        if self._prefix is None:
            raise ConfigError("this session has no prefix to train")
        return self._prefix

    def _weights(self, parcel: Parcel) -> None:
        prefix = self._trains()
        self._host.check_allowed()
        self._weight_bytes += parcel.num_bytes
        if self._weight_bytes > (most := self._host.max_weight_bytes):
            raise RefusedError(f"the prefix's weights have more than {most / 1e6:,.3g} MB, the limit of uploads here; "
                               "cut earlier, or ask whoever runs the node for more")  # fmt: skip
        prefix.stage(parcel)

    def _commit(self, parcel: Parcel) -> None:
        self._trains().commit(parcel.number("version"))
        self._weight_bytes = 0
        self._exchange.send(Parcel("committed", {"version": parcel.number("version")}))

    def _check(self, parcel: Parcel) -> None:
        prefix = self._trains()
        self._exchange.send(Parcel("checked", {"version": prefix.version, "sum": prefix.checksum()}))

    def _forward(self, parcel: Parcel) -> None:
        step, micro = parcel.number("step"), parcel.number("micro")
        self._host.check_serving()
        self._host.check_allowed()
        key = parcel.number("key")
        if key not in self._asked:
            raise ConfigError(f"part {key} of a batch was not asked for")
        asked = self._asked.pop(key)
        ids, needs_pixels = asked.ids, asked.needs_pixels
        if not needs_pixels and not self._trains().has_kept(ids):  # weights of frozen layers have changed since
            self._pixels.fetch(key, asked.epoch, asked.refs)
            needs_pixels = True
        rows = self._pixels.take(key) if needs_pixels else None
        about = {"step": step, "micro": micro}
        if self._opened.graph is None:
            assert rows is not None
            self._send_rows(Parcel("rows", about, {"0": rows}), len(ids))
            return
        self._meeting.begin(step, parcel.about.get("alone") is True)
        self._send_rows(Parcel("rows", about, self._trains().forward(parcel, ids, rows, self._meeting)), len(ids))

    def _send_rows(self, parcel: Parcel, num_rows: int) -> None:
        self._exchange.send(parcel)
        self._host.sent(num_rows, parcel.num_bytes)

    def _backward(self, parcel: Parcel) -> None:
        self._trains().backward(parcel)

    def _collect(self, parcel: Parcel) -> None:
        step = parcel.number("step")
        self._host.check_allowed()
        self._exchange.send(Parcel("grads", {"step": step}, self._trains().collect(step)))

    def _gather(self, parcel: Parcel) -> None:
        self._trains()
        self._host.check_allowed()
        if self._circle is None:
            self._circle = Circle(self._exchange, self._host.aggregator, self._host.tenant)
        self._circle.gather(parcel)

    def _add(self, parcel: Parcel) -> None:
        """Gradients are added to those of other nodes; one of them sends the sum, the others say nothing."""
        step, number = parcel.number("step"), parcel.number("number")
        self._host.check_allowed()
        whole = self._trains().add(step)
        self._exchange.send(Parcel("adding", {"step": step}))
        try:
            if self._circle is None:
                raise ApartError("the session is in no circle")
            self._circle.add(number, step, list(whole.values()))
        except ApartError as error:
            self._exchange.send(Parcel("apart", {"number": number, "why": plain(str(error))[:500]}))
            return
        if parcel.about.get("passes") is True:
            self._exchange.send(Parcel("sum", {"step": step}, whole))

    def _measure(self, parcel: Parcel) -> None:
        """What rows cost here: to be read and decoded, and to go through the prefix to each of its ends."""
        rows = self._opened.num_measured
        if not rows:
            raise ConfigError("this session was not opened to measure")
        self._host.check_allowed()
        if self._opened.graph is not None:
            self._pay(rows)  # which are made up, beside those that are decoded
        self._asked.pop(parcel.number("key"), None)
        start = time.perf_counter()
        made = self._pixels.take(parcel.number("key"))
        pixels_s = (time.perf_counter() - start) / len(made)
        ends = {} if self._opened.graph is None else _training().measure(self._opened.graph, rows)
        self._exchange.send(Parcel("measured", {"pixels_s": pixels_s, "rows": rows, "ends": ends}))

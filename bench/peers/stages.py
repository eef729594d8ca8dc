"""What each stage of the work costs alone, on the core where a side would do it; and the bound that follows.

Owns `Stages` and `bound`. What runs in hosts of the rig measures one stage after the other, with nothing beside it, and
again whenever it is asked: the machine is not equally fast all the time, and a bound should be of the same minutes as
what it is compared with.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import from_url

from bench.peers.common import BATCH, BUCKET, TRANSFORMS
from headwater.core.share import SHARES
from headwater.core.tuning import BATCHES
from headwater.node import engines
from headwater.node.onnxfile import up_to

READERS = 16  # requests under way; as many as a node and the plain loop have
PASSES = 3
SHARE_PASSES = 9
BUSY_ROWS = 8  # at once, while it is found out what a busy core costs the other
FASTEST = 3  # ways to run the prefix that are timed in every round
_ORDER = np.random.default_rng(0)


@dataclass(frozen=True)
class CutStages:
    """What a cut leaves on either side, as a share of the time that the whole frozen part takes there.

    The two differ: layers that one engine fuses or lays out well, the other may not.
    """

    name: str
    near_share: float  # in front of it, by ONNX Runtime on the storage core
    far_share: float  # behind it, by eager PyTorch on the trainer's core
    row_bytes: float  # as fp16


@dataclass(frozen=True)
class Stages:
    """Seconds and bytes a picture; all measured in this run, each stage alone."""

    near_read_s: float  # storage core: the store and who reads from it
    near_pixels_s: float  # storage core: decode and resize
    near_floats_s: float  # storage core
    near_prefix_s: float  # storage core: the engine and number of rows that are fastest there, one thread
    store_s: float  # storage core: the store, for a picture that the trainer reads
    fetch_s: float  # trainer's core
    pixels_s: float  # trainer's core
    forward_s: float  # trainer's core: floats and the frozen part in eager PyTorch
    far_floats_s: float  # trainer's core, in front of an engine there
    far_prefix_s: float  # trainer's core: the engine and number of rows that are fastest there, one thread
    step_s: float  # trainer's core: the head's step
    send_s_per_byte: float  # storage core: a plain TCP stream
    receive_s_per_byte: float  # trainer's core
    jpeg_bytes: float
    pixel_bytes: float
    # How many times as long a core takes for the same work while the other one works, too: they share memory and
    # caches, and on many virtual machines they are two threads of one core.
    storage_beside: float
    trainer_beside: float
    cuts: tuple[CutStages, ...]  # those that a planner chooses from: ends of modules


@dataclass(frozen=True)
class Bound:
    """The most pictures a second that any plan allows, with which placement, and what that keeps busy all the time."""

    per_s: float
    placement: str
    limited_by: str


def bound(stages: Stages, link_bytes_per_s: float) -> Bound:
    """The best that any placement a plan can name could give if everything overlapped and nothing else cost anything.

    Each placement asks three resources for seconds a picture: the storage core (store and node), the link, and the
    trainer's core. Work on one resource adds up; different resources overlap. So a placement gives at most
    1 ÷ (the largest of its three sums), and the bound is the best placement's. A core is slower while the other works
    (`storage_beside`, `trainer_beside`), by as much of the time as it does.

    - all on the trainer: JPEGs cross; the storage core serves, the trainer fetches, decodes, and runs the whole model;
    - pixels from the node: decoded pictures cross as bytes; the trainer runs the whole model;
    - features from the node, for each cut: what is alive there crosses as fp16; the node runs what is in front of it,
      the trainer the rest. A cut in the middle uses both cores, and can beat the last one where the link is fast;
    - both of the latter with a share of the pictures, in sixteenths, that cross as JPEGs and are made on the trainer,
      by an engine as nodes have one.

    Sending and receiving cost what they cost a plain TCP stream. Left out, since they are Headwater's own to keep
    small: requests, framing, row ids, codecs.
    """
    s = stages
    trains_s = s.forward_s + s.step_s
    near_s = s.near_read_s + s.near_pixels_s
    placements = {
        "all on the trainer": (s.store_s, s.jpeg_bytes, s.fetch_s + s.pixels_s + trains_s),
        "pixels from the node": _crossing(s, near_s, s.pixel_bytes, trains_s),
    }
    for share in SHARES:
        here = f", {100 * share:.3g} % of them made on the trainer"
        crossing = _crossing(s, near_s, s.pixel_bytes, trains_s)
        placements["pixels from the node" + here] = _shared(s, share, crossing, trains_s, 0.0)
    for cut in s.cuts:
        storage_s = near_s + s.near_floats_s + cut.near_share * s.near_prefix_s
        trainer_s = cut.far_share * s.forward_s + s.step_s
        crossing = _crossing(s, storage_s, cut.row_bytes, trainer_s)
        placements[f"features at {cut.name}"] = crossing
        own_s = s.far_floats_s + cut.near_share * s.far_prefix_s
        for share in (*SHARES, 1.0):
            name = f"features at {cut.name}, {100 * share:.3g} % of them made on the trainer"
            placements[name] = _shared(s, share, crossing, trainer_s, own_s)
    found = []
    for name, (storage_s, num_bytes, trainer_s) in placements.items():
        loads = _loads(s, storage_s, num_bytes / link_bytes_per_s, trainer_s)
        limit = max(loads, key=lambda resource: loads[resource])
        found.append(Bound(1 / loads[limit], name, limit))
    return max(found, key=lambda each: each.per_s)


def _crossing(s: Stages, storage_s: float, num_bytes: float, trainer_s: float) -> tuple[float, float, float]:
    """With what it costs both cores to get the bytes across."""
    return storage_s + num_bytes * s.send_s_per_byte, num_bytes, trainer_s + num_bytes * s.receive_s_per_byte


def _shared(
    s: Stages, share: float, crossing: tuple[float, float, float], trainer_s: float, own_s: float
) -> tuple[float, float, float]:
    """A share of the pictures is read and made on the trainer, with `own_s` of an engine; `trainer_s` is for all."""
    here = (s.store_s, s.jpeg_bytes, trainer_s + s.fetch_s + s.pixels_s + own_s)
    storage_s, num_bytes, far_s = ((1 - share) * there + share * own for there, own in zip(crossing, here, strict=True))
    return storage_s, num_bytes, far_s


def _loads(s: Stages, storage_s: float, link_s: float, trainer_s: float) -> dict[str, float]:
    """Seconds a picture of each resource, with each core slowed down for as long as the other is busy."""
    loads = {"storage core": storage_s, "link": link_s, "trainer's core": trainer_s}
    for _ in range(20):  # settles within a few
        whole = max(loads.values())
        here, there = loads["trainer's core"] / whole, loads["storage core"] / whole
        loads["storage core"] = storage_s * (1 + (s.storage_beside - 1) * here)
        loads["trainer's core"] = trainer_s * (1 + (s.trainer_beside - 1) * there)
    return loads


class OnStorage:
    """Runs in the storage host: reads, decodes and infers, one after the other."""

    def __init__(self, model: str, prefix: str, outputs: list[list[str]], count: int) -> None:
        """`outputs`: the names in the file of what crosses at each cut; the last one gives the whole frozen part."""
        self._transforms = TRANSFORMS[model]
        self._count = count
        self._prefix = Path(prefix).read_bytes()
        self._outputs = outputs
        self._ways = fastest_ways(self._prefix, outputs[-1], self._transforms.output_spec.shape)

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def _open(self, outputs: list[str], engine: str = "onnxruntime") -> engines.Session:
        return engines.load(engine, up_to(self._prefix, outputs))

    def shares(self, passes: int = SHARE_PASSES) -> list[float]:
        """Of the time of the whole frozen part: what is in front of each cut."""
        _, data = _read(BATCH // 2, passes=1)
        rows = self._transforms.finish(np.stack([self._transforms.pixels(each, "") for each in data]))
        sessions = [self._open(outputs) for outputs in self._outputs]
        taken = []
        for _ in range(1 + passes):  # in turns: the machine is not equally fast all the time; the first warms up
            begin = [time.perf_counter()]
            for session in sessions:
                session.run(rows)
                begin.append(time.perf_counter())
            taken.append(np.diff(begin))
        of_each = np.median(taken[1:], axis=0)
        return [float(share) for share in np.minimum(of_each / of_each[-1], 1.0)]

    def busy(self, seconds: float) -> float:
        """Seconds a picture of decoding and inference, over and over."""
        _, data = _read(BATCH, passes=1)

        session, size = self._ways[0]
        count = max(size, BUSY_ROWS)

        def work() -> None:
            rows = self._transforms.finish(np.stack([self._transforms.pixels(each, "") for each in data[:count]]))
            for start in range(0, count, size):
                session.run(rows[start : start + size])

        return _over_and_over(work, seconds) / count

    def time(self) -> dict[str, float]:
        transforms = self._transforms
        read_s, data = _read(self._count)
        pixels = np.stack([transforms.pixels(each, "") for each in data[:BATCH]])
        rows = transforms.finish(pixels)
        return {
            "near_read_s": read_s,
            "near_pixels_s": _decode_s(lambda each: transforms.pixels(each, ""), data),
            "near_floats_s": _median_s(lambda: transforms.finish(pixels, rows)) / BATCH,
            "near_prefix_s": _fastest_s(self._ways, rows),
        }


Way = tuple[engines.Session, int]


def fastest_ways(prefix: bytes, outputs: list[str], row_shape: tuple[int, ...]) -> list[Way]:
    """Of every way in which a node would try a prefix, the fastest few; they are timed again and again."""
    rows = np.zeros((BATCH, *row_shape), np.float32)
    sessions = [engines.load(engine, up_to(prefix, outputs)) for engine in engines.available()]
    ways = [(session, size) for session in sessions for size in BATCHES if size <= BATCH]
    taken_s = [_median_s(partial(session.run, rows[:size]), 2) / size for session, size in ways]
    return [way for _, way in sorted(zip(taken_s, ways, strict=True), key=lambda each: each[0])][:FASTEST]


def _fastest_s(ways: list[Way], rows: np.ndarray) -> float:
    """Seconds a row."""
    return min(_median_s(partial(session.run, rows[:size])) / size for session, size in ways)


def fetch(count: int) -> dict[str, float]:
    """Runs in the trainer's host on a fast link: the CPU that a read takes there."""
    _read(BATCH)  # connections
    cpu = time.process_time()
    _, data = _read(count, passes=1)
    fetch_s = (time.process_time() - cpu) / count
    num_reads = BATCH * (PASSES + 1) + count
    return {"fetch_s": fetch_s, "num_reads": num_reads, "jpeg_bytes": sum(map(len, data)) / count}


class OnTrainer:
    """Runs in the trainer's host: decode, the frozen part, the head's step."""

    def __init__(self, model: str, num_classes: int) -> None:
        import torch

        from bench.models import keep_blocks
        from bench.peers.common import Learner

        keep_blocks()
        torch.set_num_threads(1)
        self._learner = Learner(model, num_classes)
        self._y = torch.zeros(BATCH, dtype=torch.int64)
        self._ways: list[Way] = []  # known once the sizes are

    def __call__(self, do: str, **arguments: Any) -> Any:
        return getattr(self, do)(**arguments)

    def busy(self, seconds: float) -> float:
        """Seconds a picture of the frozen part, over and over."""
        import torch

        x = torch.zeros(BUSY_ROWS, 224, 224, 3, dtype=torch.uint8)
        return _over_and_over(lambda: self._learner.frozen(x), seconds) / BUSY_ROWS

    def time(self) -> dict[str, float]:
        import torch

        learner = self._learner
        _, data = _read(4 * BATCH, passes=1)
        pixels = np.stack([learner.pixels(each) for each in data[:BATCH]])
        x = torch.from_numpy(pixels)
        features = learner.frozen(x)
        rows = learner.transforms.finish(pixels)
        return {
            "pixels_s": _decode_s(learner.pixels, data),
            "forward_s": _median_s(lambda: learner.frozen(x)) / BATCH,
            "far_floats_s": _median_s(lambda: learner.transforms.finish(pixels, rows)) / BATCH,
            "far_prefix_s": _fastest_s(self._ways, rows),
            "step_s": _median_s(lambda: learner.train_step(features, self._y)) / BATCH,
        }

    def sizes(self) -> dict[str, Any]:
        """The cuts to choose from, the bytes of pixels, and the prefix as a node would get it."""
        import torch

        from headwater.core.cut import smallest_cut
        from headwater.core.profile import spread
        from headwater.model.capture import capture
        from headwater.model.cuts import cuts
        from headwater.model.places import time_places
        from headwater.model.ship import cuts_to_ship, ship

        captured = capture(self._learner.model, (torch.zeros(2, 3, 224, 224),))
        pixel_bytes = self._learner.transforms.pixel_spec.row_bytes
        every = cuts(captured)
        last = smallest_cut(every, "fp16", pixel_bytes)
        used = cuts_to_ship(every[: last.index + 1])
        shipped = ship(captured, *used)
        outputs = [list(shipped.names_at(cut)) for cut in used]
        shape = self._learner.transforms.output_spec.shape
        self._ways = fastest_ways(shipped.path.read_bytes(), outputs[-1], shape)
        images = (torch.zeros(8, 3, 224, 224).contiguous(memory_format=torch.channels_last),)
        shares = spread(1.0, time_places(captured, images, last.index))
        return {
            "pixel_bytes": pixel_bytes,
            "names": [cut.name for cut in used],
            "far_shares": [1 - shares[cut.index] for cut in used],
            "row_bytes": [2 * sum(int(np.prod(spec.shape)) for spec in cut.boundary) for cut in used],
            "prefix": str(shipped.path),
            "outputs": outputs,
        }


def _read(count: int, passes: int = PASSES) -> tuple[float, list[Any]]:
    """Seconds a picture, many reads at once; and the pictures. Others in each pass: a store answers sooner what it was
    just asked for, and an epoch asks for everything once."""
    store, keys = _listed()
    data: list[Any] = []
    with ThreadPoolExecutor(READERS) as pool:

        def read() -> None:
            chosen = _ORDER.choice(len(keys), min(count, len(keys)), replace=False)
            data[:] = pool.map(lambda number: store.get(keys[number]).bytes(), chosen)

        taken_s = _median_s(read, passes) / min(count, len(keys))
        return taken_s, (data * -(-count // len(data)))[:count]


@lru_cache
def _listed() -> tuple[Any, list[str]]:
    url = f"s3://{BUCKET}/plain"
    store = from_url(url, client_options={"allow_http": True}, virtual_hosted_style_request=False)
    return store, [meta["path"] for page in obstore.list(store) for meta in page]


def _decode_s(decode: Callable[[Any], Any], data: list[Any]) -> float:
    """Seconds a picture: a median over batches, each of other pictures, as in an epoch."""
    taken = []
    for start in range(0, len(data), BATCH):
        begin = time.perf_counter()
        for each in data[start : start + BATCH]:
            decode(each)
        taken.append((time.perf_counter() - begin) / len(data[start : start + BATCH]))
    return statistics.median(taken)


def _over_and_over(work: Callable[[], Any], seconds: float) -> float:
    """Of one run, in the median, without the first and the last: somebody else may not have been at work yet."""
    work()
    taken, begin = [], time.perf_counter()
    while len(taken) < 5 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:-1])


def _median_s(work: Callable[[], Any], passes: int = PASSES) -> float:
    """Of one run; a first one warms up, unless there is only one."""
    if passes > 1:
        work()
    taken = []
    for _ in range(passes):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)

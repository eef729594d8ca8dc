"""A node that reads packed shards against one that decodes JPEGs.

Claim: for MobileNetV3-small, features at its smallest cut, a node on one core gives at least 2.5 times as many rows a
second from shards as from the JPEGs they were packed from, if those are of the size of ImageNet's.

What packing saves is decoding, which costs by pixels and bytes, so two sets are measured: the pictures as they are (the
grocery ones are small, 348×348 and 22 KB: there the engine alone, with reading at no cost at all, stays below 2.5), and
the same pictures brought to ImageNet's size in pixels and bytes.

One node process, one thread, held to one core; the trainer, which only takes the rows, has another. Both sides are
asked of the same node in turns. Rows are compared before anything is timed.
"""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

import headwater as hw
from bench import models, pictures
from bench.path import prefix_of
from bench.result import Result
from bench.rig import RigError
from bench.rig import node as nodes
from bench.rig.python import python_env
from headwater.core.tuning import Candidate
from headwater.data.samples import Samples
from headwater.data.shards.pack import pack
from headwater.data.shards.reading import read_sample
from headwater.data.store import open_store
from headwater.data.transforms import Transforms
from headwater.node.engine import Engine
from headwater.train.client import NodeClient

BATCH = 32
CLASSES = 100
# ImageNet's training set: most pictures have 500×375 pixels, and 1,281,167 of them take 137.9 GB.
SIZE = (500, 375)
JPEG_BYTES = 137.9e9 / 1_281_167


def run(*, quick: bool, console: Console) -> Result:
    num_pictures, repeats = (256, 5) if quick else (960, 9)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RigError("pack needs two cores: one for the node, one for the trainer")
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, ExitStack() as stack:
        small, what = pictures.folder(Path(scratch), num_pictures)
        folders = {"small": small, "imagenet": Path(scratch) / "imagenet"}
        imagenet_sized(small, folders["imagenet"])
        model, transforms = models.build("mobilenet", CLASSES)
        shards = {name: Path(scratch) / f"{name}-shards" for name in folders}
        start = time.perf_counter()
        for name, folder in folders.items():
            pack(str(folder), str(shards[name]), transforms, num_threads=len(cores))
        pack_s = (time.perf_counter() - start) / len(folders)
        address = stack.enter_context(_node(Path(scratch), (*folders.values(), *shards.values()), cores[0]))
        stack.enter_context(_only_core(cores[-1]))
        options: dict[str, Any] = {"transforms": transforms, "nodes": [address], "batch_size": BATCH, "plan": None}
        jobs = {}
        for name in folders:
            for kind, data in (("jpeg", folders[name]), ("packed", shards[name])):
                jobs[f"{name}_{kind}"] = stack.enter_context(hw.near(model, data, **options))
        sizes = {name: float(job.samples.sizes.mean()) for name, job in jobs.items()}
        job = jobs["imagenet_packed"]
        console.print(f"{what}, as they are and at ImageNet's size ({sizes['imagenet_jpeg']:,.0f} bytes); "
                      f"{job.describe()}; {repeats} rounds, all sides in each")  # fmt: skip
        for name in folders:
            _check_equal(jobs[f"{name}_packed"], jobs[f"{name}_jpeg"])
        with closing(NodeClient(address)) as client:
            chosen = client.hello()["prefixes"][-1]
        way = Candidate(chosen["engine"], chosen["threads"], chosen["batch"])
        stages = Stages(job.samples, transforms, prefix_of(model, job.plan.cut), job.cuts[job.plan.cut].boundary, way)
        cases = measure(jobs, stages, cores, repeats, console)
    return _result(quick, cases, what, sizes, num_pictures / pack_s)


def imagenet_sized(source: Path, target: Path) -> None:
    """The same pictures with ImageNet's pixels and about its bytes: what decoding costs depends on these two."""
    places = sorted(source.rglob("*.jpg"))

    def encoded(place: Path, quality: int) -> bytes:
        buffer = io.BytesIO()
        picture = Image.open(place).convert("RGB").resize(SIZE, Image.Resampling.BICUBIC)
        picture.save(buffer, "JPEG", quality=quality)
        return buffer.getvalue()

    def miss(quality: int) -> float:
        return abs(statistics.mean(len(encoded(place, quality)) for place in places[::16]) - JPEG_BYTES)

    quality = min(range(75, 101), key=miss)
    for place in places:
        path = target / place.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(place, quality))


def _result(
    quick: bool, cases: list[dict[str, float]], what: str, sizes: dict[str, float], pack_per_s: float
) -> Result:
    middle = {name: statistics.median(case[name] for case in cases) for name in cases[0]}
    # Rows that are already in memory, in front of the engine: no reader can be faster than one that takes no time.
    bounds = {
        name: statistics.median(case["engine_per_s"] / case[f"{name}_jpeg_per_s"] for case in cases)
        for name in ("imagenet", "small")
    }
    parts = {
        "the engine": 1e3 / middle["engine_per_s"],
        "reading": middle["read_ms"],
        "making floats": middle["floats_ms"],
    }
    whole = 1e3 / middle["imagenet_packed_per_s"]
    parts["the rest of the node (threads, the wire)"] = whole - sum(parts.values())
    spread = max(c["imagenet_ratio"] for c in cases) - min(c["imagenet_ratio"] for c in cases)
    return Result(
        name="pack",
        quick=quick,
        numbers={"packed_over_jpeg": middle["imagenet_ratio"], "packed_over_small_jpeg": middle["small_ratio"]},
        goals={"packed_over_jpeg": "≥ 2.5"},
        cases=cases,
        bound=f"{bounds['imagenet']:.2f}, and {bounds['small']:.2f} for the small pictures: the engine alone, on rows "
        f"that are in memory already, gives {middle['engine_per_s']:,.0f} a second where the node makes "
        f"{middle['imagenet_jpeg_per_s']:,.0f} and {middle['small_jpeg_per_s']:,.0f} from JPEGs",
        limited_by=f"{max(parts, key=lambda part: parts[part])}. Of the {whole:.2f} ms that a packed row takes: "
        + ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items()),
        notes=[
            f"packed_over_jpeg: {what} brought to {SIZE[0]}×{SIZE[1]} and {sizes['imagenet_jpeg']:,.0f} bytes, as "
            f"ImageNet's are; packed_over_small_jpeg: as they are, {sizes['small_jpeg']:,.0f} bytes",
            "MobileNetV3-small, random weights, features at its smallest cut; one node thread on one core",
            f"a packed sample takes {sizes['imagenet_packed']:,.0f} bytes; all sides read from memory (the file "
            "cache), so what a disk would add is not in this",
            f"packing went at {pack_per_s:,.0f} pictures a second on all cores, once",
            f"packed_over_jpeg of the rounds: from lowest to highest {spread:.3f}",
        ],
        draw=lambda path: draw(middle, path),
    )


@contextmanager
def _node(scratch: Path, roots: tuple[Path, ...], core: int) -> Iterator[str]:
    """A node with one thread, held to one core."""
    serve = nodes.command([str(root) for root in roots], "127.0.0.1:0", scratch / "state", ("--threads", "1"))

    def popen(log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(["taskset", "-c", str(core), *serve], stdout=file, stderr=file, env=python_env(),
                                    stdin=subprocess.DEVNULL)  # fmt: skip

    node = nodes.start("storage", popen, scratch / "node.log")
    try:
        yield node.address
    finally:
        node.process.terminate()
        node.process.wait()


@contextmanager
def _only_core(core: int) -> Iterator[None]:
    """This thread, and those it starts, on one core."""
    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def _check_equal(packed: hw.Job, jpeg: hw.Job) -> None:
    """An epoch of each, which also warms files, engines and code: a fast wrong row is worth nothing."""
    for (x, y), (other, labels) in zip(packed.loader, jpeg.loader, strict=True):
        assert torch.equal(y, labels)
        assert all(torch.equal(a, b) for a, b in zip(x.tensors, other.tensors, strict=True)), "packed rows differ"


class Stages:
    """The packed side's work, one stage after the other in this thread."""

    def __init__(self, samples: Samples, transforms: Transforms, prefix: bytes, boundary: Any, way: Candidate) -> None:
        """`way`: how the node runs the prefix."""
        self._store = open_store(samples.url)
        self._refs = samples.take(range(min(8 * BATCH, len(samples))))
        self._transforms = transforms
        self._engine, self._boundary = Engine(prefix, way=way), boundary
        self._pixels = np.stack([transforms.pixels(read_sample(self._store, ref), ref.key) for ref in self._refs])
        self._rows = transforms.finish(self._pixels[:BATCH])

    def read(self) -> int:
        """Touch every byte, as whoever makes floats of them does."""
        for ref in self._refs:
            np.bitwise_xor.reduce(self._transforms.pixels(read_sample(self._store, ref), ref.key).reshape(-1))
        return len(self._refs)

    def floats(self) -> int:
        for start in range(0, len(self._pixels), BATCH):
            self._transforms.finish(self._pixels[start : start + BATCH], self._rows[: len(self._pixels[start:])])
        return len(self._pixels)

    def engine(self) -> int:
        for _ in range(4):
            self._engine.run(self._rows, self._boundary)
        return 4 * BATCH


def measure(
    jobs: dict[str, hw.Job], stages: Stages, cores: list[int], repeats: int, console: Console
) -> list[dict[str, float]]:
    """Rounds of both sides in turn, each followed by the stages on the node's core; which side is first alternates."""

    def epoch(name: str) -> float:
        start = time.perf_counter()
        rows = sum(len(y) for _, y in jobs[name].loader)
        return rows / (time.perf_counter() - start)

    cases = []
    for number in range(repeats):
        rates = {name: epoch(name) for name in (list(jobs) if number % 2 else list(jobs)[::-1])}
        with _only_core(cores[0]):
            engine, read, floats = (_rate(each) for each in (stages.engine, stages.read, stages.floats))
        cases.append(
            {
                "round": number,
                **{f"{name}_per_s": rates[name] for name in jobs},
                **{f"{name}_ratio": rates[f"{name}_packed"] / rates[f"{name}_jpeg"] for name in ("imagenet", "small")},
                "engine_per_s": engine,
                "read_ms": 1e3 / read,
                "floats_ms": 1e3 / floats,
            }
        )
        said = ", ".join(f"{name.replace('_', ' ')} {rate:.0f}/s" for name, rate in rates.items())
        console.print(f"round {number}: {said}; the engine alone {engine:.0f}/s", style="dim")
    return cases


def _rate(work: Callable[[], int]) -> float:
    """Rows a second: the median of a few runs, after one that warms up."""
    work()
    rates = []
    for _ in range(3):
        start = time.perf_counter()
        rows = work()
        rates.append(rows / (time.perf_counter() - start))
    return statistics.median(rates)


def draw(middle: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 2.6), layout="constrained")
    sides = {"small JPEGs": "small_jpeg", "JPEGs of ImageNet's size": "imagenet_jpeg",
             "packed shards": "imagenet_packed", "the engine alone (the bound)": "engine"}  # fmt: skip
    values = [middle[f"{name}_per_s"] for name in sides.values()]
    bars = axis.barh(list(sides)[::-1], values[::-1], color=["#c9d1d9", "#1f77b4", "#9aa5b1", "#9aa5b1"], height=0.6)
    axis.bar_label(bars, [f"{value:,.0f}" for value in values[::-1]], padding=3)
    axis.set(title=f"rows/s of a node on one core: packed ÷ JPEG = {middle['imagenet_ratio']:.2f}")
    axis.margins(x=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)

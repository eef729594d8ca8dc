"""The near-data path against the bare work in it.

Claim: on one machine, with an embedded node, rows reach the trainer at 0.85 or more of the rate of a bare loop that
does nothing but read, decode, resize and infer in as many threads; and they take at most an eighth of the JPEGs' bytes.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import onnxruntime as ort
from rich.console import Console

import headwater as hw
from bench import pictures
from bench.result import Result
from headwater.core.draw import Draw
from headwater.data.layouts import list_samples
from headwater.data.samples import Samples
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.model.ship import ship

BATCH = 32
THREADS = 2


def run(*, quick: bool, console: Console) -> Result:
    num_pictures, repeats = (320, 5) if quick else (960, 9)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        folder, what = pictures.folder(Path(scratch), num_pictures)
        model = pictures.lite0(100)
        console.print(f"{what}; {repeats} rounds, both sides in each; {THREADS} threads a side")
        with hw.near(
            model, folder, transforms=pictures.LITE0, batch_size=BATCH, codec="fp16", plan=None, node_threads=THREADS,
            node_cache="0",
        ) as job:  # fmt: skip
            job.adopt(replace(job.plan, engine="onnxruntime"))  # the bare loop's
            bare = bare_loop(folder, job.samples, prefix_of(model, job.plan.cut))
            cases = measure(job, bare, repeats, console)
            num_bytes = job.counts.num_bytes / job.counts.num_rows
        jpeg_bytes = float(list_samples(str(folder)).sizes.mean())
    ratio = statistics.median(case["ratio"] for case in cases)
    spread = max(case["ratio"] for case in cases) - min(case["ratio"] for case in cases)
    return Result(
        name="path",
        quick=quick,
        numbers={"ratio_to_bare_loop": ratio, "byte_reduction": jpeg_bytes / num_bytes},
        goals={"ratio_to_bare_loop": "≥ 0.85", "byte_reduction": "≥ 8"},
        cases=cases,
        bound="1.0: the bare loop does the same reads, decodes and inferences and nothing else",
        limited_by="the cores: both sides keep all of them busy, and the near side has wire and loader there, too",
        notes=[
            f"{what}; EfficientNet-lite0, real weights, pooled features as fp16; node and trainer on the same cores",
            f"{num_bytes:,.0f} bytes a picture on the wire (requests and rows), {jpeg_bytes:,.0f} as a JPEG",
            f"ratio of each round: median {ratio:.3f}, from lowest to highest {spread:.3f}",
        ],
        draw=lambda path: draw(cases, num_bytes, jpeg_bytes, path),
    )


def prefix_of(model: Any, index: int) -> bytes:
    import torch

    captured = capture(model, (torch.zeros(2, 3, 224, 224),))
    return ship(captured, cuts(captured)[index]).path.read_bytes()


def bare_loop(folder: Path, samples: Samples, model: bytes) -> Callable[[np.ndarray], None]:
    """Pillow and ONNX Runtime in `THREADS` threads, each with batches of its own: the least that the work takes."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (name,) = (each.name for each in session.get_inputs())
    keys = samples.keys.to_pylist()

    def work(batches: SimpleQueue[np.ndarray]) -> None:
        rows = np.empty((BATCH, 3, 224, 224), np.float32)
        while True:
            try:
                ids = batches.get_nowait()
            except Empty:
                return
            for place, sample in enumerate(ids):
                data = (folder / keys[sample]).read_bytes()
                pictures.LITE0.apply(data, keys[sample], Draw(0, 0, int(sample)), out=rows[place])
            session.run(None, {name: rows[: len(ids)]})[0].astype(np.float16)

    def loop(ids: np.ndarray) -> None:
        batches: SimpleQueue[np.ndarray] = SimpleQueue()
        for start in range(0, len(ids), BATCH):
            batches.put(ids[start : start + BATCH])
        threads = [threading.Thread(target=work, args=(batches,)) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return loop


def measure(job: hw.Job, bare: Callable[[np.ndarray], None], repeats: int, console: Console) -> list[dict[str, float]]:
    """Rounds of both sides in turn; which goes first alternates."""
    ids = np.arange(len(job.samples))

    def near() -> None:
        for _ in job.loader:
            pass

    def timed(side: Callable[[], None]) -> float:
        start = time.perf_counter()
        side()
        return len(ids) / (time.perf_counter() - start)

    sides = {"near_per_s": near, "bare_per_s": lambda: bare(ids)}
    for side in sides.values():  # warm files, engines and code
        side()
    cases = []
    for number in range(repeats):
        names = list(sides) if number % 2 else list(sides)[::-1]
        rates = {name: timed(sides[name]) for name in names}
        cases.append(
            {
                "round": number,
                **{name: rates[name] for name in sides},
                "ratio": rates["near_per_s"] / rates["bare_per_s"],
            }
        )
        console.print(
            f"round {number}: near {rates['near_per_s']:.0f}/s, bare {rates['bare_per_s']:.0f}/s", style="dim"
        )
    return cases


def draw(cases: list[dict[str, float]], num_bytes: float, jpeg_bytes: float, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), width_ratios=(2, 1), layout="constrained")
    rounds = [case["round"] for case in cases]
    left.plot(rounds, [case["bare_per_s"] for case in cases], "o-", color="#9aa5b1", label="bare loop (the bound)")
    left.plot(rounds, [case["near_per_s"] for case in cases], "o-", color="#1f77b4", label="near the data")
    left.set(title="pictures/s in each round", xlabel="round", ylim=(0, None))
    left.legend(frameon=False, loc="lower right")
    bars = right.bar(["JPEG", "across\nthe wire"], [jpeg_bytes, num_bytes], color=["#9aa5b1", "#1f77b4"], width=0.6)
    right.bar_label(bars, [f"{jpeg_bytes:,.0f}", f"{num_bytes:,.0f}"], padding=2)
    right.set(title="bytes a picture")
    right.margins(y=0.15)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)

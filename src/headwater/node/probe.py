"""Measures what work costs on this node: read, decode, every part of a prefix, codecs, memory.

Owns the measurement. It runs in a child process (`python -m headwater.node.probe`, a request on standard input, JSON on
standard output), so that clocks and memory are not blurred by other requests and a prefix that takes too much memory
kills the child and not the node. Seconds are CPU-seconds of one core; nothing here decides anything.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core import codecs
from headwater.core.draw import Draw
from headwater.core.spec import TensorSpec
from headwater.core.tuning import Candidate
from headwater.data import wire
from headwater.data.extract import Extractor
from headwater.data.samples import SampleRef
from headwater.data.shards.reading import read_sample
from headwater.data.store import Store, open_store
from headwater.errors import BadSampleError, HeadwaterError
from headwater.node.engine import Engine

ROUNDS = 4  # one for each stage by itself, the others for all at once
WARM_ROWS = 4
MEASURE_S = 1.5  # of CPU for the prefix; enough for two groups of a slow one, and many of a fast one


@dataclass(frozen=True)
class Model:
    """A prefix and how this node runs it."""

    data: bytes
    outputs: Sequence[str] | None
    way: Candidate

    def engine(self, precision: str) -> Engine:
        return Engine(self.data, self.outputs, way=self.way, precision=precision)


def probe(chunk: wire.Chunk, model: Model | None) -> dict[str, Any]:
    """The costs of this chunk's samples, one after the other.

    Every sample is read once: what was just read is answered sooner by many a store, and a job reads something new.
    """
    want = chunk.extraction
    rounds = [chunk.samples[start::ROUNDS] for start in range(ROUNDS)]
    together, chunk = [replace(chunk, samples=each) for each in rounds[1:] if each], replace(chunk, samples=rounds[0])
    store = open_store(want.url)
    found: dict[str, Any] = {"base_bytes": _resident_bytes()}
    data = {}
    wall, cpu = time.perf_counter(), time.process_time()
    for ref in chunk.samples:
        try:
            data[ref.id] = bytes(read_sample(store, ref))
        except BadSampleError:
            continue  # a job meets it in its turn; the others tell the cost as well
    num_read = max(len(data), 1)
    found["read_s"] = (time.process_time() - cpu) / num_read
    found["read_wait_s"] = max(0.0, (time.perf_counter() - wall) / num_read - found["read_s"])
    found["sample_bytes"] = sum(map(len, data.values())) / num_read
    decoding = _Decoding(chunk, data)
    decoding.burst()
    if not decoding.pixels:
        raise BadSampleError(chunk.samples[0].key, f"none of {len(chunk.samples)} samples could be decoded")
    pixels = decoding.pixels
    rows = np.stack([pixels[number % len(pixels)] for number in range(want.node_batch)])
    values: Any = rows
    if model is not None:
        values = want.transforms.finish(rows)
        found["finish_s"], _ = _per_row(lambda: want.transforms.finish(rows, values), len(rows))
        tensors = _probe_prefix(found, model, values, want)
    decoding.burst()
    found["encode_s_per_byte"] = {
        name: cost for name, cost in _probe_codecs(values).items() if model is None or _can_hold(name, want, tensors)
    }
    found["pipeline_s"], found["pipeline_cpu_s"] = _probe_pipeline(together or [chunk], store, model)
    decoding.burst()
    found["decode_s"] = decoding.taken_s / decoding.count
    return found


class _Decoding:
    """Decodes the same samples now and then: a machine that others use as well is faster at one moment than at another,
    and a burst is short."""

    def __init__(self, chunk: wire.Chunk, data: dict[int, bytes]) -> None:
        self._chunk = chunk
        self._data = data
        self.pixels: list[np.ndarray] = []  # as many as a group has; more would only take memory
        self.taken_s, self.count = 0.0, 0

    def burst(self) -> None:
        refs = [ref for ref in self._chunk.samples if ref.id in self._data]
        for ref in refs[:WARM_ROWS]:  # what they need is loaded from now on
            self._decode(ref)
        for ref in refs:
            start = time.thread_time()
            if self._decode(ref):
                self.taken_s += time.thread_time() - start
                self.count += 1

    def _decode(self, ref: SampleRef) -> bool:
        try:
            found = self._chunk.extraction.transforms.pixels(
                self._data[ref.id], ref.key, Draw(self._chunk.seed, self._chunk.epoch, ref.id)
            )
        except BadSampleError:
            return False
        if len(self.pixels) < self._chunk.extraction.node_batch:
            self.pixels.append(found)
        return True


def _probe_pipeline(chunks: Sequence[wire.Chunk], store: Store, model: Model | None) -> tuple[float, float]:
    """Seconds and CPU-seconds a row with all stages at work at once, as a node does it, with one thread to compute.

    More than the sum of the stages: what threads cost each other, and what others take of the same cores (a store that
    runs beside the node).
    """
    want = chunks[0].extraction
    engine = model.engine(want.precision) if model is not None else None
    run = partial(engine.run, boundary=want.boundary) if engine else None
    runs: list[tuple[float, float]] = []
    extractor = Extractor(1)
    try:
        for _ in extractor.rows(store, replace(chunks[0], samples=chunks[0].samples[:WARM_ROWS]), run):
            pass  # threads, connections and memory are there from now on
        begin = time.perf_counter()
        for chunk in chunks:
            start, used = time.perf_counter(), time.process_time()
            for _ in extractor.rows(store, chunk, run):
                pass
            taken = time.perf_counter() - start, time.process_time() - used
            runs.append((taken[0] / len(chunk.samples), taken[1] / len(chunk.samples)))
            if time.perf_counter() - begin > MEASURE_S:
                break
    finally:
        extractor.close()
    wall, cpu = (sorted(each) for each in zip(*runs, strict=True))
    return wall[len(runs) // 2], cpu[len(runs) // 2]


def _probe_prefix(found: dict[str, Any], model: Model, inputs: np.ndarray, want: wire.Extraction) -> Any:
    before = _resident_bytes()
    engine = model.engine(want.precision)
    found["fixed_bytes"] = max(0, _resident_bytes() - before)
    engine.run(inputs[:1], want.boundary)  # lays out memory once, whatever the batch
    before = _reset_peak()
    engine.run(inputs, want.boundary)
    # A group goes through in pieces of so many rows: the peak is of one.
    found["row_bytes"] = max(0, _peak_bytes() - before) // min(len(inputs), model.way.batch)
    found["prefix_s"], tensors = _per_row(lambda: engine.run(inputs, want.boundary), len(inputs), MEASURE_S)
    with tempfile.TemporaryDirectory(prefix="headwater-probe-") as folder:
        found["kernels"] = Engine(model.data, model.outputs, profile=str(Path(folder) / "run")).kernels(inputs)
    return tensors


def _can_hold(codec: str, want: wire.Extraction, tensors: Any) -> bool:
    """Whether the rows of this model are within what the codec can say."""
    try:
        wire.pack_rows(codec, want.boundary, np.arange(len(tensors[0])), tensors)
    except HeadwaterError:
        return False
    return True


def _probe_codecs(rows: np.ndarray) -> dict[str, float]:
    """On the model's inputs: of the same size as what crosses early, and of a common range of values."""
    boundary = (TensorSpec("rows", rows.shape[1:], str(rows.dtype)),)
    ids, num_bytes = np.arange(len(rows)), rows.nbytes
    costs = {}
    for name in codecs.CODECS:
        try:
            seconds, _ = _per_row(lambda name=name: wire.pack_rows(name, boundary, ids, [rows]), 1)  # type: ignore[misc]
        except HeadwaterError:
            continue  # values that this codec can't hold: it is not for this model
        costs[name] = seconds / num_bytes
    return costs


def _per_row(work: Callable[[], Any], num_rows: int, at_least_s: float = 0.05) -> tuple[float, Any]:
    """CPU-seconds a row, and the last result; the first run warms up and does not count."""
    result = work()
    start, runs = time.process_time(), 0
    while runs < 2 or time.process_time() - start < at_least_s:
        result = work()
        runs += 1
        if runs >= 2 and time.process_time() - start > at_least_s:
            break
    return (time.process_time() - start) / (runs * num_rows), result


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reset_peak() -> int:
    """Forget the highest resident size so far; returns the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_bytes()


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    request = wire.loads(sys.stdin.buffer.readline())
    assert isinstance(request, wire.Probe)
    how = json.loads(sys.stdin.buffer.readline())
    try:
        model = Model(Path(how["path"]).read_bytes(), how["outputs"], Candidate(**how["way"])) if how else None
        answer: dict[str, Any] = probe(request.chunk, model)
    except HeadwaterError as error:
        answer = {"error": wire.error_to_wire(error).decode()}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""Measures what work costs on this node: read, decode, every part of a prefix, codecs, memory.

Owns the measurement. It runs in a child process (`python -m headwater.node.probe`, see `node.child`; the answer is the
last line on standard output), so that clocks and memory are not blurred by other requests and a prefix that takes too
much memory kills the child and not the node. Seconds are CPU-seconds of one core; nothing here decides anything.
"""

from __future__ import annotations

import json
import os
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
from headwater.data import tokenizerfile, wire
from headwater.data.extract import NEAR_READERS, Extractor
from headwater.data.memory import peak_bytes, reset_peak, resident_bytes
from headwater.data.room import ROOM
from headwater.data.samples import SampleRef
from headwater.data.shards.reading import read_sample
from headwater.data.store import Store, open_store
from headwater.errors import BadSampleError, HeadwaterError
from headwater.node.child import read_request
from headwater.node.engine import Engine

ROUNDS = 4  # one for each stage by itself, the others for all at once
WARM_ROWS = 4
MEASURE_S = 0.8  # of CPU for the prefix; two groups of a slow one, and many of a fast one
GROUP_S = 0.5  # that a group of a slow prefix may take; fewer rows cost the same a row then


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
    found: dict[str, Any] = {"base_bytes": resident_bytes()}
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
    engine = None
    if model is not None:
        values = want.transforms.finish(rows)
        found["finish_s"], _ = _per_row(lambda: want.transforms.finish(rows, values), len(rows))
        engine, tensors = _probe_prefix(found, model, values, want)
    decoding.burst()
    found["encode_s_per_byte"] = {
        name: cost for name, cost in _probe_codecs(values).items() if model is None or _can_hold(name, want, tensors)
    }
    row_s = decoding.taken_s / decoding.count + float(found.get("prefix_s", 0.0))
    most = max(want.node_batch, int(MEASURE_S / row_s))
    together = [replace(each, samples=each.samples[:most]) for each in together or [chunk]]
    found["pipeline_s"], found["pipeline_cpu_s"] = _probe_pipeline(together, store, engine)
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


def _probe_pipeline(chunks: Sequence[wire.Chunk], store: Store, engine: Engine | None) -> tuple[float, float]:
    """Seconds and CPU-seconds a row with all stages at work at once, as a node does it, with one thread to compute.

    More than the sum of the stages: what threads cost each other, and what others take of the same cores (a store that
    runs beside the node).
    """
    want = chunks[0].extraction
    run = partial(engine.run, boundary=want.boundary) if engine else None
    at_once = engine.batch if engine else None
    runs: list[tuple[float, float]] = []
    extractor = Extractor(1, NEAR_READERS)
    try:
        warm = replace(chunks[0], samples=chunks[0].samples[:WARM_ROWS])
        for _ in extractor.rows(store, warm, run, at_once=at_once):
            pass  # threads, connections and memory are there from now on
        begin = time.perf_counter()
        for chunk in chunks:
            start, used = time.perf_counter(), time.process_time()
            for _ in extractor.rows(store, chunk, run, at_once=at_once):
                pass
            taken = time.perf_counter() - start, time.process_time() - used
            runs.append((taken[0] / len(chunk.samples), taken[1] / len(chunk.samples)))
            if time.perf_counter() - begin > MEASURE_S:
                break
    finally:
        extractor.close()
    wall, cpu = (sorted(each) for each in zip(*runs, strict=True))
    return wall[len(runs) // 2], cpu[len(runs) // 2]


def _probe_prefix(
    found: dict[str, Any], model: Model, inputs: np.ndarray, want: wire.Extraction
) -> tuple[Engine, Sequence[np.ndarray]]:
    loaded = resident_bytes()
    engine = model.engine(want.precision)
    engine.run(inputs[:1], want.boundary)  # lays out memory once, whatever the batch
    found["fixed_bytes"] = max(0, resident_bytes() - loaded)
    start = time.process_time()
    engine.run(inputs[:1], want.boundary)
    most = int(GROUP_S / max(time.process_time() - start, 1e-6)) // model.way.batch * model.way.batch
    inputs = inputs[: max(most, model.way.batch)]
    before = reset_peak()
    engine.run(inputs, want.boundary)
    # A group goes through in pieces of so many rows: the peak is of one, and of its first row it is known already.
    more = min(len(inputs), model.way.batch) - 1
    crosses = inputs[0].nbytes + sum(spec.row_bytes for spec in want.boundary)
    grown = 0 if before is None else peak_bytes() - before
    found["row_bytes"] = max(grown // max(more, 1), crosses)
    found["prefix_s"], tensors = _per_row(lambda: engine.run(inputs, want.boundary), len(inputs), MEASURE_S, warm=True)
    with tempfile.TemporaryDirectory(prefix="headwater-probe-") as folder:
        found["kernels"] = Engine(model.data, model.outputs, profile=str(Path(folder) / "run")).kernels(inputs)
    return engine, tensors


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


def _per_row(work: Callable[[], Any], num_rows: int, at_least_s: float = 0.05, warm: bool = False) -> tuple[float, Any]:
    """CPU-seconds a row, and the last result; unless it is `warm`, the first run does not count."""
    if not warm:
        work()
    start, runs = time.process_time(), 0
    while runs < 2 or time.process_time() - start < at_least_s:
        result = work()
        runs += 1
    return (time.process_time() - start) / (runs * num_rows), result


def main() -> None:
    asked = json.loads(read_request())
    request, how = wire.loads(asked["request"].encode()), asked["how"]
    tokenizerfile.look_in(Path(asked["tokenizers"]))
    ROOM.allow(asked["picture_bytes"])
    assert isinstance(request, wire.Probe)
    try:
        model = Model(Path(how["path"]).read_bytes(), how["outputs"], Candidate(**how["way"])) if how else None
        answer: dict[str, Any] = probe(request.chunk, model)
        if model is not None:
            answer["engine"] = model.way.engine
    except HeadwaterError as error:
        answer = {"error": wire.error_to_wire(error).decode()}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the thread that waits for the end of the input need not be waited for


if __name__ == "__main__":
    main()

"""What runs in the hosts of `bench nodes`: the trainer, alone or with nodes; and the bare loop on a device."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headwater as hw
from bench.models import keep_blocks
from bench.peers.common import TRANSFORMS, Learner
from headwater.core.draw import Draw
from headwater.data.layouts import list_samples

BATCH = 32
MODEL = "mobilenet"
CLASSES = 100
SKIP = 4  # chunks in the beginning, which wait for each other


class Trainer:
    """A head on a frozen model: features from nodes, or everything done here."""

    def __init__(self, folder: str) -> None:
        keep_blocks()
        torch.set_num_threads(1)
        self._folder = folder
        self._learner = Learner(MODEL, CLASSES)
        self._job: hw.Job | None = None

    def __call__(self, what: str, **arguments: Any) -> Any:
        return getattr(self, what)(**arguments)

    def join(self, addresses: list[str]) -> dict[str, Any]:
        """A job with these nodes, cut where the fewest bytes cross."""
        self.close()
        self._job = hw.near(self._learner.model, self._folder, transforms=self._learner.transforms, nodes=addresses,
                            batch_size=BATCH, plan=None, codec="fp16")  # fmt: skip
        # The bare loop's engine, and the same on every device; chunks that a fifth of a core makes in a second or two.
        self._job.adopt(replace(self._job.plan, engine="onnxruntime", chunk_rows=BATCH, node_batch=BATCH))
        return {"cut": self._job.plan.cut_name, "chunk_rows": self._job.plan.chunk_rows}

    def near(self, seconds: float) -> dict[str, float]:
        """Rows a second once they flow, the lower of what came and what was used; and this process's CPU for one."""
        job = self._job
        assert job is not None
        counts, before, arrived = job.counts, job.counts.num_rows, job.counts.num_arrived
        seen: list[tuple[float, int, int]] = []
        start, cpu = time.perf_counter(), time.process_time()
        while not seen or seen[-1][0] - seen[min(SKIP, len(seen) - 1)][0] < seconds:  # epochs follow each other
            batches = iter(job.loader)
            for x, y in batches:
                self._learner.learn(job.model(x), y)
                if not seen or counts.num_rows - before != seen[-1][1]:
                    seen.append((time.perf_counter() - start, counts.num_rows - before, counts.num_arrived - arrived))
                if len(seen) > SKIP + 2 and seen[-1][0] - seen[SKIP][0] >= seconds:
                    break
            batches.close()  # type: ignore[attr-defined]
        cpu_s = time.process_time() - cpu
        when, *rows = np.array(seen[SKIP:]).T
        rate = min(float(np.polyfit(when, each, 1)[0]) for each in rows)
        return {"rate": rate, "cpu_s_per_row": cpu_s / seen[-1][1]}

    def alone(self, seconds: float) -> dict[str, float]:
        """Everything here, in one thread: read, decode, the frozen part, the step."""
        self.close()
        samples = list_samples(self._folder)
        keys, labels = samples.keys.to_pylist(), samples.labels
        order, done, start = np.random.default_rng(0).permutation(len(keys)), 0, 0.0
        cpu = 0.0
        for number, first in enumerate(range(0, len(keys) - BATCH, BATCH)):
            if number == 2:  # the first warm up
                start, cpu, done = time.perf_counter(), time.process_time(), 0
            ids = order[first : first + BATCH]
            pixels = [self._learner.pixels(Path(self._folder, keys[each]).read_bytes()) for each in ids]
            self._learner.train_step(torch.from_numpy(np.stack(pixels)), torch.from_numpy(labels[ids]))
            done += BATCH
            if number > 2 and time.perf_counter() - start > seconds:
                break
        return {
            "rate": done / (time.perf_counter() - start),
            "cpu_s_per_row": (time.process_time() - cpu) / done,
        }

    def close(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None


class Bare:
    """Pillow and the engine in one thread and nothing else: what a device's core could do."""

    def __init__(self, folder: str, prefix: str) -> None:
        import onnxruntime as ort

        samples = list_samples(folder)
        self._folder, self._keys = folder, samples.keys.to_pylist()
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = ort.InferenceSession(Path(prefix).read_bytes(), options, providers=["CPUExecutionProvider"])
        (self._input,) = (each.name for each in self._session.get_inputs())

    def __call__(self, seconds: float, rows: int) -> dict[str, float]:
        transforms = TRANSFORMS[MODEL]
        buffer = np.empty((rows, 3, 224, 224), np.float32)
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for place in range(rows):
                number = (done + place) % len(self._keys)
                data = Path(self._folder, self._keys[number]).read_bytes()
                transforms.apply(data, self._keys[number], Draw(0, 0, number), out=buffer[place])
            self._session.run(None, {self._input: buffer})[0].astype(np.float16)
            done += rows
        return {"rate": done / (time.perf_counter() - start)}

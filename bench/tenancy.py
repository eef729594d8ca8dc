"""What runs in the hosts of `bench tenants`: prefixes made once, a tenant that asks a node for rows, and trainers that
do everything themselves."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.spec import TensorSpec
from headwater.data.layouts import list_samples
from headwater.data.transforms import CenterCrop, Normalize, Resize, ToFloat, Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import HeadwaterError
from headwater.train.client import NodeClient
from headwater.train.feed import Feed

TRANSFORMS = Transforms(
    [Resize(256), CenterCrop(224), ToFloat(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)
# Of torchvision: name → (constructor, its head). The first eight are the tenants of most runs.
MODELS = {
    "alexnet": ("alexnet", "classifier.6"),
    "resnet18": ("resnet18", "fc"),
    "mobilenet": ("mobilenet_v3_small", "classifier"),
    "shufflenet": ("shufflenet_v2_x1_0", "fc"),
    "mobilenet-v2": ("mobilenet_v2", "classifier"),
    "mnasnet": ("mnasnet1_0", "classifier"),
    "regnet": ("regnet_y_400mf", "fc"),
    "efficientnet": ("efficientnet_b0", "classifier"),
    "mobilenet-large": ("mobilenet_v3_large", "classifier"),
    "regnet-x": ("regnet_x_400mf", "fc"),
}
PER_NODE = 2  # chunks that a tenant has under way
PATIENCE_S = 3.0  # a node that was killed does not come back


def headless(name: str) -> Any:
    """The frozen part of a model: all but its head, with random weights."""
    import torch

    from bench.models import torchvision

    torch.manual_seed(0)
    constructor, head = MODELS[name]
    model = getattr(torchvision().models, constructor)(num_classes=10)
    parent, _, last = head.rpartition(".")
    setattr(model.get_submodule(parent), last, torch.nn.Identity())
    return model.eval().requires_grad_(False)


def make_prefixes(folder: str, names: list[str]) -> dict[str, int]:
    """ONNX files of these models; name → the width of a row. By the exporter that traces, which takes a second each."""
    import warnings

    import torch

    found = {}
    for name in names:
        model, zeros = headless(name), torch.zeros(2, 3, 224, 224)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (zeros,), f"{folder}/{name}.onnx", dynamo=False, input_names=["x"],
                              output_names=["rows"], dynamic_axes={"x": {0: "n"}, "rows": {0: "n"}})  # fmt: skip
        with torch.no_grad():
            found[name] = int(torch.flatten(model(zeros), 1).shape[1])
    return found


class Tenant:
    """A job that takes rows in order, as a trainer's loader does; the step of its head is left out."""

    def __init__(self, folder: str, prefix: str, shape: list[int], name: str) -> None:
        logging.basicConfig()
        self._name, self._path = name, Path(prefix)
        self._digest = hashlib.sha256(self._path.read_bytes()).hexdigest()
        samples = list_samples(folder)
        self._url, self._refs = samples.url, samples.take(range(len(samples)))
        self._boundary = (TensorSpec("rows", tuple(shape), "float32"),)
        self._runs = 0

    def __call__(self, address: str, rows: int, batch: int) -> dict[str, Any]:
        """So many rows in chunks of `batch`, which is also what is asked for as the node batch; seconds to the last."""
        self._runs += 1
        want = Extraction(self._url, TRANSFORMS, self._digest, self._boundary, codec="fp16", node_batch=batch)
        bounds = range(0, rows, batch)

        def chunk(number: int, worker: str) -> Chunk:
            places = range(bounds[number], min(rows, bounds[number] + batch))
            refs = tuple(self._refs[(self._runs * 17 + place) % len(self._refs)] for place in places)
            return Chunk(want, f"{self._name}-{self._runs}", 0, 0, number, refs, reuse=False)

        client = NodeClient(address)
        start, done = time.perf_counter(), 0
        try:
            client.needs(self._digest, self._path)
            client.prepare()
            start = time.perf_counter()
            for reply in Feed({address: client}, len(bounds), chunk, per_worker=PER_NODE, patience_s=PATIENCE_S):
                done += int(reply.good.sum())
        except HeadwaterError as error:
            return {"finished": False, "rows": done, "seconds": time.perf_counter() - start, "why": str(error)[:200]}
        finally:
            client.close()
        return {"finished": done == rows, "rows": done, "seconds": time.perf_counter() - start, "why": ""}


class Trainers:
    """Tenants that do everything on the trainer's core: read, decode, and run the frozen part in eager PyTorch."""

    def __init__(self, folder: str, names: list[str]) -> None:
        import torch

        from bench.models import keep_blocks

        keep_blocks()
        torch.set_num_threads(1)
        samples = list_samples(folder)
        self._paths = [Path(folder, key) for key in samples.keys.to_pylist()]
        self._models = {name: headless(name).to(memory_format=torch.channels_last) for name in names}

    def __call__(self, rows: dict[str, int], batch: int) -> list[float]:
        """Each name's rows, all at once; seconds until each was done."""
        taken: dict[str, float] = {}
        threads = [threading.Thread(target=self._run, args=(name, count, batch, taken)) for name, count in rows.items()]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return [taken[name] for name in rows]

    def _run(self, name: str, rows: int, batch: int, taken: dict[str, float]) -> None:
        import torch

        start = time.perf_counter()
        with torch.no_grad():
            for begin in range(0, rows, batch):
                paths = [self._paths[place % len(self._paths)] for place in range(begin, min(rows, begin + batch))]
                pixels = [TRANSFORMS.apply(path.read_bytes(), path.name) for path in paths]
                inputs = torch.from_numpy(np.stack(pixels)).to(memory_format=torch.channels_last)
                self._models[name](inputs)
        taken[name] = time.perf_counter() - start

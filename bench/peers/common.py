"""What every side of `bench offload` shares: the models, the training step, where the data is, what must be installed.

Owns `Learner`, the step that all sides run, made as fast as eager PyTorch goes on one core; and `Place`. Only `near`
may use more of Headwater than its transforms, which decode the pictures on every side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.fusion import fuse_conv_bn_eval

import headwater as hw
from bench import pictures
from bench.models import IMAGENET, torchvision
from bench.rig import RigError
from headwater.data.transforms import Normalize

BATCH = 32
BUCKET = "pictures"
MODELS = ("mobilenet", "lite0")  # the smaller first: a process keeps the memory that it once had
TRANSFORMS = {"lite0": pictures.LITE0, "mobilenet": IMAGENET}
# side → the package that it needs
PACKAGES = {"webdataset": "webdataset", "litdata": "litdata", "mosaic": "streaming", "ray": "ray"}


@dataclass(frozen=True)
class Place:
    """Where a side finds its data, and where it may keep what it downloads."""

    scratch: Path
    num_pictures: int
    num_classes: int
    mbit_per_s: float = 1000.0  # of the link, for a side that is best tuned to it

    def url(self, side: str) -> str:
        return f"s3://{BUCKET}/{side}"

    @property
    def endpoint(self) -> str:
        return os.environ["AWS_ENDPOINT_URL"]


def check_installed(sides: tuple[str, ...]) -> None:
    """RigError if a peer is not there."""
    absent = [name for name in sides if name in PACKAGES and find_spec(PACKAGES[name]) is None]
    if absent:
        raise RigError(
            f"bench offload runs {', '.join(absent)} beside Headwater, and not all are installed: make peers"
        )


@lru_cache
def build(name: str, num_classes: int) -> tuple[nn.Module, nn.Linear]:
    """The model, frozen up to a linear head; and the head. The same on every side, Headwater's included."""
    if name == "lite0":
        model = pictures.lite0(num_classes)
        head = model._fc
    else:
        torch.manual_seed(0)
        model = torchvision().models.mobilenet_v3_small(weights=None)
        # One linear layer on the pooled features, in place of the two that ImageNet's 1000 classes have.
        head = model.classifier = nn.Linear(model.classifier[0].in_features, num_classes)
        hw.freeze(model.eval(), until="classifier")
    fold_batch_norms(model)
    return model.eval().to(memory_format=torch.channels_last), head


def fold_batch_norms(model: nn.Module) -> None:
    """Put frozen batch-norms into the convolutions before them, which makes eager PyTorch faster."""
    for module in model.modules():
        children = list(module.named_children())
        for (conv_name, conv), (norm_name, norm) in pairwise(children):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(module, conv_name, fuse_conv_bn_eval(conv, norm).requires_grad_(False))
                setattr(module, norm_name, nn.Identity())


class Learner:
    """A model whose head learns. The frozen part runs here unless features come in."""

    def __init__(self, name: str, num_classes: int) -> None:
        self.name = name
        self.model, self.head = build(name, num_classes)
        self.transforms = TRANSFORMS[name]
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=0.01)
        self._features: Tensor | None = None
        normalize = self.transforms.ops[-1]
        assert isinstance(normalize, Normalize)
        self._mean = torch.tensor(normalize.mean).mul(255).view(1, 3, 1, 1)
        self._scale = torch.tensor(normalize.std).mul(255).reciprocal().view(1, 3, 1, 1)

    def pixels(self, data: Any) -> np.ndarray:
        """A JPEG as uint8 224×224×3. Turning these to floats is left to `frozen`, for a whole batch at once, so that
        what a worker process hands over is small."""
        return self.transforms.pixels(data, "")

    def frozen(self, x: Tensor) -> Tensor:
        """From uint8 pictures to features, without a tape, in the layout that convolutions run fastest in."""
        with torch.inference_mode():
            # N×H×W×3 seen as N×3×H×W is channels-last as it is: no copy but the one to floats.
            x = x.permute(0, 3, 1, 2).float().sub_(self._mean).mul_(self._scale)
            hook = self.head.register_forward_pre_hook(self._keep)
            try:
                self.model(x)
            finally:
                hook.remove()
        assert self._features is not None
        return self._features.clone()  # made outside of inference mode, so that the head's backward may keep it

    def _keep(self, head: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._features = inputs[0]

    def train_step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of SGD on pictures (uint8, four dimensions) or on features (two)."""
        features = self.frozen(x) if x.ndim == 4 else x.float()
        return self.learn(self.head(features), y)

    def learn(self, output: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(output, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def collate(samples: list[tuple[np.ndarray, int]]) -> tuple[Tensor, Tensor]:
    """Pictures and labels as two tensors."""
    return torch.from_numpy(np.stack([pixels for pixels, _ in samples])), torch.tensor([label for _, label in samples])


def in_batches(samples: Iterator[tuple[np.ndarray, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    batch: list[tuple[np.ndarray, int]] = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == BATCH:
            yield collate(batch)
            batch = []
    if batch:
        yield collate(batch)

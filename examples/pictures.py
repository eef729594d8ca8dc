"""What the other examples share: a folder of pictures, transforms, and a small model whose features are frozen."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import headwater as hw
from headwater.data.transforms import Normalize, Resize, ToFloat

TRANSFORMS = [Resize((32, 32)), ToFloat(), Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))]


def write_digits(folder: Path, count: int = 400) -> Path:
    """Real handwritten digits (of scikit-learn, nothing is downloaded) as PNGs, one folder a digit."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number in range(count):
        path = folder / str(digits.target[number]) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((255 - digits.images[number] * 15.9).astype(np.uint8)).convert("RGB").save(path)
    return folder


def small_model(num_classes: int = 10) -> nn.Sequential:
    """A frozen part that shrinks a picture to 32 numbers, and a head that learns. Yours would be a pretrained one."""
    torch.manual_seed(0)
    features = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )  # fmt: skip
    return hw.freeze(nn.Sequential(OrderedDict(features=features, head=nn.Linear(32, num_classes))), until="head")

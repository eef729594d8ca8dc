"""Writes layers/*.csv: layers of well-known models with their operations and bytes, from their shapes alone.

    python examples/scenarios/make_layers.py

Nothing is run or measured: shapes go through the model on PyTorch's meta device. Operations are two for each
multiply-add; bytes are of 32-bit floats. Seconds are 0: they follow from the rates of a rig file (docs/simulator.md).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.models import torchvision

FOLDER = Path(__file__).parent / "layers"
MODELS = ("alexnet", "resnet18", "resnet50", "vgg11", "vgg16")
COLUMNS = ("layer", "forward_s", "backward_s", "bytes_out", "weight_bytes", "kind", "flops")


def kind_and_flops(module: nn.Module, out: torch.Tensor) -> tuple[str, float]:
    """Of one sample."""
    if isinstance(module, nn.Conv2d):
        across = module.in_channels // module.groups * module.kernel_size[0] * module.kernel_size[1]
        return "conv", 2.0 * across * out[0].numel()
    if isinstance(module, nn.Linear):
        return "linear", 2.0 * module.in_features * module.out_features
    return "elementwise", float(out[0].numel())


def layers_of(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    model = getattr(torchvision().models, name)().to("meta").eval()

    def hook(title: str, module: nn.Module) -> Any:
        def note(_: nn.Module, given: Any, out: torch.Tensor) -> None:
            kind, flops = kind_and_flops(module, out)
            weights = sum(4 * each.numel() for each in module.parameters())
            rows.append({"layer": title, "forward_s": 0, "backward_s": 0, "bytes_out": 4 * out[0].numel(),
                         "weight_bytes": weights, "kind": kind, "flops": flops})  # fmt: skip

        return note

    for title, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(hook(title, module))
    model(torch.empty(1, 3, 224, 224, device="meta"))
    return rows


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in MODELS:
        with (FOLDER / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(layers_of(name))


if __name__ == "__main__":
    main()

"""The models that benchmarks train a head on. Owns their names and how each is made: frozen but for its last layer.

Weights are random but for EfficientNet-lite0: what a layer costs does not depend on them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import headwater as hw
from bench import pictures
from headwater.data.transforms import CenterCrop, Normalize, Resize, ToFloat, Transforms

IMAGENET = Transforms(
    [Resize(256), CenterCrop(224), ToFloat(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
)


def build(name: str, num_classes: int) -> tuple[nn.Module, Transforms]:
    """The model in evaluation mode, frozen up to its head, and its transforms."""
    torch.manual_seed(0)
    if name == "lite0":
        return pictures.lite0(num_classes), pictures.LITE0
    return _BUILDERS[name](num_classes), IMAGENET


def _torchvision(name: str, head: str) -> Callable[[int], nn.Module]:
    def make(num_classes: int) -> nn.Module:
        model = getattr(torchvision().models, name)(num_classes=num_classes)
        return hw.freeze(model.eval(), until=head)

    return make


def _timm(name: str, head: str) -> Callable[[int], nn.Module]:
    def make(num_classes: int) -> nn.Module:
        torchvision()
        import timm

        return hw.freeze(timm.create_model(name, num_classes=num_classes).eval(), until=head)

    return make


def torchvision() -> Any:
    """torchvision, also where its compiled operators do not fit the installed torch: only its models are wanted."""
    if not hasattr(torchvision, "library"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torchvision.library = library  # type: ignore[attr-defined]  # gone with it, the operators would be, too
    import torchvision as package

    return package


_BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "alexnet": _torchvision("alexnet", "classifier.6"),
    "mobilenet": _torchvision("mobilenet_v3_small", "classifier"),
    "resnet18": _torchvision("resnet18", "fc"),
    "resnet50": _torchvision("resnet50", "fc"),
    "shufflenet": _torchvision("shufflenet_v2_x1_0", "fc"),
    "vit": _timm("vit_tiny_patch16_224", "head"),
}
NAMES = ("lite0", *_BUILDERS)


def keep_blocks() -> None:
    """Tell glibc to keep large blocks: otherwise eager PyTorch on a CPU fetches memory anew for every layer."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD

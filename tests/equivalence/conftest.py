"""torchvision beside a CPU-only torch, and one thread."""

from __future__ import annotations

import pytest
import torch

if not hasattr(torch.ops.torchvision, "nms"):
    # torchvision's Python side asks for these operators when it is imported; its compiled side needs a CUDA build.
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)

"""Gradients as fp16 on the wire, with what rounding lost kept for the next step. Owns `ErrorFeedback`; needs torch."""

from __future__ import annotations

import torch

_LARGEST = 65504.0  # of fp16


class ErrorFeedback:
    """Per bucket: what was not sent last time."""

    def __init__(self) -> None:
        self._left: dict[int, torch.Tensor] = {}

    def round(self, index: int, gradients: torch.Tensor) -> None:
        """Add what was left of this bucket, round to fp16 in place, and keep the difference.

        DDP makes other buckets after the first step; what was left of one of another size is forgotten.
        """
        left = self._left.get(index)
        if left is not None and left.shape == gradients.shape:
            gradients.add_(left)
        else:
            left = self._left[index] = torch.empty_like(gradients)
        left.copy_(gradients)
        finite = torch.isfinite(gradients)
        if bool(finite.all()):
            gradients.clamp_(-_LARGEST, _LARGEST)
        gradients.copy_(gradients.half())
        left.sub_(gradients)
        left.masked_fill_(~finite, 0.0)  # an overflow of the model's is to be seen, once

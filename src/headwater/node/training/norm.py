"""Batch-norm over a batch whose rows are on several nodes.

Owns `whole_batch_norm`. Forwards, every node tells the mean and the squared deviations of its own rows and gets those
of all rows; backwards, the same with the two sums that every row's gradient depends on. What comes out is what one
process with the whole batch computes, to rounding. Running statistics are the trainer's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Meet(Protocol):
    """Where the parts of a batch's statistics are added up. `number` counts the batch-norms on the way."""

    def forward(self, number: int, count: int, mean: Tensor, squares: Tensor) -> tuple[int, Tensor, Tensor]:
        """(count, mean, biased variance) of all rows."""

    def backward(self, number: int, sums: Tensor) -> Tensor:
        """The sums over all rows."""


def whole_batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, meet: Meet | None, number: int
) -> Tensor:
    if meet is None:  # only shapes are wanted
        return torch.empty_like(x)
    result: Tensor = _Norm.apply(x, weight, bias, eps, meet, number)
    return result


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """One for each channel, to be used with `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, meet: Meet, number: int
    ) -> Tensor:
        dims = [0, *range(2, x.dim())]
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        total, mean, variance = meet.forward(number, count, mean, variance * count)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight
        # The mean first: with one multiplication and one addition, what is left of large means would be lost.
        y = (x - _wide(mean, x)).mul_(_wide(scale, x))
        if bias is not None:
            y.add_(_wide(bias, x))
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.total, ctx.meet, ctx.number, ctx.has_bias = total, meet, number, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        dims = [0, *range(2, x.dim())]
        centred = x - _wide(mean, x)
        sum_dy = dy.sum(dims)
        sum_dy_x = (dy * centred).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:
            all_dy, all_dy_x = ctx.meet.backward(ctx.number, torch.stack([sum_dy, sum_dy_x])) / ctx.total
            scale = inverse if weight is None else inverse * weight
            dx = dy - _wide(all_dy, x)
            dx.sub_(centred.mul_(_wide(inverse * inverse * all_dy_x, x))).mul_(_wide(scale, x))
        dweight = sum_dy_x * inverse if weight is not None and ctx.needs_input_grad[1] else None
        dbias = sum_dy if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None

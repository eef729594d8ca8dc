"""Capture: a user's model as a graph that shares the model's own tensors.

Owns `capture` and `Captured`. torch.export fixes whatever Python decided on `module.training`, so a capture belongs
to the modes its modules were in. May import core, errors and torch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export

from headwater.core.spec import ITEM_BYTES, Boundary, TensorSpec
from headwater.errors import CaptureError
from headwater.model.quiet import quiet

Modes = tuple[tuple[str, bool], ...]

# Lines of torch.export's message that say what to do inside torch rather than what is wrong with the model.
_NOISE = ("For more", "For extended", "For C++", "If you suspect", "The error above", "consider using", "Caused by:")
_MESSAGE_LINES = 6

MAX_EXAMPLE_ROWS = 4


@dataclass(frozen=True, eq=False)
class Captured:
    """A model as a graph. `graph_module` has the model's own parameters and buffers, by identity."""

    model: nn.Module
    graph_module: torch.fx.GraphModule
    example: tuple[Tensor, ...]
    inputs: Boundary
    modes: Modes


def modes_of(model: nn.Module) -> Modes:
    """Which modules are in training mode: what a capture depends on beside the code."""
    return tuple((name, module.training) for name, module in model.named_modules())


def capture(model: nn.Module, example: tuple[Tensor, ...]) -> Captured:
    """Capture `model` in the modes it is in, for any batch size. `example` has one tensor for each input."""
    kind = type(model).__name__
    example = _few_rows(kind, example)
    try:
        with quiet(), _neutral():
            graph_module = export(model, example, dynamic_shapes=_dynamic_batch(model, example)).module()
    except Exception as error:
        raise CaptureError(
            f"torch.export could not capture {kind} for inputs {_shapes(example)}: {first_lines(error)}\n"
            "  way out: keep the values of tensors out of if, for and .item() in forward(), leave the batch size open "
            "there, or pass the part of the model that can be captured"
        ) from error
    _check_identity(model, graph_module)
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(
        TensorSpec(node.name, tuple(tensor.shape[1:]), dtype_name(tensor.dtype))
        for node, tensor in zip(placeholders, example, strict=True)
    )
    return Captured(model, graph_module, example, inputs, modes_of(model))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few_rows(kind: str, example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Two to four rows of our own: torch.export takes a batch of one for a fixed size, and more rows only cost."""
    if not example or any(not isinstance(tensor, Tensor) or tensor.dim() == 0 for tensor in example):
        raise CaptureError(
            f"{kind}: the example has to be a tuple of tensors with a batch dimension, not {example!r:.80}"
        )
    if len({tensor.shape[0] for tensor in example}) != 1 or example[0].shape[0] == 0:
        raise CaptureError(f"{kind}: the inputs {_shapes(example)} need one and the same number of rows, at least one")
    for tensor in example:
        if dtype_name(tensor.dtype) not in ITEM_BYTES:
            raise CaptureError(
                f"{kind}: an input of {dtype_name(tensor.dtype)} can't be sent; use one of {', '.join(ITEM_BYTES)}"
            )
    with torch.inference_mode(False):  # a tensor made in inference mode can't be exported, its clone can
        few = tuple(tensor.detach()[:MAX_EXAMPLE_ROWS].clone() for tensor in example)
        return tuple(torch.cat([tensor, tensor]) for tensor in few) if few[0].shape[0] == 1 else few


def _dynamic_batch(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, Any]:
    """The dynamic_shapes of torch.export: the first dimension of every input is open."""
    open_batch = {0: Dim.DYNAMIC}
    bound = inspect.signature(model.forward).bind(*example)
    return {
        name: tuple(open_batch for _ in value) if isinstance(value, tuple) else open_batch
        for name, value in bound.arguments.items()
    }


@contextlib.contextmanager
def _neutral() -> Iterator[None]:
    """The same surroundings for every capture, and no trace of it: a capture may happen amid the user's training loop.

    Attention's fast path is chosen by grad mode and has no ONNX form; the slow path gives the same numbers.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _check_identity(model: nn.Module, graph_module: torch.fx.GraphModule) -> None:
    """The graph must train the user's own tensors; a copy would train in vain."""
    theirs: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    theirs |= dict(model.named_buffers(remove_duplicate=False))
    ours: dict[str, Tensor] = dict(graph_module.named_parameters(remove_duplicate=False))
    ours |= dict(graph_module.named_buffers(remove_duplicate=False))
    for name, tensor in ours.items():
        if name in theirs and theirs[name] is not tensor:
            raise CaptureError(
                f"{type(model).__name__}: torch.export copied {name} instead of sharing it, so training would not "
                "reach the model; register it as a plain parameter or buffer of one module"
            )
    for name, _ in graph_module.named_parameters():
        if name not in theirs:
            raise CaptureError(
                f"{type(model).__name__}: the parameter {name} of the captured graph is not one of the model's own; "
                "create parameters in __init__, not in forward()"
            )


def _shapes(example: tuple[Tensor, ...]) -> str:
    return ", ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in example)


def first_lines(error: Exception) -> str:
    """The lines of an exporter's message that are about the model."""
    lines = [line.strip() for line in str(error).splitlines()]
    useful = [line for line in lines if line and not line.startswith(_NOISE)]
    return "\n    ".join([type(error).__name__, *useful[:_MESSAGE_LINES]])

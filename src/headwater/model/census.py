"""Census: what a model consists of at one moment, and whether it still does.

Owns `Census` (the model's modules and tensors by identity) and `Stamps` (the values of its frozen tensors). Both are
checked at every step, so checks are a few dictionary look-ups; values are compared only after a tensor was written
to. May import errors, torch and `freeze`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import ImpureError, ModelError
from headwater.model.freeze import is_frozen

# Sums over the same values differ between devices by rounding (1e-15 a term); other weights differ by far more.
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Census:
    """`modules` in the order of named_modules; `tensors` by every name they have."""

    modules: tuple[nn.Module, ...]
    tensors: dict[str, Tensor]
    _children: tuple[tuple[dict[str, Any], str, Any], ...]
    _held: tuple[tuple[dict[str, Any], str, Any, str], ...]

    @classmethod
    def of(cls, model: nn.Module) -> Census:
        children, held = [], []
        for path, module in model.named_modules(remove_duplicate=False):
            children += [(module._modules, name, child) for name, child in module._modules.items()]
            for owner in (module._parameters, module._buffers):
                held += [(owner, name, tensor, f"{path}.{name}".lstrip(".")) for name, tensor in owner.items()]
        tensors = {name: tensor for _, _, tensor, name in held if tensor is not None}
        return cls(tuple(model.modules()), tensors, tuple(children), tuple(held))

    def modes(self) -> tuple[bool, ...]:
        """The training flag of each module, after the frozen ones were put back into eval mode."""
        flags = []
        for module in self.modules:
            if module.training and is_frozen(module):
                module.training = False
            flags.append(module.training)
        return tuple(flags)

    def replaced(self) -> dict[str, Tensor] | None:
        """The tensors the model now has in place of others; None if it is no longer built the same."""
        for owner, name, child in self._children:
            if owner.get(name) is not child:
                return None
        changed: dict[str, Tensor] = {}
        for owner, name, tensor, path in self._held:
            found = owner.get(name)
            if found is tensor:
                continue
            if found is None or tensor is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                return None
            changed[path] = found
        return changed


class Stamps:
    """What the frozen tensors were when the prefix was shipped; a node goes on computing with those."""

    def __init__(self, versions: dict[str, int], prints: dict[str, tuple[float, float]]) -> None:
        self._versions = versions
        self._prints = prints

    @classmethod
    def of(cls, model: nn.Module) -> Stamps:
        tensors = {name: tensor for name, tensor in Census.of(model).tensors.items() if not tensor.requires_grad}
        versions = {name: _version(tensor) for name, tensor in tensors.items()}
        return cls(versions, {name: _fingerprint(tensor) for name, tensor in tensors.items()})

    def check(self, census: Census, names: tuple[str, ...]) -> None:
        """Fail if one of the tensors named is trainable by now, or has other values."""
        tensors, versions = census.tensors, self._versions
        for name in names:
            tensor = tensors.get(name)
            if tensor is None:
                continue  # a constant of the graph, not of the model
            if tensor.requires_grad:
                raise ImpureError(
                    f"{name} became trainable, but it is in front of the cut and runs near the data: freeze it again, "
                    "or start a job with an earlier cut"
                )
            if _version(tensor) != versions.get(name):
                self._compare(name, tensor)

    def doubt(self) -> None:
        """Compare values at the next check: a new tensor counts its writes from zero again."""
        self._versions.clear()

    def _compare(self, name: str, tensor: Tensor) -> None:
        before, now = self._prints.get(name), _fingerprint(tensor)
        scale = now[1] * math.sqrt(max(1, tensor.numel())) + 1e-12
        if before is None or any(abs(a - b) > TOLERANCE * scale for a, b in zip(before, now, strict=True)):
            raise ModelError(
                f"{name} is in front of the cut and has changed since the prefix was shipped: load weights before "
                "the job starts, or start a new job"
            )
        self._versions[name] = _version(tensor)


def _version(tensor: Tensor) -> int:
    """Counts the in-place writes to a tensor; tensors made in inference mode don't count, and can't be written to."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _fingerprint(tensor: Tensor) -> tuple[float, float]:
    values = tensor.detach()
    if not values.is_floating_point():
        return float(values.sum()), float(values.double().norm())
    return float(values.sum(dtype=torch.float64)), float(torch.linalg.vector_norm(values, dtype=torch.float64))

"""Freezing: which part of a model may run near the data.

Owns `freeze` and `keep_frozen`. A frozen module has no trainable parameter and stays in eval mode, also after the
user's `model.train()`: its batch-norm and dropout would otherwise depend on the batch. Marks are plain attributes
of the modules, so they survive deepcopy and pickle. May import errors and torch.
"""

from __future__ import annotations

import difflib
from typing import Any, TypeVar

from torch import nn

from headwater.errors import ModelError

M = TypeVar("M", bound=nn.Module)

# Names of the module's own parameters that `freeze` switched off, so that a later `freeze` can switch them on again.
_PARAMS = "_headwater_frozen_params"
# The module has to be in eval mode.
_EVAL = "_headwater_eval"


def freeze(model: M, until: str | None = None) -> M:
    """Freeze what is registered before the module or parameter named `until`; None freezes everything.

    Returns the model: its parameters there need no gradient, and its modules stay in eval mode, also after
    `model.train()`. ModelError if the model has no such name, with the names that are close.

    The order is that of `model.named_parameters()`, so a root parameter such as a class token counts as first.
    `until` itself and what follows is left as the user set it; what an earlier `freeze` froze there thaws.
    """
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    if until is not None and (until == "" or until not in names):
        close = difflib.get_close_matches(until, names, n=5, cutoff=0.4)
        hint = f"close names: {', '.join(close)}" if close else "see model.named_modules() for its names"
        raise ModelError(f"freeze(until={until!r}): {type(model).__name__} has no such module or parameter; {hint}")

    _thaw(model)
    _freeze_before(model, "", until)
    if keep_frozen_hook not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(keep_frozen_hook)
    return model


def keep_frozen(model: nn.Module) -> None:
    """Put the frozen modules of `model` back into eval mode."""
    for module in model.modules():
        if module.training and is_frozen(module):
            module.training = False


def keep_frozen_hook(module: nn.Module, args: Any) -> None:
    """Runs before every forward of a model that was frozen; a module-level function, so the model still pickles."""
    keep_frozen(module)


def is_frozen(module: nn.Module) -> bool:
    """Whether `freeze` holds this module in eval mode."""
    return _EVAL in module.__dict__  # asked at every step; a plain getattr would search parameters and children


def _thaw(model: nn.Module) -> None:
    for module in model.modules():
        for name in module.__dict__.pop(_PARAMS, ()):
            module._parameters[name].requires_grad_(True)  # type: ignore[union-attr]
        if module.__dict__.pop(_EVAL, False):
            module.training = model.training


def _freeze_before(module: nn.Module, path: str, until: str | None) -> bool:
    """Freeze `module` up to `until` in registration order; False once `until` was met."""
    if path == until:
        return False
    frozen: list[str] = []
    whole = True
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if (f"{path}.{name}" if path else name) == until:
            whole = False
            break
        if parameter.requires_grad:
            parameter.requires_grad_(False)
            frozen.append(name)
    if whole:
        for name, child in module._modules.items():
            if child is not None and not _freeze_before(child, f"{path}.{name}" if path else name, until):
                whole = False
                break
    if frozen:
        module.__dict__[_PARAMS] = tuple(frozen)
    if whole:
        module.__dict__[_EVAL] = True
        module.training = False
    return whole

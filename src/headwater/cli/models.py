"""A model by name, as a job file or a command line gives it.

Owns the spelling of names; imports libraries on demand.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from headwater.errors import ConfigError

SPELLING = "timm:NAME, torchvision:NAME, or package.module:FUNCTION"


def build_model(name: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """The model that `name` stands for: a torch module."""
    source, separator, rest = name.partition(":")
    if not separator or not source or not rest:
        raise ConfigError(f"a model is named {SPELLING}, not {name!r}")
    arguments = dict(arguments or {})
    if source == "timm":
        return _call("timm", "create_model", name, rest, **arguments)
    if source == "torchvision":
        return _call("torchvision.models", "get_model", name, rest, **arguments)
    return _call(source, rest, name, **arguments)


def _call(module_name: str, function: str, name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{name}: can't import {module_name} ({error}); install it, or check the name") from error
    except Exception as error:  # a torchvision that was built for another torch raises a RuntimeError
        raise ConfigError(f"{name}: importing {module_name} failed with {type(error).__name__}: {str(error)[:300]}; "
                          "does its build fit the torch that is installed?") from error  # fmt: skip
    if not callable(getattr(module, function, None)):
        close = difflib.get_close_matches(function, dir(module), n=3)
        hint = f"; close: {', '.join(close)}" if close else ""
        raise ConfigError(f"{name}: {module_name} has no function {function!r}{hint}")
    try:
        model = getattr(module, function)(*args, **kwargs)
    except Exception as error:
        raise ConfigError(f"{name}: building it failed with {type(error).__name__}: {str(error)[:300]}") from error
    if not hasattr(model, "state_dict"):
        raise ConfigError(f"{name} gave {type(model).__name__}, not a torch module")
    return model

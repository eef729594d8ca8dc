"""Sums in the network: the aggregator (`headwater reduce`) and the workers' side of it (docs/reduce.md).

Owns the public names: `attach`, one line in a torchrun script, and `Reducer`, the same sums for plain arrays. What
needs torch is imported when it is first used: an aggregator runs without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.reduce.hook import Attached, attach
    from headwater.reduce.reducer import Reducer

_HOMES = {"Attached": "hook", "Reducer": "reducer", "attach": "hook"}

__all__ = ["Attached", "Reducer", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"headwater.reduce has no {name!r}; its names are {', '.join(__all__)}")
    return getattr(import_module(f"headwater.reduce.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""Headwater: run the part of training that shrinks data where the data lives.

The public names, and nothing else. Those that need torch are imported when they are first used, so that a storage node
can import this package without it.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headwater import version as _version

# ONNX Runtime 1.31 has telemetry for its maker: unless told not to before it is loaded, it begins a database of records
# of its use. Nobody who trains or serves with Headwater has agreed to that; who wants it sets the variable to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from headwater import reduce
    from headwater.core.plan import Plan
    from headwater.data import transforms
    from headwater.data.torchvision import from_torchvision
    from headwater.errors import HeadwaterError
    from headwater.model.freeze import freeze
    from headwater.model.near import Rows
    from headwater.train.embedding import EmbeddingBag
    from headwater.train.job import Job, near
    from headwater.train.partition import partition

__version__ = _version.VERSION

_HOMES = {
    "EmbeddingBag": "headwater.train.embedding",
    "HeadwaterError": "headwater.errors",
    "Job": "headwater.train.job",
    "Plan": "headwater.core.plan",
    "Rows": "headwater.model.near",
    "freeze": "headwater.model.freeze",
    "from_torchvision": "headwater.data.torchvision",
    "near": "headwater.train.job",
    "partition": "headwater.train.partition",
    "reduce": "headwater.reduce",
    "transforms": "headwater.data.transforms",
}

__all__ = ["EmbeddingBag", "HeadwaterError", "Job", "Plan", "Rows", "__version__", "freeze", "from_torchvision",
           "near", "partition", "reduce", "transforms"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"headwater has no {name!r}; its names are {', '.join(__all__)}")
    if name in ("reduce", "transforms"):  # modules
        return import_module(_HOMES[name])
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

"""Named arrays as one array of each type, so that they are added up, and travel, in one piece.

Owns `bundle` and `unbundle`. Not everybody has all of the arrays: behind the values is for each name a number, 1 of who
has it, so that their sum says how many had. What is missing counts as -0.0, which changes no sum, not even one of -0.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.spec import TensorSpec
from headwater.errors import DamagedError

Values = npt.NDArray[Any]
TYPES = ("float32", "float64")  # whose sums are the same wherever they are made, as long as their order is


def bundle(arrays: Mapping[str, Values], forms: Mapping[str, TensorSpec]) -> dict[str, Values]:
    """By type. `forms` are those of all arrays that there could be, the same for everybody."""
    made = {}
    for dtype, named in _by_type(forms).items():
        whole, start = np.empty(sum(named.values()) + len(named), dtype), 0
        for name, size in named.items():
            whole[start : start + size] = arrays[name].reshape(-1) if name in arrays else -0.0
            start += size
        whole[start:] = [name in arrays for name in named]
        made[dtype] = whole
    return made


def unbundle(whole: Mapping[str, Values], forms: Mapping[str, TensorSpec]) -> dict[str, Values]:
    """Those that anybody had; they look into what is given. DamagedError if that is of other forms."""
    found = {}
    by_type = _by_type(forms)
    if set(whole) != set(by_type):
        raise DamagedError(f"sums of {', '.join(sorted(whole))[:200] or 'nothing'}, where there are gradients of "
                           f"{', '.join(by_type)}")  # fmt: skip
    for dtype, named in by_type.items():
        values, size = whole[dtype], sum(named.values()) + len(named)
        if values.shape != (size,) or str(values.dtype) != dtype:
            raise DamagedError(f"a sum of {list(values.shape)} {values.dtype}; it must be [{size}] {dtype}")
        start, counts = 0, values[size - len(named) :]
        for (name, length), count in zip(named.items(), counts.tolist(), strict=True):
            if count:
                found[name] = values[start : start + length].reshape(forms[name].shape)
            start += length
    return found


def _by_type(forms: Mapping[str, TensorSpec]) -> dict[str, dict[str, int]]:
    """How many values each has, by type and name, in the order in which they are."""
    found: dict[str, dict[str, int]] = {}
    for name, spec in sorted(forms.items(), key=lambda each: (each[1].dtype, each[0])):
        found.setdefault(spec.dtype, {})[name] = spec.num_items
    return found

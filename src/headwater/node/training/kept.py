"""What the frozen layers in front of the first trained one made of samples, kept for the next epoch.

Owns `Kept`. It is held in memory, within a limit that the session has reserved; when that is reached, nothing more is
kept, and what is there stays. Only a prefix that sees the same pixels in each epoch has one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KEPT_BYTES = 256 << 20


class Kept:
    """Rows by sample; a row has a part of each tensor that crosses into what is trained."""

    def __init__(self, max_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._rows: dict[int, list[Tensor]] = {}

    def has(self, ids: Sequence[int]) -> bool:
        return all(sample in self._rows for sample in ids)

    def take(self, ids: Sequence[int]) -> list[Tensor]:
        """The rows of these samples together."""
        found = [self._rows[sample] for sample in ids]
        return [torch.stack(list(each)) for each in zip(*found, strict=True)]

    def put(self, ids: Sequence[int], tensors: Sequence[object]) -> None:
        """Keep these, as far as there is room, and if they are rows at all."""
        rows = [each for each in tensors if isinstance(each, Tensor) and each.dim() and len(each) == len(ids)]
        if len(rows) < len(tensors) or not rows:
            return
        row_bytes = sum(each[0].numel() * each.element_size() for each in rows)
        for place, sample in enumerate(ids):
            if sample in self._rows or self._num_bytes + row_bytes > self._max_bytes:
                continue
            self._rows[sample] = [each[place].clone() for each in rows]
            self._num_bytes += row_bytes

    def clear(self) -> None:
        self._rows.clear()
        self._num_bytes = 0

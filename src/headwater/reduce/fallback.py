"""The ordinary all-reduce, for steps that the aggregator leaves unfinished. Owns `Fallback`; needs torch.

A process group of its own (Gloo), which the carrier's thread alone uses: whatever the training loop does with other
groups meanwhile can't get between. Every worker calls the same things in the same order, or waits for those that don't
yet, for `timeout_s` at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from headwater.core.sums import BF16, Format
from headwater.errors import WorkerGoneError


class Fallback:
    """All workers of the model's group, without an aggregator."""

    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        """`ranks` are the workers' places in the default group. A collective: all of them make one."""
        self._ranks, self._timeout_s = ranks, timeout_s
        self._group = dist.new_group(
            ranks=ranks, backend="gloo", timeout=timedelta(seconds=timeout_s),
            use_local_synchronization=len(ranks) < dist.get_world_size(),  # others may not attach
        )  # fmt: skip
        self.num_workers = len(ranks)
        self.rank = ranks.index(dist.get_rank())

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Each worker's numbers, as many of each."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.num_workers)]
        self._do("gather", dist.all_gather, found, mine)
        return [[int(each) for each in one] for one in found]

    def least(self, number: int) -> int:
        """The least of all workers' numbers."""
        said = torch.tensor([number], dtype=torch.int64)
        self._do("agree", dist.all_reduce, said, op=dist.ReduceOp.MIN)
        return int(said)

    def spread(self, body: npt.NDArray[np.uint8], source: int) -> npt.NDArray[np.uint8]:
        """The bytes of one worker, on all."""
        said = torch.from_numpy(np.ascontiguousarray(body))
        self._do("broadcast", dist.broadcast, said, src=self._ranks[source])
        return said.numpy()

    def add_up(self, values: npt.NDArray[Any], number: Format, *, mean: bool) -> None:
        """The sum, or the mean, in place."""
        if not len(values):
            return
        tensor = as_tensor(values, number)
        wide = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor  # as the aggregator does
        self._do("all-reduce", dist.all_reduce, wide)
        if mean:
            wide.div_(self.num_workers)
        if wide is not tensor:
            tensor.copy_(wide)

    def _do(self, what: str, call: Any, *args: Any, **options: Any) -> None:
        try:
            call(*args, **options, group=self._group)
        except (RuntimeError, ValueError) as error:  # torch's own errors of collectives are RuntimeErrors
            raise WorkerGoneError(
                f"a worker is gone, or did not come within {self._timeout_s:g} s (timeout_s): the "
                f"ordinary {what} of {self.num_workers} workers failed: {_short(error)}"
            ) from None


def as_tensor(values: npt.NDArray[Any], number: Format) -> torch.Tensor:
    """The same memory as a tensor."""
    if number is BF16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

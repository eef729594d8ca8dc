"""A node's copy of a prefix that is trained: its weights, what a step keeps of it, and its gradients.

Owns `TrainedPrefix` and `measure`. In which order it may be told things is `core.partition.Replica`'s; this file does
the arithmetic. It decides nothing about weights: they come from the trainer, which has the optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core.bundle import bundle
from headwater.core.graph import End, PrefixGraph, num_frozen
from headwater.core.partition import Replica
from headwater.core.spec import Boundary
from headwater.data.parcel import Parcel, checksum, pack_rows, unpack_rows
from headwater.errors import ConfigError, DamagedError
from headwater.node.training.build import Built, empty_weights, first_line, footprint
from headwater.node.training.kept import KEPT_BYTES, Kept
from headwater.node.training.norm import Meet

# What a process takes for having imported torch (measured: 190 MB), and what autograd and the allocator take on top of
# what an operator makes: gradients of the same size while they are used.
TORCH_BYTES = 200 << 20
TIMES_MADE = 2
TIMES_WEIGHTS = 3  # the weights, their gradients, and the next version while it comes in


def use_threads(num_threads: int) -> None:
    """As many as the node was given; torch would take every core that it sees."""
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def need_bytes(graph: PrefixGraph, end: End, num_rows: int, depth: int, keeps: bool) -> int:
    """What training up to there takes on this node, with so many rows in each of `depth` micro-batches under way."""
    kept_bytes = KEPT_BYTES if keeps and num_frozen(graph, end) else 0
    weight_bytes, made_bytes = footprint(graph, end, num_rows)
    return TORCH_BYTES + kept_bytes + TIMES_WEIGHTS * weight_bytes + (depth - 1 + TIMES_MADE) * made_bytes


class TrainedPrefix:
    """One replica."""

    def __init__(self, graph: PrefixGraph, end: End, codec: str, keeps: bool, depth: int, max_rows: int) -> None:
        """`keeps` what frozen layers make of samples: each epoch has the same pixels. `depth` micro-batches at once,
        each of up to `max_rows`, which memory was reserved for."""
        self._kept = Kept() if keeps and num_frozen(graph, end) else None
        self._codec = codec
        self._graph, self._end = graph, end
        self._used = graph.used(end)
        self._weights = empty_weights(graph, end, "cpu")
        self._built = Built(graph, end, self._weights)
        self._state = Replica(depth=depth)
        self._staged: dict[str, np.ndarray] = {}
        self._under_way: dict[int, list[Tensor]] = {}  # of each micro-batch what gets gradients
        self._added: dict[str, np.ndarray] = {}  # gradients that were added to other nodes', as they were before
        self._learning: Boundary = ()  # what that is, of the boundary
        self._most_bytes = footprint(graph, end, max_rows)[1]
        self._fitting = {max_rows}  # numbers of rows that make no more than that

    @property
    def version(self) -> int:
        return self._state.version

    def stage(self, parcel: Parcel) -> None:
        """Some tensors of the next version."""
        self._added = {}
        self._state.stage(parcel.number("version"), parcel.number("base", -1))
        for name in parcel.arrays:
            if name not in self._weights:
                raise ConfigError(f"{name[:80]!r} is not a tensor of the prefix")
            if self._kept is not None and name not in self._graph.trained:
                self._kept.clear()
            spec = self._graph.weights[name]
            self._staged[name] = parcel.array(name, spec.shape, spec.dtype)

    def commit(self, version: int) -> None:
        """Take the next version over, as a whole."""
        is_first = self._state.version < 0
        if is_first and (missing := set(self._used) - set(self._staged)):
            raise ConfigError(f"the prefix's {min(missing)} has not come, and {len(missing) - 1} others")
        self._state.commit(version)
        with torch.no_grad():
            for name, each in self._staged.items():
                self._weights[name].copy_(torch.from_numpy(np.array(each)))
        self._staged.clear()

    def checksum(self) -> str:
        """Of the weights as they are."""
        return checksum({name: self._weights[name].detach().numpy() for name in self._used})

    def has_kept(self, ids: Sequence[int]) -> bool:
        """Are these samples' pixels not needed any more?"""
        return self._kept is not None and self._kept.has(ids)

    def forward(
        self, parcel: Parcel, ids: Sequence[int], pixels: np.ndarray | None, meet: Meet
    ) -> dict[str, np.ndarray]:
        """Rows of the boundary of these samples, as they travel. No pixels: their frozen part was kept."""
        micro = parcel.number("micro")
        self._check_rows(len(ids))
        if parcel.about.get("passes") is True:
            self._state.passes(parcel.number("version"))
            with torch.no_grad():
                made = self._built.trained(self._frozen(ids, pixels), meet)
            return pack_rows(self._codec, self._end.boundary, [each.contiguous().numpy() for each in made])
        self._added = {}
        self._state.forward(parcel.number("step"), parcel.number("version"), micro)
        made = self._built.trained(self._frozen(ids, pixels), meet)
        self._under_way[micro] = [each for each in made if each.requires_grad]
        self._learning = tuple(spec for spec, each in zip(self._end.boundary, made, strict=True) if each.requires_grad)
        return pack_rows(self._codec, self._end.boundary, [each.detach().contiguous().numpy() for each in made])

    def _check_rows(self, num_rows: int) -> None:
        """A prefix may compute sizes from the number of rows, so that fewer of them make more, or something else."""
        if num_rows in self._fitting:
            return
        num_bytes = footprint(self._graph, self._end, num_rows)[1]
        if num_bytes > self._most_bytes:
            raise ConfigError(f"{num_rows:,} rows take {num_bytes / 1e6:,.3g} MB in the prefix, and "
                              f"{self._most_bytes / 1e6:,.3g} MB were reserved for the most rows; a prefix must not "
                              "take more for fewer")  # fmt: skip
        self._fitting.add(num_rows)

    def _frozen(self, ids: Sequence[int], pixels: np.ndarray | None) -> list[Any]:
        """What crosses from the frozen part into the trained one."""
        if pixels is None:
            assert self._kept is not None
            return list(self._kept.take(ids))
        spec = self._graph.inputs[0]
        if pixels.shape[1:] != spec.shape:
            raise ConfigError(f"the transforms give rows of {list(pixels.shape[1:])}, the prefix takes {spec}")
        found = self._built.frozen([torch.from_numpy(pixels).to(getattr(torch, spec.dtype))])
        if self._kept is not None:
            self._kept.put(ids, found)
        return found

    def backward(self, parcel: Parcel) -> None:
        """Gradients of those rows; those of the weights are added to what there is."""
        micro = parcel.number("micro")
        self._state.backward(parcel.number("step"), micro)
        made = self._under_way.pop(micro)
        if not made:
            return
        rows = unpack_rows(self._codec, self._learning, parcel, len(made[0]))
        scales = parcel.about.get("scales", [1.0] * len(rows))
        if not isinstance(scales, list) or len(scales) != len(rows) or not all(type(each) is float for each in scales):
            raise DamagedError("gradients came with scales of another number, or kind")
        grads = [torch.from_numpy(np.array(each)).to(tensor.dtype) for each, tensor in zip(rows, made, strict=True)]
        for grad, scale in zip(grads, scales, strict=True):
            if scale != 1.0:
                grad.div_(scale)
        _back(made, grads)

    def collect(self, step: int) -> dict[str, np.ndarray]:
        """The gradients that were added up, of the weights that got any; with that the step is over here."""
        was_added = step == self._state.added
        self._state.collect(step)
        found, self._added = self._added, {}
        return found if was_added else self._gradients()

    def add(self, step: int) -> dict[str, np.ndarray]:
        """The same, to be added to other nodes'. They are kept as they are until something else is asked for."""
        self._state.add(step)
        self._added = self._gradients()
        return bundle(self._added, self._graph.learning(self._end))

    def _gradients(self) -> dict[str, np.ndarray]:
        found = {}
        for name in self._used:
            weight = self._weights[name]
            if weight.grad is not None:
                found[name] = weight.grad.numpy()
                weight.grad = None
        return found

    def drop(self) -> None:
        """The step has not happened."""
        self._state.drop()
        self._added = {}
        self._staged.clear()
        self._under_way.clear()
        for weight in self._weights.values():
            weight.grad = None


def _back(made: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """The backward pass; what it needs may have been overwritten by an operator that works in place."""
    try:
        torch.autograd.backward(made, grads)
    except RuntimeError as error:
        raise ConfigError(f"the prefix has no gradients: {first_line(error)}") from error


class Alone:
    """Statistics of a batch whose rows are all here."""

    def forward(self, number: int, count: int, mean: Tensor, squares: Tensor) -> tuple[int, Tensor, Tensor]:
        return count, mean, squares / count

    def backward(self, number: int, sums: Tensor) -> Tensor:
        return sums


def measure(graph: PrefixGraph, num_rows: int, repeats: int = 2) -> dict[str, list[float]]:
    """Seconds that so many rows take to each end of the prefix: forwards, and backwards. The weights are made up."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for end in graph.ends:
        weights = empty_weights(graph, end, "cpu")
        with torch.no_grad():
            for each in weights.values():
                if each.is_floating_point():
                    each.copy_(torch.rand(each.shape, generator=generator) * 0.1)
                else:
                    each.zero_()
        built = Built(graph, end, weights)
        inputs = [torch.rand((num_rows, *spec.shape), generator=generator).to(getattr(torch, spec.dtype))
                  for spec in graph.inputs]  # fmt: skip
        best = [float("inf"), float("inf")]
        for _ in range(repeats + 1):  # the first one also warms up
            start = time.perf_counter()
            made = [each for each in built.run(inputs, Alone()) if each.requires_grad]
            middle = time.perf_counter()
            if made:
                _back(made, [torch.ones_like(each) for each in made])
            stop = time.perf_counter()
            best = [min(best[0], middle - start), min(best[1], stop - middle)]
        found[end.name] = best
    return found

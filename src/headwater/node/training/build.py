"""From a prefix as plain data to something that runs: operators of torch, by name, over tensors.

Owns `Built`, and `footprint`, which says what a prefix would take before any memory is. What may be named is checked by
`core.graph`; here shapes and types are, by running everything without data first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.core.graph import (
    MAX_NODES,
    NORM,
    Dtype,
    End,
    Layout,
    PrefixGraph,
    Value,
    Weight,
    crossing,
    last_uses,
    num_frozen,
)
from headwater.errors import ConfigError, HeadwaterError
from headwater.node.training.norm import Meet, whole_batch_norm

_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "py.getitem": operator.getitem, "py.add": operator.add, "py.sub": operator.sub, "py.mul": operator.mul,
    "py.floordiv": operator.floordiv,
}  # fmt: skip
_BIGGEST = 2**63
MAX_PIECES = 4096  # that an operator may cut a tensor into: each is an object, however small it is
MAX_MADE = 2 * MAX_NODES  # tensors that all operators make together, for the same reason
AT_ONCE = 4  # values of a frozen part that are alive together, each taken for as large as the largest


def _size(tensor: Tensor, dim: int) -> int:
    return int(tensor.shape[dim])


def _counted(name: str) -> Callable[..., Any]:
    """Arithmetic on sizes; a number that no size can have is an error, not a long computation."""
    work = _NUMBERS[name]

    def run(*args: Any) -> Any:
        if name != "py.getitem" and not all(isinstance(each, int | float) for each in args):
            raise ConfigError(f"{name} is for numbers; lists and texts could be made to fill any memory")
        found = work(*args)
        if isinstance(found, int) and not -_BIGGEST <= found < _BIGGEST:
            raise ConfigError(f"{name} gives a number beyond 64 bits")
        return found

    return run


def _pieces(tensor: Tensor, size: int, dim: int) -> None:
    if size > 0 and -(-tensor.shape[dim] // size) > MAX_PIECES:
        raise ConfigError(f"a tensor in {tensor.shape[dim]:,} along its dimension {dim} would be cut into more than "
                          f"{MAX_PIECES:,} pieces")  # fmt: skip


def _split(tensor: Tensor, split_size: int, dim: int = 0) -> Any:
    _pieces(tensor, split_size, dim)
    return torch.ops.aten.split.Tensor(tensor, split_size, dim)


def _chunk(tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    _pieces(tensor, max(1, -(-tensor.shape[dim] // max(1, chunks))), dim)
    return torch.ops.aten.chunk.default(tensor, chunks, dim)


def _unbind(tensor: Tensor, dim: int = 0) -> Any:
    _pieces(tensor, 1, dim)
    return torch.ops.aten.unbind.int(tensor, dim)


_CUTTING: Mapping[str, Callable[..., Any]] = {
    "aten.split.Tensor": _split, "aten.chunk.default": _chunk, "aten.unbind.int": _unbind,
}  # fmt: skip


def _resolve(name: str) -> Callable[..., Any]:
    if name in _NUMBERS:
        return _counted(name)
    if name == "aten.sym_size.int":
        return _size
    if name in _CUTTING:
        return _CUTTING[name]
    _, packet, overload = name.split(".")
    try:
        found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload)
    except AttributeError:
        raise ConfigError(f"this node's PyTorch {torch.__version__} has no {name}") from None
    return found


class Watch(Protocol):
    """Told of every value that is made."""

    def __call__(self, value: Any) -> None: ...


class Built:
    """A prefix up to one of its ends, over these tensors."""

    def __init__(self, graph: PrefixGraph, end: End, weights: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self.end = end
        self.weights = weights
        self._calls = [(_resolve(call.op) if call.op != NORM else None, call) for call in graph.calls[: end.num_calls]]
        self._free = last_uses(graph, end)
        self.num_frozen = num_frozen(graph, end)
        self.crossing = crossing(graph, end, self.num_frozen)

    def frozen(self, inputs: Sequence[Tensor], watch: Watch | None = None) -> list[Any]:
        """What crosses from the part that nothing trained has a say in; by sample alone."""
        values: dict[int, Any] = dict(enumerate(inputs))
        with torch.no_grad():
            self._run(values, 0, self.num_frozen, None, watch)
        return [values[number] for number in self.crossing]

    def trained(self, frozen: Sequence[Any], meet: Meet | None, watch: Watch | None = None) -> list[Tensor]:
        """The rest, up to the end; with what its backward pass needs."""
        values: dict[int, Any] = dict(zip(self.crossing, frozen, strict=True))
        self._run(values, self.num_frozen, self.end.num_calls, meet, watch)
        found = []
        for number in self.end.values:
            if not isinstance(values[number], Tensor):
                raise ConfigError("what crosses at the end of the prefix is not a tensor")
            found.append(values[number])
        return found

    def run(self, inputs: Sequence[Tensor], meet: Meet | None) -> list[Tensor]:
        return self.trained(self.frozen(inputs), meet)

    def _run(self, values: dict[int, Any], start: int, stop: int, meet: Meet | None, watch: Watch | None) -> None:
        num_inputs = len(self.graph.inputs)
        norms = sum(call.op == NORM for _, call in self._calls[:start])
        # What crosses is kept for whoever asks; everything else is let go of as soon as nobody needs it.
        kept = set(self.crossing) if stop == self.num_frozen and start == 0 else set()

        def read(value: Any) -> Any:
            if isinstance(value, Value):
                return values[value.number]
            if isinstance(value, Weight):
                return self.weights[value.name]
            if isinstance(value, list | tuple):
                return [read(each) for each in value]
            if isinstance(value, Dtype):
                return getattr(torch, value.name)
            if isinstance(value, Layout):
                return getattr(torch, value.name)
            return value

        for place in range(start, stop):
            run, call = self._calls[place]
            args = [read(each) for each in call.args]
            kwargs = {name: read(each) for name, each in call.kwargs.items()}
            try:
                if run is None:
                    made = whole_batch_norm(*args, **kwargs, meet=meet, number=norms)
                    norms += 1
                else:
                    made = run(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
                raise ConfigError(f"call {place} of the prefix, {call.op}, can't run: {first_line(error)}") from error
            values[num_inputs + place] = made
            if watch is not None:
                watch(made)
            for number in self._free.get(place, ()):
                if number not in kept:
                    values.pop(number, None)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def empty_weights(graph: PrefixGraph, end: End, device: str) -> dict[str, Tensor]:
    """Tensors of the prefix, without values."""
    found = {}
    for name in graph.used(end):
        spec = graph.weights[name]
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        found[name] = tensor.requires_grad_(name in graph.trained and tensor.is_floating_point())
    return found


def footprint(graph: PrefixGraph, end: End, num_rows: int) -> tuple[int, int]:
    """(bytes of weights, bytes of everything that so many rows make), found by running it without data.

    ConfigError if it can't run, or gives something else than it says.
    """
    try:
        weights = empty_weights(graph, end, "meta")
        inputs = [torch.empty((num_rows, *spec.shape), dtype=getattr(torch, spec.dtype), device="meta")
                  for spec in graph.inputs]  # fmt: skip
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ConfigError(f"the prefix has a tensor that no memory holds: {first_line(error)}") from error
    weight_bytes = sum(each.numel() * each.element_size() for each in weights.values())
    alive: list[Any] = list(inputs)
    passing: dict[int, int] = {}  # bytes of what the frozen part makes, which is soon let go of
    staying: dict[int, int] = {}  # of what the backward pass may need

    def noting(seen: dict[int, int]) -> Watch:
        def watch(value: Any) -> None:
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, Tensor):
                    if len(alive) >= MAX_MADE:
                        raise ConfigError(f"the prefix makes more than {MAX_MADE:,} tensors; cut earlier")
                    alive.append(each)  # or another one could get its place in memory, and pass for it
                    storage = each.untyped_storage()
                    # A view that repeats itself counts for as large as it looks: whoever reads it takes as long.
                    looks = math.prod(each.shape) * each.element_size()
                    seen[storage._cdata] = max(storage.nbytes(), looks, seen.get(storage._cdata, 0))

        return watch

    built = Built(graph, end, weights)
    try:
        with torch.no_grad():
            found = built.trained(built.frozen(inputs, noting(passing)), None, noting(staying))
    except HeadwaterError:
        raise
    except Exception as error:
        raise ConfigError(f"the prefix can't run: {first_line(error)}") from error
    for tensor, spec in zip(found, end.boundary, strict=True):
        if tuple(tensor.shape) != (num_rows, *spec.shape) or tensor.dtype is not getattr(torch, spec.dtype):
            raise ConfigError(f"the prefix gives {list(tensor.shape)} {tensor.dtype} where it says {spec}")
    # What is added later on, such as a shortcut, lives beside what is made meanwhile.
    return weight_bytes, sum(staying.values()) + AT_ONCE * max(passing.values(), default=0)

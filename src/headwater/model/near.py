"""Near: the user's model, with a second way in for rows that already passed its prefix.

Owns `Rows` and `NearModel`. A suffix is made for each (cut, modes of the modules) when it is first met, so train(),
eval() and mixed modes behave as the original's. Suffixes share the model's tensors and are no submodules: the model
has no parameter twice. May import errors, torch, and the modules of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from headwater.core.cut import refusal
from headwater.core.spec import Boundary, TensorSpec
from headwater.errors import ModelError
from headwater.model.capture import Captured, capture, dtype_name
from headwater.model.census import Census, Stamps
from headwater.model.cuts import cuts
from headwater.model.flow import Flow, flow, module_path, uses_batch_statistics
from headwater.model.split import suffix_from


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of rows that crossed a cut: what the loader yields in place of the model's inputs.

    tensors   what crossed, one tensor for each part of the boundary, with the rows along the first axis
    cut       the index of the cut
    samples   the ids of the rows' samples
    """

    tensors: tuple[Tensor, ...]
    cut: int
    samples: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ModelError("rows need at least one tensor")

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Rows:
        """The rows on another device, as `Tensor.to`; ModelError for another element type."""
        if isinstance(device, torch.dtype):
            raise ModelError(f"rows can't become {device}: they have the element types that the suffix was captured "
                             "with; for lower precision run the model under torch.autocast")  # fmt: skip
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Rows:
        """The rows in page-locked memory, from which copies to a GPU need not wait."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> Rows:
        samples = None if self.samples is None else change(self.samples)
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors), samples=samples)

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    def __getitem__(self, which: slice | Tensor | list[int]) -> Rows:
        """Some of the rows, by slice or by a list of places: for micro-batches."""
        if isinstance(which, int):
            raise ModelError(f"rows[{which}] would be one row without a batch; write rows[{which}:{which + 1}]")
        return self._each(lambda tensor: tensor[which])

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the first tensor."""
        return self.tensors[0].dtype

    def size(self, dim: int | None = None) -> Any:
        """As `Tensor.size`, of the first tensor."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def shape(self) -> torch.Size:
        """The shape of the first tensor; its first number is the number of rows."""
        return self.tensors[0].shape

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.tensors[0].device


@dataclass(frozen=True, eq=False)
class _Suffix:
    """What is behind a cut, the tensors in front of it that must stay as they were shipped, and what one row breaks."""

    module: GraphModule
    boundary: Boundary
    in_front: tuple[str, ...]
    lone_row_fault: str


class NearModel(nn.Module):
    """Runs the original on plain inputs, and what is behind the cut on `Rows`.

    `original` is the user's model; parameters are shared with it, so either one's optimizer and `train` or `eval` mode
    count for both. ModelError if a frozen part was changed after rows were made with it.
    """

    def __init__(self, captured: Captured) -> None:
        """`captured` is the capture whose prefix feeds this model: cuts and boundaries are counted in it."""
        super().__init__()
        self.original = captured.model
        self._example = captured.example
        self._stamps = Stamps.of(captured.model)
        reference = flow(captured)
        self._described = _describe(reference)
        seen: set[Node] = set()
        self._used = tuple(_constants(reference, place, seen) for place in reference.places)
        self._forget()
        self._flows[tuple(training for _, training in captured.modes), _device(captured.model)] = reference

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(arg, Rows) for arg in (*args, *kwargs.values())):
            return self.original(*args, **kwargs)
        if len(args) != 1 or kwargs:
            raise ModelError(
                f"rows stand for all inputs of {type(self.original).__name__}: pass them alone, not beside "
                f"{len(args) + len(kwargs) - 1} other arguments"
            )
        rows: Rows = args[0]
        return self._suffix_for(rows)(*rows.tensors)

    def check_cut(self, index: int) -> None:
        """Fail if a tensor in front of this cut is trainable by now, or has other values than when it was captured."""
        self._stamps.check(Census.of(self.original), tuple(chain.from_iterable(self._used[:index])))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _CACHES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        """Drop every capture; the next rows make what they need."""
        self._census = Census.of(self.original)
        self._flows: dict[tuple[Any, ...], Flow] = {}
        self._suffixes: dict[tuple[Any, ...], _Suffix] = {}

    @torch.compiler.disable  # a capture under torch.compile would meet sizes that are not its own
    def _suffix_for(self, rows: Rows) -> GraphModule:
        self._follow_replaced_tensors()
        modes = self._census.modes()
        key = (rows.cut, modes, _device(self.original))
        suffix = self._suffixes.get(key)
        if suffix is None:
            suffix = self._suffixes[key] = self._make_suffix(*key)
        _check_rows(rows, suffix)
        self._stamps.check(self._census, suffix.in_front)
        return suffix.module

    def _follow_replaced_tensors(self) -> None:
        """`.to(device)` and `load_state_dict(assign=True)` give a model new tensors: the suffixes take them over."""
        replaced = self._census.replaced()
        if replaced == {}:
            return
        self._stamps.doubt()
        if replaced is None:
            self._forget()
            return
        graphs = [whole.captured.graph_module for whole in self._flows.values()]
        for graph in (*graphs, *(suffix.module for suffix in self._suffixes.values())):
            for name, tensor in replaced.items():
                _rebind(graph, name, tensor)
        self._census = Census.of(self.original)

    def _make_suffix(self, index: int, modes: tuple[bool, ...], device: torch.device) -> _Suffix:
        here = self._flows.get((modes, device))
        if here is None:
            here = flow(capture(self.original, tuple(tensor.to(device) for tensor in self._example)))
            self._flows[modes, device] = here
        crossing = _same_place(self._described, here, index)
        cut = cuts(here.captured)[index]
        if not cut.legal:
            raise refusal(cut, f"rows were cut there, and it is no longer legal: {cut.why_not}")
        labels = dict(zip(here.alive(index), cut.boundary, strict=True))
        boundary = tuple(labels.get(node) or _spec(node) for node in crossing)
        module = suffix_from(here, index, crossing)
        return _Suffix(module, boundary, tensors_in_front(here, index), _lone_row_fault(here, index))


# What a copy or a pickle of a NearModel makes anew.
_CACHES = frozenset({"_census", "_flows", "_suffixes"})


@dataclass(frozen=True)
class _Described:
    """A capture without its graph: enough to tell whether another capture has the same prefix."""

    num_inputs: int
    places: tuple[tuple[str, str], ...]
    last_use: tuple[int, ...]


def _describe(whole: Flow) -> _Described:
    last_use = tuple(whole.last_use[node] for node in (*whole.inputs, *whole.places))
    return _Described(len(whole.inputs), tuple(map(_place, whole.places)), last_use)


def _place(node: Node) -> tuple[str, str]:
    return str(node.target), module_path(node)


def _same_place(reference: _Described, here: Flow, index: int) -> tuple[Node, ...]:
    """The nodes of this capture that the rows of the reference's cut `index` stand for."""
    if not 0 <= index <= len(reference.places):
        raise ModelError(f"rows from cut {index}: this model has the cuts 0 to {len(reference.places)}")
    ours = tuple(map(_place, here.places[:index]))
    for theirs, found in zip_longest(reference.places[:index], ours):
        if theirs != found:
            raise ModelError(
                f"in its present modes the model computes {found} where the prefix that was shipped computes {theirs}; "
                "keep what is in front of the cut in the modes it was captured in (hw.freeze does), or cut earlier"
            )
    earlier = (*here.inputs, *here.places[:index])
    last_use = reference.last_use[: reference.num_inputs + index]
    crossing = tuple(node for node, last in zip(earlier, last_use, strict=True) if index == 0 or last > index)
    missing = set(here.alive(index)) - set(crossing)
    if missing:
        raise ModelError(
            f"in its present modes the model also needs {', '.join(sorted(node.name for node in missing))} behind cut "
            f"{index}, which the rows don't carry; cut elsewhere, or capture the model in these modes"
        )
    return crossing


def _spec(node: Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(node.name, tuple(int(size) for size in value.shape[1:]), dtype_name(value.dtype))


def _check_rows(rows: Rows, suffix: _Suffix) -> None:
    boundary = suffix.boundary
    if len(rows.tensors) != len(boundary):
        raise ModelError(
            f"rows from cut {rows.cut} carry {len(rows.tensors)} tensors, the suffix takes {len(boundary)}"
        )
    for tensor, spec in zip(rows.tensors, boundary, strict=True):
        if tensor.shape[1:] != spec.shape or tensor.dtype != getattr(torch, spec.dtype):
            raise ModelError(
                f"rows from cut {rows.cut}: {spec.name} came as {dtype_name(tensor.dtype)}{list(tensor.shape[1:])}, "
                f"the suffix takes {spec}"
            )
    if suffix.lone_row_fault and len(rows) == 1:
        raise ModelError(suffix.lone_row_fault)


def _lone_row_fault(whole: Flow, index: int) -> str:
    """PyTorch's batch-norm refuses to learn from one value a channel; that check is Python and not in the graph."""
    for place in whole.places[index:]:
        if uses_batch_statistics(place):
            shape = place.all_input_nodes[0].meta["val"].shape
            if len(shape) < 3 or all(size == 1 for size in shape[2:]):
                path = module_path(place) or "the model"
                return (
                    f"{path} is in training mode and a batch of one row gives it one value a channel: drop the last "
                    "incomplete batch, or put it into eval mode"
                )
    return ""


def tensors_in_front(whole: Flow, index: int) -> tuple[str, ...]:
    seen: set[Node] = set()
    return tuple(chain.from_iterable(_constants(whole, place, seen) for place in whole.places[:index]))


def _constants(whole: Flow, place: Node, seen: set[Node]) -> tuple[str, ...]:
    """The tensors that this place needs and that were not seen before."""
    return tuple(str(node.target) for node in whole.with_constants(place, seen) if node.op == "get_attr")


def _rebind(module: GraphModule, name: str, tensor: Tensor) -> None:
    """Let a graph refer to the tensor that the model has now."""
    path, _, key = name.rpartition(".")
    owner: Any = module
    for part in path.split(".") if path else ():
        owner = owner._modules.get(part)
        if owner is None:
            return
    for held in (owner._parameters, owner._buffers):
        if key in held:
            held[key] = tensor


def _device(model: nn.Module) -> torch.device:
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")

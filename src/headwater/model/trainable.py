"""A prefix that is trained where it runs: its cuts, its form as plain data, and what of it stays with the model.

Owns `trainable_cuts` and `Trainable`. Weights are the model's own tensors, by name; the running statistics of
batch-norms and their counters are not sent at all: they belong to the model, and whoever adds up the batch's
statistics moves them on. May import core, errors, torch, and the modules of this package that analyse the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from headwater.core.cut import Cut
from headwater.core.graph import (
    NORM,
    OPERATORS,
    Argument,
    Call,
    Dtype,
    End,
    Layout,
    PrefixGraph,
    Value,
    Weight,
)
from headwater.core.spec import TensorSpec
from headwater.errors import ModelError
from headwater.model.capture import Captured, dtype_name
from headwater.model.cuts import cuts
from headwater.model.flow import (
    argument,
    attribute,
    flow,
    is_check,
    is_counter,
    uses_batch_statistics,
)
from headwater.model.split import prefixes_module

_NUMBERS = {operator.getitem: "py.getitem", operator.add: "py.add", operator.sub: "py.sub", operator.mul: "py.mul",
            operator.floordiv: "py.floordiv"}  # fmt: skip


@dataclass(frozen=True)
class Norm:
    """What a batch-norm in the prefix keeps in the model."""

    name: str
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float


@dataclass(frozen=True, eq=False)
class Trainable:
    """The prefix up to some cuts: the graph that is sent, the model's tensors in it, and what the model keeps."""

    graph: PrefixGraph
    tensors: Mapping[str, Tensor]
    norms: tuple[Norm, ...]  # in the order of their calls
    counters: tuple[tuple[Tensor, int], ...]
    needs_grad: Mapping[str, tuple[bool, ...]]  # by end, for each value that crosses there


def trainable_cuts(captured: Captured) -> tuple[Cut, ...]:
    """Every cut of the model; legal is one whose prefix nodes can train."""
    found = cuts(captured, trains=True)
    whole, unknown = flow(captured), ""
    result = [found[0]]
    for place, cut in zip(whole.places, found[1:], strict=True):
        name = _operator(place)
        if not unknown and name not in OPERATORS:
            unknown = f"{name} is not among the operators that nodes train; cut before it"
        if unknown and cut.legal:
            cut = replace(cut, legal=False, why_not=unknown, impure=True)
        result.append(cut)
    return tuple(result)


def _operator(node: Node) -> str:
    """What the operator is called in the list."""
    if node.target in _NUMBERS:
        return _NUMBERS[node.target]
    return NORM if uses_batch_statistics(node) and str(node.target) == "aten.batch_norm.default" else str(node.target)


def trainable(captured: Captured, ends: Sequence[Cut]) -> Trainable:
    """The prefix that may end at these cuts."""
    ends = sorted(ends, key=lambda cut: cut.index)
    module, outputs = prefixes_module(captured, ends)
    numbers: dict[Node, int] = {}
    names: dict[Node, str] = {}
    calls: list[Call] = []
    tensors: dict[str, Tensor] = {}
    norms: list[Norm] = []
    counters: list[tuple[Tensor, int]] = []
    gets_grad: set[Node] = set()
    results: list[Node] = []

    def read(value: Any) -> Argument:
        if isinstance(value, Node):
            if value in names:
                tensors[names[value]] = attribute(value, value)
                return Weight(names[value])
            return Value(numbers[value])
        if isinstance(value, list | tuple):
            return [read(each) for each in value]
        if isinstance(value, torch.dtype):
            return Dtype(dtype_name(value))
        if isinstance(value, torch.memory_format):
            return Layout(str(value).removeprefix("torch."))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ModelError(f"{value!r:.80}, an argument in front of the cut, can't be sent to a node; cut before it")

    num_inputs = 0
    for node in module.graph.nodes:
        if node.op == "placeholder":
            numbers[node] = num_inputs
            num_inputs += 1
        elif node.op == "get_attr":
            names[node] = str(node.target)
            tensor = attribute(node, node)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                gets_grad.add(node)
        elif node.op == "output":
            results = list(node.args[0])
        elif is_check(node):
            continue
        elif is_counter(node):
            counters.append((attribute(node, node.args[0]), node.args[1]))
        else:
            numbers[node] = num_inputs + len(calls)
            if any(arg in gets_grad for arg in node.all_input_nodes):
                gets_grad.add(node)
            calls.append(_call(node, read, norms))
    weights = {name: TensorSpec(name, tuple(each.shape), dtype_name(each.dtype)) for name, each in tensors.items()}
    trained = frozenset(name for name, each in tensors.items() if isinstance(each, nn.Parameter) and each.requires_grad)
    for name in trained:
        if not tensors[name].is_floating_point() or tensors[name].dtype is torch.bfloat16:
            raise ModelError(
                f"{name} is of {dtype_name(tensors[name].dtype)}; nodes train float16, float32 and float64"
            )
    found, needs = [], {}
    for cut, places in zip(ends, outputs, strict=True):
        values = tuple(numbers[results[place]] for place in places)
        count = max(0, max(values) - num_inputs + 1)
        found.append(End(cut.name, count, values, cut.boundary))
        needs[cut.name] = tuple(results[place] in gets_grad for place in places)
    graph = PrefixGraph(captured.inputs, tuple(calls), weights, trained, tuple(found))
    return Trainable(graph, tensors, tuple(norms), tuple(counters), needs)


def _call(node: Node, read: Any, norms: list[Norm]) -> Call:
    name = _operator(node)
    if name not in OPERATORS:
        raise ModelError(f"{name} is not among the operators that nodes train; cut before it")
    if name == NORM:
        running = [argument(node, each) for each in ("running_mean", "running_var")]
        mean, var = (None if each is None else attribute(node, each) for each in running)
        if isinstance(running[0], Node) and running[0].op == "get_attr":
            label = str(running[0].target).rpartition(".")[0]
        else:
            label = node.name
        norms.append(Norm(label, mean, var, float(argument(node, "momentum"))))
        given = [argument(node, each) for each in ("input", "weight", "bias")]
        return Call(NORM, tuple(map(read, given)), {"eps": float(argument(node, "eps"))})
    # Where tensors are made is the node's business.
    kwargs = {key: read(value) for key, value in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
    return Call(name, tuple(read(each) for each in node.args), kwargs)

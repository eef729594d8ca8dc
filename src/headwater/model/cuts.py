"""Cuts: every place where a captured model can be divided, what would cross there, and whether that is allowed.

Owns `cuts`: the one file that says what is legal; `core.cut` has the form of the result. A prefix may run near the
data if it is pure: nothing trainable, nothing random, nothing that depends on its batch or changes the model. What
crosses must come as rows, so the batch leads every tensor of a boundary. May import core, errors, torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import Node

from headwater.core.cut import Cut
from headwater.core.spec import ITEM_BYTES, Boundary, TensorSpec
from headwater.model.capture import Captured, dtype_name
from headwater.model.flow import (
    Flow,
    attribute,
    flow,
    inner_nodes,
    is_counter,
    is_random,
    module_calls,
    module_path,
    op_name,
    uses_batch_statistics,
)

# NumPy has no bfloat16, and rows are NumPy arrays wherever they are made.
_SENDABLE = frozenset(ITEM_BYTES) - {"bfloat16"}


def cuts(captured: Captured, *, trains: bool = False) -> tuple[Cut, ...]:
    """Every cut of the model, in the order of computation. With `trains`, a prefix may be trained where it runs: what
    is trainable, and batch-norms with the statistics of their batch, are allowed in it."""
    graph = flow(captured)
    names, also = _names(graph)
    labels = {node: node.name for node in graph.inputs} | dict(zip(graph.places, names[1:], strict=True))
    found = []
    for index, (purity, weights) in enumerate(zip(_impurities(graph, trains), _weights(graph), strict=True)):
        boundary, fault = _boundary(graph, index, labels)
        why_not = purity or fault
        found.append(
            Cut(index, names[index], boundary, not why_not, why_not, *weights, also=also[index], impure=bool(purity))
        )
    return tuple(found)


def _names(graph: Flow) -> tuple[list[str], list[tuple[str, ...]]]:
    """For each cut its name, and the further modules that end there."""
    last_place: dict[str, int] = {}
    for place, node in enumerate(graph.places, start=1):
        for key, _ in module_calls(node):
            last_place[key] = place
    names, taken = ["input"], {"input"}
    also: list[tuple[str, ...]] = [()]
    for place, node in enumerate(graph.places, start=1):
        done = [_call_name(key, path) for key, path in module_calls(node) if last_place[key] == place]
        base = done[0] if done else f"{module_path(node)}/{op_name(node)}"
        name, again = base, 1
        while name in taken:
            again += 1
            name = f"{base}.{again}" if not done else f"{base}@{again}"
        taken.add(name)
        names.append(name)
        also.append(tuple(done[1:]))
    return names, also


def _call_name(key: str, path: str) -> str:
    """torch.export marks the second call of one module with @1."""
    return f"{path}@{key.rsplit('@', 1)[1]}" if "@" in key else path


def _boundary(graph: Flow, index: int, labels: dict[Node, str]) -> tuple[Boundary, str]:
    """What crosses, or why it can't."""
    alive = graph.alive(index)
    if not alive:
        return (), "nothing that follows depends on the data"
    specs = []
    for node in alive:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return (), f"a {type(value).__name__} of {op_name(node)} would cross ({labels[node]}), not a tensor"
        if value.dim() == 0 or not graph.is_batch(value.shape[0]):
            return (), f"{labels[node]} has shape {_shape(graph, value)}: its leading dimension is not the batch"
        if any(isinstance(size, torch.SymInt) for size in value.shape[1:]):
            return (), f"{labels[node]} has shape {_shape(graph, value)}: the batch is in more than its first dimension"
        if dtype_name(value.dtype) not in _SENDABLE:
            return (), f"{labels[node]} has element type {dtype_name(value.dtype)}, which can't be sent"
        specs.append(TensorSpec(labels[node], tuple(int(size) for size in value.shape[1:]), dtype_name(value.dtype)))
    return tuple(specs), _torn_memory(graph, index, alive, labels)


def _torn_memory(graph: Flow, index: int, alive: Sequence[Node], labels: dict[Node, str]) -> str:
    """Two names for one memory become two copies when they are sent, so a later in-place write would miss one."""
    changed = graph.written_after(index)
    seen: dict[Node, Node] = {}
    for node in alive:
        group = graph.group[node]
        if group in changed and group in seen:
            return (
                f"{labels[seen[group]]} and {labels[node]} share memory that is changed in place later; cut elsewhere"
            )
        seen[group] = node
    return ""


def _shape(graph: Flow, value: Tensor) -> str:
    return "×".join("batch" if graph.is_batch(size) else str(size) for size in value.shape) or "scalar"


def _impurities(graph: Flow, trains: bool) -> list[str]:
    """For each cut why its prefix is impure, or ""."""
    reasons, reason = [""], ""
    checked: set[Node] = set()
    for node in graph.captured.graph_module.graph.nodes:
        is_place = graph.ordinal.get(node, 0) > 0
        if not reason and (is_place or graph.changes_the_model(node)):
            reason = _why_impure(graph, node, checked, trains)
        if is_place:
            reasons.append(reason)
    return reasons


def _why_impure(graph: Flow, node: Node, checked: set[Node], trains: bool) -> str:
    """Why a node, or a constant it needs, may not run near the data."""
    model = graph.captured.model
    for source in graph.with_constants(node, checked):
        if source.op == "get_attr":
            tensor = attribute(node, source)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad and not trains:
                return (
                    f"{source.target} is trainable: call hw.freeze(model, until=...), set its requires_grad to False, "
                    "or cut before it"
                )
            continue
        for inner in inner_nodes(source):
            path = module_path(source)
            if uses_batch_statistics(inner) and not trains:
                return _why_module(model, path, "normalises with the statistics of its batch")
            if is_random(inner):
                return _why_module(model, path, f"draws random numbers ({op_name(inner)})")
    if graph.changes_the_model(node) and not (trains and is_counter(node)):
        return _why_module(model, module_path(node), "changes its own buffers as it runs")
    return ""


def _why_module(model: nn.Module, path: str, what: str) -> str:
    module = model.get_submodule(path)
    if module.training:
        name = path or "model"
        return f"{name} is in training mode: call hw.freeze(model, until=...) or {name}.eval()"
    return f"{path or type(model).__name__} {what} even in eval mode: cut before it"


def _weights(graph: Flow) -> list[tuple[int, int]]:
    """For each cut the number of parameters in front of it, and the bytes of them and the buffers."""
    checked: set[Node] = set()
    seen: set[int] = set()
    num_params, num_bytes = 0, 0
    result = [(0, 0)]
    for place in graph.places:
        for node in graph.with_constants(place, checked):
            tensor = attribute(place, node) if node.op == "get_attr" else None
            if isinstance(tensor, Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                num_bytes += tensor.numel() * tensor.element_size()
                num_params += tensor.numel() if isinstance(tensor, nn.Parameter) else 0
        result.append((num_params, num_bytes))
    return result

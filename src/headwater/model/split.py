"""Split: a captured model as two modules, in front of a cut and behind it.

Owns `prefix_module`, `prefixes_module` and `suffix_module`. All are copies of parts of the captured graph and share the
model's own tensors. None changes what it is given: a tensor that an in-place operator would write to is cloned first.
May import errors, torch, and the modules of this package that analyse the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from headwater.core.cut import Cut, refusal
from headwater.model.capture import Captured
from headwater.model.flow import Flow, flow, is_check, is_size, written


def prefix_module(captured: Captured, cut: Cut) -> GraphModule:
    """The model up to `cut`: its inputs → the tuple of tensors that cross."""
    return prefixes_module(captured, [cut])[0]


def prefixes_module(captured: Captured, cuts: Sequence[Cut]) -> tuple[GraphModule, list[tuple[int, ...]]]:
    """The model up to the last of `cuts` (by index), giving what crosses at each of them; and which outputs are whose.

    A tensor that crosses at several cuts is one output, unless it was changed in place between them.
    """
    for cut in cuts:
        _require_legal(cut)
    whole = flow(captured)
    wanted = sorted(cuts, key=lambda cut: cut.index)
    last = wanted[-1].index
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in whole.inputs:
        copies[node] = graph.placeholder(node.name)
    _clone_written(whole, graph, copies, whole.places[:last])
    outputs: list[Node] = []
    seen: dict[tuple[Node, int], int] = {}  # (tensor, how often its memory was changed by then) → output
    of_cut: dict[int, tuple[int, ...]] = {}

    def note(index: int) -> None:
        """What crosses after place `index`, kept from what later places do to it."""
        changes = [whole.group[arg] for place in whole.places[:index] for arg in written(place)]
        to_come = {whole.group[arg] for place in whole.places[index:last] for arg in written(place)}
        places = []
        for node in whole.alive(index):
            key = node, changes.count(whole.group[node])
            if key not in seen:
                seen[key] = len(outputs)
                value = copies[node]
                if whole.group[node] in to_come:
                    value = graph.call_function(torch.ops.aten.clone.default, (value,))
                outputs.append(value)
            places.append(seen[key])
        of_cut[index] = tuple(places)

    indices = {cut.index for cut in wanted}
    if 0 in indices:
        note(0)
    for node in _until_place(whole, last):
        if not is_check(node) and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if whole.ordinal.get(node, 0) in indices - {0}:
            note(whole.ordinal[node])
    graph.output(tuple(outputs))
    return _finish(captured, graph, "Prefix"), [of_cut[cut.index] for cut in cuts]


def suffix_module(captured: Captured, cut: Cut) -> GraphModule:
    """The model after `cut`: the tensors that cross → the model's output, in the model's own structure."""
    _require_legal(cut)
    whole = flow(captured)
    return suffix_from(whole, cut.index, whole.alive(cut.index))


def suffix_from(whole: Flow, index: int, crossing: Sequence[Node]) -> GraphModule:
    """The model after place `index`, fed with `crossing`, which may have more tensors than are needed."""
    captured = whole.captured
    graph = Graph()
    copies: dict[Node, Node] = {}
    for position, node in enumerate(crossing):
        copies[node] = graph.placeholder(f"row_{position}")
    rows = copies[crossing[0]]
    _clone_written(whole, graph, copies, whole.places[index:])
    passed = index == 0
    for node in captured.graph_module.graph.nodes:
        ordinal = whole.ordinal.get(node)
        if is_check(node) or (ordinal is not None and ordinal <= index):
            passed = passed or (ordinal == index and index > 0)
            continue
        if not passed and whole.changes_the_model(node):
            continue  # belongs to the prefix, which is impure then: no legal cut gets here
        if is_size(node) and node.args[0] not in copies:
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (rows, 0))
        elif node.op == "output":
            graph.output(torch.fx.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    _give_structure(captured, graph, len(crossing))
    return _finish(captured, graph, "Suffix")


def _until_place(whole: Flow, index: int) -> list[Node]:
    """The nodes up to and with place `index`. A buffer that is counted up just after it belongs to the suffix."""
    if index == 0:
        return []
    nodes = list(whole.captured.graph_module.graph.nodes)
    return nodes[: nodes.index(whole.places[index - 1]) + 1]


def _require_legal(cut: Cut) -> None:
    if not cut.legal:
        raise refusal(cut, f"can't divide the model: {cut.why_not}")


def _clone_written(whole: Flow, graph: Graph, copies: dict[Node, Node], places: Sequence[Node]) -> None:
    """Protect the caller's tensors from the in-place operators among `places`."""
    changed = {whole.group[arg] for place in places for arg in written(place)}
    for node, copy in list(copies.items()):
        if whole.group[node] in changed:
            copies[node] = graph.call_function(torch.ops.aten.clone.default, (copy,))


def _give_structure(captured: Captured, graph: Graph, num_rows: int) -> None:
    """Let the graph return what the model returns: a tensor, a tuple, a dict, a dataclass."""
    info: Any = captured.graph_module.graph._codegen.pytree_info  # type: ignore[attr-defined]
    names = [f"row_{position}" for position in range(num_rows)]
    _, in_spec = pytree.tree_flatten((tuple(names), {}))
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, in_spec, info.out_spec)))


def _finish(captured: Captured, graph: Graph, name: str) -> GraphModule:
    graph.eliminate_dead_code()  # first: a GraphModule takes over every tensor that its graph mentions
    return GraphModule(captured.graph_module, graph, class_name=name)

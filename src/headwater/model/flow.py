"""Flow: what the captured graph computes from the data, what shares memory, and what is alive at each place.

Owns `Flow`, the analysis behind cuts and splits. A *place* is a node that depends on the model's inputs as data.
Everything else (parameters, constants, position ids, sizes of the batch) is recomputed on whichever side needs it.
May import errors, torch and `capture`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from headwater.model.capture import Captured

# Used at the end of the graph.
FOREVER = 1 << 60

# Composite operators that may hand back their own input without saying so in their schema.
_MAYBE_SAME = frozenset(
    {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "conj_physical", "type_as", "unsafe_chunk"}
)
_BATCH_NORMS = frozenset({"batch_norm", "_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm"})


@dataclass(frozen=True, eq=False)
class Flow:
    """`places` counts from 1: `ordinal[places[0]] == 1`, and the model's inputs have ordinal 0."""

    captured: Captured
    inputs: tuple[Node, ...]
    places: tuple[Node, ...]
    ordinal: dict[Node, int]
    last_use: dict[Node, int]
    group: dict[Node, Node]
    batch: frozenset[Any]

    def alive(self, index: int) -> tuple[Node, ...]:
        """The values that cross a cut after place `index`, in the order in which they come to be."""
        if index == 0:
            return self.inputs
        earlier = (*self.inputs, *self.places[:index])
        return tuple(node for node in earlier if self.last_use[node] > index)

    def written_after(self, index: int) -> frozenset[Node]:
        """The memory groups that an in-place operator changes after place `index`."""
        return frozenset(self.group[arg] for node in self.places[index:] for arg in written(node))

    def is_batch(self, size: Any) -> bool:
        """Whether a size is the number of rows."""
        return isinstance(size, torch.SymInt) and size.node.expr in self.batch

    def changes_the_model(self, node: Node) -> bool:
        """Whether a node writes to a parameter or buffer."""
        return node in self.group and any(self.group[arg].op == "get_attr" for arg in written(node))

    def with_constants(self, node: Node, seen: set[Node]) -> list[Node]:
        """A node and, transitively, what it needs that does not depend on the data and is not in `seen` yet."""
        found, pending = [node], [node]
        while pending:
            for arg in pending.pop().all_input_nodes:
                if arg not in self.ordinal and arg not in seen:
                    seen.add(arg)
                    found.append(arg)
                    pending.append(arg)
        return found


def flow(captured: Captured) -> Flow:
    nodes = [node for node in captured.graph_module.graph.nodes if not is_check(node)]
    inputs = tuple(node for node in nodes if node.op == "placeholder")
    group = _memory_groups(nodes)
    data = _data_nodes(nodes, group)
    places = tuple(node for node in nodes if node in data and node.op not in ("placeholder", "output"))
    ordinal = dict.fromkeys(inputs, 0) | {node: place for place, node in enumerate(places, start=1)}
    batch = frozenset(node.meta["val"].shape[0].node.expr for node in inputs if _has_open_batch(node))
    result = Flow(captured, inputs, places, ordinal, {}, group, batch)
    result.last_use.update({node: _last_use(result, node) for node in ordinal})
    return result


def is_check(node: Node) -> bool:
    """A run-time check that torch.export inserted: it computes nothing and its sizes are checked when rows arrive."""
    if node.op == "call_module":
        return node.target == "_guards_fn"
    name = op_name(node)
    return name.startswith(("_assert", "sym_constrain_range")) or name == "_check"


def is_size(node: Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.aten.sym_size.int


def op_name(node: Node) -> str:
    """The bare name of a node's operator: `add_` for aten.add_.Tensor."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return str(getattr(target, "__name__", target))


def module_calls(node: Node) -> tuple[tuple[str, str], ...]:
    """(key of the call, path of the module) of the modules a node is inside of, outermost first, without the root."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = ((key, value[0]) for key, value in stack.items())
    return tuple((key, path) for key, path in calls if path and not path.startswith("_empty_nn_module_stack"))


def module_path(node: Node) -> str:
    """The path of the innermost module that a node is part of; "" is the model itself."""
    calls = module_calls(node)
    return calls[-1][1] if calls else ""


def argument(node: Node, name: str, default: Any = None) -> Any:
    """The value a node passes for the argument `name` of its operator."""
    if name in node.kwargs:
        return node.kwargs[name]
    for position, spec in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if spec.name == name:
            return node.args[position] if position < len(node.args) else spec.default_value
    return default


def inner_nodes(node: Node) -> Iterator[Node]:
    """The node itself and, where it calls a nested graph (a no_grad block, a branch), the nodes in there."""
    yield node
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            nested = attribute(node, arg)
            if isinstance(nested, GraphModule):
                for inner in nested.graph.nodes:
                    yield from inner_nodes(inner)


def attribute(node: Node, arg: Node) -> Any:
    """What a get_attr node refers to."""
    assert node.graph.owning_module is not None
    return operator.attrgetter(str(arg.target))(node.graph.owning_module)


def written(node: Node) -> tuple[Node, ...]:
    """The arguments that a node changes in place."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        inside = any(written(inner) for inner in inner_nodes(node) if inner is not node)
        return tuple(node.all_input_nodes) if inside else ()
    return tuple(arg for arg, alias in _aliased_arguments(node) if alias.is_write)


def uses_batch_statistics(node: Node) -> bool:
    return op_name(node) in _BATCH_NORMS and bool(argument(node, "training"))


def is_counter(node: Node) -> bool:
    """Does this count a buffer up by a number, as a batch-norm counts its batches?"""
    is_add = op_name(node) == "add_" and len(node.args) == 2 and type(node.args[1]) is int and not node.kwargs
    return is_add and isinstance(node.args[0], Node) and node.args[0].op == "get_attr"


def is_random(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    switches = (("train", True), ("training", True), ("dropout_p", 1.0), ("p", 1.0))
    return all(bool(argument(node, name, default)) for name, default in switches)


def _aliased_arguments(node: Node) -> Iterator[tuple[Node, Any]]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for position, spec in enumerate(node.target._schema.arguments):
        if spec.alias_info is None:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(spec.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Node):
                yield item, spec.alias_info


def _memory_groups(nodes: list[Node]) -> dict[Node, Node]:
    """Nodes that may share memory have the same group; a group is named by its earliest node."""
    parent = {node: node for node in nodes}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    order = {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        for other in _shares_memory_with(node):
            first, second = sorted((find(node), find(other)), key=order.__getitem__)
            parent[second] = first
    return {node: find(node) for node in nodes}


def _shares_memory_with(node: Node) -> tuple[Node, ...]:
    if node.op != "call_function":
        return ()
    if node.target is operator.getitem or isinstance(node.target, torch._ops.HigherOrderOperator):
        return tuple(node.all_input_nodes)
    if op_name(node) in _MAYBE_SAME:
        return tuple(node.all_input_nodes[:1])
    if isinstance(node.target, torch._ops.OpOverload) and any(
        spec.alias_info is not None for spec in node.target._schema.returns
    ):
        return tuple(arg for arg, _ in _aliased_arguments(node))
    return ()


def _data_nodes(nodes: list[Node], group: dict[Node, Node]) -> set[Node]:
    """Nodes whose value depends on the values of the inputs, not only on how many rows there are."""
    tainted: set[Node] = set()  # groups that some node writes data into, such as zeros() filled row by row
    while True:
        data: set[Node] = set()
        for node in nodes:
            from_inputs = any(arg in data for arg in node.all_input_nodes) and not is_size(node)
            if node.op == "placeholder" or from_inputs or (group[node] in tainted and node.op != "get_attr"):
                data.add(node)
        more = {group[arg] for node in data for arg in written(node)} - tainted
        if not more:
            return data
        tainted |= more


def _has_open_batch(node: Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) > 0 and isinstance(shape[0], torch.SymInt)


def _last_use(flow: Flow, node: Node) -> int:
    """The ordinal of the last place that needs a value; 0 if none does."""
    last = 0
    for user in node.users:
        if user.op == "output":
            return FOREVER
        if is_size(user) and not flow.is_batch(user.meta["val"]):
            return FOREVER
        last = max(last, flow.ordinal.get(user, 0))
    return last

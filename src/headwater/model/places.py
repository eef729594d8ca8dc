"""Times of a prefix's parts: from the kernels that an engine ran, and from the graph itself run node by node.

Owns the way from an engine's kernel names back to places of the captured graph. Engines fuse and rename; the module
path that the exporter leaves on every ONNX node leads back. May import core, torch and the modules of this package;
onnx where it is used.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from headwater.model.capture import Captured
from headwater.model.flow import flow, module_path

# What ONNX Runtime appends to a name when it lays a tensor out anew.
_SUFFIXES = ("_nchwc", "_token_0", "_quant")
# What ONNX Runtime makes part of the convolution in front of it; the whole is then called by the value it gives.
_JOINS = {"Add", "BatchNormalization", "Clip", "HardSigmoid", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Tanh"}


def kernel_places(captured: Captured, onnx_file: Path) -> dict[str, int]:
    """Names that an engine may call a kernel by (nodes and values of the file) → the place it belongs to, from 0."""
    import onnx

    nodes = flow(captured).places
    paths = [module_path(node) for node in nodes]
    found: dict[str, int] = {}
    convolutions: dict[str, int] = {}  # value → the place of the convolution that it may come out of
    place = 0
    for node in onnx.load(str(onnx_file), load_external_data=False).graph.node:
        path = _module_of(node)
        if path is not None:
            # Nodes come in the order of the places; one place may have become several nodes.
            place = next((later for later in range(place, len(paths)) if paths[later] == path), place)
        here = place
        if node.op_type == "Conv":
            here = convolutions[node.output[0]] = _convolution(nodes, place)
        elif node.op_type in _JOINS and (before := [each for each in node.input if each in convolutions]):
            convolutions[node.output[0]] = max(convolutions[each] for each in before)
        for name in (node.name, *node.output):
            found.setdefault(name, here)
    for value, place in convolutions.items():
        found[f"{value}_nchwc"] = place
    return found


def _convolution(nodes: Sequence[Node], place: int) -> int:
    """The place of a convolution into which the exporter has folded the batch-norm at this place."""
    return next((each for each in range(place, -1, -1) if "conv" in str(nodes[each].target)), place)


def _module_of(node: Any) -> str | None:
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = ast.literal_eval(entry.value)
            return str(scopes[-2]) if len(scopes) > 1 and not scopes[-2].startswith("_empty") else None
    return None


def place_seconds(kernels: Sequence[tuple[str, float]], places: Mapping[str, int], num_places: int) -> list[float]:
    """Seconds at each place. A kernel whose name says nothing belongs to the one before it."""
    seconds = [0.0] * num_places
    place = 0
    for name, taken_s in kernels:
        place = _find(name, places, place)
        seconds[min(place, num_places - 1)] += taken_s
    return seconds


def _find(name: str, places: Mapping[str, int], otherwise: int) -> int:
    name = name.removeprefix("fused ")
    if name in places:
        return places[name]
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    while name:
        if name in places:
            return places[name]
        name = name.rpartition("/")[0]
    return otherwise


def time_places(
    captured: Captured, inputs: tuple[Tensor, ...], num_places: int, settle: Callable[[], None] = lambda: None
) -> list[float]:
    """Seconds that each of the first `num_places` places takes forward, without gradients, in this process.

    `settle` waits until what was begun is done, where that is not the case when a call returns.
    """
    places = {node: index for index, node in enumerate(flow(captured).places[:num_places])}
    runs = []
    for _ in range(2):  # others may use the core: the shorter time of each place counts
        clock = _Clock(captured, places, settle)
        with torch.no_grad():
            clock.run(*(tensor.clone() for tensor in inputs))
        runs.append(clock.seconds)
    return [min(each) for each in zip(*runs, strict=True)]


class _Clock(Interpreter):
    """Runs a graph node by node with a clock in hand, and stops after the last place that is asked for."""

    def __init__(self, captured: Captured, places: Mapping[Node, int], settle: Callable[[], None]) -> None:
        super().__init__(captured.graph_module)
        self._nodes = tuple(captured.graph_module.graph.nodes)
        self._places = places
        self._settle = settle
        self.seconds = [0.0] * len(places)

    def run(self, *args: Any) -> None:  # type: ignore[override]
        self.args_iter = iter(args)
        left = set(self._places)
        for node in self._nodes:
            if not left:
                break
            if node.op == "call_module":  # checks of torch.export's own
                continue
            start = time.perf_counter()
            self.env[node] = self.run_node(node)
            self._settle()
            if node in self._places:
                self.seconds[self._places[node]] = time.perf_counter() - start
                left.discard(node)

"""ONNX files as bytes: what an uploaded one may not contain, and the part of it that gives some of its outputs.

Owns a reader of just enough of the format (protobuf), so that a node needs no package for it.

`check_self_contained` finds tensors that say "my numbers are in that file". A runtime that follows such a reference
would put this machine's files into rows. ONNX Runtime 1.31 refuses those that lead out of the working directory; we
refuse all, whatever the runtime.

`up_to` leaves out what the wanted outputs do not need. ONNX Runtime 1.31 would not: given a file with fewer outputs, it
still runs every operator in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from headwater.errors import RefusedError

# Field numbers of onnx.proto: message → field → the message in it. Only paths that can lead to a tensor are walked.
_NESTED: Mapping[str, Mapping[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # of a tensor
_MAX_DEPTH = 100  # protobuf's own limit


def check_self_contained(model: bytes) -> None:
    """RefusedError if any tensor of this ONNX file lies in another file, or if it is no protobuf message."""
    try:
        outside = _refers_outside(memoryview(model), "Model", 0)
    except (IndexError, ValueError):
        raise RefusedError(f"the prefix is not an ONNX file ({len(model)} bytes)") from None
    if outside:
        raise RefusedError("the prefix has weights in another file; export it with its weights inside "
                           "(external_data=False)")  # fmt: skip


# Fields of onnx.proto that `up_to` looks at.
_MODEL_GRAPH = 7
_GRAPH_NODE, _GRAPH_TENSOR, _GRAPH_OUTPUT, _GRAPH_VALUE = 1, 5, 12, 13
_NODE_INPUT, _NODE_OUTPUT, _NODE_ATTRIBUTE = 1, 2, 5
_ATTRIBUTE_GRAPHS = (6, 11)
_TENSOR_NAME, _VALUE_NAME = 8, 1
_MAX_PARTS = 200_000  # of a graph; the largest models here have some thousands, and each takes some hundred bytes


def up_to(model: bytes, outputs: Sequence[str]) -> bytes:
    """The same model with these outputs alone, in this order, and with nothing that they do not need."""
    try:
        return _up_to(memoryview(model), outputs)
    except (IndexError, ValueError):
        raise RefusedError(f"the prefix is not an ONNX file ({len(model)} bytes)") from None


def _up_to(model: memoryview, outputs: Sequence[str]) -> bytes:
    graphs = [value for field, value, _ in _spans(model) if field == _MODEL_GRAPH]
    if len(graphs) != 1 or not isinstance(graphs[0], memoryview):
        raise ValueError
    parts = list(islice(_spans(graphs[0]), _MAX_PARTS + 1))
    if len(parts) > _MAX_PARTS:
        raise RefusedError(f"the prefix has more than {_MAX_PARTS:,} operators and tensors; cut earlier")
    given = {_name(value, _VALUE_NAME): span for field, value, span in parts if field == _GRAPH_OUTPUT}
    if absent := [name for name in outputs if name not in given]:
        raise RefusedError(f"the prefix gives no {absent[0]!r}; it gives {', '.join(sorted(given))[:300]}")
    needed = set(outputs)
    kept = []
    for field, value, span in reversed(parts):  # nodes stand after those they need
        if field == _GRAPH_NODE:
            takes, gives = _ends(value)
            if needed.isdisjoint(gives):
                continue
            needed |= takes | gives
        kept.append((field, value, span))
    graph = b"".join(
        span for field, value, span in reversed(kept)
        if field != _GRAPH_OUTPUT
        and not (field == _GRAPH_TENSOR and _name(value, _TENSOR_NAME) not in needed)
        and not (field == _GRAPH_VALUE and _name(value, _VALUE_NAME) not in needed)
    )  # fmt: skip
    graph += b"".join(given[name] for name in outputs)
    rest = b"".join(span for field, _, span in _spans(model) if field != _MODEL_GRAPH)
    return rest + _number(_MODEL_GRAPH << 3 | 2) + _number(len(graph)) + graph


def _ends(node: memoryview | int) -> tuple[set[str], set[str]]:
    """What an operator takes, in graphs within it as well, and what it gives."""
    takes: set[str] = set()
    gives: set[str] = set()
    if not isinstance(node, memoryview):
        raise ValueError
    for field, value, _ in _spans(node):
        if isinstance(value, int):
            continue
        if field == _NODE_INPUT:
            takes.add(bytes(value).decode())
        elif field == _NODE_OUTPUT:
            gives.add(bytes(value).decode())
        elif field == _NODE_ATTRIBUTE:
            for inner, graph, _ in _spans(value):
                if inner in _ATTRIBUTE_GRAPHS and isinstance(graph, memoryview):
                    takes |= _mentioned(graph)
    return takes - {""}, gives - {""}


def _mentioned(graph: memoryview) -> set[str]:
    """Every name that a nested graph may take from outside."""
    found: set[str] = set()
    for field, value, _ in _spans(graph):
        if field == _GRAPH_NODE:
            found |= _ends(value)[0]
        elif field == _GRAPH_OUTPUT:
            found.add(_name(value, _VALUE_NAME))
    return found


def _name(message: memoryview | int, field: int) -> str:
    if not isinstance(message, memoryview):
        raise ValueError
    return next((bytes(value).decode() for number, value, _ in _spans(message)
                 if number == field and isinstance(value, memoryview)), "")  # fmt: skip


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _refers_outside(message: memoryview, kind: str, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        raise ValueError
    for field, value in fields(message):
        if kind == "Tensor":
            if field == _EXTERNAL_DATA or (field == _DATA_LOCATION and value != 0):
                return True
            continue
        inner = _NESTED[kind].get(field)
        if inner and isinstance(value, memoryview) and _refers_outside(value, inner, depth + 1):
            return True
    return False


def fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """(field number, value) of a protobuf message: numbers as int, everything else as bytes."""
    for field, value, _ in _spans(message):
        yield field, value


def _spans(message: memoryview) -> Iterator[tuple[int, memoryview | int, memoryview]]:
    """(field number, value, the bytes of the whole field) of a protobuf message."""
    place = 0
    while place < len(message):
        start = place
        tag, place = _varint(message, place)
        wire_type = tag & 7
        if wire_type == 0:
            number, place = _varint(message, place)
            yield tag >> 3, number, message[start:place]
            continue
        if wire_type == 2:
            length, place = _varint(message, place)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError
        if place + length > len(message):
            raise ValueError
        yield tag >> 3, message[place : place + length], message[start : place + length]
        place += length


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = message[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
        shift += 7
        if shift > 63:
            raise ValueError

"""What an uploaded ONNX file may not contain: a reference to another file.

Owns a reader of just enough of the format (protobuf) to find tensors that say "my numbers are in that file". A runtime
that follows such a reference would put this machine's files into rows. ONNX Runtime 1.31 refuses those that lead out
of the working directory; we refuse all, whatever the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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


def _refers_outside(message: memoryview, kind: str, depth: int) -> bool:
    if depth > _MAX_DEPTH:
        raise ValueError
    for field, value in _fields(message):
        if kind == "Tensor":
            if field == _EXTERNAL_DATA or (field == _DATA_LOCATION and value != 0):
                return True
            continue
        inner = _NESTED[kind].get(field)
        if inner and isinstance(value, memoryview) and _refers_outside(value, inner, depth + 1):
            return True
    return False


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """(field number, value) of a protobuf message: numbers as int, everything else as bytes."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        wire_type = tag & 7
        if wire_type == 0:
            number, place = _varint(message, place)
            yield tag >> 3, number
            continue
        if wire_type == 2:
            length, place = _varint(message, place)
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError
        if place + length > len(message):
            raise ValueError
        yield tag >> 3, message[place : place + length]
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

"""A trainable prefix as plain data: a list of known operators over tensors, the form in which it travels.

Owns `PrefixGraph`, its JSON and its checks. A node builds from it what it runs, so what is here decides what a stranger
can make a node compute: operators are named from a list, arguments are plain values, and an operator sees earlier
values only. What shapes come out, the node finds out by itself before it reserves memory (`node.training.build`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.core.form import shown
from headwater.core.spec import Boundary, TensorSpec
from headwater.errors import ConfigError

FORMAT, VERSION = "headwater-prefix", 1
MAX_NODES = 50_000
MAX_JSON_BYTES = 32 << 20
MAX_TENSORS = 20_000
_DEPTH = 4  # of lists in arguments
_ITEMS = 4096  # of a list in an argument

NORM = "headwater.batch_norm"  # with the statistics of the whole batch, wherever its rows are made
# Convolution, matrices and attention; norms; activations; pooling; shapes; arithmetic; and sizes, which are numbers.
# Nothing here reads files, draws random numbers, or calls back.
OPERATORS = frozenset({
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.conv2d.padding",
    "aten.conv_transpose2d.input", "aten.linear.default", "aten.matmul.default", "aten.mm.default", "aten.bmm.default",
    "aten.addmm.default", "aten.baddbmm.default", "aten.einsum.default",
    "aten.scaled_dot_product_attention.default", "aten.embedding.default",
    NORM, "aten.batch_norm.default", "aten.layer_norm.default", "aten.group_norm.default", "aten.instance_norm.default",
    "aten.rms_norm.default", "aten.linalg_vector_norm.default",
    "aten.relu.default", "aten.relu_.default", "aten.relu6.default", "aten.relu6_.default", "aten.hardtanh.default",
    "aten.hardtanh_.default", "aten.hardswish.default", "aten.hardswish_.default", "aten.hardsigmoid.default",
    "aten.hardsigmoid_.default", "aten.silu.default", "aten.silu_.default", "aten.gelu.default", "aten.sigmoid.default",
    "aten.sigmoid_.default", "aten.tanh.default", "aten.tanh_.default", "aten.elu.default", "aten.elu_.default",
    "aten.leaky_relu.default", "aten.leaky_relu_.default", "aten.prelu.default", "aten.mish.default",
    "aten.softplus.default", "aten.softmax.int", "aten._softmax.default", "aten.log_softmax.int", "aten.celu.default",
    "aten.max_pool2d.default", "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_max_pool2d.default", "aten.avg_pool1d.default", "aten.max_pool1d.default",
    "aten.adaptive_avg_pool1d.default",
    "aten.dropout.default", "aten.dropout_.default", "aten.feature_dropout.default",
    "aten.flatten.using_ints", "aten.unflatten.int", "aten.reshape.default", "aten.view.default",
    "aten.transpose.int", "aten.permute.default", "aten.t.default", "aten.expand.default", "aten.expand_as.default",
    "aten.cat.default", "aten.stack.default", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.chunk.default",
    "aten.unbind.int", "aten.select.int", "aten.slice.Tensor", "aten.narrow.default", "aten.squeeze.dim",
    "aten.squeeze.default", "aten.squeeze.dims", "aten.unsqueeze.default", "aten.contiguous.default",
    "aten.clone.default", "aten.alias.default", "aten.roll.default", "aten.flip.default", "aten.pad.default",
    "aten.constant_pad_nd.default", "aten.repeat.default", "aten.movedim.int", "aten.swapaxes.default",
    "aten.channel_shuffle.default", "aten.pixel_shuffle.default", "aten.pixel_unshuffle.default",
    "aten.index_select.default", "aten.detach.default", "aten.to.dtype", "aten.type_as.default", "aten.view_as.default",
    "aten.upsample_nearest2d.vec", "aten.upsample_bilinear2d.vec", "aten.ones_like.default", "aten.zeros_like.default",
    "aten.add.Tensor", "aten.add_.Tensor", "aten.sub.Tensor", "aten.sub_.Tensor", "aten.mul.Tensor",
    "aten.mul_.Tensor", "aten.div.Tensor", "aten.div_.Tensor", "aten.rsub.Scalar", "aten.neg.default",
    "aten.add.Scalar", "aten.mul.Scalar", "aten.sub.Scalar", "aten.div.Scalar",
    "aten.pow.Tensor_Scalar", "aten.sqrt.default", "aten.rsqrt.default", "aten.exp.default", "aten.log.default",
    "aten.abs.default", "aten.square.default", "aten.reciprocal.default", "aten.clamp.default", "aten.clamp_.default",
    "aten.clamp_min.default", "aten.maximum.default", "aten.minimum.default", "aten.where.self",
    "aten.mean.dim", "aten.mean.default", "aten.sum.dim_IntList", "aten.sum.default", "aten.amax.default",
    "aten.amin.default", "aten.var_mean.correction", "aten.var.correction", "aten.std.correction",
    "aten.sym_size.int", "py.getitem", "py.add", "py.sub", "py.mul", "py.floordiv",
})  # fmt: skip


@dataclass(frozen=True)
class Value:
    """What the operator of this number gave; inputs come first."""

    number: int


@dataclass(frozen=True)
class Weight:
    """The tensor of this name."""

    name: str


@dataclass(frozen=True)
class Dtype:
    """An element type, by its name."""

    name: str


@dataclass(frozen=True)
class Layout:
    """A memory format, by its name."""

    name: str


_NAMED: Mapping[str, type[Weight] | type[Dtype] | type[Layout]] = {"weight": Weight, "dtype": Dtype, "layout": Layout}
_DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
_LAYOUTS = frozenset({"contiguous_format", "preserve_format", "channels_last"})
Argument = Any  # None, bool, int, float, str, one of the tags, or a list of these


@dataclass(frozen=True)
class Call:
    """One operator and what it is given."""

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]

    def to_json(self) -> list[Any]:
        return [self.op, [_plain(each) for each in self.args], {name: _plain(v) for name, v in self.kwargs.items()}]


@dataclass(frozen=True)
class End:
    """A place where the prefix may end: after how many calls, and which values cross there."""

    name: str
    num_calls: int
    values: tuple[int, ...]
    boundary: Boundary


@dataclass(frozen=True)
class PrefixGraph:
    """Inputs, calls and the places where it may end. `frozen_calls` of them, the first ones, depend on nothing that is
    trained."""

    inputs: Boundary
    calls: tuple[Call, ...]
    weights: Mapping[str, TensorSpec]  # their whole shape
    trained: frozenset[str]  # names of weights that get gradients
    ends: tuple[End, ...]

    def learning(self, end: End) -> dict[str, TensorSpec]:
        """The weights up to there that get gradients, by name."""
        return {name: self.weights[name] for name in self.used(end) if name in self.trained}

    def used(self, end: End) -> tuple[str, ...]:
        """The weights that are needed up to there, by name."""
        found = {
            each.name for call in self.calls[: end.num_calls] for each in _leaves(call) if isinstance(each, Weight)
        }
        return tuple(sorted(found))

    def num_norms(self, end: End) -> int:
        """Batch-norms on the way that need the statistics of the whole batch."""
        return sum(call.op == NORM for call in self.calls[: end.num_calls])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "inputs": [spec.to_json() for spec in self.inputs],
            "calls": [call.to_json() for call in self.calls],
            "weights": [spec.to_json() for spec in self.weights.values()],
            "trained": sorted(self.trained),
            "ends": [{"name": end.name, "num_calls": end.num_calls, "values": list(end.values),
                      "boundary": [spec.to_json() for spec in end.boundary]} for end in self.ends],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> PrefixGraph:
        """From what another machine sent: everything about it is checked, but for what only running it can tell."""
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise ConfigError(f"not a {FORMAT} of version {VERSION}: {shown(data)}")
        lists = {name: data.get(name) for name in ("inputs", "calls", "weights", "trained", "ends")}
        for name, value in lists.items():
            if not isinstance(value, list) or len(value) > MAX_NODES:
                raise ConfigError(
                    f"the prefix's {name} are {shown(value)}; they must be a list of at most {MAX_NODES:,}"
                )
        inputs = tuple(TensorSpec.from_json(each) for each in data["inputs"])
        if not 1 <= len(inputs) <= 16:
            raise ConfigError(f"a prefix with {len(inputs)} inputs; it has 1 to 16")
        weights = {spec.name: spec for spec in map(TensorSpec.from_json, data["weights"])}
        if len(weights) != len(data["weights"]) or len(weights) > MAX_TENSORS:
            raise ConfigError(f"the prefix's weights have one name twice, or are more than {MAX_TENSORS:,}")
        trained = frozenset(each for each in data["trained"] if isinstance(each, str) and each in weights)
        if len(trained) != len(data["trained"]):
            raise ConfigError("the prefix trains tensors that it does not have")
        calls = tuple(_call(each, place, len(inputs), weights) for place, each in enumerate(data["calls"]))
        ends = tuple(_end(each, len(inputs), len(calls)) for each in data["ends"])
        if not 1 <= len(ends) <= 256 or len({end.name for end in ends}) != len(ends):
            raise ConfigError("a prefix ends at 1 to 256 places with names of their own")
        for spec in (*weights.values(), *(spec for end in ends for spec in end.boundary)):
            if spec.dtype == "bfloat16":  # NumPy has none, and these travel as NumPy's arrays
                raise ConfigError(f"{shown(spec.name)} is bfloat16, in which neither weights nor what crosses can "
                                  "travel; use float32, or float16")  # fmt: skip
        return cls(inputs, calls, weights, trained, ends)

    def dumps(self) -> bytes:
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    def end(self, name: object) -> End:
        """The place of that name."""
        for end in self.ends:
            if end.name == name:
                return end
        raise ConfigError(f"the prefix has no end named {shown(name)}")


def _plain(value: Argument) -> Any:
    if isinstance(value, Value):
        return {"value": value.number}
    for tag, kind in _NAMED.items():
        if isinstance(value, kind):
            return {tag: value.name}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _argument(data: object, limit: int, weights: Mapping[str, TensorSpec], depth: int = 0) -> Argument:
    """`limit`: how many values there are already."""
    if data is None or isinstance(data, bool | float):
        return data
    if isinstance(data, int):
        if not -(2**63) <= data < 2**63:
            raise ConfigError("an operator's argument is a number beyond 64 bits")
        return data
    if isinstance(data, str):
        if len(data) > 64:
            raise ConfigError("an operator's argument is a text of more than 64 characters")
        return data
    if isinstance(data, list) and depth < _DEPTH and len(data) <= _ITEMS:
        return [_argument(each, limit, weights, depth + 1) for each in data]
    if isinstance(data, dict) and len(data) == 1:
        ((tag, value),) = data.items()
        if tag == "value" and type(value) is int and 0 <= value < limit:
            return Value(value)
        if tag == "weight" and isinstance(value, str) and value in weights:
            return Weight(value)
        if tag == "dtype" and isinstance(value, str) and value in _DTYPES:
            return Dtype(value)
        if tag == "layout" and isinstance(value, str) and value in _LAYOUTS:
            return Layout(value)
        if tag == "float" and value in ("inf", "-inf", "nan"):
            return float(value)
    raise ConfigError(f"an operator's argument is {shown(data)}, which is none that it may have here")


def _call(data: object, place: int, num_inputs: int, weights: Mapping[str, TensorSpec]) -> Call:
    if not isinstance(data, list) or len(data) != 3 or not isinstance(data[0], str):
        raise ConfigError(f"call {place} of the prefix is {shown(data)}; it must be [operator, arguments, named ones]")
    op, args, kwargs = data
    if op not in OPERATORS:
        raise ConfigError(f"call {place} of the prefix is {shown(op)}, which is not among the operators that a node "
                          "runs; cut before it")  # fmt: skip
    if not isinstance(args, list) or not isinstance(kwargs, dict) or len(args) > 32 or len(kwargs) > 16:
        raise ConfigError(f"call {place} of the prefix, {op}: its arguments are not a short list and an object")
    limit = num_inputs + place
    named = {str(name): _argument(each, limit, weights) for name, each in kwargs.items()}
    return Call(op, tuple(_argument(each, limit, weights) for each in args), named)


def _end(data: object, num_inputs: int, num_calls: int) -> End:
    if isinstance(data, dict):
        name, count, values, boundary = (data.get(key) for key in ("name", "num_calls", "values", "boundary"))
        if (
            isinstance(name, str)
            and type(count) is int
            and 0 <= count <= num_calls
            and isinstance(values, list)
            and isinstance(boundary, list)
            and 1 <= len(values) == len(boundary) <= 256
            and all(type(each) is int and 0 <= each < num_inputs + count for each in values)
        ):
            return End(name[:500], count, tuple(values), tuple(TensorSpec.from_json(each) for each in boundary))
    raise ConfigError(f"an end of the prefix is {shown(data)}, which names no place and values in it")


def _leaves(call: Call) -> Iterator[Argument]:
    pending: list[Argument] = [*call.args, *call.kwargs.values()]
    while pending:
        each = pending.pop()
        if isinstance(each, list | tuple):
            pending += each
        else:
            yield each


def num_frozen(graph: PrefixGraph, end: End) -> int:
    """How many of the first calls depend on nothing that is trained, and on no batch's statistics."""
    for place, call in enumerate(graph.calls[: end.num_calls]):
        if call.op == NORM or any(isinstance(each, Weight) and each.name in graph.trained for each in _leaves(call)):
            return place
    return end.num_calls


def crossing(graph: PrefixGraph, end: End, place: int) -> tuple[int, ...]:
    """The values from before call number `place` that are needed from there on, up to the end."""
    first = len(graph.inputs) + place
    needed = {each.number for call in graph.calls[place : end.num_calls] for each in _leaves(call)
              if isinstance(each, Value)} | set(end.values)  # fmt: skip
    return tuple(sorted(number for number in needed if number < first))


def last_uses(graph: PrefixGraph, end: End) -> dict[int, list[int]]:
    """For each call up to the end, the values that nobody needs after it."""
    last: dict[int, int] = {}
    for place, call in enumerate(graph.calls[: end.num_calls]):
        for each in _leaves(call):
            if isinstance(each, Value):
                last[each.number] = place
    found: dict[int, list[int]] = {}
    for number, place in last.items():
        if number not in end.values:
            found.setdefault(place, []).append(number)
    return found

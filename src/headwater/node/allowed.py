"""What an uploaded ONNX file may contain: looked at before any engine is.

Owns the list of operators and the limits. Only ONNX's own operators are let through, and of these only what computes
tensors from tensors: nothing that loops, draws random numbers, handles text or opens files. So a run of a prefix ends,
and gives the same for the same picture.

A small file may still ask for much memory, as it is loaded or as it runs: `node.tryout` finds that out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headwater.errors import RefusedError
from headwater.node.onnxfile import fields

# All that torch 2.13's exporter may write (onnxscript 0.7), less what is random, and further ones of the same kind.
_NAMES = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitShift
    BitwiseAnd BitwiseNot BitwiseOr BitwiseXor BlackmanWindow Cast CastLike Ceil Celu CenterCropPad Clip Col2Im
    Compress Concat ConcatFromSequence Constant ConstantOfShape Conv ConvInteger ConvTranspose Cos Cosh CumSum DFT
    DeformConv DepthToSpace DequantizeLinear Det Div Dropout DynamicQuantizeLinear Einsum Elu Equal Erf Exp Expand
    EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool
    Greater GreaterOrEqual GridSample GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax
    Identity If InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log
    LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxRoiPool Mean MeanVarianceNormalization
    Min Mish Mod Mul Neg NonMaxSuppression NonZero Not OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul
    QuantizeLinear RMSNormalization RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax
    ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
    RotaryEmbedding Round STFT ScatterElements ScatterND Selu SequenceAt Shape Shrink Sigmoid Sign Sin Sinh Size
    Slice Softmax Softplus Softsign SpaceToDepth Split SplitToSequence Sqrt Squeeze Sub Sum Swish Tan Tanh
    ThresholdedRelu Tile TopK Transpose Trilu Unique Unsqueeze Where Xor
"""
OPERATORS = frozenset(_NAMES.split())
OPSETS = (11, 28)  # the oldest where these mean what they mean now; the newest that was looked at
MAX_PARTS = 200_000  # operators and tensors; the largest models here have some thousands
MAX_FIELDS = 4_000_000  # of protobuf that are looked at one by one; a part has ten or so
MAX_BESIDE_BYTES = 32 << 20  # beside the weights; read as protobuf, this may take twenty times as much memory
_MAX_DEPTH = 100  # protobuf's own limit
_MAX_DIMS_BYTES = 10 * 64  # packed: no tensor that anybody runs has so many dimensions

# Field numbers of onnx.proto.
_MODEL_OPSET, _MODEL_GRAPH, _MODEL_TRAINING, _MODEL_FUNCTION = 8, 7, 20, 25
_OPSET_DOMAIN, _OPSET_VERSION = 1, 2
_GRAPH_NODE, _GRAPH_TENSOR, _GRAPH_SPARSE = 1, 5, 15
_NODE_OP, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS, _ATTRIBUTE_SPARSE = (5, 10), (6, 11), (22, 23)
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_STRINGS, _TENSOR_NAME, _TENSOR_RAW = 1, 2, 6, 8, 9
# Bytes an item of each of ONNX's types takes in memory at most; text, and what is not here, is refused.
_ITEM_BYTES: Mapping[int, int] = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 12: 4, 13: 8, 16: 2,
                                  17: 1, 18: 1, 19: 1, 20: 1, 21: 1, 22: 1}  # fmt: skip


@dataclass
class _Census:
    """What was met on the way through a file."""

    max_weight_bytes: int
    num_parts: int = 0
    num_fields: int = 0
    weight_bytes: int = 0  # as tensors in memory
    raw_bytes: int = 0  # in the file
    foreign: set[str] = field(default_factory=set)

    def part(self) -> None:
        self.num_parts += 1
        if self.num_parts > MAX_PARTS:
            raise RefusedError(f"the prefix has more than {MAX_PARTS:,} operators and tensors; cut earlier")

    def fields(self, message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
        """Those of a message, counted: a file may have any number that mean nothing."""
        for each in fields(message):
            self.num_fields += 1
            if self.num_fields > MAX_FIELDS:
                raise RefusedError(f"the prefix has more than {MAX_FIELDS:,} fields; cut earlier")
            yield each


def check_upload(model: bytes, max_bytes: int) -> None:
    """RefusedError if the file has what it may not have, or more than `max_bytes` of weights."""
    census = _Census(max_bytes)
    try:
        _model(memoryview(model), census)
    except (IndexError, ValueError):
        raise RefusedError(f"the prefix is not an ONNX file ({len(model)} bytes)") from None
    if census.foreign:
        raise RefusedError(f"the prefix has operators that no node runs: {', '.join(sorted(census.foreign))[:300]}; "
                           "cut before them, or write that part with ONNX's own operators that neither loop nor draw "
                           "random numbers")  # fmt: skip
    beside = len(model) - census.raw_bytes
    if beside > MAX_BESIDE_BYTES:
        raise RefusedError(f"the prefix has {beside:,} bytes beside its weights, the limit is {MAX_BESIDE_BYTES:,}; "
                           "export it with its weights as raw data")  # fmt: skip


def _model(message: memoryview, census: _Census) -> None:
    graphs = 0
    for number, value in census.fields(message):
        if number in (_MODEL_TRAINING, _MODEL_FUNCTION):
            raise RefusedError("the prefix has functions or training steps of its own; export it with them inlined")
        if number == _MODEL_OPSET:
            _opset(_message(value), census)
        elif number == _MODEL_GRAPH:
            graphs += 1
            _graph(_message(value), census, 0)
    if graphs != 1:
        raise ValueError


def _opset(message: memoryview, census: _Census) -> None:
    found = dict(census.fields(message))
    domain, version = _text(found.get(_OPSET_DOMAIN, memoryview(b""))), found.get(_OPSET_VERSION, 0)
    if domain not in ("", "ai.onnx"):
        return  # harmless as long as no operator is of it
    if not isinstance(version, int) or not OPSETS[0] <= version <= OPSETS[1]:
        raise RefusedError(f"the prefix is of opset {version}; nodes run {OPSETS[0]} to {OPSETS[1]}")


def _graph(message: memoryview, census: _Census, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError
    for number, value in census.fields(message):
        if number == _GRAPH_SPARSE:
            raise RefusedError("the prefix has sparse weights; export it with dense ones")
        if number == _GRAPH_TENSOR:
            _tensor(_message(value), census)
        elif number == _GRAPH_NODE:
            _node(_message(value), census, depth)


def _node(message: memoryview, census: _Census, depth: int) -> None:
    census.part()
    operator = domain = ""
    for number, value in census.fields(message):
        if number == _NODE_OP:
            operator = _text(value)
        elif number == _NODE_DOMAIN:
            domain = _text(value)
        elif number == _NODE_ATTRIBUTE:
            _attribute(_message(value), census, depth)
    if domain not in ("", "ai.onnx") or operator not in OPERATORS:
        census.foreign.add(f"{domain}.{operator}" if domain else operator or "(none)")


def _attribute(message: memoryview, census: _Census, depth: int) -> None:
    for number, value in census.fields(message):
        if number in _ATTRIBUTE_SPARSE:
            raise RefusedError("the prefix has sparse weights; export it with dense ones")
        if number in _ATTRIBUTE_TENSORS:
            _tensor(_message(value), census)
        elif number in _ATTRIBUTE_GRAPHS:
            _graph(_message(value), census, depth + 1)


def _tensor(message: memoryview, census: _Census) -> None:
    census.part()
    items, kind, name = 1, 0, ""
    for number, value in census.fields(message):
        if number == _TENSOR_DIMS:
            if not isinstance(value, int) and len(value) > _MAX_DIMS_BYTES:
                raise ValueError
            for size in (value,) if isinstance(value, int) else _varints(value):
                items *= size  # -1 is 2**64 - 1 here, and too much
                if items > census.max_weight_bytes:
                    raise _too_large(census)
        elif number == _TENSOR_TYPE:
            kind = value if isinstance(value, int) else 0
        elif number == _TENSOR_NAME:
            name = _text(value)
        elif number == _TENSOR_RAW:
            census.raw_bytes += len(_message(value))
        elif number == _TENSOR_STRINGS:
            kind = 0
    if kind not in _ITEM_BYTES:
        raise RefusedError(f"the prefix has a tensor {name[:80]!r} that is not of numbers; leave it out")
    census.weight_bytes += items * _ITEM_BYTES[kind]
    if census.weight_bytes > census.max_weight_bytes:
        raise _too_large(census)


def _too_large(census: _Census) -> RefusedError:
    return RefusedError(f"the prefix has weights of more than {census.max_weight_bytes / 1e9:.2f} GB, this node's "
                        "limit for uploads; cut earlier, or raise it with `headwater serve --max-upload`")  # fmt: skip


def _message(value: memoryview | int) -> memoryview:
    if isinstance(value, int):
        raise ValueError
    return value


def _text(value: memoryview | int) -> str:
    return bytes(_message(value)).decode()


def _varints(packed: memoryview) -> list[int]:
    found, number, shift = [], 0, 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            found.append(number)
            number = shift = 0
        elif shift > 63:
            raise ValueError
    return found

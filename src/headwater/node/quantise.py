"""int8 prefixes: the ranges of values that samples give, and the file that is made with both.

Owns both steps. They run in a child process (`python -m headwater.node.quantise`): the package `onnx`, which writes the
file, never gets into the node. The file is ONNX as before, with each weight and each value in front of an operator
rounded to 8 bits ("QDQ"); engines turn these into integer kernels. Weights have a scale for each channel.
Rounding moves the mean of a channel, the more the deeper the prefix; by how much, on the samples, is taken back at the
outputs.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.core.draw import Draw
from headwater.data import wire
from headwater.data.cores import cpu_flags, usable_cores
from headwater.data.room import ROOM
from headwater.data.shards.reading import read_sample
from headwater.data.store import open_store
from headwater.errors import BadSampleError, HeadwaterError, RefusedError
from headwater.node.child import read_request
from headwater.node.engines.ort import OnnxRuntime
from headwater.node.onnxfile import check_self_contained, up_to

Ranges = Mapping[str, tuple[float, float]]  # of each value in the file: lowest, highest

_ROWS = 8  # that are calibrated on at once
# Operators with integer kernels, and those that only pass values on: left out, values would be converted around them.
_OPERATORS = ("Conv", "Gemm", "MatMul", "Add", "Relu", "Clip", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat",
              "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")  # fmt: skip
_CHANNELS_STAY = {"QuantizeLinear", "DequantizeLinear", "Relu", "Clip", "HardSwish", "Add", "Mul", "BatchNormalization",
                  "MaxPool", "AveragePool", "GlobalAveragePool", "Concat"}  # fmt: skip
_VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}


def has_vnni() -> bool:
    """Whether the CPU multiplies and adds bytes in one step."""
    return bool(_VNNI & cpu_flags())


def calibrate(chunk: wire.Chunk, model: bytes) -> Ranges:
    """The range of every value in this model on these samples."""
    check_self_contained(model)
    return _ranges(model, _rows_of(chunk))


def _ranges(model: bytes, rows: Sequence[np.ndarray]) -> Ranges:
    from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

    class Reader:
        batches = (np.stack(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {name: batch}

    with tempfile.TemporaryDirectory(prefix="headwater-int8-") as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(model)
        calibrator = create_calibrator(path, augmented_model_path=str(Path(folder) / "augmented.onnx"),
                                       calibrate_method=CalibrationMethod.MinMax)  # fmt: skip
        (name,) = (each.name for each in calibrator.infer_session.get_inputs())
        calibrator.collect_data(Reader())
        found = calibrator.compute_data()
    ranges = {name: (float(np.min(each.lowest)), float(np.max(each.highest))) for name, each in found.items()}
    return {name: pair for name, pair in ranges.items() if np.isfinite(pair).all()}


def quantise(model: bytes, ranges: Ranges, outputs: list[str] | None, chunk: wire.Chunk) -> bytes:
    """The part of this model that gives `outputs`, as an int8 model; the chunk has the samples of the ranges."""
    check_self_contained(model)
    if outputs is not None:
        model = up_to(model, outputs)
    rows = _rows_of(chunk)
    made = _rounded(model, ranges)
    before, after = (_means(each, rows) for each in (model, made.SerializeToString()))
    _shift(made.graph, {name: before[name] - after[name] for name in before}, ranges)
    result: bytes = made.SerializeToString()
    return result


def _rounded(model: bytes, ranges: Ranges) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.calibrate import CalibrationMethod, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(_folded(model)))
    known = TensorsData(CalibrationMethod.MinMax, {
        name: (np.array(low, np.float32), np.array(high, np.float32)) for name, (low, high) in ranges.items()
    })  # fmt: skip
    quantizer = QDQQuantizer(
        graph,
        per_channel=True,
        # Without VNNI two products of 8 bits are added in 16, which 8-bit weights can overflow; 7-bit ones can't.
        reduce_range=not has_vnni(),
        weight_qType=QuantType.QInt8,
        activation_qType=QuantType.QUInt8,
        tensors_range=known,
        nodes_to_quantize=[],
        nodes_to_exclude=_left_in_float(graph, set(ranges)),
        op_types_to_quantize=list(_OPERATORS),
        extra_options={},
    )
    quantizer.quantize_model()
    return quantizer.model.model


def _means(model: bytes, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The mean of each channel of those outputs that are features, or pictures of features."""
    session = OnnxRuntime(model, threads=max(1, int(usable_cores())))
    sums: dict[str, Any] = {}
    for start in range(0, len(rows), _ROWS):
        for name, value in zip(session.outputs, session.run(np.stack(rows[start : start + _ROWS])), strict=True):
            if value.dtype == np.float32 and value.ndim in (2, 4):
                pixels = tuple(range(2, value.ndim))
                sums[name] = sums.get(name, 0.0) + value.mean(pixels, np.float64, keepdims=True).sum(0)
    return {name: (total / len(rows)).astype(np.float32) for name, total in sums.items()}


def _shift(graph: Any, shifts: Mapping[str, np.ndarray], ranges: Ranges) -> None:
    """Add to each output what its channels lack. What has no negative values does not get any."""
    import onnx

    makers = {name: node for node in graph.node for name in node.output}
    for output in graph.output:
        shift = shifts.get(output.name)
        if shift is None or not np.isfinite(shift).all() or not shift.any() or output.name not in makers:
            continue
        if shift.ndim > 1 and not _comes_from_convolution(output.name, makers):
            continue  # other pictures may have their channels last
        before, added, amount = (f"{output.name}_{each}" for each in ("before_shift", "shifted", "shift"))
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [before if name == output.name else name for name in names]
        graph.initializer.append(onnx.numpy_helper.from_array(shift, amount))
        has_floor = ranges.get(output.name, (-1.0, 0.0))[0] >= 0
        graph.node.append(onnx.helper.make_node("Add", [before, amount], [added if has_floor else output.name],
                                                name=f"{output.name}_add_shift"))  # fmt: skip
        if has_floor:
            graph.node.append(onnx.helper.make_node("Relu", [added], [output.name], name=f"{output.name}_floor"))


def _comes_from_convolution(name: str, makers: Mapping[str, Any]) -> bool:
    """Whether this is what a convolution gave, but for what leaves channels where they are."""
    while (node := makers.get(name)) is not None and node.op_type in _CHANNELS_STAY:
        name = node.input[0]
    return node is not None and node.op_type == "Conv"


def _folded(model: bytes) -> bytes:
    """With batch-norms in the convolutions before them, and constants computed: ONNX Runtime does it as it loads."""
    import onnxruntime as ort

    with tempfile.TemporaryDirectory(prefix="headwater-int8-") as folder:
        path = Path(folder) / "folded.onnx"
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(path)
        options.add_session_config_entry("session.load_model_format", "ONNX")
        options.log_severity_level = 4
        ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return path.read_bytes()


def _left_in_float(graph: Any, ranges: set[str]) -> list[str]:
    """What stays as it is: the first convolution, products of two values, and whatever touches one of unknown range."""
    weights = {each.name for each in graph.graph.initializer}
    excluded = []
    first = True
    for number, node in enumerate(graph.graph.node):
        if not node.name:
            node.name = f"node_{number}"
        unknown = [name for name in (*node.input, *node.output) if name and name not in weights and name not in ranges]
        of_two_values = node.op_type == "MatMul" and node.input[1] not in weights  # attention: not worth its error
        if unknown or of_two_values or (first and node.op_type == "Conv"):
            excluded.append(node.name)
        first = first and node.op_type != "Conv"
    return excluded


def _rows_of(chunk: wire.Chunk) -> list[np.ndarray]:
    """The samples as the prefix gets them; those that can't be read are left out."""
    want = chunk.extraction
    store = open_store(want.url)
    spec = want.transforms.output_spec
    rows = []
    for ref in chunk.samples:
        row = np.empty(spec.shape, spec.dtype)
        with contextlib.suppress(BadSampleError):
            want.transforms.apply(read_sample(store, ref), ref.key, Draw(chunk.seed, chunk.epoch, ref.id), out=row)
            rows.append(row)
    if len(rows) < wire.MIN_CALIBRATION:
        raise RefusedError(
            f"int8 is calibrated on at least {wire.MIN_CALIBRATION} samples, and {len(rows)} of {len(chunk.samples)} "
            "could be read; use fp32, or more pictures"
        )
    return rows


def main() -> None:
    """The child. Asked with samples it answers with ranges; asked with ranges as well it writes the file."""
    asked = json.loads(read_request())
    answer: dict[str, Any] = {}
    ROOM.allow(asked["picture_bytes"])
    try:
        model = Path(asked["path"]).read_bytes()
        request = wire.loads(asked["request"].encode())
        assert isinstance(request, wire.Calibrate)
        if "ranges" in asked:
            made = quantise(model, asked["ranges"], asked["outputs"], request.chunk)
            Path(asked["target"]).write_bytes(made)
        else:
            answer["ranges"] = calibrate(request.chunk, model)
    except HeadwaterError as error:
        answer["error"] = wire.error_to_wire(error).decode()
    except Exception as error:
        refused = RefusedError(f"the prefix can't be made int8: {str(error)[:300]}; use fp32")
        answer["error"] = wire.error_to_wire(refused).decode()
    print(json.dumps(answer), flush=True)
    os._exit(0)  # the thread that waits for the end of the input need not be waited for


if __name__ == "__main__":
    main()

"""OpenVINO: often the faster engine on CPUs. Owns what it is told. The extra `openvino`."""

from __future__ import annotations

import io
import queue
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.node.engines import inputs_of

# What it computes in; without the hint it would take bf16 by itself on a CPU that has it.
_COMPUTE_IN = {"fp32": "f32", "int8": "f32", "fp16": "f16", "bf16": "bf16"}


_SETTLING = threading.Lock()


class OpenVino:
    """One model, compiled for this CPU, with a request for each run at the same time."""

    def __init__(self, model: bytes, *, threads: int = 1, at_once: int = 1, precision: str = "fp32") -> None:
        # What it imports would send records of its use to its maker, from processes that it forks off this one.
        sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
        import openvino
        from openvino.frontend import FrontEndManager

        _settle(openvino)
        reader = FrontEndManager().load_by_framework("onnx")  # ONNX and nothing else
        graph = reader.convert(reader.load(io.BytesIO(model)))
        at_once = at_once if threads == 1 else 1
        settings: dict[str, Any] = {
            "NUM_STREAMS": at_once,
            "INFERENCE_NUM_THREADS": at_once * threads,
            "INFERENCE_PRECISION_HINT": _COMPUTE_IN[precision],
            "ENABLE_CPU_PINNING": False,  # decoders need the cores, too
        }
        self._compiled = openvino.Core().compile_model(graph, "CPU", settings)
        self.inputs: Sequence[str] = [_name(each) for each in self._compiled.inputs]
        self.outputs: Sequence[str] = [_name(each) for each in self._compiled.outputs]
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._at_once = at_once
        self._shrinking = threading.Lock()
        for _ in range(at_once):
            self._requests.put(self._compiled.create_infer_request())

    def run(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        request = self._requests.get()
        try:
            found = request.infer(inputs_of(rows, len(self.inputs)), share_inputs=True)
            return [found[place] for place in range(len(self.outputs))]
        finally:
            request._inputs_data = None  # or it would hold the group's buffer until its next run
            self._requests.put(request)

    def shrink(self) -> None:
        with self._shrinking:  # or two of them would wait for each other's requests
            idle = [self._requests.get() for _ in range(self._at_once)]  # not while one of them runs
            try:
                if hasattr(self._compiled, "release_memory"):  # OpenVINO 2025.0 and later
                    self._compiled.release_memory()
            finally:
                for each in idle:
                    self._requests.put(each)


def _settle(openvino: Any) -> None:
    """Have it make its tables of element types now, in one thread.

    Two threads that need them first at the same time wait for each other for ever: one has the interpreter, the other
    the right to make the tables.
    """
    with _SETTLING:
        tensor = openvino.Tensor(np.zeros(1, np.float32), shared_memory=True)
        tensor.get_element_type().to_dtype()
        assert tensor.data.dtype == np.float32


def _name(port: Any) -> str:
    return min(port.names, default="")

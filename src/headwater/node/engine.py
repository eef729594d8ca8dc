"""Runs a prefix. Owns the ONNX Runtime session and what it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from headwater.core.spec import Boundary
from headwater.errors import RefusedError
from headwater.node.onnxfile import check_self_contained, up_to

PROFILE_RUNS = 5


class Engine:
    """One prefix, ready to run. Threads may call `run` at the same time."""

    def __init__(self, model: bytes, outputs: Sequence[str] | None = None, *, profile: str | None = None) -> None:
        """`outputs` names what is wanted of the model; without it, everything that it gives.

        `profile` names a file for ONNX Runtime's own timing of each kernel; see `kernels`.
        """
        options = ort.SessionOptions()
        # Parallelism comes from running several groups at once, one a core: a session that also splits each group
        # would fight the decoders for the same cores.
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        # ONNX and nothing else: left alone, ONNX Runtime also takes a format of its own that `check_self_contained`
        # can't look into.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        options.log_severity_level = 4  # errors come back as exceptions; the log would only repeat them
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        check_self_contained(model)
        if outputs is not None:
            model = up_to(model, outputs)
        try:
            self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise RefusedError(f"the prefix is not a model that this node can run: {_first_line(error)}") from None
        self._inputs = [each.name for each in self._session.get_inputs()]
        self._outputs = [each.name for each in self._session.get_outputs()]

    def run(self, rows: np.ndarray, boundary: Boundary) -> Sequence[np.ndarray]:
        """The boundary's tensors for these rows."""
        if len(self._inputs) != 1 or len(self._outputs) != len(boundary):
            raise RefusedError(
                f"the prefix takes {len(self._inputs)} inputs and gives {len(self._outputs)} tensors; "
                f"the request has 1 input and wants {len(boundary)}"
            )
        try:
            tensors = self._session.run(self._outputs, {self._inputs[0]: rows})
        except Exception as error:
            raise RefusedError(f"the prefix failed on {rows.dtype}{list(rows.shape)}: {_first_line(error)}") from None
        for tensor, spec in zip(tensors, boundary, strict=True):
            if tensor.shape != (len(rows), *spec.shape) or str(tensor.dtype) != spec.dtype:
                raise RefusedError(f"the prefix gave {tensor.dtype}{list(tensor.shape)} where the request wants {spec}")
        return tensors

    def kernels(self, rows: np.ndarray) -> list[list[Any]]:
        """[name, seconds] of every kernel for these rows, in the order they ran; ends the profile.

        The clock is the wall's, and others may use the core: each kernel's shortest time of several runs is taken.
        """
        inputs = {self._inputs[0]: rows}
        for _ in range(PROFILE_RUNS):
            self._session.run(self._outputs, inputs)
        events = json.loads(Path(self._session.end_profiling()).read_text())
        ran = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
        size = len(ran) // PROFILE_RUNS
        runs = [ran[start : start + size] for start in range(0, size * PROFILE_RUNS, size)]
        return [
            [each[0]["name"].removesuffix("_kernel_time"), min(event["dur"] for event in each) / 1e6]
            for each in zip(*runs, strict=True)
        ]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]

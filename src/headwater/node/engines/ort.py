"""ONNX Runtime: the engine that every node has, and the yardstick for the others. Owns what a session is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from headwater.node.engines import inputs_of

PROFILE_RUNS = 5
# Taken where this build of ONNX Runtime has them, the first first; what they can't run goes to the next. Only the CPU's
# was ever tried by us.
_PROVIDERS = ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")


class OnnxRuntime:
    """One model in one session."""

    def __init__(self, model: bytes, *, threads: int = 1, profile: str | None = None) -> None:
        """`profile` names a file for ONNX Runtime's own timing of each kernel; see `kernels`."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        # ONNX and nothing else: left alone, ONNX Runtime also takes a format of its own that `check_self_contained`
        # can't look into.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        # Threads that wait for work would keep decoders off their cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 4  # errors come back as exceptions; the log would only repeat them
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = profile
        here = ort.get_available_providers()
        self._session = ort.InferenceSession(model, options, providers=[name for name in _PROVIDERS if name in here])
        self.inputs: Sequence[str] = [each.name for each in self._session.get_inputs()]
        self.outputs: Sequence[str] = [each.name for each in self._session.get_outputs()]

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of its input, without the batch; several inputs of the same shape are one, along its first axis."""
        shapes = {tuple(each.shape[1:]) for each in self._session.get_inputs()}
        if len(shapes) != 1:
            return ()
        (shape,) = shapes
        return shape if len(self.inputs) == 1 else (len(self.inputs), *shape)

    def rows_of(self, num_rows: int) -> np.ndarray:
        """Rows that every model of this shape can take: zeros, or where whole numbers are wanted ones."""
        shape = [each if isinstance(each, int) else 1 for each in self.row_shape]
        if all(each.type == "tensor(int64)" for each in self._session.get_inputs()):
            return np.ones((num_rows, *shape), np.int64)
        return np.zeros((num_rows, *shape), np.float32)

    def run(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        feeds = dict(zip(self.inputs, inputs_of(rows, len(self.inputs)), strict=True))
        result: Sequence[np.ndarray] = self._session.run(self.outputs, feeds)
        return result

    def shrink(self) -> None:
        # It can do so at the end of a run alone: one of a single row.
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        feeds = dict(zip(self.inputs, inputs_of(self.rows_of(1), len(self.inputs)), strict=True))
        self._session.run(self.outputs, feeds, options)

    def kernels(self, rows: np.ndarray) -> list[list[Any]]:
        """[name, seconds] of every kernel for these rows, in the order they ran; ends the profile.

        The clock is the wall's, and others may use the core: each kernel's shortest time of several runs is taken.
        """
        for _ in range(PROFILE_RUNS):
            self.run(rows)
        events = json.loads(Path(self._session.end_profiling()).read_text())
        ran = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
        size = len(ran) // PROFILE_RUNS
        runs = [ran[start : start + size] for start in range(0, size * PROFILE_RUNS, size)]
        return [
            [each[0]["name"].removesuffix("_kernel_time"), min(event["dur"] for event in each) / 1e6]
            for each in zip(*runs, strict=True)
        ]

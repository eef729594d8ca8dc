"""Runs a prefix: checks the file, takes the wanted part of it, and hands groups to a session in pieces.

Owns what is asked of a prefix whatever engine runs it: self-contained ONNX, the inputs that it gets, the boundary
that was promised.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from headwater.core.spec import Boundary
from headwater.core.tuning import Candidate
from headwater.errors import RefusedError
from headwater.node import engines
from headwater.node.engines.ort import OnnxRuntime
from headwater.node.onnxfile import check_self_contained, up_to


class Engine:
    """One prefix, ready to run. Threads may call `run` at the same time."""

    def __init__(
        self,
        model: bytes,
        outputs: Sequence[str] | None = None,
        *,
        way: Candidate | None = None,
        at_once: int = 1,
        precision: str = "fp32",
        profile: str | None = None,
    ) -> None:
        """`outputs` names what is wanted of the model; without it, everything that it gives.

        `way` is how to run it; without it, ONNX Runtime with one thread and whole groups. `at_once` groups come at the
        same time. `profile` names a file for ONNX Runtime's own timing of each kernel; see `kernels`.
        """
        self.batch = way.batch if way else None  # rows at once; None: a whole group
        way = way or Candidate()
        self.name = way.engine
        check_self_contained(model)
        if outputs is not None:
            model = up_to(model, outputs)
        try:
            self._session: engines.Session = (
                engines.load(way.engine, model, threads=way.threads, at_once=at_once, precision=precision)
                if profile is None
                else OnnxRuntime(model, profile=profile)
            )
        except Exception as error:
            raise RefusedError(f"the prefix is not a model that this node can run: {first_line(error)}") from None
        # A session that takes all cores for one group has nothing left for a second one.
        self._turn: contextlib.AbstractContextManager[Any] = (
            threading.Lock() if way.threads > 1 else contextlib.nullcontext()
        )

    def run(self, rows: np.ndarray, boundary: Boundary) -> Sequence[np.ndarray]:
        """The boundary's tensors for these rows."""
        inputs, outputs = len(self._session.inputs), len(self._session.outputs)
        if (inputs != 1 and rows.shape[1:2] != (inputs,)) or outputs != len(boundary):
            found = 1 if rows.ndim < 3 or rows.dtype != np.int64 else rows.shape[1]
            raise RefusedError(
                f"the prefix takes {inputs} inputs and gives {outputs} tensors; the request has {found} and wants "
                f"{len(boundary)}"
            )
        try:
            with self._turn:
                tensors = self._run(rows)
        except Exception as error:
            raise RefusedError(f"the prefix failed on {rows.dtype}{list(rows.shape)}: {first_line(error)}") from None
        for tensor, spec in zip(tensors, boundary, strict=True):
            if tensor.shape != (len(rows), *spec.shape) or str(tensor.dtype) != spec.dtype:
                raise RefusedError(f"the prefix gave {tensor.dtype}{list(tensor.shape)} where the request wants {spec}")
        return tensors

    def _run(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        size = self.batch or len(rows)
        if len(rows) <= size:
            return self._session.run(rows)
        parts = [self._session.run(rows[start : start + size]) for start in range(0, len(rows), size)]
        return [np.concatenate(each) for each in zip(*parts, strict=True)]

    @property
    def row_shape(self) -> tuple[object, ...]:
        """Of its input, as the model says: a size that it leaves open is no number. Only of ONNX Runtime's sessions."""
        assert isinstance(self._session, OnnxRuntime)
        return tuple(self._session.row_shape)

    def rows_of(self, num_rows: int) -> np.ndarray:
        """Rows that it takes, made up. Only of ONNX Runtime's sessions."""
        assert isinstance(self._session, OnnxRuntime)
        return self._session.rows_of(num_rows)

    def try_run(self, rows: np.ndarray) -> None:
        """Run it on these, whatever comes out; raises whatever the engine raises."""
        self._session.run(rows)

    def shrink(self) -> None:
        """Give back what is kept from larger groups. An engine that fails at it keeps its memory."""
        with contextlib.suppress(Exception):
            self._session.shrink()

    def kernels(self, rows: np.ndarray) -> list[list[Any]]:
        """[name, seconds] of every kernel for these rows; only of an engine made with `profile`, and only once."""
        assert isinstance(self._session, OnnxRuntime)
        return self._session.kernels(rows)


def first_line(error: Exception) -> str:
    """What an engine has to say, in one line. OpenVINO tells first where in its sources it was."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if lines[0].startswith(("Exception from ", "Check ")) else 0][:300]

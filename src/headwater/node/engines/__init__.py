"""What runs a prefix: ONNX Runtime, which every node has, and others where they are installed.

Owns the table of engines. A session takes an ONNX file whose safety `node.engine` has checked. Adding an engine takes a
file here, a line in `load`, and its name in `core.tuning.ENGINES`. An engine's package is imported where it is used.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import onnxruntime

from headwater.core.plan import PRECISIONS
from headwater.core.tuning import ENGINES
from headwater.data.cores import cpu_flags
from headwater.errors import RefusedError


class Session(Protocol):
    """A model, ready to run. Threads may call `run` at the same time."""

    inputs: Sequence[str]
    outputs: Sequence[str]

    def run(self, rows: np.ndarray) -> Sequence[np.ndarray]:
        """Every output for these rows. Raises whatever the engine raises."""

    def shrink(self) -> None:
        """Give back what is kept from larger runs; those under way keep theirs."""


def load(name: str, model: bytes, *, threads: int = 1, at_once: int = 1, precision: str = "fp32") -> Session:
    """This model in this engine: each run takes `threads` threads, and `at_once` runs come at the same time."""
    if name == "openvino":
        from headwater.node.engines.ov import OpenVino

        return OpenVino(model, threads=threads, at_once=at_once, precision=precision)
    from headwater.node.engines.ort import OnnxRuntime

    return OnnxRuntime(model, threads=threads)


def inputs_of(rows: np.ndarray, count: int) -> list[np.ndarray]:
    """What each of a model's inputs gets: all, or where there are several its part of every row."""
    return [rows] if count == 1 else [np.ascontiguousarray(rows[:, number]) for number in range(count)]


@cache
def available() -> tuple[str, ...]:
    """The engines that are installed here; ONNX Runtime always is."""
    return tuple(name for name in ENGINES if importlib.util.find_spec(name) is not None)


def on_accelerator() -> bool:
    """Whether ONNX Runtime here would use one."""
    return any(name.startswith(("CUDA", "Tensorrt")) for name in onnxruntime.get_available_providers())


@cache
def versions() -> str:
    """The engines in words that tell one installation from another."""
    return ", ".join(f"{name} {version(name)}" for name in available())


@cache
def version(name: str) -> str:
    """By the module's own word for ONNX Runtime, which comes as packages of several names."""
    if name == "onnxruntime":
        return str(onnxruntime.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # not from a package: an archive on the path
        return "of unknown version"


# What a CPU must have for an engine to compute in it rather than only to store it.
_CPU_HAS = {"fp16": {"avx512_fp16", "amx_fp16"}, "bf16": {"avx512_bf16", "amx_bf16"}}


@cache
def why_not(precision: str) -> str:
    """Why this node can't run a prefix in this precision, and the way out; empty if it can."""
    if precision == "int8" and importlib.util.find_spec("onnx") is None:
        return "this node has no `onnx` package to quantise with; install it there: pip install '.[int8]' in a checkout"
    if precision in _CPU_HAS and not engines_for(precision):
        if "openvino" not in available():
            return f"{precision} needs OpenVINO on the node: pip install '.[openvino]' in a checkout; or use fp32"
        needs = " or ".join(sorted(_CPU_HAS[precision]))
        return f"this node's CPU does not compute in {precision} (it needs {needs}); use fp32 or int8"
    return ""


def engines_for(precision: str) -> tuple[str, ...]:
    """The engines here that compute in this precision."""
    if precision in _CPU_HAS:  # ONNX Runtime has no such kernels for CPUs
        able = bool(_CPU_HAS[precision] & cpu_flags())
        return tuple(name for name in available() if name == "openvino" and able)
    return available()


def precisions() -> tuple[str, ...]:
    """What this node can run a prefix in."""
    return tuple(name for name in PRECISIONS if not why_not(name))


def precision_faults() -> dict[str, str]:
    """For each precision that this node can't do: why, and the way out."""
    return {name: fault for name in PRECISIONS if (fault := why_not(name))}


def check_possible(engine: str, precision: str) -> None:
    """RefusedError, with the way out, if this node can't do that."""
    if fault := why_not(precision):
        raise RefusedError(f"precision {precision}: {fault}")
    if engine != "auto" and engine not in engines_for(precision):
        here = ", ".join(engines_for(precision))
        install = f"install it there (pip install '.[{engine}]'), or " if engine not in available() else ""
        raise RefusedError(
            f"the plan pins the engine {engine!r}, and for {precision} this node has {here}; {install}"
            'set engine to "auto"'
        )

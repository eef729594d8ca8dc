"""Python and packages: what is there, what is too old, and what this installation is for."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from headwater.cli.checks import NOTE, OK, WRONG, Finding
from headwater.node import engines
from headwater.version import VERSION

LEAST_PYTHON = (3, 11)
# Where this is a checkout that was never installed, nobody else says what is needed.
_CORE = ("numpy", "pyarrow", "obstore", "onnxruntime", "pillow", "typer", "rich")
_TRAINER = ("torch", "onnx", "onnxscript")
_PART = "packages"


def check() -> Iterator[Finding]:
    """Nothing large is imported: versions are read."""
    python = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= LEAST_PYTHON
    yield Finding(
        _PART,
        "Python",
        OK if fine else WRONG,
        python,
        "" if fine else f"Headwater needs Python {'.'.join(map(str, LEAST_PYTHON))} or later",
    )
    yield Finding(_PART, "headwater", OK, VERSION)
    least = _least()
    for name in _CORE:
        yield _package(name, least.get(name), WRONG, f"pip install 'headwater' again, or pip install {name}")
    found = {name: _version(name) for name in _TRAINER}
    if found["torch"] is None:
        yield Finding(
            _PART,
            "torch",
            NOTE,
            "not installed: this is a storage node's installation, which needs none",
            "to train from here: pip install 'headwater[train]' ('.[train]' in a checkout)",
        )
    else:
        for name in _TRAINER:
            yield _package(name, least.get(name), WRONG, f"pip install {name}; prefixes are exported with it")
    names = engines.available()
    yield Finding(
        _PART,
        "engines",
        OK if names else WRONG,
        engines.versions() if names else "none can be loaded",
        "" if names else "pip install onnxruntime",
    )
    if "openvino" not in names:
        yield Finding(
            _PART,
            "OpenVINO",
            NOTE,
            "not installed; nodes use ONNX Runtime alone",
            "pip install '.[openvino]' in a checkout, on nodes with Intel or AMD CPUs: it is taken where it is faster",
        )
    for precision, why in engines.precision_faults().items():
        yield Finding(_PART, precision, NOTE, f"no prefix can be run in {precision} here: {why}")


def _package(name: str, least: str | None, verdict: str, way: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(_PART, name, verdict, "not installed", way)
    if least is not None and _numbers(found) < _numbers(least):
        return Finding(_PART, name, WRONG, f"{found} is older than {least}", f"pip install '{name}>={least}'")
    return Finding(_PART, name, OK, found)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _least() -> dict[str, str]:
    """The oldest versions that will do, as the installed package says."""
    try:
        wanted = requires("headwater") or []
    except PackageNotFoundError:
        return {}
    found = [re.match(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?\s*>=\s*([0-9.]+)", each) for each in wanted]
    return {each[1].lower(): each[2] for each in found if each is not None}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text.partition("+")[0])[:3])

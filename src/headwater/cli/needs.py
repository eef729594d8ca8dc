"""What a verb needs beyond a node's installation."""

from __future__ import annotations

from importlib.util import find_spec

from headwater.errors import ConfigError


def needs_torch() -> None:
    """Say plainly that this is a storage node's installation."""
    missing = [name for name in ("torch", "onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this command needs {', '.join(missing)}; install the trainer's part: "
                          "pip install 'headwater[train]'")  # fmt: skip

"""What a verb needs before it begins: more than a node's installation, somewhere to write, nodes that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from headwater.errors import ConfigError, UnreachableError
from headwater.train.directory import RAY, RayFleet


def needs_torch() -> None:
    """Say plainly that this is a storage node's installation."""
    missing = [name for name in ("torch", "onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"this command needs {', '.join(missing)}; install the trainer's part: "
                          "pip install '.[train]' in a checkout")  # fmt: skip


def needs_simpy() -> None:
    """Say plainly that the simulator is an extra."""
    if find_spec("simpy") is None:
        raise ConfigError("this command needs simpy; install the simulator's part: pip install '.[sim]' in a checkout")


def check_folders(*files: Path | None) -> None:
    """Say now, and not after minutes of work, that a file can't be written."""
    for file in files:
        if file is not None and (file.is_dir() or not file.absolute().parent.is_dir()):
            what = "is a folder" if file.is_dir() else f"can't be written: there is no folder {file.absolute().parent}"
            raise ConfigError(f"{file} {what}; name a file in a folder that is there")


def addresses_of(given: Sequence[str]) -> list[str]:
    """Each once; of a fleet, the nodes that it has at this moment."""
    found: list[str] = []
    for each in given:
        if each.startswith(RAY):
            fleet = RayFleet(each.removeprefix(RAY))
            try:
                found += fleet.addresses()
            finally:
                fleet.close()
        else:
            found.append(each)
    if not found:
        raise UnreachableError(f"{', '.join(given)} has no node that answers at this moment; ask again, or look what "
                               "keeps its nodes from starting (Ray's logs say it)")  # fmt: skip
    return list(dict.fromkeys(found))

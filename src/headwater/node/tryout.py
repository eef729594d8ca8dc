"""A first look at an uploaded prefix, in a child process: what breaks an engine, or fills the memory, ends the child.

Owns the child (`python -m headwater.node.tryout`) and what its end means. The node itself loads only what a child has
loaded and run before. That is no proof for other rows, but what is made to break an engine breaks it here.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import numpy as np

from headwater.data import wire
from headwater.data.memory import memory_bytes
from headwater.errors import HeadwaterError, RefusedError
from headwater.node import engines
from headwater.node.child import Children, as_child, read_request
from headwater.node.engine import Engine, first_line
from headwater.node.onnxfile import check_self_contained

WITHIN_S = 120.0  # a model of some gigabytes on a slow device
MEMORY_TIMES = 8  # of the file: engines keep weights twice or thrice while they rearrange them
MEMORY_SPARE_BYTES = 2 << 30  # on top of that, or all that the node has where that is less
_MAX_ROW_ITEMS = 64 << 20
_WAY_OUT = "cut earlier, or export it with its constants computed"


def try_out(children: Children, path: Path) -> None:
    """RefusedError if the model at `path` can't be loaded, or breaks what loads it."""
    check_self_contained(path.read_bytes())  # takes no process
    try:
        ended = children.run("headwater.node.tryout", json.dumps({"path": str(path)}).encode(), WITHIN_S)
    except OSError as error:
        raise RefusedError(f"the prefix can't be tried: no process can be started ({error}); make room there") from None
    try:
        answer = json.loads(ended.said.splitlines()[-1]) if ended.code == 0 else {}
    except (ValueError, IndexError):
        answer = {}
    if not isinstance(answer, dict) or "error" not in answer:
        if children.closed:
            raise RefusedError("the node is stopping; upload it again once it is back")
        raise RefusedError(f"the prefix broke the engine that tried it, which {ended}; it is not kept")
    if answer["error"] is not None:
        raise wire.error_from_wire(str(answer["error"]).encode()) or RefusedError(str(answer["error"]))


def main() -> None:
    """The child: a path on standard input, and on standard output what is wrong with the model there, or null."""
    asked = json.loads(read_request())
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not ours
    answer: dict[str, str | None] = {"error": None}
    try:
        model = Path(asked["path"]).read_bytes()
        _limit(min(MEMORY_SPARE_BYTES, memory_bytes()) + MEMORY_TIMES * len(model))
        engine = Engine(model)
        if _is_moderate(engine.row_shape):
            _run(engine, engine.rows_of(1))
    except HeadwaterError as error:
        answer["error"] = wire.error_to_wire(error).decode()
    except MemoryError:
        answer["error"] = wire.error_to_wire(RefusedError("the prefix takes too much memory to be loaded")).decode()
    print(json.dumps(answer), file=said, flush=True)
    os._exit(0)  # engines' threads need not be waited for


def _run(engine: Engine, rows: np.ndarray) -> None:
    """One row through it. What it says of such rows is told to whoever asks for some; what it takes of memory, now."""
    try:
        engine.try_run(rows)
    except Exception as error:
        if isinstance(error, MemoryError) or "alloc" in str(error).lower():
            raise RefusedError(f"the prefix failed on one row within the memory that it may take here "
                               f"({first_line(error)}); {_WAY_OUT}") from None  # fmt: skip


def _limit(num_bytes: int) -> None:
    """Of addresses, on top of those that are taken already. Accelerators lay claim to far more than they use."""
    if engines.on_accelerator():
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))


def _is_moderate(shape: tuple[object, ...]) -> bool:
    """Whether a row is no more than an engine should be tried with."""
    sizes = [size for size in shape if isinstance(size, int) and size > 0]
    if not shape or len(sizes) != len(shape):
        raise RefusedError(f"the prefix takes rows of {list(shape)}; only the number of rows may vary")
    return bool(np.prod(sizes, dtype=np.float64) <= _MAX_ROW_ITEMS)


if __name__ == "__main__":
    as_child(main)

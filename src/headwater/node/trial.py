"""`python -m headwater.node.trial`: load a prefix once and run it on one row, where it can do no harm.

Owns the limits of that. What an engine computes of a file's constants as it loads them, and of a row as it runs, may
take any memory and time. In this process both end; the node's own are not touched.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import numpy as np

from headwater.data.memory import memory_bytes
from headwater.errors import RefusedError
from headwater.node.child import Children, read_request
from headwater.node.engine import first_line
from headwater.node.engines.ort import OnnxRuntime

WITHIN_S = 120.0  # a large model on a fiftieth of a core
# What it may take on top of what is there before it is loaded: so much of the machine, and so many times the file (the
# file, its tensors, these in the order that kernels want, and the file once more while it is read).
PART, FILES = 4, 4
_WAY_OUT = "cut earlier, or export it with its constants computed"


def try_out(children: Children, path: Path) -> None:
    """RefusedError if the prefix can't be loaded and run within the limits."""
    try:
        ended = children.run("headwater.node.trial", json.dumps({"path": str(path)}).encode(), WITHIN_S)
    except OSError as error:
        raise RefusedError(f"the prefix can't be tried out: {error}; make room on the node") from None
    said = ended.said.decode(errors="replace").splitlines()
    if ended.code != 0 or not said:
        raise RefusedError(f"the prefix can't be run: the process that tried it out {ended}; {_WAY_OUT}")
    if fault := json.loads(said[-1])["fault"]:
        raise RefusedError(fault)


def _limit_memory(file_bytes: int) -> None:
    status = Path("/proc/self/status").read_text().splitlines()
    here = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
    most = here + FILES * file_bytes + memory_bytes() // PART
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _fault(path: Path) -> str:
    try:
        session = OnnxRuntime(path.read_bytes())
    except Exception as error:
        return f"the prefix is not a model that this node can run: {first_line(error)}"
    shape = session.row_shape if len(session.inputs) == 1 else ()
    if not shape or not all(isinstance(each, int) and each > 0 for each in shape):
        return (f"the prefix takes {len(session.inputs)} inputs, rows of {list(shape)}; it must take one, and only the "
                "number of rows may vary")  # fmt: skip
    try:
        session.run(np.zeros((1, *shape), np.float32))
    except Exception as error:
        return f"the prefix failed on one row within the memory that it may take here ({first_line(error)}); {_WAY_OUT}"
    return ""


def main() -> None:
    path = Path(json.loads(read_request())["path"])
    _limit_memory(path.stat().st_size)
    print(json.dumps({"fault": _fault(path)}), flush=True)
    os._exit(0)  # the thread that waits for the end of the input need not be waited for


if __name__ == "__main__":
    main()

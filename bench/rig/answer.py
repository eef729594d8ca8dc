"""The far end of `RigUp.open`: `python -m bench.rig.answer MODULE:FACTORY`.

The first line in has the factory's arguments, every further one those of a call of what it made; each gets one line
out. All lines are JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import Any


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    # What the object prints goes to standard error; standard output is for answers alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    made: Any = None
    for number, line in enumerate(sys.stdin):
        try:
            arguments = json.loads(line)
            if number == 0:
                made, result = getattr(import_module(module), name)(**arguments), None
            else:
                result = made(**arguments)
            answer = {"result": result}
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=out, flush=True)
        if "error" in answer:
            break
    close = getattr(made, "close", None)
    if close is not None:
        close()


if __name__ == "__main__":
    main()

"""The far end of `RigUp.call`: `python -m bench.rig.call MODULE:FUNCTION`, arguments as JSON in, result as JSON out."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    arguments = json.load(sys.stdin)
    # What the function prints goes to standard error; standard output is for the result alone.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    answer = getattr(import_module(module), name)(**arguments)
    with os.fdopen(answer_to, "w") as out:
        json.dump(answer, out)


if __name__ == "__main__":
    main()

"""`python -m bench.scenarios [NAME ...]`: play scenarios and write docs/results/scenario-NAME.md."""

from __future__ import annotations

import sys
from importlib import import_module

from bench.scenarios.page import NAMES, Page


def main() -> int:
    wanted = sys.argv[1:] or list(NAMES)
    if unknown := [name for name in wanted if name not in NAMES]:
        print(f"no scenario is called {', '.join(unknown)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    for name in wanted:
        page: Page = import_module(f"bench.scenarios.{NAMES[name]}").run()
        print(page.text())
        print(f"written: {page.keep()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

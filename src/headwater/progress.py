"""Signs of life on the terminal for whatever takes over a second.

Owns `Progress`. It writes to standard error if that is a terminal; else to the log, as INFO: pipes stay clean.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

log = logging.getLogger(__name__)


class Progress:
    """One line that says what is being done, gone when it is done."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[int], None]]:
        """Show `what` while the block runs; the callable given to it shows a count as well."""
        start = time.perf_counter()
        if not self._console.is_terminal:
            log.info("%s …", what)
            yield lambda count: None
            log.info("%s: %.1f s", what, time.perf_counter() - start)
            return
        with self._console.status(f"{what} …") as status:
            yield lambda count: status.update(f"{what} … {count:,}")
        taken_s = time.perf_counter() - start
        if taken_s > 1:
            self._console.print(f"[dim]{what}: {taken_s:.1f} s[/dim]")

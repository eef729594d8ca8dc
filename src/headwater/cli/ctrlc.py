"""Ctrl-C that is never lost. Owns `CtrlC`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class CtrlC:
    """Ctrl-C while something goes on. It ends that, at once or after the step, and is never lost: raised while Python
    is in a finaliser, an interrupt is swallowed there."""

    def __init__(self) -> None:
        self._asked = self._in_step = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: object) -> None:
        again, self._asked = self._asked, True
        if again or not self._in_step:
            raise KeyboardInterrupt

    @contextmanager
    def step(self) -> Iterator[None]:
        """The first waits for the end of the block, so a checkpoint never has half a step; a second does not."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False
        if self._asked:
            raise KeyboardInterrupt

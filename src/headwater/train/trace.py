"""The timeline of a live run: spans as they are reported, by this process and by nodes.

Owns `Trace`. Times are this process's `time.perf_counter`; those of nodes are laid over it (`core.trace.shift_s`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from headwater.core.trace import TRAINER, Span, busy_s, perfetto, shift_s
from headwater.data.wire import Spans

LOOP = "loop"  # the lane of the training loop
MAX_SPANS = 1_000_000  # about 150 bytes each; later ones are left out


class Trace:
    """Everything that was reported so far. Any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.num_left_out = 0

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def add(self, name: str, start_s: float, end_s: float, lane: str | None = None, chunk: int | None = None) -> None:
        """Something that this process did; in the calling thread unless a lane is named."""
        lane = threading.current_thread().name if lane is None else lane
        self._keep([Span(TRAINER, lane, name, start_s, end_s - start_s, chunk)])

    def add_far(self, place: str, chunk: int, asked_s: float, answered_s: float, found: Spans) -> None:
        """What a node did for a chunk that was asked for and answered at these times."""
        shift = shift_s(asked_s, answered_s, found.begun_s, found.ended_s)
        self._keep([Span(place, lane, name, start_s + shift, seconds, chunk)
                    for name, lane, start_s, seconds in found.spans])  # fmt: skip

    def busy_s(self) -> dict[str, dict[str, float]]:
        """Seconds of each stage, by place."""
        return busy_s(self.spans)

    def write(self, path: str | os.PathLike[str]) -> None:
        """As a file that ui.perfetto.dev opens."""
        Path(path).write_text(perfetto(self.spans, (TRAINER,)))

    def _keep(self, spans: Sequence[Span]) -> None:
        with self._lock:
            room = MAX_SPANS - len(self._spans)
            self._spans += spans[:room]
            self.num_left_out += len(spans[room:]) if room >= 0 else len(spans)

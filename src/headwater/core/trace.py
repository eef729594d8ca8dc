"""A run's timeline: who did what when, on every tier.

Owns `Span`, how spans of two clocks are laid over each other, and the file that Perfetto (ui.perfetto.dev) and Chrome
open. Live runs and simulated ones write the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

STAGES = ("read", "decode", "augment", "infer", "send", "wait", "step")


@dataclass(frozen=True)
class Span:
    """Something that took a while. `place` is a machine or a device ("trainer", a node's address), `lane` what did it
    there (a thread); seconds are on one clock for all spans of a trace."""

    place: str
    lane: str
    name: str
    start_s: float
    seconds: float
    chunk: int | None = None


def shift_s(asked_s: float, answered_s: float, begun_s: float, ended_s: float) -> float:
    """What to add to another machine's clock to get ours, from one request: when we asked and had the answer, when it
    began and ended there. The ways there and back are taken to be as long."""
    return ((asked_s + answered_s) - (begun_s + ended_s)) / 2


def perfetto(spans: Sequence[Span], places: Iterable[str] = ()) -> str:
    """The file's text. `places` come first, in this order; times begin at 0."""
    order = list(dict.fromkeys([*places, *(span.place for span in spans)]))
    lanes = list(dict.fromkeys((span.place, span.lane) for span in sorted(spans, key=lambda each: each.lane)))
    begin = min((span.start_s for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, place in enumerate(order, start=1):
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": place}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        )
    for number, (place, lane) in enumerate(lanes, start=1):
        about = {"pid": order.index(place) + 1, "tid": number}
        events.append({"ph": "M", "name": "thread_name", **about, "args": {"name": lane}})
    number_of = {lane: number for number, lane in enumerate(lanes, start=1)}
    for span in sorted(spans, key=lambda each: each.start_s):
        event = {
            "ph": "X",
            "name": span.name,
            "cat": span.name,
            "pid": order.index(span.place) + 1,
            "tid": number_of[span.place, span.lane],
            "ts": round(1e6 * (span.start_s - begin), 3),
            "dur": round(1e6 * span.seconds, 3),
        }
        if span.chunk is not None:
            event["args"] = {"chunk": span.chunk}
        events.append(event)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def busy_s(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Seconds of each kind of span, by place."""
    found: dict[str, dict[str, float]] = {}
    for span in spans:
        there = found.setdefault(span.place, {})
        there[span.name] = there.get(span.name, 0.0) + span.seconds
    return found

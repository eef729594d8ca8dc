"""A run's timeline: who did what when, on every tier.

Owns `Span`, how spans of two clocks are laid over each other, the file that Perfetto (ui.perfetto.dev) and Chrome open,
and `strips`, what the page draws of it. Live runs and simulated ones write the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.form import shown
from headwater.errors import ConfigError

TRAINER = "trainer"
STAGES = ("read", "decode", "augment", "infer", "send", "wait", "finish", "step")


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


def from_perfetto(data: object) -> list[Span]:
    """The spans of such a file, parsed as JSON. ConfigError if it is another one."""
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ConfigError("this is no timeline: it has no list of traceEvents")
    names: dict[tuple[str, str, str], str] = {}
    for event in events:
        if event.get("ph") == "M" and isinstance(about := event.get("args"), dict):
            tid = _text(event.get("tid")) if event.get("name") == "thread_name" else "0"
            names[_text(event.get("name")), _text(event.get("pid")), tid] = _text(about.get("name"))
    spans = []
    for number, event in enumerate(events):
        if event.get("ph") != "X":
            continue
        start, taken = event.get("ts"), event.get("dur")
        if not all(isinstance(each, int | float) and -1e15 < each < 1e15 for each in (start, taken)):
            raise ConfigError(f"event {number} of the timeline has no times (ts, dur)")
        about = event.get("args")
        chunk = about.get("chunk") if isinstance(about, dict) else None
        pid, tid = _text(event.get("pid")), _text(event.get("tid"))
        spans.append(Span(names.get(("process_name", pid, "0"), pid), names.get(("thread_name", pid, tid), tid),
                          _text(event.get("name")), 1e-6 * float(start), max(0.0, 1e-6 * float(taken)),
                          chunk if isinstance(chunk, int) else None))  # fmt: skip
    return spans


def _text(value: object) -> str:
    """A name or a number of a timeline, whatever it is."""
    return value if isinstance(value, str) else shown(value)


def strips(spans: Sequence[Span], num_bins: int = 240) -> dict[str, Any]:
    """How many threads each stage keeps busy at each place, over the whole time: plain data for a picture.

    What is under a strip is the time of its spans: nothing is sampled or left out.
    """
    begin = min((span.start_s for span in spans), default=0.0)
    end = max((span.start_s + span.seconds for span in spans), default=0.0)
    bin_s = max(end - begin, 1e-6) / num_bins
    edges = np.linspace(0.0, num_bins * bin_s, num_bins + 1)
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.place, span.name), []).append(span)
    places = sorted({span.place for span in spans}, key=lambda place: (place == TRAINER, place))  # as the chain goes
    known = {name: place for place, name in enumerate(STAGES)}
    found = []
    for (place, name), each in sorted(groups.items(), key=lambda one: (places.index(one[0][0]),
                                                                       known.get(one[0][1], len(known)))):  # fmt: skip
        starts = np.array([span.start_s - begin for span in each])
        done = _behind(edges, starts) - _behind(edges, starts + np.array([span.seconds for span in each]))
        busy = np.maximum(np.diff(done), 0.0) / bin_s
        found.append({"place": place, "name": name, "busy": [round(float(value), 4) for value in busy]})
    return {"bin_s": bin_s, "strips": found}


def _behind(edges: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At each edge, the seconds since each time that is over, added up."""
    times = np.sort(times)
    sums = np.concatenate([[0.0], np.cumsum(times)])
    num = np.searchsorted(times, edges, side="right")
    found: npt.NDArray[np.float64] = num * edges - sums[num]
    return found


def busy_s(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Seconds of each kind of span, by place."""
    found: dict[str, dict[str, float]] = {}
    for span in spans:
        there = found.setdefault(span.place, {})
        there[span.name] = there.get(span.name, 0.0) + span.seconds
    return found

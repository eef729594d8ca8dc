"""What a person is shown of nodes: rates between looks, what limits, tenants beside each other.

Owns `Look`, `Looks` and `view`. A look is every number of a node's /metrics at one moment, beside what else the node
says of itself; a view adds what changed since an earlier look. The page and `headwater top` show views, and compute
nothing.

What holds (tests/core/test_looks.py): a view's numbers are those of the newest look; rates are never negative, also
where a node was started anew; several nodes together have the sums of what each has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

STAGES = ("read", "decode", "infer", "send")
WINDOW_S = 5.0  # rates are over about so long: a chunk takes seconds
APART_S = 0.5  # looks that are closer tell no rate
STALE_S = 20.0  # nobody has looked for so long: what was before says nothing about now
COMPUTING = 0.75  # of the cores: decoding and inference keep up no more
SENDING = 0.5  # of the time of streams that are worked on

Key = tuple[str, ...]  # a metric, then the values of its labels
Numbers = Mapping[Key, float]
_PEAKS = ("headwater_group_rows", "headwater_engine_batch_rows")  # of several nodes, the largest says more than the sum


@dataclass(frozen=True)
class Look:
    """What a node said at one moment of whoever looked. `about` is what it says beside numbers."""

    at_s: float
    numbers: Numbers
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """The newest look, and what changed a second; `window_s` is None until there are two looks."""

    look: Look
    per_s: Numbers
    window_s: float | None

    def number(self, metric: str, *labels: str) -> float:
        """Of the newest look; the sum over the labels that are not named."""
        return self._numbers.get((metric, *labels), 0.0)

    def rate(self, metric: str, *labels: str) -> float | None:
        """A second; None until there are two looks."""
        return None if self.window_s is None else self._rates.get((metric, *labels), 0.0)

    @cached_property
    def _numbers(self) -> Numbers:
        return _with_sums(self.look.numbers)

    @cached_property
    def _rates(self) -> Numbers:
        return _with_sums(self.per_s)


class Looks:
    """The last few looks at one node."""

    def __init__(self) -> None:
        self._looks: list[Look] = []

    def add(self, look: Look) -> None:
        before = self._looks[-1] if self._looks else None
        if before is not None and (look.at_s - before.at_s > STALE_S or _start(look) != _start(before)):
            self._looks.clear()
        if len(self._looks) > 1 and look.at_s - self._looks[-2].at_s < APART_S:
            self._looks.pop()
        self._looks.append(look)
        while len(self._looks) > 2 and look.at_s - self._looks[1].at_s >= WINDOW_S:
            self._looks.pop(0)

    def seen(self) -> Seen | None:
        """None before the first look."""
        if not self._looks:
            return None
        first, last = self._looks[0], self._looks[-1]
        window_s = last.at_s - first.at_s
        if window_s < APART_S:
            return Seen(last, {}, None)
        grown = {key: value for key, value in last.numbers.items() if key[0].endswith("_total")}
        per_s = {key: max(0.0, value - first.numbers.get(key, 0.0)) / window_s for key, value in grown.items()}
        return Seen(last, per_s, window_s)


def together(seen: Sequence[Seen]) -> Seen:
    """Several nodes as if they were one."""
    numbers: dict[Key, float] = {}
    per_s: dict[Key, float] = {}
    for each in seen:
        for key, value in each.look.numbers.items():
            before = numbers.get(key, 0.0)
            numbers[key] = max(before, value) if key[0] in _PEAKS else before + value
        for key, value in each.per_s.items():
            per_s[key] = per_s.get(key, 0.0) + value
    windows = [each.window_s for each in seen if each.window_s is not None]
    memories = [each.look.about.get("memory") or {} for each in seen]
    about = {
        "roots": sorted({root for each in seen for root in each.look.about.get("roots", ())}),
        "draining": bool(seen) and all(each.look.about.get("draining") for each in seen),
        "memory": {
            "budget_bytes": _sum(each.get("budget_bytes") for each in memories),
            "used_bytes": _sum(each.get("used_bytes") for each in memories),
            "num_waiting": _sum(each.get("num_waiting") for each in memories) or 0,
            "tenants": [share for each in memories for share in each.get("tenants", ())],
        },
        "faults": sorted((one for each in seen for one in each.look.about.get("faults", ())),
                         key=lambda one: -float(one["at_s"])),
    }  # fmt: skip
    at_s = max((each.look.at_s for each in seen), default=0.0)
    return Seen(Look(at_s, numbers, about), per_s, min(windows, default=None))


def only(seen: Seen, may_see: Callable[[Key], bool], about: Mapping[str, Any]) -> Seen:
    """What somebody may see of it."""
    look = Look(seen.look.at_s, {key: value for key, value in seen.look.numbers.items() if may_see(key)}, about)
    return Seen(look, {key: value for key, value in seen.per_s.items() if may_see(key)}, seen.window_s)


def view(seen: Seen) -> dict[str, Any]:
    """Plain data for the page and the terminal. Rates are None until there are two looks."""
    number, rate = seen.number, seen.rate
    hits, misses = rate("headwater_cache_hits_total"), rate("headwater_cache_misses_total")
    asked = (hits or 0.0) + (misses or 0.0)
    return {
        "window_s": seen.window_s,
        "numbers": [[key[0], list(key[1:]), value] for key, value in sorted(seen.look.numbers.items())],
        "per_s": {
            "rows_sent": rate("headwater_rows_sent_total"),
            "row_bytes_sent": rate("headwater_row_bytes_sent_total"),
            "rows_made": rate("headwater_rows_made_total"),
            "rows_kept": hits,
            "read_bytes": rate("headwater_read_bytes_total"),
            "cpu_s": rate("process_cpu_seconds_total"),
            "errors": rate("headwater_errors_total"),
        },
        "stages": [{"name": stage, "busy": rate("headwater_busy_seconds_total", stage)} for stage in STAGES],
        "cores": number("headwater_cores"),
        "threads": number("headwater_threads"),
        "chunks": {name: number(f"headwater_chunks_{name}") for name in ("working", "waiting", "stalled", "limit")},
        "memory": {
            **{name: value for name, value in (seen.look.about.get("memory") or {}).items() if name != "tenants"},
            "resident_bytes": number("process_resident_memory_bytes"),
            "limit_bytes": number("headwater_memory_limit_bytes"),
        },
        "cache": {
            "is_on": number("headwater_cache_on") > 0,
            "is_full": number("headwater_cache_full") > 0,
            "bytes": number("headwater_cache_bytes"),
            "limit_bytes": number("headwater_cache_limit_bytes"),
            "hits": number("headwater_cache_hits_total"),
            "misses": number("headwater_cache_misses_total"),
            "evicted_bytes": number("headwater_cache_evicted_bytes_total"),
            "unkept": number("headwater_cache_unkept_total"),
            "damaged": number("headwater_cache_damaged_total"),
            "hit_share": hits / asked if hits is not None and asked > 0 else None,
        },
        "tenants": tenants(seen),
        "faults": list(seen.look.about.get("faults", ())),
        "limit": limit(seen),
        "roots": list(seen.look.about.get("roots", ())),
        "draining": bool(seen.look.about.get("draining")),
        "prefixes": list(seen.look.about.get("prefixes", ())),
        "version": str(seen.look.about.get("headwater", "")),
        "cache_fault": seen.look.about.get("cache_fault"),
    }


def tenants(seen: Seen) -> list[dict[str, Any]]:
    """Everyone who has asked for something, the fastest first, with the jobs that have memory now."""
    number, rate = seen.number, seen.rate
    names = sorted({key[1] for key in seen.look.numbers if key[0] == "headwater_requests_under_way"
                    or key[0] in ("headwater_requests_total", "headwater_rows_sent_total")})  # fmt: skip
    shares = [dict(each) for each in (seen.look.about.get("memory") or {}).get("tenants", ())]
    jobs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for share in shares:  # a job's name begins with its tenant's, on a node that knows tenants
        tenant = str(share["tenant"]).partition("/")[0]
        of = tenant if tenant in jobs else next((name for name in names if len(names) == 1), None)
        if of is not None:
            jobs[of].append(share)
    rows = [
        {
            "name": name,
            "rows_per_s": rate("headwater_rows_sent_total", name),
            "bytes_per_s": rate("headwater_row_bytes_sent_total", name),
            "rows": number("headwater_rows_sent_total", name),
            "bytes": number("headwater_row_bytes_sent_total", name),
            "under_way": number("headwater_requests_under_way", name),
            "batch": number("headwater_group_rows", name),
            "errors": number("headwater_errors_total", name),
            "bad": number("headwater_bad_samples_total", name),
            "memory_bytes": sum(float(share["row_bytes"]) for share in jobs[name]),
            "num_jobs": len(jobs[name]),
        }
        for name in names
    ]
    return sorted(rows, key=lambda each: (-float(each["rows_per_s"] or 0.0), -float(each["rows"]), each["name"]))


def limit(seen: Seen) -> dict[str, str]:
    """What holds a node back, as far as the node can tell: the stage that is lit, and why, in words.

    A rule of thumb over busy threads. What a trainer waits for, only the trainer knows.
    """
    if seen.window_s is None:
        return {"on": "", "said": "measuring"}
    busy = {stage: seen.rate("headwater_busy_seconds_total", stage) or 0.0 for stage in STAGES}
    cores = seen.number("headwater_cores")
    computing = (busy["decode"] + busy["infer"]) / cores if cores > 0 else 0.0
    if computing >= COMPUTING:
        on = "decode" if busy["decode"] > busy["infer"] else "infer"
        many = "1 core" if cores == 1 else f"{cores:.3g} cores"
        return {"on": on, "said": f"the CPU: decoding and inference take {100 * min(computing, 1.0):.0f} % of {many}"}
    if waiting := int((seen.look.about.get("memory") or {}).get("num_waiting") or 0):
        return {"on": "infer", "said": f"memory: {waiting} request{'s wait' if waiting > 1 else ' waits'} for it"}
    streams = max(1.0, seen.number("headwater_chunks_working"))
    if busy["send"] >= SENDING * streams:
        part = 100 * min(1.0, busy["send"] / streams)
        return {"on": "send", "said": f"the link, or trainers that take no more: {part:.0f} % of the time is sending"}
    if busy["read"] >= 1.0 and busy["read"] > busy["decode"] + busy["infer"]:
        return {"on": "read", "said": f"the store: {busy['read']:.1f} threads wait for reads"}
    if seen.rate("headwater_rows_sent_total"):
        return {"on": "", "said": "nothing here: trainers ask for no more than this"}
    return {"on": "", "said": "idle: nobody asks for rows"}


def _start(look: Look) -> float:
    return look.numbers.get(("process_start_time_seconds",), 0.0)


def _with_sums(numbers: Numbers) -> Numbers:
    """Every number, and the sums over the last labels."""
    found: dict[Key, float] = {}
    for key, value in numbers.items():
        for width in range(1, len(key) + 1):
            found[key[:width]] = found.get(key[:width], 0.0) + value
    return found


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None

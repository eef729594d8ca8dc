"""Which engine runs a prefix on a node, in how many threads, how many rows at once: what is tried and what is taken.

Owns the rule; `node.tuning` holds the clock. Every engine is tried with one thread for each of several groups at once,
and with all cores on one group; the best of them with other numbers of rows. What is compared is the rows a second of
the whole node.

The rule. Candidates at most 3 % behind the fastest count as equal, since clocks on a shared machine are no better.
Among them ONNX Runtime comes first, which the others are judged against; then one thread a group, which leaves decoders
a core each; then the fewest rows at once, which take the least memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwater.errors import ConfigError

ENGINES = ("onnxruntime", "openvino")  # the first is the yardstick
AUTO = "auto"
_OR_AUTO = f" or {AUTO}"
ENGINE_CHOICES = (AUTO, *ENGINES, *(f"{name}{_OR_AUTO}" for name in ENGINES))
EQUAL = 0.03
# Rows at once. The first is tried with every engine; then many rows, which share the reads of large weights.
BATCHES = (4, 16, 1, 32)
TRIAL_S = 0.15  # that a trial aims to take
# Of one core. Decoding and resizing a JPEG of 500×375 takes 2.5 to 5.5 ms of it (measured): a prefix that takes a tenth
# of that is not worth choosing for.
TRIFLE_ROWS_PER_S = 4_000.0
_CLOSE = 0.9  # of the fastest: worth trying with other numbers of rows
_RUNS = 3  # of a trial at least: one to warm up, two that count


@dataclass(frozen=True)
class Candidate:
    """One way to run a prefix. `batch` rows go through at once; a larger group goes in pieces."""

    engine: str = ENGINES[0]
    threads: int = 1
    batch: int = 32

    def __str__(self) -> str:
        return f"{self.engine}, {_count(self.threads, 'thread')}, {_count(self.batch, 'row')} at once"


@dataclass(frozen=True)
class Trial:
    """What came of a candidate: rows a second of the whole node, or why it can't be used.

    `ended`: the process it ran in ended, or was ended, in the middle. Another time that may go otherwise. Memory is a
    line: bytes of the engine however few rows, and more for each row at once; zeros where it was not measured.
    """

    candidate: Candidate
    rows_per_s: float = 0.0
    fault: str = ""
    ended: bool = False
    fixed_bytes: int = 0
    row_bytes: int = 0


@dataclass(frozen=True)
class Tuned:
    """What was taken, what was tried, and why."""

    candidate: Candidate
    trials: tuple[Trial, ...]
    why: str

    @property
    def memory(self) -> tuple[int, int] | None:
        """Bytes however few rows, and for each row at once, as they were measured; best with the most rows."""
        own = [each for each in self.trials if each.row_bytes and each.candidate.engine == self.candidate.engine
               and each.candidate.threads == self.candidate.threads]  # fmt: skip
        best = max(own, key=lambda each: each.candidate.batch, default=None)
        return None if best is None else (best.fixed_bytes, best.row_bytes)

    @property
    def rates(self) -> tuple[tuple[int, float], ...]:
        """Rows a second by rows at once, up to as many as were taken."""
        way = self.candidate
        return tuple((each.candidate.batch, each.rows_per_s) for each in self.trials
                     if each.candidate.engine == way.engine and each.candidate.threads == way.threads
                     and each.candidate.batch <= way.batch and each.rows_per_s > 0)  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.candidate), "why": self.why, "trials": trials_to_json(self.trials)}


class Tuner:
    """Says what to try next. Feed it what came of each."""

    def __init__(self, engines: Sequence[str], cores: int, like: Candidate | None = None) -> None:
        """`like` was best for another cut of the same model: if it works here, too, nothing else is tried."""
        self._cores = max(1, cores)
        self._like = like
        threads = (1,) if self._cores == 1 else (1, self._cores)
        self._open = [Candidate(engine, each, BATCHES[0]) for each in threads for engine in engines]
        self._widened = False
        self.trials: list[Trial] = []

    def next(self, left_s: float) -> Candidate | None:
        """The next candidate that can be tried within `left_s` seconds; None if there is none.

        Until one has worked, there is always time for the next.
        """
        if self._like is not None and not self.trials:
            return self._like
        if self._like is not None and not self.trials[0].fault:
            return None
        while True:
            if not self._open and not self._widened:
                self._widened = True
                self._open = self._wider()
            if not self._open or self._is_trifle():
                return None
            candidate = self._open.pop(0)
            if any(trial.fault and trial.candidate.engine == candidate.engine for trial in self.trials):
                continue
            if not any(not trial.fault for trial in self.trials) or self.seconds(candidate) <= left_s:
                return candidate

    def record(self, trial: Trial) -> None:
        self.trials.append(trial)

    def seconds(self, candidate: Candidate) -> float:
        """What a trial of this candidate is expected to take; 0 while nothing is known."""
        good = [trial for trial in self.trials if not trial.fault]
        alike = [trial for trial in good if trial.candidate.engine == candidate.engine] or good
        if not alike:
            return 0.0
        rate = max(trial.rows_per_s for trial in alike)
        at_once = candidate.batch * (self._cores if candidate.threads == 1 else 1)
        return max(TRIAL_S, _RUNS * at_once / rate)

    def _is_trifle(self) -> bool:
        return bool(self.trials) and self.trials[0].rows_per_s > TRIFLE_ROWS_PER_S * self._cores

    def _wider(self) -> list[Candidate]:
        good = sorted((trial for trial in self.trials if not trial.fault), key=lambda trial: -trial.rows_per_s)
        close = [trial for trial in good if trial.rows_per_s >= _CLOSE * good[0].rows_per_s][:2]
        return [Candidate(trial.candidate.engine, trial.candidate.threads, batch)
                for trial in close for batch in BATCHES[1:]]  # fmt: skip


def choose(trials: Sequence[Trial], only: str = AUTO) -> Tuned | None:
    """What to take of all that was tried, or of one engine; None if nothing worked.

    An engine that ended its process is left out, whatever it did before that.
    """
    ended = {trial.candidate.engine for trial in trials if trial.ended}
    able = [trial for trial in trials if not trial.fault and trial.candidate.engine not in ended]
    good = [trial for trial in able if only in (AUTO, trial.candidate.engine)]
    if not good:
        return None
    fastest = max(trial.rows_per_s for trial in good)
    equal = [trial for trial in good if trial.rows_per_s >= fastest * (1 - EQUAL)]
    best = min(equal, key=lambda trial: _preference(trial.candidate))
    return Tuned(best.candidate, tuple(trials), _why(best, trials, only))


def rather(engine: str) -> str:
    """What a plan says to have this engine used wherever it can be; "auto" for "auto"."""
    return engine if engine == AUTO else f"{engine}{_OR_AUTO}"


def wish(said: str) -> tuple[str, bool]:
    """The engine that a plan names, or "auto"; and whether it must be that one."""
    name = said.removesuffix(_OR_AUTO)
    return name, name == said != AUTO


def fault_of(trials: Iterable[Trial], engine: str) -> str:
    """Why this engine can't be used; empty if nothing is known against it."""
    return next((trial.fault for trial in trials if trial.fault and trial.candidate.engine == engine), "")


def trials_to_json(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    return [{**asdict(each.candidate), "rows_per_s": each.rows_per_s, "fault": each.fault,
             "fixed_bytes": each.fixed_bytes, "row_bytes": each.row_bytes} for each in trials]  # fmt: skip


def trials_from_json(data: object) -> tuple[Trial, ...]:
    """The way back; ConfigError if it is not what `trials_to_json` gives."""
    if not isinstance(data, list):
        raise ConfigError("trials of engines are a list")
    return tuple(map(_trial, data))


def _trial(data: object) -> Trial:
    kinds: dict[str, type] = {"engine": str, "threads": int, "batch": int, "rows_per_s": float, "fault": str,
                              "fixed_bytes": int, "row_bytes": int}  # fmt: skip
    if not isinstance(data, Mapping) or any(type(data.get(name)) is not kind for name, kind in kinds.items()):
        raise ConfigError(f"a trial of an engine has {', '.join(kinds)}; this one is {str(data)[:80]}")
    if data["engine"] not in ENGINES or data["threads"] < 1 or data["batch"] < 1 or not 0 <= data["rows_per_s"] < 1e12 \
            or not 0 <= data["fixed_bytes"] < 1 << 50 or not 0 <= data["row_bytes"] < 1 << 50:  # fmt: skip
        raise ConfigError(f"a trial of an engine makes no sense: {str(data)[:200]}")
    way = Candidate(data["engine"], data["threads"], data["batch"])
    return Trial(way, data["rows_per_s"], data["fault"], False, data["fixed_bytes"], data["row_bytes"])


def _preference(candidate: Candidate) -> tuple[int, int, int]:
    return ENGINES.index(candidate.engine), candidate.threads, candidate.batch


def _why(best: Trial, trials: Sequence[Trial], only: str) -> str:
    text = f"{best.rows_per_s:,.3g} rows/s measured"
    if only != AUTO:
        text += "; the plan names the engine"
    for engine in dict.fromkeys(trial.candidate.engine for trial in trials):
        own = [trial.rows_per_s for trial in trials if trial.candidate.engine == engine and not trial.fault]
        if fault := fault_of(trials, engine):
            text += f"; {engine} can't be used: {fault}"
        elif engine != best.candidate.engine and own:
            equal = " (counts as equal)" if max(own) >= best.rows_per_s * (1 - EQUAL) else ""
            text += f"; {engine} at best {max(own):,.3g}{equal}"
    if len(trials) == 1:
        text += ("; nothing else was tried: so small a prefix is not worth it, or this was best for another cut of the "
                 "model, or there was no time")  # fmt: skip
    return text


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

"""Tries engines on a prefix when it is first used, and keeps what was found on disk.

Owns the clock and the child process around `core.tuning`, which decides. Trials run in a child
(`python -m headwater.node.tuning`), so that the node's memory and threads stay clean, and so that an engine that breaks
takes nobody along. They take about `BUDGET_S` in all (and up to `LOADING` times that with a model that takes
long to load), one prefix at a time. What was found is kept for each prefix, its
outputs, its precision and this machine (with its cores and the versions of its engines); a record that is damaged, of
anything else, or older than `KEPT_S`, is measured again. An engine that ended its process, or took too long, is left
out until the node starts again, and nothing is kept then. For other outputs of the same file, which are other cuts of
the same model, what was best for the first is tried alone: a job that changes its cut in the middle of an epoch should
not stand still for long. Each trial also tells the memory it took; one that would take more than the child was given is
passed over, and then nothing is kept on disk, since another time there may be more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headwater.core.tuning import (
    AUTO,
    TRIAL_S,
    Candidate,
    Trial,
    Tuned,
    Tuner,
    choose,
    fault_of,
    trials_from_json,
    wish,
)
from headwater.core.tuning import trials_to_json as to_json
from headwater.data.cores import machine, usable_cores
from headwater.data.memory import peak_bytes, reset_peak, resident_bytes
from headwater.errors import ConfigError, RefusedError
from headwater.node import engines
from headwater.node.child import Children, Ended, as_child, read_request
from headwater.node.engine import first_line
from headwater.node.onnxfile import check_self_contained, up_to

log = logging.getLogger(__name__)

_T = TypeVar("_T")
BUDGET_S = 4.0
LOADING = 3.0  # times the budget that trials and loading may take together
_END_AFTER_S = 60.0  # a child that is stuck; a slow device needs some time for even one trial
TOLERANCE = 1e-4  # of the largest value: what rows may differ from ONNX Runtime's
MAX_RECORDS = 1000
KEPT_S = 30 * 24 * 3600.0
FORMAT = "headwater-tuning 3"
_STOPPING = "the node is stopping; ask again once it is back"


@dataclass(frozen=True)
class Subject:
    """What is tuned: the prefix by its digest, which of its outputs, and the precision; for a plan that names one, one
    engine only."""

    digest: str
    outputs: tuple[str, ...] | None
    precision: str
    only: str = AUTO


class Tuning:
    """Records in `folder`. `num_threads` groups run on the node at once."""

    def __init__(self, folder: Path, num_threads: int, budget_s: float = BUDGET_S) -> None:
        self._folder = folder
        self._cores = max(1, min(num_threads, int(usable_cores())))
        self._budget_s = budget_s
        self._known: dict[Subject, tuple[Trial, ...]] = {}
        self._children = Children()
        self._broke: dict[Subject, set[str]] = {}  # the engines that ended their process on it
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def tuned(
        self,
        subject: Subject,
        path: Path,
        outputs: Sequence[str] | None,
        engine: str = AUTO,
        limit_bytes: int | None = None,
    ) -> Tuned:
        """How to run this prefix, tried now if nothing is known. `path` and `outputs` say where it is.

        What tries it keeps within `limit_bytes`. RefusedError if the engine that is pinned can't run it; one that is
        only preferred gives way.
        """
        name, must = wish(engine)
        able = engines.engines_for(subject.precision)
        if name != AUTO and (name in able or must):
            found = self._named(subject, path, outputs, name, limit_bytes, must)
            if choice := choose(found, name):
                return choice
            if must:
                fault = fault_of(found, name) or "its trial did not end"
                raise RefusedError(f"{name} can't run this prefix: {fault}; set the plan's engine to \"auto\"")
        trials = self._trials(subject, path, outputs, able, limit_bytes)
        if choice := choose(trials):
            return choice
        if self._broke.get(subject, set()) >= set(able):
            raise RefusedError(
                "every engine that tried this prefix broke, and would end the node as well; cut elsewhere"
            )
        faults = "; ".join(dict.fromkeys(f"{each.candidate.engine}: {each.fault}" for each in trials if each.fault))
        way = Candidate(able[0]) if limit_bytes is None else Candidate(able[0], batch=1)  # nobody knows what more takes
        return Tuned(way, trials, f"no trial succeeded ({faults or 'the log of the node says more'})")

    def _named(
        self,
        subject: Subject,
        path: Path,
        outputs: Sequence[str] | None,
        engine: str,
        limit_bytes: int | None,
        again: bool,
    ) -> tuple[Trial, ...]:
        """Trials of one engine, in a record of their own: among several it may have been left out early. Unless it won
        there. `again` tries one that ended its process before."""
        open_trials = self._known.get(subject) or self._read(subject) or ()
        if (won := choose(open_trials)) and won.candidate.engine == engine:
            return open_trials
        alike = choose(self._read_alike(subject) or ())
        like = alike.candidate if alike and alike.candidate.engine == engine else None
        alone = replace(subject, only=engine)
        if again and any(each.ended for each in self._known.get(alone, ())):
            with self._lock:
                self._known.pop(alone, None)
        return self._trials(alone, path, outputs, (engine,), limit_bytes, like)

    def _trials(
        self,
        subject: Subject,
        path: Path,
        outputs: Sequence[str] | None,
        able: Sequence[str],
        limit_bytes: int | None,
        like: Candidate | None = None,
    ) -> tuple[Trial, ...]:
        """What is known of these engines, tried now if nothing is; `like` unless another cut's own record has one."""
        trials = self._known.get(subject) or self._read(subject)
        if trials is None:
            alike = choose(self._read_alike(subject) or ())
            trials, is_whole = self._try(
                subject, path, outputs, able, limit_bytes, alike.candidate if alike else like
            )  # fmt: skip
            if is_whole:
                self._write(subject, trials)
        with self._lock:
            self._known[subject] = trials
        return trials

    def close(self) -> None:
        """End what is being tried."""
        self._children.close()

    def _try(
        self,
        subject: Subject,
        path: Path,
        outputs: Sequence[str] | None,
        able: Sequence[str],
        limit_bytes: int | None,
        like: Candidate | None = None,
    ) -> tuple[tuple[Trial, ...], bool]:
        """What came of it, and whether nothing was left out for want of memory."""
        asked = {
            "path": str(path),
            "outputs": None if outputs is None else list(outputs),
            "precision": subject.precision,
            "engines": list(able),
            "like": None if like is None else asdict(like),
            "cores": self._cores,
            "budget_s": self._budget_s,
            "limit_bytes": limit_bytes,
        }
        with self._turn:  # another one's trials beside these would make them say something else
            if self._children.closed:
                raise RefusedError(_STOPPING)
            within_s = self._budget_s + _END_AFTER_S
            try:
                ended = self._children.run("headwater.node.tuning", json.dumps(asked).encode(), within_s)
            except OSError as error:  # no room for a file or a process: rows can be made all the same
                log.warning("no engine could be tried for prefix %s: %s", subject.digest[:12], error)
                return (), True
        if self._children.closed:
            raise RefusedError(_STOPPING)
        trials = _told(ended)
        if ended.broke:
            told = [each.candidate.engine for each in trials if each.ended] or able  # before the first: each needs it
            self._broke.setdefault(subject, set()).update(told)
        for engine in dict.fromkeys(each.candidate.engine for each in trials):
            if fault := fault_of(trials, engine):
                log.warning("%s can't be used for prefix %s: %s", engine, subject.digest[:12], fault)
        if not trials:
            log.warning("no engine could be tried for prefix %s: what tries them %s\n%s", subject.digest[:12], ended,
                        ended.errors)  # fmt: skip
        broken = {each.candidate.engine for each in trials if each.ended}
        left = [each for each in able if each not in {trial.candidate.engine for trial in trials}]
        if broken and left:
            more, is_whole = self._try(subject, path, outputs, left, limit_bytes)
            return trials + more, is_whole
        return trials, b'"too large"' not in ended.said

    def _path(self, subject: Subject) -> Path:
        about = self._about(subject)
        outputs = about.pop("outputs")
        return self._folder / f"{_short_digest(about)}-{_short_digest(outputs)}.json"

    def _about(self, subject: Subject) -> dict[str, Any]:
        outputs = None if subject.outputs is None else list(subject.outputs)
        return {**asdict(subject), "outputs": outputs, "machine": f"{machine()}, {self._cores} cores",
                "engines": engines.versions()}  # fmt: skip

    def _read_alike(self, subject: Subject) -> tuple[Trial, ...] | None:
        """What is kept for other outputs of the same file."""
        beside = self._path(subject).name.partition("-")[0]
        for path in sorted(self._folder.glob(f"{beside}-*.json")):
            with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
                outputs = json.loads(path.read_bytes())["about"]["outputs"]
                other = replace(subject, outputs=None if outputs is None else tuple(outputs))
                if trials := self._read(other):
                    return trials
        return None

    def _read(self, subject: Subject) -> tuple[Trial, ...] | None:
        path = self._path(subject)
        try:
            kept = json.loads(path.read_bytes())
            if time.time() - path.stat().st_mtime > KEPT_S:
                return None
            if kept["format"] != FORMAT or kept["about"] != self._about(subject):
                raise ConfigError("it is of something else")
            trials = trials_from_json(kept["trials"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, KeyError, TypeError, ConfigError) as error:
            log.warning("trying engines again: the record that was kept can't be used (%s)", error)
            return None
        return trials if choose(trials) else None

    def _write(self, subject: Subject, trials: Sequence[Trial]) -> None:
        """Whole or not at all. Without it the next start tries again, so a full disk is no reason to stop."""
        if choose(trials) is None or any(each.ended for each in trials):
            return
        said = {"format": FORMAT, "about": self._about(subject), "trials": to_json(trials)}
        path = self._path(subject)
        scratch = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            scratch.write_text(json.dumps(said))
            scratch.replace(path)
            kept = sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime)
            for old in kept[:-MAX_RECORDS]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("what was found about engines can't be kept: %s", error)
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)


def _short_digest(about: Any) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def _told(ended: Ended) -> tuple[Trial, ...]:
    """The trials that a child has told of; what it was at when it died is a fault."""
    trials: list[Trial] = []
    trying = None
    for line in ended.said.splitlines():
        try:
            said = json.loads(line)
            if "trying" in said:
                trying = Candidate(**said["trying"])
            else:
                trials += trials_from_json([said])
                trying = None
        except (ValueError, TypeError, ConfigError):
            continue  # cut short, or an engine's own words
    if trying is not None and ended.code != 0:
        trials.append(Trial(trying, fault=f"the process that tried it {ended}", ended=True))
    return tuple(trials)


def main() -> None:
    """The child: a request on standard input, a line of JSON before and after each trial on standard output."""
    asked = json.loads(read_request())
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is not ours
    model = Path(asked["path"]).read_bytes()
    check_self_contained(model)
    if asked["outputs"] is not None:
        model = up_to(model, asked["outputs"])
    bench = _Bench(model, asked["cores"], asked["precision"], asked["limit_bytes"])
    like = asked["like"]
    begin = time.perf_counter()
    tuner = Tuner(asked["engines"], asked["cores"], None if like is None else Candidate(**like))
    while True:
        # A large model takes seconds to read and to load, and is the one worth trying: that counts for less.
        taken_s = time.perf_counter() - begin
        left_s = asked["budget_s"] - max(taken_s - bench.loading_s, taken_s / LOADING)
        if (candidate := tuner.next(left_s)) is None:
            break
        print(json.dumps({"trying": asdict(candidate)}), file=said, flush=True)
        trial = bench.trial(candidate)
        if trial is None:
            print(json.dumps({"too large": asdict(candidate)}), file=said, flush=True)
            continue
        tuner.record(trial)
        print(json.dumps(to_json([trial])[0]), file=said, flush=True)
    for engine in asked["engines"]:
        if not any(not trial.fault for trial in tuner.trials):  # a row at once takes less than the check did
            trial = bench.trial(Candidate(engine, 1, 1), in_any_case=True)
            assert trial is not None
            tuner.record(trial)
            print(json.dumps(to_json([trial])[0]), file=said, flush=True)
    said.flush()
    os._exit(0)  # engines' threads need not be waited for


class _Line:
    """The memory of one session, from what the process takes at most while it runs so many rows at once."""

    def __init__(self, before: int) -> None:
        self._before = before
        self.at_rest = before  # with the session loaded, and nothing run yet
        self._points: list[tuple[int, int]] = []

    def watch(self, rows: int, work: Callable[[], _T]) -> _T:
        reset_peak()
        result = work()
        taken = max(peak_bytes(), resident_bytes())
        # An engine keeps what its largest group took, so that smaller ones say nothing.
        if not self._points or rows > self._points[-1][0]:
            self._points.append((rows, taken))
        return result

    def expects(self, rows: int) -> int:
        """What the process will take at most; from its first run, which also lays out memory once, rather too much."""
        known, taken = self._points[-1]
        return taken + max(0, rows - known) * max(1, (taken - self.at_rest) // known)

    def found(self) -> tuple[int, int]:
        """Bytes however few rows, and for each row."""
        (few, first), (many, last) = self._points[0], self._points[-1]
        row_bytes = (last - first) // (many - few) if many > few else (first - self.at_rest) // few
        row_bytes = max(1, row_bytes)
        return max(0, first - self._before - few * row_bytes), row_bytes


class _Bench:
    """One session at a time, as it would run on the node: several groups at once, or one on all cores."""

    def __init__(self, model: bytes, cores: int, precision: str, limit_bytes: int | None) -> None:
        from headwater.node.engines.ort import OnnxRuntime

        self._model = model
        self._cores = cores
        self._precision = precision
        self._limit_bytes = limit_bytes
        reference = OnnxRuntime(model)
        shape = reference.row_shape
        if not all(isinstance(each, int) for each in shape):
            raise RefusedError(f"the prefix takes rows of no fixed shape ({shape}); only their number may vary")
        # Normalised pictures have values of about this range, and neighbours that are alike.
        self._rows = reference.rows_of(2)
        if self._rows.dtype == np.float32:
            coarse = np.random.default_rng(0).normal(size=(2, *shape)).clip(-2.5, 2.5)
            self._rows = np.cumsum(coarse, axis=-1, dtype=np.float32)
            self._rows /= max(1e-6, float(np.abs(self._rows).max()) / 2.5)
        self._expected = reference.run(self._rows)
        self._session: engines.Session | None = None
        self._way: tuple[str, int] | None = None
        self._line = _Line(0)
        self.loading_s = 0.0  # so far

    def trial(self, candidate: Candidate, in_any_case: bool = False) -> Trial | None:
        """What came of it; None if it would take more memory than there is, unless it is tried in any case."""
        try:
            if self._way != (candidate.engine, candidate.threads):
                self._session = self._way = None  # memory for one at a time
                self._line = _Line(resident_bytes())
                start = time.perf_counter()
                self._session = engines.load(candidate.engine, self._model, threads=candidate.threads,
                                             at_once=self._cores, precision=self._precision)  # fmt: skip
                self.loading_s += time.perf_counter() - start
                self._line.at_rest = resident_bytes()
                self._line.watch(len(self._rows), lambda session=self._session: self._check(session))  # type: ignore[misc]
                self._way = candidate.engine, candidate.threads
            assert self._session is not None
            session, at_once = self._session, candidate.batch * (self._cores if candidate.threads == 1 else 1)
            is_too_large = self._limit_bytes is not None and self._line.expects(at_once) > self._limit_bytes
            if is_too_large and not in_any_case:
                return None
            rate = self._line.watch(at_once, lambda: self._rate(session, candidate))
            fixed_bytes, row_bytes = self._line.found()
            return Trial(candidate, rate, fixed_bytes=fixed_bytes, row_bytes=row_bytes)
        except Exception as error:
            return Trial(candidate, fault=first_line(error))

    def _check(self, session: engines.Session) -> None:
        """At full precision every engine gives the rows that ONNX Runtime gives. Others state their error elsewhere."""
        found = session.run(self._rows)
        for tensor, wanted in zip(found, self._expected, strict=True):
            if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
                raise RefusedError(f"it gives {tensor.dtype}{tensor.shape}, not {wanted.dtype}{wanted.shape}")
            if self._precision != "fp32" or not wanted.size:
                continue
            off = float(np.abs(tensor.astype(np.float64) - wanted).max())
            if not off <= TOLERANCE * max(1e-6, float(np.abs(wanted).max())):
                raise RefusedError(f"its rows differ from ONNX Runtime's by up to {off:.2g}")

    def _rate(self, session: engines.Session, candidate: Candidate) -> float:
        """Rows a second of the whole node."""
        rows = np.resize(self._rows, (candidate.batch, *self._rows.shape[1:]))
        rates: list[float] = []
        faults: list[Exception] = []
        together = threading.Barrier(self._cores if candidate.threads == 1 else 1)

        def work() -> None:
            try:
                session.run(rows)
                together.wait(timeout=_END_AFTER_S)
                start, runs = time.perf_counter(), 0
                while runs < 2 or time.perf_counter() - start < TRIAL_S:
                    session.run(rows)
                    runs += 1
                rates.append(runs * len(rows) / (time.perf_counter() - start))
            except Exception as error:
                faults.append(error)
                together.abort()

        workers = [threading.Thread(target=work, daemon=True) for _ in range(together.parties)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        if faults:
            raise next((each for each in faults if not isinstance(each, threading.BrokenBarrierError)), faults[0])
        return float(sum(rates))


if __name__ == "__main__":
    as_child(main)

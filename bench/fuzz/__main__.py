"""`python -m bench.fuzz --inputs 1000000`: so many inputs over all targets, in child processes.

Prints a line for each target, and exits with 1 if any input did what none may do. Such inputs are saved. Where atheris
is installed (`pip install 'headwater[fuzz]'`) it guides the inputs by what they reach; otherwise they are drawn.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.fuzz.target import Target
from bench.fuzz.worker import STATUS_BYTES, Status

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
STUCK_S = 120.0  # by the wall, for one input
MAX_DEATHS = 50  # of a target's processes, before it is given up
KINDS = ("error", "crash", "hang", "slow", "memory", "escape")


@dataclass
class Run:
    """A target's inputs, in one process after the other."""

    target: Target
    count: int
    folder: Path
    command: list[str]
    hang_s: float
    done: int = 0
    deaths: int = 0
    process: subprocess.Popen[bytes] | None = None
    moved: tuple[int, float, float] = (-1, 0.0, 0.0)  # inputs done, and the clocks when that changed
    taken_s: float = 0.0
    found: list[dict[str, str]] = field(default_factory=list)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "status").write_bytes(bytes(STATUS_BYTES))
        self.status = Status(self.folder / "status")
        self.status.end(self.done)
        self.process = subprocess.Popen([*self.command, self.target.name, "--done", str(self.done), "--count",
                                         str(self.count), "--folder", str(self.folder)],
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)  # fmt: skip
        self.moved = (-1, 0.0, 0.0)
        self.began = time.monotonic()

    def has_ended(self) -> bool:
        """Look at it; True once all its inputs are done."""
        assert self.process is not None
        code = self.process.poll()
        done, data = self.status.read()
        if code is None:
            if self._is_stuck(done):
                self.process.kill()
                self.process.wait()
                self._note("hang", "did not come back", data)
                return self._go_on(done)
            return False
        self.taken_s += time.monotonic() - self.began
        if code != 0:
            said = (self.folder / "errors").read_text(errors="replace")[-4000:] if data or done else "no start"
            self._note("crash", _where(said) or f"exit code {code}", data, said)
            return self._go_on(done)
        self.done = done
        return True

    def _go_on(self, done: int) -> bool:
        """Behind the input that ended a process."""
        self.done, self.deaths = done + 1, self.deaths + 1
        if self.done >= self.count or self.deaths >= MAX_DEATHS:
            return True
        self.start()
        return False

    def _is_stuck(self, done: int) -> bool:
        assert self.process is not None
        cpu_s, now = _cpu_s(self.process.pid), time.monotonic()
        if self.moved[0] != done:
            self.moved = (done, cpu_s, now)
        if done == self.done:  # still being made ready
            return now - self.began > 2 * STUCK_S
        return cpu_s - self.moved[1] > self.hang_s or now - self.moved[2] > STUCK_S

    def _note(self, kind: str, where: str, data: bytes, said: str = "") -> None:
        name = f"{kind}-{self.deaths}"
        (self.folder / name).write_bytes(data)
        self.found.append({"kind": kind, "where": where, "said": said[-1500:], "input": name})

    def faults(self) -> list[dict[str, str]]:
        path = self.folder / "found.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return told + self.found


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _where(said: str) -> str:
    """The innermost line of ours in what faulthandler wrote."""
    lines = said.rpartition("Current thread")[2].splitlines()
    own = [line.strip() for line in lines if "headwater/" in line and "File" in line]
    return own[0] if own else ""


def share_out(targets: list[Target], inputs: int) -> dict[str, int]:
    """Inputs for each target, by its share."""
    whole = sum(target.share for target in targets)
    return {target.name: max(1, -(-inputs * target.share // whole)) for target in targets}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000, help="over all targets; the full run takes 1000000")
    parser.add_argument("--targets", help="names, with commas between; all of them if left out")
    parser.add_argument("--seed", type=int, default=0, help="other numbers give other inputs")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--hang", type=float, default=10.0, help="seconds of CPU after which an input is ended")
    parser.add_argument("--plain", action="store_true", help="draw inputs even where atheris is installed")
    parser.add_argument("--save", type=Path, help="the folder for inputs that were found; a new one if left out")
    parser.add_argument("--table", default="bench.fuzz.table", help="the module that has the table of targets")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="a folder of inputs for each target")
    asked = parser.parse_args()
    table = importlib.import_module(asked.table).TARGETS
    names = asked.targets.split(",") if asked.targets else list(table)
    if unknown := [name for name in names if name not in table]:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(table)}")
    targets = [table[name] for name in names]
    guided = importlib.util.find_spec("atheris") is not None and not asked.plain
    print(f"inputs are {'guided by atheris' if guided else 'drawn'}, from seed {asked.seed}", flush=True)
    save = asked.save or Path(tempfile.mkdtemp(prefix="headwater-fuzz-"))
    save = save.resolve()
    counts = share_out(targets, asked.inputs)
    command = [sys.executable, "-m", "bench.fuzz.worker", "--seed", str(asked.seed), "--table", asked.table]
    command += ["--guided"] if guided else []
    waiting = [Run(each, counts[each.name], save / each.name,
                   [*command, "--corpus", str(asked.corpus / each.name)], asked.hang)
               for each in sorted(targets, key=lambda each: -counts[each.name])]  # fmt: skip
    ended = _carry_out(waiting, asked.jobs)
    return _tell(ended, save)


def _carry_out(waiting: list[Run], jobs: int) -> list[Run]:
    running: list[Run] = []
    ended: list[Run] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start()
            time.sleep(0.1)
            for each in [each for each in running if each.has_ended()]:
                running.remove(each)
                ended.append(each)
                print(_line(each), flush=True)
    finally:
        for each in running:
            if each.process is not None:
                each.process.kill()
                each.process.wait()
    return ended


def _line(run: Run) -> str:
    counts = Counter(each["kind"] for each in run.faults())
    told = "  ".join(f"{kind} {counts[kind]}" for kind in KINDS)
    note = " (in a child on a node)" if run.target.contained else ""
    return f"{run.target.name:12} {min(run.done, run.count):9,} inputs in {run.taken_s:6.0f} s  {told}{note}"


def _tell(ended: list[Run], save: Path) -> int:
    """What was found, and whether that is a failure: what a node leaves to a child ends no node."""
    failed = False
    for run in ended:
        faults = run.faults()
        for where, count in Counter(f"{each['kind']} {each['where']}" for each in faults).items():
            first = next(each for each in faults if f"{each['kind']} {each['where']}" == where)
            kept = save / run.target.name / str(first["input"])
            print(f"\n{run.target.name}: {count} × {where}\n  {first['said'][-600:].strip()}\n  {kept}")
        harmless = ("crash", "hang", "slow", "memory") if run.target.contained else ()
        failed = failed or any(each["kind"] not in harmless for each in faults) or run.done < run.count
    total = sum(min(run.done, run.count) for run in ended)
    num_faults = sum(len(run.faults()) for run in ended)
    print(f"\n{total:,} inputs, {num_faults:,} faults" + (f"; the inputs are in {save}" if num_faults else ""))
    if not num_faults:
        shutil.rmtree(save)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The process that inputs run in: `python -m bench.fuzz.worker`, started by `bench.fuzz.__main__`.

What it is at stands in a file that outlives it: how many inputs are done, and the one at hand. So whoever waits for it
knows which input ended it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import mmap
import os
import random
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench.fuzz.mutate import MAX_BYTES, mutate

_HEAD = struct.Struct("<QQ")  # inputs done, bytes of the one at hand
STATUS_BYTES = _HEAD.size + MAX_BYTES
KEPT = 3  # inputs saved for each fault
_NOISE_BYTES = 1 << 20  # of standard error


class Status:
    """Inputs done and the one at hand, in a file."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), STATUS_BYTES)

    def begin(self, data: bytes) -> None:
        self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        self._memory[8:16] = struct.pack("<Q", len(data))

    def end(self, done: int) -> None:
        self._memory[:8] = struct.pack("<Q", done)

    def read(self) -> tuple[int, bytes]:
        done, size = _HEAD.unpack_from(self._memory)
        return done, self._memory[_HEAD.size : _HEAD.size + size]


class Findings:
    """Faults, one a line of a file; the inputs beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, where: str, said: str, data: bytes) -> None:
        self._counts[where] += 1
        name = None
        if self._counts[where] <= KEPT:
            name = f"{kind}-{random.Random(where).getrandbits(32):08x}-{os.getpid()}-{self._counts[where]}"
            (self._folder / name).write_bytes(data)
        line = json.dumps({"kind": kind, "where": where, "said": said, "input": name})
        with (self._folder / "found.jsonl").open("a") as file:
            file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    for name in ("--done", "--count", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--table", required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--guided", action="store_true")
    asked = parser.parse_args()
    _be_quiet(asked.folder / "errors")
    guided: Any = nullcontext()
    if asked.guided:
        import atheris

        guided = atheris.instrument_imports(include=["headwater"])
    with guided:
        from bench.fuzz.guard import Guard
        from bench.fuzz.target import Room

        target = importlib.import_module(asked.table).TARGETS[asked.target]
    status, findings = Status(asked.folder / "status"), Findings(asked.folder)
    with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
        os.chdir(scratch)
        guard = Guard(target, Room.make(Path(scratch)))
        seeds = [*target.seeds(), *(path.read_bytes()[:MAX_BYTES] for path in sorted(asked.corpus.glob("*")))]
        guard.limit()
        done = asked.done

        def take(data: bytes) -> None:
            nonlocal done
            status.begin(data)
            fault = guard.run(data)
            if fault is not None:
                findings.add(fault.kind, fault.where, fault.said, data)
            done += 1
            status.end(done)
            if done % 1000 == 0:
                _quieten()

        if asked.guided:
            _guided(take, seeds, target.kind, asked.count - done, asked.seed + done, Path(scratch))
        else:
            _drawn(take, seeds, target.kind, done, asked.count, asked.seed)


def _drawn(take: Any, seeds: Sequence[bytes], kind: str, done: int, count: int, seed: int) -> None:
    """Inputs from our own mutations; each is a matter of the seed and its number."""
    for number in range(done, count):
        generator = random.Random(f"{seed}/{number}")
        data = generator.choice(seeds)
        take(seeds[number] if number < len(seeds) else mutate(generator, data, kind, seeds))


def _guided(take: Any, seeds: Sequence[bytes], kind: str, count: int, seed: int, scratch: Path) -> None:
    """Inputs that atheris makes, with our mutations among its own, and keeps where they reach new lines of ours."""
    import atheris

    folder = scratch / "corpus"
    folder.mkdir()
    for number, data in enumerate(seeds):
        (folder / str(number)).write_bytes(data)

    def change(data: bytes, max_size: int, number: int) -> bytes:
        generator = random.Random(number)
        if generator.random() < 0.3:
            return bytes(atheris.Mutate(data, max_size))
        return mutate(generator, data, kind, seeds)[:max_size]

    # Time and memory are the guard's to watch.
    options = [f"-runs={count}", f"-max_len={MAX_BYTES}", f"-seed={seed % 2**31 + 1}", "-timeout=86400",
               "-rss_limit_mb=0", "-malloc_limit_mb=0", "-verbosity=0", f"-artifact_prefix={scratch}/"]  # fmt: skip
    atheris.Setup(["fuzz", *options, str(folder)], take, custom_mutator=change)
    atheris.Fuzz()


def _be_quiet(path: Path) -> None:
    """Engines and decoders have much to say about such inputs. The last of it is kept."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    noise = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(noise, 2)
    faulthandler.enable()


def _quieten() -> None:
    if os.fstat(2).st_size > _NOISE_BYTES:
        os.ftruncate(2, 0)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of a node or an engine need not be waited for

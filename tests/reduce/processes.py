"""Aggregators and workers as real processes, over real UDP on loopback. Owns `Running` and `results`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KEY = "a-key-of-these-tests"
ENV = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1", "HEADWATER_REDUCE_KEY": KEY,
       "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip


class Running:
    """A `headwater reduce` process, and the lines it wrote."""

    def __init__(self, folder: Path, *options: str, listen: str = "127.0.0.1:0") -> None:
        key = folder / "key"
        if not key.exists():
            key.touch(0o600)
            key.write_text(f"{KEY}\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater.cli", "reduce", "--listen", listen, "--key-file", str(key),
             "--log-format", "json", *options],
            stderr=subprocess.PIPE, text=True, env=ENV,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.lines: list[dict[str, Any]] = []
        for line in self.process.stderr:
            self.lines.append(json.loads(line))
            if "address" in self.lines[-1]:
                self.address: str = self.lines[-1]["address"]
                return
        raise AssertionError(f"it ended with {self.process.wait()}: {self.lines}")

    def stop(self) -> list[dict[str, Any]]:
        """As an operator does; everything that it wrote."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        self.lines += [json.loads(line) for line in self.process.stderr]
        assert self.process.wait(20) == 0
        return self.lines

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def results(processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The last line of each, as JSON."""
    found = []
    for each in processes:
        out, err = each.communicate(timeout=120)
        assert each.returncode == 0, err[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found

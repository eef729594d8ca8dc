"""A Python object in a host that answers again and again. Owns `Remote`; its far end is `bench.rig.answer`."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.rig.description import RigError

ANSWERS_WITHIN_S = 300.0


class Remote:
    """The near end. The object is made while the caller goes on; between questions its process waits."""

    def __init__(self, what: str, process: subprocess.Popen[str], log: Path, **arguments: Any) -> None:
        self._what = what
        self._process = process
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._is_made = False
        self._tell(arguments)

    def ask(self, *, within_s: float = ANSWERS_WITHIN_S, **arguments: Any) -> Any:
        """Call it; its result. RigError with what it wrote if it fails, or if it takes longer than that."""
        self.wait(within_s)
        self._tell(arguments)
        return self._hear(within_s)

    def wait(self, within_s: float = ANSWERS_WITHIN_S) -> None:
        """Until the object is made."""
        if not self._is_made:
            self._hear(within_s)
            self._is_made = True

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End the process as a crash does (kill -9); who waits for an answer gets a RigError."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; whoever listens for the answer hears of it
            print(json.dumps(what), file=self._process.stdin, flush=True)

    def _hear(self, within_s: float) -> Any:
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise self._fault(f"did not answer within {within_s:g} s") from None
        if not line:
            raise self._fault(f"ended with exit code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RigError(f"{self._what} failed:\n{answer['error']}")
        return answer["result"]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError), self._process.stdout as lines:  # closed when the rig comes down
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _fault(self, what: str) -> RigError:
        return RigError(f"{self._what} {what}; it wrote:\n{self._log.read_text(errors='replace')[-4000:]}")

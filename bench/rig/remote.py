"""A Python object in a host that answers again and again. Owns `Remote`; its far end is `bench.rig.answer`."""

from __future__ import annotations

import json
import subprocess
from types import TracebackType
from typing import Any

from bench.rig.description import RigError


class Remote:
    """The near end. Only what `ask` asks for runs; between questions the process waits."""

    def __init__(self, what: str, process: subprocess.Popen[str], **arguments: Any) -> None:
        self._what = what
        self._process = process
        self.ask(**arguments)

    def ask(self, **arguments: Any) -> Any:
        """Call it; its result. RigError with what it wrote if it fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the line below says so
        line = self._process.stdout.readline()
        if not line:
            raise RigError(f"{self._what} ended with exit code {self._process.wait()}; what it wrote is above")
        answer = json.loads(line)
        if "error" in answer:
            raise RigError(f"{self._what} failed:\n{answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Remote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

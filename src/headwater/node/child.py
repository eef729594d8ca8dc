"""Work that runs in a process of its own: what it takes of memory, threads or luck is not the node's.

Owns `Children`. A child is `python -m MODULE`; it gets one request on standard input and answers on standard output. It
ends when its input does (`end_with_input`), so none outlives the node, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_FOLDER = "headwater-child-"  # and the number of the process that made it
_ERRORS_KEPT = 2000
_FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_POLL_S = 0.25  # how soon it is noticed that nobody waits any more


@dataclass(frozen=True)
class Ended:
    """How a child ended, and all that it said."""

    code: int
    said: bytes
    errors: str  # the end of what it wrote to standard error
    in_time: bool

    @property
    def broke(self) -> bool:
        """Whether it ended in its own code, by a fault that no Python code catches."""
        return -self.code in _FATAL

    def __str__(self) -> str:
        how = f"ended with exit code {self.code}; is it memory?" if self.in_time else "was ended: it took too long"
        last = self.errors.strip().splitlines()[-1:]
        return how + (f" ({last[0][:200]})" if last else "")


class Children:
    """The processes that a node has running."""

    def __init__(self) -> None:
        _sweep()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether children are ended rather than waited for."""
        return self._closed

    def run(self, module: str, request: bytes, within_s: float, abandoned: Callable[[], bool] = lambda: False) -> Ended:
        """Wait for its end; it is killed if that takes longer, or once nobody waits for it any more."""
        with (
            tempfile.TemporaryDirectory(prefix=f"{_FOLDER}{os.getpid()}-") as folder,  # gone with it, however it ends
            tempfile.TemporaryFile() as answer,  # nobody reads before it has ended, and a pipe would fill up
            tempfile.TemporaryFile() as errors,
        ):
            # In a session of its own: Ctrl-C is the node's to answer, which then ends its children.
            child = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=answer,
                                     stderr=errors, start_new_session=True,
                                     env={**os.environ, "TMPDIR": folder})  # fmt: skip
            assert child.stdin is not None
            with self._lock:
                self._running.add(child)
                if self._closed:
                    child.kill()
            try:
                with contextlib.suppress(OSError):  # it died before it could listen
                    child.stdin.write(request + b"\n")
                    child.stdin.flush()
                until = time.monotonic() + within_s
                while (in_time := time.monotonic() < until) and not abandoned():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(timeout=min(_POLL_S, within_s))
                        break
            finally:
                child.kill()
                child.wait()
                with contextlib.suppress(OSError):
                    child.stdin.close()
                with self._lock:
                    self._running.discard(child)
            answer.seek(0)
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _ERRORS_KEPT))
            return Ended(child.returncode, answer.read(), errors.read().decode(errors="replace"), in_time)

    def close(self) -> None:
        """End them all, and whatever is started from now on."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for child in running:
            child.kill()


def _sweep() -> None:
    """Folders of children whose node was killed: its prefixes may be large."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not is_alive(folder.name.removeprefix(_FOLDER).split("-")[0]):
                shutil.rmtree(folder, ignore_errors=True)


def read_request() -> bytes:
    """In the child: what it was asked. From now on it ends with the node, and goes first when memory runs out."""
    request = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    return request


def as_child(main: Callable[[], None]) -> None:
    """In the child: carry it out. An error ends it with 1.

    Python's own way out would stumble over the thread that waits for the input, and look like an engine that broke.
    """
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def is_alive(pid: str) -> bool:
    """Whether a process of this number runs, whosever it is."""
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:  # somebody else's, and alive
        return True
    return True

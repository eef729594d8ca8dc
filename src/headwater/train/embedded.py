"""A node of one's own: started beside the trainer, ended with it.

Owns the child process. The node reads its standard input and ends when that closes, so it goes with its trainer even
when the trainer is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref

from headwater.errors import NodeError
from headwater.train.access import Access

START_WITHIN_S = 120.0  # it takes a second or two; a machine may have much else to do


class EmbeddedNode:
    """A node process on a free loopback port, which answers to whoever has `access`."""

    def __init__(
        self,
        root: str,
        num_threads: int | None = None,
        cache_bytes: int | None = None,
        memory_bytes: int | None = None,
        is_far: bool = False,
        tables: str = "",
    ) -> None:
        """`is_far` from the store, behind a link that rows from other nodes need, too. `tables`: a folder for embedding
        tables."""
        numbers = ["" if each is None else str(each) for each in (num_threads, cache_bytes, memory_bytes)]
        command = [sys.executable, "-m", "headwater.node", root, *numbers, "far" if is_far else "", tables]
        # A session of its own: Ctrl-C reaches the trainer alone, which then ends the node in good order.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        self._end = weakref.finalize(self, _end, self._process)
        assert self._process.stdout is not None
        late = threading.Event()
        waiting = threading.Timer(START_WITHIN_S, _give_up, (self._process, late))
        waiting.daemon = True
        waiting.start()
        line = ""
        try:
            line = self._process.stdout.readline()
            said = json.loads(line)
        except ValueError:
            said = {"error": f"it ended with exit code {self._process.wait()}; what it printed is above"}
        finally:
            waiting.cancel()
        if late.is_set():
            heard = f"only {line.strip()[:100]!r}" if line else "nothing"
            said = {"error": f"it said {heard} within {START_WITHIN_S:g} s; see what else this machine is busy with, "
                    "or start a node yourself with `headwater serve` and name it in nodes=[…]"}  # fmt: skip
        if "address" not in said or "token" not in said:
            self.close()
            raise NodeError(f"the embedded node did not start: {said.get('error')}")
        self.address: str = said["address"]
        self.access = Access(said["token"])
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process and wait for it."""
        self._end()


def _give_up(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    process.kill()


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.terminate()  # a process that the trainer forked may hold the other end of its input open
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()

"""The trainer's own node as a worker: it does here what nodes do near the data, for the plan's share of the chunks.

Owns `OwnNode`: a node process beside the trainer, started when a plan first asks for it, and again should it end. Its
engine, transforms and codec are those of every node, so its rows are theirs. It keeps no rows on disk: nodes do.
"""

from __future__ import annotations

import threading
from pathlib import Path
from threading import Event
from typing import Any

from headwater.data.wire import Chunk
from headwater.errors import UnreachableError
from headwater.train.client import NodeClient
from headwater.train.embedded import EmbeddedNode
from headwater.train.reply import Heard, Reply
from headwater.train.trace import Trace

PLACE = "the node beside the trainer"  # in timelines


class OwnNode:
    """A node on this machine that reads the store over this machine's own link."""

    name = "here"

    def __init__(self, root: str, num_threads: int | None = None, memory_bytes: int | None = None) -> None:
        """`memory_bytes` is what it may take, where several of them share a machine."""
        self._root, self._num_threads, self._memory_bytes = root, num_threads, memory_bytes
        self._files: dict[str, Path] = {}
        self._lock = threading.RLock()  # the garbage collector may close the job anywhere, also in here
        self._starting = threading.Lock()
        self._closed = False
        self.read_bytes = 0  # of samples, so far
        self._trace: Trace | None = None
        self._node, self._client = self._start()

    @property
    def trace(self) -> Trace | None:
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        with self._lock:
            self._trace = self._client.trace = trace

    def heard(self, chunk: Chunk) -> Heard | None:
        return self._client.heard(chunk)

    def needs(self, digest: str, path: Path) -> None:
        """The prefix that `prepare` makes sure of from now on."""
        with self._lock:
            self._files.pop(digest, None)
            self._files[digest] = path  # as the last: what it needs now
            self._client.needs(digest, path)

    def prepare(self) -> None:
        """Answer, or raise; a node that has ended is started anew."""
        with self._starting:
            if self._closed:  # a feed may still ask for whoever was away
                raise UnreachableError("the node beside the trainer was closed with its job")
            if not self._node.is_alive:
                node, client = self._start()
                with self._lock:
                    is_late = self._closed  # `close` does not wait for a start
                    if not is_late:
                        ended, self._node, self._client = self._node, node, client
                        client.trace = self._trace
                        for digest, path in self._files.items():
                            client.needs(digest, path)
                if is_late:
                    client.close()
                    node.close()
                    raise UnreachableError("the node beside the trainer was closed with its job")
                ended.close()  # its client goes with whoever still waits for an answer from it
        self._client.prepare()

    def rows(self, chunk: Chunk, stopped: Event) -> Reply:
        reply = self._client.rows(chunk, stopped)
        read_bytes = sum(ref.size if ref.length < 0 else ref.length for ref in chunk.samples)
        with self._lock:
            self.read_bytes += read_bytes
        return Reply(reply.good, reply.tensors, reply.bad, read_bytes)  # what came over a link: the stored samples

    def probe(self, chunk: Chunk) -> dict[str, Any]:
        """What the work on this chunk costs here; takes a few seconds."""
        return self._client.probe(chunk)

    def hello(self) -> dict[str, Any]:
        return self._client.hello()

    def stop(self, stopped: Event) -> None:
        self._client.stop(stopped)

    def close(self) -> None:
        """Hang up and end the process. One that is being started meanwhile ends as soon as it has begun."""
        with self._lock:
            self._closed = True
            client, node = self._client, self._node
        client.close()
        node.close()

    def _start(self) -> tuple[EmbeddedNode, NodeClient]:
        node = EmbeddedNode(self._root, self._num_threads, 0, self._memory_bytes, is_far=True)
        try:
            return node, NodeClient(node.address, node.access, PLACE)
        except BaseException:
            node.close()
            raise

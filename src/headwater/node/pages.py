"""The pages that an operator's tools ask a node for, over HTTP: /metrics, /healthz and /readyz.

Owns `Pages`, a server that no client can make a burden: one thread has all connections, and another makes /metrics, a
few times a second at most. Connections are few and short: what does not come within its time or size is hung up on, the
oldest goes when there are too many, and new ones are taken at a limited pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater.core.exposition import CONTENT_TYPE
from headwater.errors import ConfigError

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192  # what others allow, too
WITHIN_S = 5.0  # of a connection, from its first byte to its last; Prometheus waits for 10 s by default
MAX_PER_S = 200.0  # connections: a flood of them took a tenth of a core so
FRESH_S = 0.25  # numbers that are no older are shown again
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
            431: "Request Header Fields Too Large", 500: "Internal Server Error",
            503: "Service Unavailable"}  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    status: int
    text: str
    kind: str = _PLAIN

    def to_bytes(self, with_text: bool = True) -> bytes:
        body = self.text.encode()
        head = (f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.kind}\r\n"
                f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n")  # fmt: skip
        return head.encode() + (body if with_text else b"")


def listen_http(address: str) -> socket.socket:
    """A socket at HOST:PORT; port 0 takes a free one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"--http is {address!r}; it must look like 127.0.0.1:9815")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"can't listen on --http {address} ({error.strerror or error}); is something else running "
                          "there, or is it not an address of this machine?") from None  # fmt: skip


class Pages:
    """Answers on `listener` until closed. `metrics` makes that page; it is told how many clients were turned away."""

    def __init__(self, listener: socket.socket, metrics: Callable[[int], str], is_ready: Callable[[], bool]) -> None:
        self.num_turned_away = 0
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._metrics = metrics
        self._is_ready = is_ready
        self._maker = ThreadPoolExecutor(1, "metrics")
        self._making: asyncio.Future[Page] | None = None
        self._made_at = 0.0
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(1.0)
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    async def _serve(self) -> None:
        try:
            await self._accept()
        finally:
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self) -> None:
        self._listener.setblocking(False)
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no more files may be open, or the client has gone again
                log.debug("a connection to --http was lost: %s", error)
            else:
                if len(self._open) >= MAX_CONNECTIONS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    oldest.cancel()
                    self.num_turned_away += 1
                task = self._loop.create_task(self._talk(connection))
                self._open[task] = None
                task.add_done_callback(lambda done: self._open.pop(done, None))
            await asyncio.sleep(1.0 / MAX_PER_S)

    async def _talk(self, connection: socket.socket) -> None:
        """One question, one answer."""
        with connection:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REQUEST_BYTES)
            try:
                async with asyncio.timeout(WITHIN_S):
                    writer.write(await self._answer(reader))
                    writer.close()
                    await writer.wait_closed()
            except TimeoutError:
                self.num_turned_away += 1
            except (OSError, EOFError):  # it hung up
                pass
            finally:
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            self.num_turned_away += 1
            return Page(431, f"a request has at most {MAX_REQUEST_BYTES} bytes\n").to_bytes()
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Page(400, "this is no request of HTTP/1.1\n").to_bytes()
        method, path = words[0], words[1].split("?")[0]
        if method not in ("GET", "HEAD"):
            return Page(405, "pages are read with GET\n").to_bytes()
        return (await self._page(path)).to_bytes(with_text=method == "GET")

    async def _page(self, path: str) -> Page:
        match path:
            case "/healthz":
                return Page(200, "ok\n")
            case "/readyz":
                return Page(200, "ready\n") if self._is_ready() else Page(503, "draining\n")
            case "/metrics":
                return await self._fresh_metrics()
        return Page(404, "there are /metrics, /healthz and /readyz\n")

    async def _fresh_metrics(self) -> Page:
        """Made now, or a moment ago; whoever comes while they are made gets the same."""
        now = self._loop.time()
        if self._making is None or (self._making.done() and now - self._made_at > FRESH_S):
            self._made_at = now
            self._making = self._loop.run_in_executor(self._maker, self._make)
        return await asyncio.shield(self._making)

    def _make(self) -> Page:
        try:
            return Page(200, self._metrics(self.num_turned_away), CONTENT_TYPE)
        except Exception:
            log.exception("unexpected error while metrics were made")
            return Page(500, "metrics can't be made; the node's log has more\n")

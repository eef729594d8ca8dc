"""A small web server that no client can make a burden.

Owns `Server`: one thread has all connections, and asks `answer` for the page of each request. Connections are few and
short: what does not come within its time or size is hung up on, the oldest goes when there are too many, and new ones
are taken at a limited pace. Pages are only read, with GET and HEAD.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headwater.core.access import is_loopback
from headwater.errors import ConfigError

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 8192  # what others allow, too
WITHIN_S = 5.0  # of a connection, from its first byte to its last; Prometheus waits for 10 s by default
MAX_PER_S = 200.0  # connections: a flood of them took a tenth of a core so
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
            405: "Method Not Allowed", 421: "Misdirected Request", 431: "Request Header Fields Too Large",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Page:
    """An answer. `headers` come beside those that every page has."""

    status: int
    text: str | bytes
    kind: str = _PLAIN
    headers: tuple[tuple[str, str], ...] = ()

    def to_bytes(self, with_text: bool = True) -> bytes:
        body = self.text if isinstance(self.text, bytes) else self.text.encode()
        named = (("Content-Type", self.kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store"),
                 *self.headers, ("Connection", "close"))  # fmt: skip
        lines = [f"HTTP/1.1 {self.status} {_REASONS[self.status]}", *(f"{name}: {value}" for name, value in named)]
        return "\r\n".join([*lines, "", ""]).encode() + (body if with_text else b"")


@dataclass(frozen=True)
class Request:
    """Who asks for what. `is_here`: from this machine. `headers` have small letters."""

    path: str
    headers: dict[str, str]
    is_here: bool

    @property
    def host(self) -> str:
        """The name that the client knows us by, without the port."""
        host = self.headers.get("host", "")
        return host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]


def listen_http(address: str, option: str = "--http") -> socket.socket:
    """A socket at HOST:PORT; port 0 takes a free one."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"{option} is {address!r}; it must look like 127.0.0.1:9815")
    host = host.removeprefix("[").removesuffix("]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"can't listen on {option} {address} ({error.strerror or error}); is something else running "
                          "there, or is it not an address of this machine?") from None  # fmt: skip


class Server:
    """Answers on `listener` until closed."""

    def __init__(self, listener: socket.socket, answer: Callable[[Request], Awaitable[Page]]) -> None:
        self.num_turned_away = 0
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._answer_to = answer
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest first
        self.loop = asyncio.new_event_loop()
        self._serving = self.loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, name="pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self.loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(1.0)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._serving)
        self.loop.close()

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
                connection, address = await self.loop.sock_accept(self._listener)
            except OSError as error:  # no more files may be open, or the client has gone again
                log.debug("a connection to --http was lost: %s", error)
            else:
                if len(self._open) >= MAX_CONNECTIONS:
                    oldest = next(iter(self._open))
                    del self._open[oldest]
                    oldest.cancel()
                    self.num_turned_away += 1
                task = self.loop.create_task(self._talk(connection, is_loopback(str(address[0]))))
                self._open[task] = None
                task.add_done_callback(lambda done: self._open.pop(done, None))
            await asyncio.sleep(1.0 / MAX_PER_S)

    async def _talk(self, connection: socket.socket, is_here: bool) -> None:
        """One question, one answer."""
        with connection:
            reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REQUEST_BYTES)
            try:
                async with asyncio.timeout(WITHIN_S):
                    writer.write(await self._answer(reader, is_here))
                    writer.close()
                    await writer.wait_closed()
            except TimeoutError:
                self.num_turned_away += 1
            except (OSError, EOFError):  # it hung up
                pass
            finally:
                writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, is_here: bool) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            self.num_turned_away += 1
            return Page(431, f"a request has at most {MAX_REQUEST_BYTES} bytes\n").to_bytes()
        first, *rest = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Page(400, "this is no request of HTTP/1.1\n").to_bytes()
        if words[0] not in ("GET", "HEAD"):
            return Page(405, "pages are read with GET\n").to_bytes()
        headers = {name.strip().lower(): value.strip() for name, colon, value in (each.partition(":") for each in rest)
                   if colon}  # fmt: skip
        page = await self._answer_to(Request(words[1].split("?")[0], headers, is_here))
        return page.to_bytes(with_text=words[0] == "GET")

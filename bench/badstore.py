"""A store that fails when it is told to: a proxy in front of the real one, for `bench faults`.

Owns `BadStore`, which `RigUp.open` makes in a host. Requests go through as they come, the Host header included, which
their signature covers. What it does to answers: an error, a pause, half a body under the whole length, a flipped bit.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

GOOD = "good"
SLOW_S = 1.5
ERRORS = {
    "500": ("500 Internal Server Error", "InternalError", "We encountered an internal error. Please try again."),
    "503": ("503 Service Unavailable", "SlowDown", "Please reduce your request rate."),
    "expired": ("403 Forbidden", "ExpiredToken", "The provided token has expired."),
}
MODES = (GOOD, "slow", "half", "flip", *ERRORS)
_MOST_HEAD = 64 << 10
_UP_WITHIN_S = 20.0


class BadStore:
    """Listens at `listen` for requests to the store at `store`; both are (address, port)."""

    def __init__(self, listen: tuple[str, int], store: tuple[str, int], seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._mode = GOOD
        self._num_spoiled = 0
        self._writers: set[asyncio.StreamWriter] = set()  # of connections that are open
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(*listen)), daemon=True)
        self._thread.start()
        if not self._ready.wait(_UP_WITHIN_S):
            raise OSError(f"can't listen at {listen}")

    def __call__(self, mode: str) -> int:
        """Answer like this from now on; how many answers were spoiled so far."""
        assert mode in MODES, mode
        self._mode = mode
        return self._num_spoiled

    def close(self) -> None:
        """Hang up on everybody."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _run(self, host: str, port: int) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, host, port, limit=_MOST_HEAD)
        self._ready.set()
        await self._over.wait()
        server.close()
        for writer in self._writers:  # also those that nobody serves yet, or that have something left to send
            writer.transport.abort()
        await asyncio.sleep(0)  # they are closed when the loop comes round

    def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        self._writers.add(to_client)
        task = asyncio.get_running_loop().create_task(self._serve(client, to_client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """One connection, and one of its own to the store."""
        to_store = None
        try:
            store, to_store = await asyncio.open_connection(self._store[0], self._store[1], limit=_MOST_HEAD)
            self._writers.add(to_store)
            while await self._pass_on(client, to_client, store, to_store):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # one of both has hung up
        finally:
            for writer in (to_client, to_store):
                if writer is not None:
                    writer.close()
                    self._writers.discard(writer)

    async def _pass_on(
        self,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        store: asyncio.StreamReader,
        to_store: asyncio.StreamWriter,
    ) -> bool:
        """A request and its answer; whether the connection lasts."""
        head = await client.readuntil(b"\r\n\r\n")
        method = head.split(b" ", 1)[0]
        body = await client.readexactly(int(_header(head, b"content-length") or 0))
        mode = self._mode
        if mode in ERRORS:
            self._num_spoiled += 1
            to_client.write(_error(*ERRORS[mode], with_body=method != b"HEAD"))
            await to_client.drain()
            return True
        if mode == "slow":
            self._num_spoiled += 1
            await asyncio.sleep(SLOW_S)
        to_store.write(head + body)
        answer = await store.readuntil(b"\r\n\r\n")
        data = b"" if method == b"HEAD" else await _body(answer, store)
        if mode == "half" and len(data) > 1:
            self._num_spoiled += 1
            to_client.write(answer + data[: len(data) // 2])
            await to_client.drain()
            return False
        if mode == "flip" and data:
            flipped = bytearray(data)
            flipped[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            data = bytes(flipped)
            self._num_spoiled += 1
        to_client.write(answer + data)
        await to_client.drain()
        return True


def _header(head: bytes, name: bytes) -> bytes | None:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return None


async def _body(head: bytes, reader: asyncio.StreamReader) -> bytes:
    """What follows this head of an answer, as it is on the wire."""
    if (_header(head, b"transfer-encoding") or b"").lower() != b"chunked":
        return await reader.readexactly(int(_header(head, b"content-length") or 0))
    data = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        data += line + await reader.readexactly(int(line.split(b";")[0], 16) + 2)
        if int(line.split(b";")[0], 16) == 0:
            return data


def _error(status: str, code: str, message: str, *, with_body: bool) -> bytes:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + (body if with_body else "")).encode()


def address(text: str) -> tuple[str, int]:
    """Of http://ADDRESS:PORT."""
    host, _, port = text.rpartition("/")[2].partition(":")
    return host, int(port)


def endpoint(listen: tuple[str, int]) -> dict[str, Any]:
    """What a store's clients have in their environment to come here."""
    return {"AWS_ENDPOINT_URL": f"http://{listen[0]}:{listen[1]}"}

"""Doors: requests over HTTP to a node's pages and to `headwater ui`, tokens, and what is shown of what nodes say."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Sequence
from typing import Any

import pyarrow.flight as flight
from rich.console import Console

from bench.fuzz.replies import HELLO, make_client
from bench.fuzz.requests import make_node
from bench.fuzz.target import Harness, Room, Target
from headwater.cli.nodes import STAGES, look, tables
from headwater.cli.runfiles import RunFiles
from headwater.cli.top import line as said_of
from headwater.cli.top import screen
from headwater.cli.ui import Door as Ui
from headwater.cli.watching import Watched
from headwater.core.access import Grant, entry_text, token_digest
from headwater.core.looks import Looks, together, view
from headwater.core.redact import TOKEN_START
from headwater.data.store import full_url
from headwater.errors import ConfigError
from headwater.node.door import Door
from headwater.node.pages import Pages
from headwater.node.tokens import OneToken, TokensFile
from headwater.node.web import MAX_REQUEST_BYTES, Server, listen_http
from headwater.train.access import Access

_TOKEN = TOKEN_START + "t" * 43
_GRANTS = (Grant("me", token_digest(_TOKEN)),)
_ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Za-z ]+\r\n(?:[A-Za-z-]+: [^\r\n]*\r\n)+\r\n")


def _ask(server: Server, data: bytes) -> bytes:
    """What the server answers to these bytes; empty where it hangs up. The first byte says whether the client is on
    this machine."""
    is_here, data = data[:1] != b"\xff", data.removeprefix(b"\xff")

    async def talk() -> bytes:
        reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
        reader.feed_data(data)
        reader.feed_eof()
        try:
            return await server._answer(reader, is_here)
        except EOFError:
            return b""

    return asyncio.run_coroutine_threadsafe(talk(), server.loop).result(30)


def _check(answer: bytes, data: bytes, secret: str) -> None:
    """It is a whole answer, and what is not for all is told to whoever has the secret alone."""
    if not answer:
        return
    found = _ANSWER.match(answer)
    assert found is not None, answer[:200]
    length = re.search(rb"Content-Length: (\d+)", found[0])
    assert length is not None
    assert len(answer) - found.end() in (0, int(length[1]))
    assert secret.encode() not in answer
    path = data.removeprefix(b"\xff").partition(b" ")[2].partition(b" ")[0].partition(b"?")[0]
    if found[1] == b"200" and path in (b"/status.json", b"/run.json"):
        assert secret.encode() in data


def _web(room: Room) -> Harness:
    node = make_node(room)
    pages = Pages(listen_http("127.0.0.1:0"), node.shown, lambda: True, lambda: _GRANTS)

    def harness(data: bytes) -> None:
        _check(_ask(pages._server, data), data, _TOKEN)

    return harness


def _ui(room: Room) -> Harness:
    door = Ui("127.0.0.1:0", [], RunFiles([]), Access())
    door.key = "k" * 32

    def harness(data: bytes) -> None:
        _check(_ask(door._server, data), data, door.key)

    return harness


def _web_seeds() -> Sequence[bytes]:
    seeds = []
    for secret in (_TOKEN, "k" * 32):
        for path in ("/status.json", "/run.json", "/metrics?x=1"):
            seeds.append(f"GET {path} HTTP/1.1\r\nHost: localhost:1\r\nAuthorization: Bearer {secret}\r\n\r\n".encode())
    return [*seeds, b"GET /page.js HTTP/1.0\r\n\r\n", b"HEAD / HTTP/1.1\r\nHost: [::1]:9\r\nCookie: a=b\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde", b"\xffGET /status.json HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /healthz HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n"]  # fmt: skip


def _token(room: Room) -> Harness:
    """The authorization headers of a call, one a line."""
    door = Door(OneToken(_GRANTS[0]))

    def harness(data: bytes) -> None:
        lines = data.split(b"\n")
        values: list[Any] = [line if line[:1] == b"\0" else line.decode(errors="replace") for line in lines]
        visit = door.start_call(None, {"Authorization": values} if data else {})  # type: ignore[arg-type]
        kind, _, token = values[0].partition(" ")
        assert visit.grant == _GRANTS[0]
        assert (kind.lower(), token, len(values)) == ("bearer", _TOKEN, 1)

    return harness


def _token_seeds() -> Sequence[bytes]:
    bearer = f"Bearer {_TOKEN}".encode()
    return [bearer, bearer.lower(), b"", bearer + b"\n" + bearer, b"Basic " + _TOKEN.encode(), b"\0" + bearer]


def _tokens_file(room: Room) -> Harness:
    path = room.state / "tokens.toml"

    def harness(data: bytes) -> None:
        path.write_bytes(room.fill_in(data))
        known = TokensFile(path, (full_url(str(room.root)),))
        visit = Door(known).start_call(None, {"authorization": [f"Bearer {_TOKEN}"]})  # type: ignore[arg-type]
        assert visit.grant in known.grants()

    return harness


def _tokens_seeds() -> Sequence[bytes]:
    fields = {"roots": ["@ROOT@/a"], "max_chunks": 2, "max_upload": "5MB", "max_prefixes": "1GiB", "max_tables": "1GB",
              "rows_per_second": 9, "weight": 2.5, "operator": True}  # fmt: skip
    entry = entry_text("me", token_digest(_TOKEN), fields)
    dated = entry_text("me", token_digest(_TOKEN), {}) + "expires = 2999-12-31T10:00:00+02:00\n"
    other = entry_text("you", "0" * 64, {}) + "expires = 2020-01-01\n"
    return [each.encode() for each in (entry, dated + "\n" + other, other)]


def _shown(room: Room) -> Harness:
    """What a node says of itself (`hello`, `status`): told to a person by `headwater nodes`, `top` and the page."""
    client, line = make_client()
    watched = Watched([], Access())
    watched._clients = {"node": client}

    def harness(data: bytes) -> None:
        try:
            tree = json.loads(data)
            hello, line.answer = (json.dumps(tree[name]).encode() for name in ("hello", "status"))
        except (ValueError, RecursionError, KeyError, TypeError):
            hello, line.answer = data, data
        looks = Looks()
        found = [watched._look("node", looks) for _ in range(2)]
        console = Console(file=io.StringIO(), width=100)
        seen = [each.seen for each in found if each.seen is not None]
        said = {"nodes": [each.to_json() for each in found], "together": view(together(seen)) if seen else None}
        console.print(screen(json.loads(json.dumps(said))))
        assert all(said_of(each) for each in said["nodes"])  # type: ignore[union-attr]
        line.answer = hello
        console.print(*tables(look({"node": client}, 0.0)))

    return harness


def _shown_seeds() -> Sequence[bytes]:
    share = {"tenant": "me/job", "group_rows": 8, "held_rows": 3, "row_bytes": 1e6}
    prefix = {"digest": "f" * 64, "outputs": ["y"], "precision": "fp32", "engine": "onnxruntime", "threads": 2,
              "batch": 4, "why": "fast"}  # fmt: skip
    busy = {**{f"{name}_s": 1.5 for name in STAGES}, "num_rows": 9, "num_bad": 1, "read_bytes": 5}
    hello = {**HELLO, "memory": {"budget_bytes": 10**9, "used_bytes": 5, "num_waiting": 2, "tenants": [share]},
             "prefixes": [prefix], "draining": True, "resident_bytes": 5, "page_cache_bytes": None,
             "busy": busy}  # fmt: skip
    numbers = [["headwater_cores", [], 2.0], ["headwater_rows_sent_total", ["me"], 9.0],
               ["headwater_busy_seconds_total", ["read"], 1.0],
               ["headwater_requests_under_way", ["me", "rows"], 1]]  # fmt: skip
    fault = {"kind": "RefusedError", "tenant": "me", "said": "no", "times": 2, "at_s": 1.7e9}
    status = {"about": {**hello, "faults": [fault]}, "numbers": numbers}
    odd = {**hello, "prefixes": [{**prefix, "outputs": None, "why": "[/x] [red]"}]}
    pairs = [{"hello": each, "status": {**status, "about": {**each, "faults": [fault]}}}
             for each in (hello, HELLO, odd)]  # fmt: skip
    return [*(json.dumps(each).encode() for each in pairs), json.dumps(status).encode()]


TARGETS = (
    Target("web", "a request to a node's pages", _web, _web_seeds, (), 30),
    Target("ui", "a request to `headwater ui`", _ui, _web_seeds, (), 15),
    Target("token", "the authorization of a call", _token, _token_seeds, (flight.FlightUnauthenticatedError,), 15),
    Target("tokens-file", "a tokens file", _tokens_file, _tokens_seeds,
           (ConfigError, flight.FlightUnauthenticatedError), 20, "lines"),
    Target("shown", "what is shown of what a node says of itself", _shown, _shown_seeds, (), 20, "json"),
)  # fmt: skip

"""The pages of a node, over HTTP: /metrics, /healthz and /readyz for tools, and one to look at for people.

Owns `Pages`. One look at the node makes /metrics and /status.json (what the page shows), a few times a second at
most and in a thread of its own, so both have the same numbers. Tools need no token for /metrics; /status.json has more
(jobs, faults, roots), and on a node with tokens it wants one. A token is taken from this machine alone: there is no TLS
here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater import page
from headwater.core.access import Grant, identify, is_loopback
from headwater.core.exposition import CONTENT_TYPE
from headwater.core.looks import Look, Looks, only, view
from headwater.errors import RefusedError
from headwater.node.metrics import Shown, may_see
from headwater.node.web import Page, Request, Server

FRESH_S = 0.25  # numbers that are no older are shown again
_JSON = "application/json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Made:
    """Of one look: what it showed, and /metrics."""

    shown: Shown
    metrics: Page


class Pages:
    """Answers on `listener` until closed. `look` is told how many clients were turned away; `why_not_ready` says
    nothing if the node is; `grants` has the tokens that are in force, on a node that asks for one."""

    def __init__(
        self,
        listener: socket.socket,
        look: Callable[[int], Shown],
        why_not_ready: Callable[[], str],
        grants: Callable[[], Sequence[Grant]] | None = None,
    ) -> None:
        self._look = look
        self._why_not_ready = why_not_ready
        self._grants = grants
        self._is_here_only = is_loopback(str(listener.getsockname()[0]))
        self._maker = ThreadPoolExecutor(1, "metrics")
        self._making: asyncio.Future[_Made | None] | None = None
        self._made_at = 0.0
        self._looks = Looks()
        self._views: dict[Grant | None, bytes] = {}  # of the newest look
        self._server = Server(listener, self._page)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def num_turned_away(self) -> int:
        return self._server.num_turned_away

    def close(self) -> None:
        """Hang up on everybody."""
        self._server.close()
        self._maker.shutdown(wait=False, cancel_futures=True)

    async def _page(self, request: Request) -> Page:
        match request.path:
            case "/healthz":
                return Page(200, "ok\n")
            case "/readyz":
                fault = self._why_not_ready()
                return Page(503, f"{fault}\n") if fault else Page(200, "ready\n")
            case "/metrics":
                made = await self._fresh()
                return _CANT_BE_MADE if made is None else made.metrics
            case page.STATUS:
                return await self._status(request)
            case path if path in page.FILES:
                content, kind = page.static()[path]
                return Page(200, content, kind, page.HEADERS)
        return Page(404, "there are / to look at, /metrics, /healthz and /readyz\n")

    async def _status(self, request: Request) -> Page:
        """What the page shows, to whoever may see it."""
        if self._is_here_only and not is_loopback(request.host):
            # A name that someone else's page had turned into our address.
            return _refused(421, "this page is served to this machine: ask for it as 127.0.0.1 or localhost")
        grant = None
        if self._grants is not None:
            if not request.is_here:
                return _refused(403, _NOT_IN_THE_OPEN)
            given = [request.headers["authorization"]] if "authorization" in request.headers else []
            try:
                grant = identify(self._grants(), given, time.time())
            except RefusedError as error:
                return _refused(401, str(error))
        if (made := await self._fresh()) is None:
            return _CANT_BE_MADE
        said = await asyncio.get_running_loop().run_in_executor(self._maker, self._view, made, grant)
        return Page(200, said, _JSON, page.HEADERS)

    async def _fresh(self) -> _Made | None:
        """Made now, or a moment ago; whoever comes while it is made gets the same."""
        now = self._server.loop.time()
        if self._making is None or (self._making.done() and now - self._made_at > FRESH_S):
            self._made_at = now
            self._making = self._server.loop.run_in_executor(self._maker, self._make)
        return await asyncio.shield(self._making)

    def _make(self) -> _Made | None:
        try:
            shown = self._look(self.num_turned_away)
            self._looks.add(Look(time.monotonic(), shown.numbers(), shown.about(None)))
            self._views.clear()
            return _Made(shown, Page(200, shown.text(), CONTENT_TYPE))
        except Exception:
            log.exception("unexpected error while metrics were made")
            return None

    def _view(self, made: _Made, grant: Grant | None) -> bytes:
        """In the maker's thread: looks are its own."""
        if grant not in self._views:
            seen = self._looks.seen()
            assert seen is not None
            if grant is not None and not grant.is_operator:
                about = made.shown.about(grant)
                seen = only(seen, may_see(grant.tenant, about), about)
            told = {"kind": "node", "at_s": time.time(), "nodes": [{"name": "this node", "fault": "", **view(seen)}]}
            self._views[grant] = json.dumps(told).encode()
        return self._views[grant]


_NOT_IN_THE_OPEN = (
    "this node asks for a token, and none is taken here over a network, where others could read it; look from your own "
    "machine: headwater ui grpc+tls://HOST:PORT"
)
_CANT_BE_MADE = Page(500, "metrics can't be made; the node's log has more\n")


def _refused(status: int, why: str) -> Page:
    return Page(status, json.dumps({"fault": why}), _JSON, page.HEADERS)

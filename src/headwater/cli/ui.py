"""`headwater ui`: a page to look at, of nodes, and of a run by its files; served on loopback."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import signal
import threading
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from headwater import page
from headwater.cli.runfiles import RunFiles
from headwater.cli.watching import Watched
from headwater.core.access import is_loopback
from headwater.errors import ConfigError, HeadwaterError
from headwater.node.web import Page, Request, Server, listen_http
from headwater.train.access import Access

WHILE_ASKED_S = 10.0  # a page that nobody has open asks nodes for nothing
FIRST_WITHIN_S = 2.0  # that a page waits for nodes that were not heard of yet
_JSON = "application/json"

log = logging.getLogger(__name__)


def ui(
    shown: list[str] = typer.Argument(
        help="What to look at: nodes, such as grpc+tls://store-1:8815; and of a run its output folder, or files: what "
        "`headwater plan --json` prints, or a timeline of --trace."
    ),
    listen: str = typer.Option("127.0.0.1:9816", help="Address and port of this machine; port 0 takes a free one."),
    browser: bool = typer.Option(False, "--open", help="Open the page in a browser."),
) -> None:
    """Show nodes and runs on a page: the chain with live rates, what limits, tenants, faults, the plan, the timeline.

    It is served to this machine alone, and to whoever has the key in the address that is printed; ssh -L brings it
    elsewhere. Token and certificates for nodes are taken from HEADWATER_TOKEN, HEADWATER_TLS_CA, HEADWATER_TLS_CERT and
    HEADWATER_TLS_KEY, and stay here. A node's own page (`headwater serve --http`) shows that node.
    """
    addresses = [each for each in dict.fromkeys(shown) if "://" in each]
    files = RunFiles([Path(each) for each in dict.fromkeys(shown) if "://" not in each])
    host = listen.rpartition(":")[0]
    if not is_loopback(host):
        raise ConfigError(f"--listen is {listen!r}, which others reach, and this page has no TLS; listen on 127.0.0.1, "
                          "and bring it elsewhere with ssh -L 9816:127.0.0.1:9816")  # fmt: skip
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    door = Door(listen, addresses, files, Access.of())
    try:
        where = f"http://{host}:{door.port}/#key={door.key}"
        Console().print(f"look at {where} ; Ctrl-C stops it", soft_wrap=True, highlight=False)
        if browser:
            webbrowser.open(where)
        ended.wait()
    finally:
        door.close()


class Door:
    """The page on loopback. Who has the key may look."""

    def __init__(self, listen: str, addresses: list[str], files: RunFiles, access: Access) -> None:
        self.key = secrets.token_urlsafe(24)
        self._files = files
        self._watched = Watched(addresses, access, while_asked_s=WHILE_ASKED_S)
        self._maker = ThreadPoolExecutor(1, "page")
        self._server = Server(listen_http(listen, "--listen"), self._page)

    @property
    def port(self) -> int:
        return self._server.port

    def close(self) -> None:
        self._server.close()
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._watched.close()

    async def _page(self, request: Request) -> Page:
        if request.path in page.FILES:
            content, kind = page.static()[request.path]
            return Page(200, content, kind, page.HEADERS)
        make = {page.STATUS: self._status, page.RUN: self._run}.get(request.path)
        if make is None:
            return Page(404, "there is / to look at\n")
        if not is_loopback(request.host):  # a name that someone else's page had turned into our address
            return _said(421, {"fault": "this page is served to this machine: ask for it as 127.0.0.1 or localhost"})
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1", "replace"), self.key.encode()):
            return _said(401, {"fault": "the key is missing, or of another run of headwater ui; open the address that "
                                        "it printed"})  # fmt: skip
        return await asyncio.get_running_loop().run_in_executor(self._maker, self._made, make)

    def _made(self, make: Any) -> Page:
        try:
            return _said(200, make())
        except HeadwaterError as error:
            return _said(500, {"fault": str(error)})
        except Exception:
            log.exception("unexpected error while the page's numbers were made")
            return _said(500, {"fault": "the numbers can't be made; headwater ui has written more"})

    def _status(self) -> dict[str, Any]:
        return {**self._watched.to_json(within_s=FIRST_WITHIN_S), "run_version": self._files.version()}

    def _run(self) -> dict[str, Any]:
        return self._files.read()


def _said(status: int, data: dict[str, Any]) -> Page:
    return Page(status, json.dumps(data).encode(), _JSON, page.HEADERS)

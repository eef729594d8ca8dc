"""A node's life as a process: start, announce, wait, drain, stop.

Owns signals and the watch over an embedded node's parent; `core.drain` decides what they lead to.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import secrets
import select
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from headwater.core.access import Grant, token_digest
from headwater.core.redact import TOKEN_START
from headwater.data.memory import memory_bytes
from headwater.errors import ConfigError
from headwater.node.cache import Cache
from headwater.node.calls import Calls
from headwater.node.circle import Aggregator
from headwater.node.pages import Pages
from headwater.node.service import Node
from headwater.node.tables import Tables, default_table_bytes
from headwater.node.tls import Tls
from headwater.node.tokens import OneToken
from headwater.node.web import listen_http

DRAIN_S = 20.0  # a chunk takes seconds; Kubernetes kills after 30 s
STOP_WITHIN_S = 1.0  # streams end within 0.25 s of being told; those nobody reads are cut off
MAX_FILES = 65_536  # open at once, if the system allows it: connections, mapped shards, kept rows
TABLE_SHARE = (
    0.125  # of the memory, for vectors of embedding tables: what is on disk is read through the page cache, too
)
EMBEDDED_CACHES = 8  # folders for the rows of nodes that run at the same time, each beside a script of its own
_INPUT_ENDED, _CHANGED = b"\0", b"\xff"  # told by ourselves; signals tell their number

log = logging.getLogger(__name__)


def default_state() -> Path:
    """Where a node keeps prefixes unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "headwater" / "node"


def _allow_files() -> None:
    """As many open files as the system allows: the usual 1,024 are a limit for programs that can't have more."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def serve(
    roots: tuple[str, ...],
    *,
    listen: str = "grpc://127.0.0.1:8815",
    state: Path | None = None,
    num_threads: int | None = None,
    max_upload_bytes: int = 2 << 30,
    cache_bytes: int | None = None,
    cache_folder: Path | None = None,
    num_caches: int = 1,
    drain_s: float = 0.0,
    http: str = "",
    max_memory_bytes: int | None = None,
    adapt: bool = True,
    announce: Callable[[Node], None] = lambda node: None,
    until_input_ends: bool = False,
    is_far: bool = False,
    tokens: Path | OneToken | None = None,
    tls: Tls | None = None,
    hand_over: Path | None = None,
    tables: Path | None = None,
    table_bytes: int | None = None,
    table_memory_bytes: int | None = None,
    aggregator: Aggregator | None = None,
) -> None:
    """Serve `roots` until a signal arrives, or, if wanted, until standard input ends.

    After a signal, what is under way has `drain_s` to be finished; another signal ends it. `http` is the HOST:PORT of
    the page to look at, /metrics, /healthz and /readyz; the node's `http_port` has the port that was taken. Without it
    there are none.

    Rows are kept in `cache_folder` (by default beside the prefixes) within `cache_bytes`: None takes the default of
    `Cache`, 0 keeps none. Where another node uses that folder, the first of `num_caches` that none uses is taken:
    FOLDER, FOLDER-2, …. Jobs share `max_memory_bytes`, by default what the machine has. `is_far` from the store: behind
    a link that others need, too. `hand_over` is a folder that trainers may see, too. On
    `aggregator` nodes add up among themselves (docs/partition.md).
    """
    if not roots:
        raise ConfigError("a node serves at least one folder or bucket; name it: headwater serve s3://photos")
    # A pipe: the system may deliver a signal to any thread, and only what is written to a file wakes ours from there.
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        sys.stdin.buffer.read()
        os.write(tell, _INPUT_ENDED)

    listener = listen_http(http) if http else None  # what can't be is found before anything is started
    node = open_node(roots, listen=listen, state=state, num_threads=num_threads, max_upload_bytes=max_upload_bytes,
                     cache_bytes=cache_bytes, cache_folder=cache_folder, num_caches=num_caches, drain_s=drain_s,
                     max_memory_bytes=max_memory_bytes, adapt=adapt, is_wary=not until_input_ends, is_far=is_far,
                     tokens=tokens, tls=tls, hand_over=hand_over, tables=tables, table_bytes=table_bytes,
                     table_memory_bytes=table_memory_bytes, aggregator=aggregator)  # fmt: skip
    if until_input_ends:
        threading.Thread(target=watch, name="parent", daemon=True).start()
    node.calls.changed = lambda: os.write(tell, _CHANGED)
    if listener is not None:
        pages = Pages(listener, node.shown, node.why_not_ready, node.grants)
        node.http_port, node.num_turned_away = pages.port, lambda: pages.num_turned_away
    announce(node)
    log.info("the node ends: %s", _wait(node.calls, told))
    node.stop(STOP_WITHIN_S)
    if listener is not None:
        pages.close()


def open_node(
    roots: tuple[str, ...],
    *,
    listen: str,
    state: Path | None = None,
    num_threads: int | None = None,
    max_upload_bytes: int = 2 << 30,
    cache_bytes: int | None = None,
    cache_folder: Path | None = None,
    num_caches: int = 1,
    drain_s: float = 0.0,
    max_memory_bytes: int | None = None,
    adapt: bool = True,
    is_wary: bool = True,
    is_far: bool = False,
    tokens: Path | OneToken | None = None,
    tls: Tls | None = None,
    hand_over: Path | None = None,
    tables: Path | None = None,
    table_bytes: int | None = None,
    table_memory_bytes: int | None = None,
    aggregator: Aggregator | None = None,
) -> Node:
    """A node that answers, with its folders; everything that can be wrong with them is said. The arguments are those of
    `serve`; whoever opens it stops it."""
    _allow_files()
    state = state or default_state()
    try:
        state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder for prefixes, {state}, can't be made: {error.strerror}; choose another with "
                          "--state, or with XDG_CACHE_HOME for a node that your script starts") from None  # fmt: skip
    rows = cache_folder or state / "rows"
    others = [rows.with_name(f"{rows.name}-{number}") for number in range(2, num_caches + 1)]
    cache = Cache(rows, cache_bytes, others)
    kept_tables, jobs_bytes = _tables(tables, table_bytes, table_memory_bytes, max_memory_bytes)
    try:
        return Node(listen, roots, state=state, num_threads=num_threads, max_upload_bytes=max_upload_bytes,
                    cache=cache, drain_s=drain_s, tokens=tokens, tls=tls, is_wary=is_wary,
                    max_memory_bytes=jobs_bytes, adapt=adapt, is_far=is_far,
                    hand_over=hand_over, tables=kept_tables, aggregator=aggregator)  # fmt: skip
    except (OSError, pa.ArrowException) as error:  # Flight says no more than "did not start properly"
        if isinstance(error, OSError) and error.filename is not None:
            raise ConfigError(f"{error.filename} can't be used ({error.strerror}); a node keeps prefixes in {state}: "
                              "choose another folder with --state") from None  # fmt: skip
        raise ConfigError(
            f"can't listen on {listen} ({error}); is something else running there, or is it not an address of this "
            "machine? choose another with --listen"
        ) from error


def _tables(
    folder: Path | None, most_bytes: int | None, cache_bytes: int | None, max_memory_bytes: int | None
) -> tuple[Tables | None, int | None]:
    """The node's tables, and what is left of its memory for jobs."""
    if folder is None:
        return None, max_memory_bytes
    total = min(memory_bytes(), max_memory_bytes or memory_bytes())
    cache_bytes = cache_bytes or int(total * TABLE_SHARE)
    if cache_bytes > total // 2:
        raise ConfigError(f"{cache_bytes / 1e6:,.0f} MB for tables (--table-memory) are more than half of the node's "
                          f"{total / 1e6:,.0f} MB; give them less, or the node more (--memory)")  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        most_bytes = default_table_bytes(folder) if most_bytes is None else most_bytes
    except OSError as error:
        raise ConfigError(f"the folder for tables, {folder}, can't be used: {error.strerror}; choose another with "
                          "--tables") from None  # fmt: skip
    return Tables(folder, most_bytes, cache_bytes), total - cache_bytes


def _wait(calls: Calls, told: int) -> str:
    """Until the node is to end; why it does."""
    while True:
        why, left_s = calls.look()
        if why is not None:
            return why
        heard = os.read(told, 64) if select.select([told], [], [], left_s)[0] else b""
        for each in heard:
            if each == _INPUT_ENDED[0]:
                calls.end("whoever started it has ended, or closed its input")
            elif each != _CHANGED[0]:
                calls.told_to_stop()


def serve_embedded(
    root: str,
    num_threads: int | None,
    cache_bytes: int | None = None,
    memory_bytes: int | None = None,
    is_far: bool = False,
    tables: Path | None = None,
) -> None:
    """Serve one root on a free loopback port, tell the parent which and with what token, and end when the parent closes
    our input.

    The input also closes when the parent is killed, so an embedded node never outlives its trainer.
    """

    logging.getLogger("headwater.node.calls").setLevel(logging.ERROR)  # the trainer tells its user of the others

    token = TOKEN_START + secrets.token_urlsafe(32)

    def announce(node: Node) -> None:
        print(json.dumps({"address": f"grpc://127.0.0.1:{node.port}", "token": token}), flush=True)

    # Others may run programs on this machine, too: the port is for whoever started this node.
    tokens = OneToken(Grant("trainer", token_digest(token)))
    serve((root,), listen="grpc://127.0.0.1:0", num_threads=num_threads, cache_bytes=cache_bytes,
          num_caches=EMBEDDED_CACHES, max_memory_bytes=memory_bytes, announce=announce,
          until_input_ends=True, is_far=is_far, tokens=tokens,
          tables=tables)  # fmt: skip

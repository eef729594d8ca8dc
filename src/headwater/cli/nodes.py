"""`headwater nodes`: who answers, what it works on, and how busy each of its stages is."""

from __future__ import annotations

import io
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from headwater.cli.needs import addresses_of
from headwater.core.plain import all_plain, plain
from headwater.errors import HeadwaterError
from headwater.train.access import Access
from headwater.train.client import NodeClient

STAGES = ("read", "decode", "infer", "send")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seen:
    """What a node said at the beginning and at the end of a while; or why it said nothing."""

    address: str
    hello: dict[str, Any]
    before: dict[str, Any]
    taken_s: float
    fault: str = ""

    def rate(self, name: str) -> float:
        """A second, over the while; a node that was started meanwhile counts from zero."""
        now, before = (float(each["busy"].get(name, 0.0)) for each in (self.hello, self.before))
        return (now - before if now >= before else now) / self.taken_s

    def to_json(self) -> dict[str, Any]:
        if self.fault:
            return {"address": self.address, "fault": self.fault}
        rates = {name: self.rate(name) for name in self.hello["busy"]}
        return {"address": self.address, "seconds": self.taken_s, "hello": self.hello, "per_s": rates}


def nodes(
    addresses: list[str] = typer.Argument(
        help="Addresses of nodes, such as grpc://store-1:8815, or of a fleet, such as ray://photos."
    ),
    seconds: float = typer.Option(1.0, min=0.1, help="How long to look."),
    follow: bool = typer.Option(False, "--follow", "-f", help="Look again and again, until Ctrl-C."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: one line for each look."),
) -> None:
    """Show nodes: what they serve, rows a second, how busy reading, decoding, inference and sending are.

    Busy is in threads: 0.50 means that a stage kept one thread at work for half of the time. rows/s are made, kept/s
    are sent from what was kept; "off" where nothing is kept. Ends with exit code 1 if a node does not answer.
    Token and certificates are taken from HEADWATER_TOKEN, HEADWATER_TLS_CA, HEADWATER_TLS_CERT and HEADWATER_TLS_KEY.
    """
    console = Console()
    access = Access.of()
    clients = {address: NodeClient(address, access) for address in addresses_of(addresses)}
    try:
        if as_json:
            while True:
                seen = look(clients, seconds)
                print(json.dumps([each.to_json() for each in seen]), flush=True)
                if not follow:
                    break
        elif follow:
            with Live(console=console, auto_refresh=False) as live:
                while True:
                    seen = look(clients, seconds)
                    live.update(Group(*tables(seen)), refresh=True)
        else:
            with console.status(f"looking for {seconds:g} s"):
                seen = look(clients, seconds)
            console.print(*tables(seen), sep="\n")
    finally:
        for client in clients.values():
            client.close()
    if any(each.fault for each in seen):
        raise typer.Exit(1)


def look(clients: dict[str, NodeClient], seconds: float) -> list[Seen]:
    """All of them at the same time."""

    def one(address: str) -> Seen:
        begin = time.perf_counter()
        try:
            before = clients[address].hello()
            time.sleep(seconds)
            seen = Seen(address, all_plain(clients[address].hello()), before, time.perf_counter() - begin)
            Console(file=io.StringIO()).print(*tables([seen]))  # it may say anything
            json.dumps(seen.to_json())
        except HeadwaterError as error:
            time.sleep(max(0.0, seconds - (time.perf_counter() - begin)))
            return Seen(address, {}, {}, seconds, plain(str(error)))
        except Exception as error:
            log.debug("%s can't be shown", address, exc_info=True)
            return Seen(address, {}, {}, seconds, f"says of itself what can't be shown ({type(error).__name__}); is it "
                                                  "a node of this version?")  # fmt: skip
        return seen

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(one, clients))


def tables(seen: list[Seen]) -> list[Table | Text]:
    """Who is there; what they run and why, if they do; and who is not there, in full whatever the width."""
    found = [each for each in (table(seen), stages(seen), prefixes(seen), jobs(seen)) if each.row_count]
    faults = [Text(f"{each.address}: {each.fault}", style="red") for each in seen if each.fault]
    return [*found, *reasons(seen), *faults]


def table(seen: list[Seen]) -> Table:
    found = Table(title="nodes", title_justify="left")
    for title in ("node", "serves"):
        found.add_column(title, overflow="fold", min_width=12)
    for title in ("cores", "memory", "rows/s", "kept/s", "bad"):
        found.add_column(title, justify="right", no_wrap=True)
    for each in seen:
        if each.fault:
            continue
        hello = each.hello
        found.add_row(
            each.address,
            escape(", ".join(hello["roots"])) + (" (being stopped)" if hello.get("draining") else ""),
            f"{hello['cores']:g}",
            f"{hello['memory_bytes'] / 1e9:.1f} GB" if hello.get("memory_bytes") else "?",
            f"{each.rate('num_rows'):,.1f}",
            "off" if hello.get("cache_fault") else f"{each.rate('num_cache_hits'):,.1f}",
            f"{hello['busy']['num_bad']:,.0f}",
        )
    return found


def stages(seen: list[Seen]) -> Table:
    """How busy each stage is."""
    found = Table(title="busy in threads", title_justify="left")
    found.add_column("node", overflow="fold", min_width=12)
    for title in (*STAGES, "MB/s read"):
        found.add_column(title, justify="right", no_wrap=True)
    for each in seen:
        if not each.fault:
            found.add_row(each.address, *(f"{each.rate(f'{stage}_s'):.2f}" for stage in STAGES),
                          f"{each.rate('read_bytes') / 1e6:,.1f}")  # fmt: skip
    return found


def prefixes(seen: list[Seen]) -> Table:
    """What each node runs; `reasons` tell why that way."""
    found = Table(title="prefixes in use", title_justify="left")
    for title in ("node", "prefix", "gives", "precision", "engine", "threads × rows"):
        found.add_column(title, overflow="fold", min_width={"node": 10, "prefix": 8}.get(title))
    for each in seen:
        for prefix in each.hello.get("prefixes", ()):
            gives = "everything" if prefix["outputs"] is None else ", ".join(prefix["outputs"])
            found.add_row(each.address, escape(prefix["digest"][:8]), escape(gives), escape(prefix["precision"]),
                          escape(prefix["engine"]), f"{prefix['threads']} × {prefix['batch']}")  # fmt: skip
    return found


def reasons(seen: list[Seen]) -> list[Text]:
    """Why each prefix runs as it does: a sentence each, over the whole width."""
    return [Text(f"{prefix['digest'][:8]} on {each.address}: {prefix['why']}", style="dim")
            for each in seen for prefix in each.hello.get("prefixes", ())]  # fmt: skip


def jobs(seen: list[Seen]) -> Table:
    """Who shares a node's memory, and what each may run at once."""
    found = Table(title="jobs in a node's memory", title_justify="left")
    for title in ("node", "job"):
        found.add_column(title, overflow="fold")
    for title in ("rows at once", "rows held", "MB of rows", "of the node's memory"):
        found.add_column(title, justify="right", no_wrap=True)
    for each in seen:
        memory = each.hello.get("memory") or {}
        budget = memory.get("budget_bytes")
        told = "not watched" if budget is None else f"{memory['used_bytes'] / 1e9:.2f} of {budget / 1e9:.2f} GB"
        for share in memory.get("tenants", ()):
            found.add_row(each.address, escape(share["tenant"]), f"{share['group_rows']}", f"{share['held_rows']}",
                          f"{share['row_bytes'] / 1e6:.2f}", told)  # fmt: skip
        if memory.get("num_waiting"):
            found.add_row(each.address, f"{memory['num_waiting']} requests wait for memory", "", "", "", told)
    return found

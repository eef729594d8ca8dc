"""`headwater top`: what the page shows of nodes, in a terminal."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headwater.cli.needs import addresses_of
from headwater.cli.watching import Watched
from headwater.errors import ConfigError
from headwater.train.access import Access

FIRST_WITHIN_S = 8.0
MAX_FAULTS = 6
_OF_NODES = ("rows/s", "sent/s", "from cache", "CPU", "memory", "cache")


def top(
    addresses: list[str] = typer.Argument(
        help="Addresses of nodes, such as grpc+tls://store-1:8815, or of a fleet, such as ray://photos."
    ),
    every: float = typer.Option(2.0, min=0.5, help="Seconds between looks."),
    once: bool = typer.Option(False, "--once", help="Look once, show it, and end."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: one line a look, with what the page gets."),
) -> None:
    """Watch nodes: rows a second, what limits, who takes what, the cache, and faults as they happen; Ctrl-C ends it.

    Where this is no terminal, one line a node and look is printed. With --once it ends with exit code 1 if a node does
    not answer. Token and certificates are taken from HEADWATER_TOKEN, HEADWATER_TLS_CA, HEADWATER_TLS_CERT and
    HEADWATER_TLS_KEY.
    """
    if wrong := [each for each in addresses if "://" not in each]:
        raise ConfigError(f"a node's address looks like grpc://host:8815 or grpc+tls://host:8815, not {wrong[0]!r}; "
                          "`headwater ui` shows the files of a run")  # fmt: skip
    console = Console()
    watched = Watched(addresses_of(addresses), Access.of(), every_s=min(every, 1.0))
    try:
        watched.found(within_s=FIRST_WITHIN_S, num_looks=2)  # a rate takes two
        if once:
            said = watched.to_json()
            print(json.dumps(said)) if as_json else console.print(screen(said))
            if any(each["fault"] for each in said["nodes"]):
                raise typer.Exit(1)
        elif as_json or not console.is_terminal:
            while True:
                said = watched.to_json()
                print(json.dumps(said) if as_json else "\n".join(map(line, said["nodes"])), flush=True)
                time.sleep(every)
        else:
            with Live(screen(watched.to_json()), console=console, auto_refresh=False, screen=True) as live:
                while True:
                    live.update(screen(watched.to_json()), refresh=True)
                    time.sleep(every)
    finally:
        watched.close()


def line(node: dict[str, Any]) -> str:
    """A node, for a log."""
    start = f"{datetime.now():%H:%M:%S} {node['name']}"
    if node["fault"]:
        return f"{start} FAULT {node['fault']}"
    rates = node["per_s"]
    stages = " ".join(f"{each['name']} {_rate(each['busy'])}" for each in node["stages"])
    return (f"{start} {_rate(rates['rows_sent'])} rows/s {_bytes(rates['row_bytes_sent'])}/s; busy threads: {stages}; "
            f"{len(node['tenants'])} tenants; {_limit(node)}")  # fmt: skip


def screen(said: dict[str, Any]) -> Group:
    """All of it."""
    nodes = [each for each in said["nodes"] if not each["fault"]]
    shown: list[Table | Text] = [_nodes(nodes), *map(_stages, nodes)] if nodes else []
    whole = said["together"] or (nodes[0] if nodes else None)
    if whole is not None:
        if whole["tenants"]:
            shown.append(_tenants(whole["tenants"]))
        shown += [_fault(each) for each in whole["faults"][:MAX_FAULTS]]
    shown += [Text(f"{each['name']}: {each['fault']}", style="red") for each in said["nodes"] if each["fault"]]
    return Group(*shown)


def _nodes(nodes: list[dict[str, Any]]) -> Table:
    found = _table("nodes", ("node",), _OF_NODES)
    for each in nodes:
        rates, cache = each["per_s"], each["cache"]
        name = each["name"] + (" (being stopped)" if each["draining"] else "")
        found.add_row(
            Text(name),
            Text(_rate(rates["rows_sent"]), style="bold"),
            _bytes(rates["row_bytes_sent"]),
            "–" if cache["hit_share"] is None else f"{100 * cache['hit_share']:.0f} %",
            f"{_rate(rates['cpu_s'])} of {each['cores']:g}",
            _bytes(each["memory"]["resident_bytes"]),
            _bytes(cache["bytes"]) if cache["is_on"] else "off",
        )
    return found


def _stages(node: dict[str, Any]) -> Text:
    """How many threads each stage keeps busy, the one that limits lit."""
    said = Text.assemble((f"{node['name']}: ", "bold"))
    for stage in node["stages"]:
        said.append(
            f"{stage['name']} {_rate(stage['busy'])}  ", "bold yellow" if node["limit"]["on"] == stage["name"] else ""
        )
    return said.append(f"threads; {_limit(node)}")


def _tenants(tenants: list[dict[str, Any]]) -> Table:
    found = _table("tenants", ("tenant",), ("rows/s", "sent/s", "rows", "batch", "memory", "open", "faults"))
    for each in tenants:
        found.add_row(
            Text(each["name"]),
            _rate(each["rows_per_s"]),
            _bytes(each["bytes_per_s"]),
            f"{each['rows']:,.0f}",
            f"{each['batch']:,.0f}" if each["batch"] else "–",
            _bytes(each["memory_bytes"]) if each["memory_bytes"] else "–",
            f"{each['under_way']:,.0f}",
            Text(f"{each['errors']:,.0f}", style="red" if each["errors"] else ""),
        )
    return found


def _fault(each: dict[str, Any]) -> Text:
    times = f" × {each['times']}" if each["times"] > 1 else ""
    return Text.assemble(f"{datetime.fromtimestamp(each['at_s']):%H:%M:%S} ", (f"{each['kind']}{times}", "red"),
                         f" {each['tenant']}: {each['said']}")  # fmt: skip


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    found = Table(title=title, title_justify="left")
    for name in left:
        found.add_column(name, overflow="fold")
    for name in right:
        found.add_column(name, justify="right", no_wrap=True)
    return found


def _limit(node: dict[str, Any]) -> str:
    return str(node["limit"]["said"])


def _rate(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:,.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError

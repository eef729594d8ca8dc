"""`headwater doctor`: is everything there that a node or a trainer needs, and what to do where it is not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.cli.checks import NOTE, OK, WRONG, Finding, machine, network, packages, store
from headwater.core.plain import plain
from headwater.train.access import Access
from headwater.version import VERSION

_LOOKS = {OK: ("ok", "green"), NOTE: ("note", "yellow"), WRONG: ("wrong", "bold red")}


def doctor(
    nodes: list[str] = typer.Argument(None, help="Nodes to try, such as grpc+tls://store-1:8815."),
    urls: list[str] = typer.Option([], "--store", help="A store to list and read one object of; again for more."),
    seconds: float = typer.Option(0.5, min=0.05, help="How long each direction of a node's link is measured."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Check this installation, this machine, and the nodes and stores that are named; say what to do about each fault.

    Ends with exit code 1 if something is wrong; notes are worth knowing, no more. Nothing is changed. Token and
    certificates are taken from HEADWATER_TOKEN, HEADWATER_TLS_CA, HEADWATER_TLS_CERT and HEADWATER_TLS_KEY.
    """
    console = Console(stderr=as_json)
    found = []
    with console.status("looking") as status:
        for finding in _all(nodes or [], urls, seconds):
            found.append(finding)
            status.update(f"{finding.part}: {finding.what}")
    num_wrong = sum(each.verdict == WRONG for each in found)
    if as_json:
        print(json.dumps({"headwater": VERSION, "wrong": num_wrong, "findings": [each.to_json() for each in found]}))
    else:
        show(found, console)
    if num_wrong:
        raise typer.Exit(1)


def _all(nodes: list[str], urls: list[str], seconds: float) -> Iterator[Finding]:
    yield from packages.check()
    yield from machine.check()
    access = Access.of() if nodes else Access()
    for address in dict.fromkeys(nodes):
        yield from network.check(address, access, seconds)
    for url in dict.fromkeys(urls):
        yield from store.check(url)


def show(found: list[Finding], console: Console) -> None:
    """A table a part, then what to do."""
    for part in dict.fromkeys(each.part for each in found):
        table = Table(title=part, title_justify="left", box=None, show_header=False, padding=(0, 2, 0, 0))
        for each in found:
            if each.part == part:
                text, style = _LOOKS[each.verdict]
                table.add_row(Text(text, style), Text(each.what), Text(plain(each.said)))
        console.print(table)
    todo = [each for each in found if each.do and each.verdict != OK]
    for each in sorted(todo, key=lambda one: one.verdict == WRONG):  # what is wrong is read last
        console.print(
            Text.assemble((f"{each.what} ({each.part}): ", _LOOKS[each.verdict][1]), plain(each.do)), soft_wrap=True
        )
    num_wrong = sum(each.verdict == WRONG for each in found)
    console.print("everything that is needed is there" if not num_wrong else f"{num_wrong} wrong", style="bold")

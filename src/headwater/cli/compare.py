"""`headwater compare a b`: two traces, or two simulated outcomes, side by side."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table


def compare(
    first: Path = typer.Argument(help="A trace (`train --trace`, `simulate --trace`) or an outcome (`simulate -o`)."),
    second: Path = typer.Argument(help="Another one of the same kind."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Compare two runs, live or simulated: how long, where the time went, what crossed the links."""
    from headwater.sim.comparing import compare as compared

    lines = compared(first, second)
    if as_json:
        print(json.dumps([{**asdict(line), "ratio": line.ratio} for line in lines]))
        return
    table = Table(title=f"{first.name} and {second.name}", title_justify="left")
    for title in ("", first.name, second.name, "second ÷ first"):
        table.add_column(title, justify="right" if title else "left")
    for line in lines:
        table.add_row(line.what, *("" if each is None else f"{each:,.4g}" for each in
                                   (line.first, line.second, line.ratio)))  # fmt: skip
    Console().print(table)

"""`headwater down`: a fleet that `headwater up` has started is taken away."""

from __future__ import annotations

import typer
from rich.console import Console

from headwater.data.cluster import Cluster
from headwater.errors import ConfigError
from headwater.fleet.up import down as take_away


def down(
    ray: str = typer.Option("", help="The Ray cluster, as for `headwater up`: the address of its head, or auto."),
    name: str = typer.Option("nodes", help="What the fleet is called."),
) -> None:
    """Take a fleet away: its nodes take nothing new, finish what is under way, and go.

    Trainers that still use them wait as long as their patience_s, and then stop with an error that says so.
    """
    if not ray:
        raise ConfigError("say on which cluster: --ray auto, or --ray ADDRESS of its head")
    console = Console()
    with console.status("looking for the cluster") as status:
        cluster = Cluster(ray)
        try:
            count = take_away(cluster, name, status.update)
        finally:
            cluster.close()
    console.print(f"{name} is gone, with its {count} node{'s' if count != 1 else ''}", highlight=False)

"""`headwater up`: a fleet of nodes on an engine that places, restarts and scales them."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from headwater.core.amount import num_bytes
from headwater.core.fleet import MOST_NODES, Scaling
from headwater.data.cluster import Cluster
from headwater.data.secrets import redact
from headwater.data.store import full_url
from headwater.errors import ConfigError
from headwater.fleet.member import NodeOptions
from headwater.fleet.up import up as start_fleet
from headwater.node.serve import DRAIN_S


def up(
    roots: list[str] = typer.Argument(help="Folders or buckets to serve, as the storage machines name them."),
    ray: str = typer.Option(
        "",
        help="The Ray cluster: the address of its head, such as 10.0.0.5:6379, or auto: RAY_ADDRESS, or the cluster "
        "that this machine is part of.",
    ),
    name: str = typer.Option("nodes", help="What the fleet is called; trainers name it as ray://NAME."),
    least: int = typer.Option(1, "--min", min=1, max=MOST_NODES, help="The least number of nodes."),
    most: int = typer.Option(
        0, "--max", min=0, max=MOST_NODES, help="The most nodes, where chunks wait for them; 0: as many as --min."
    ),
    port: int = typer.Option(0, min=0, max=65535, help="Port that nodes listen on; 0 takes a free one."),
    tokens: Path = typer.Option(None, help="The tokens file, under this path on each storage machine."),
    tls_cert: Path = typer.Option(None, help="Speak TLS: the certificate, in PEM, on each storage machine."),
    tls_key: Path = typer.Option(None, help="The certificate's key, in PEM, on each storage machine."),
    tls_client_ca: Path = typer.Option(
        None, help="Mutual TLS: let in only clients with a certificate of this authority, on each storage machine."
    ),
    insecure: bool = typer.Option(
        False, "--insecure", help="Allow addresses that others reach without tokens or without TLS."
    ),
    threads: int = typer.Option(0, min=0, help="Threads of a node that decode and infer; 0 takes one for each core."),
    state: Path = typer.Option(None, help="Folder for uploaded prefixes; by default in the user's cache folder."),
    cache_size: str = typer.Option("", help="How much of its disk a node's kept rows may take, such as 50GB; 0: none."),
    cache_dir: Path = typer.Option(None, help="Folder for kept rows; by default `rows` in the state folder."),
    max_upload: str = typer.Option("2GB", help="Largest prefix that may be uploaded."),
    memory: str = typer.Option("", help="How much memory a node may take, such as 2GB."),
    drain_s: float = typer.Option(DRAIN_S, min=0.0, help="Seconds that requests get when a node is taken away."),
) -> None:
    """Start a fleet of nodes on a Ray cluster; Ray places them, restarts them, and there are as many as are needed.

    Nodes run on machines where Ray was started with --resources='{"storage": 1}': one on each, or as many as that says.
    The command ends once the least number of nodes answers; the fleet stays until `headwater down`. Again with other
    --min and --max, it changes these. Credentials for s3:// are those of the environment in which Ray was started
    there.
    """
    if not ray:
        raise ConfigError("say on which cluster: --ray auto, or --ray ADDRESS of its head; without a cluster, "
                          "`headwater serve` starts one node")  # fmt: skip
    if (tls_cert is None) != (tls_key is None) or (tls_client_ca is not None and tls_cert is None):
        raise ConfigError("TLS takes --tls-cert and --tls-key together, and --tls-client-ca only with them")
    if most and most < least:
        raise ConfigError(f"--max is {most}, and --min is {least}; give at least as many, or leave it out")
    options = NodeOptions(
        tuple(full_url(each) for each in roots),
        port=port,
        tokens=_there(tokens),
        tls_cert=_there(tls_cert),
        tls_key=_there(tls_key),
        tls_client_ca=_there(tls_client_ca),
        insecure=insecure,
        threads=threads,
        state=_there(state),
        cache_dir=_there(cache_dir),
        cache_bytes=num_bytes(cache_size, "--cache-size") if cache_size else None,
        max_upload_bytes=num_bytes(max_upload, "--max-upload"),
        memory_bytes=num_bytes(memory, "--memory") if memory else None,
        drain_s=drain_s,
    )
    console = Console()
    with console.status("looking for the cluster") as status:
        cluster = Cluster(ray)
        try:
            found = start_fleet(cluster, name, options, Scaling(least, most or least), status.update)
        finally:
            cluster.close()
    count = f"{least}" if most in (0, least) else f"{least} to {most}"
    console.print(f"{name} serves {', '.join(redact(each) for each in options.roots)} with {count} "
                  f"node{'s' if (most or least) > 1 else ''}; {len(found)} answer{'s' if len(found) == 1 else ''}:",
                  highlight=False, soft_wrap=True)  # fmt: skip
    for address in found:
        console.print(f"  {address}", highlight=False)
    console.print(f'trainers: nodes="ray://{name}"; `headwater down --ray {ray} --name {name}` takes them away',
                  style="dim", highlight=False, soft_wrap=True)  # fmt: skip


def _there(path: Path | None) -> str:
    """A path of the storage machines: what it is there can't be seen from here."""
    if path is None:
        return ""
    if not path.is_absolute():
        raise ConfigError(f"{path} is a path of the storage machines, and must be absolute")
    return str(path)

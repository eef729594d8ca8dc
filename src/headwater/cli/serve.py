"""`headwater serve`: a storage node beside the data."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import typer
from rich.console import Console

from headwater.core.amount import num_bytes
from headwater.data.store import open_store
from headwater.errors import ConfigError
from headwater.node.serve import serve as run_node
from headwater.node.service import Node

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def serve(
    roots: list[str] = typer.Argument(help="Folders or buckets to serve: a path, file://, s3://, gs:// or az:// URL."),
    listen: str = typer.Option("127.0.0.1:8815", help="Address and port to listen on; port 0 takes a free one."),
    open_to_all: bool = typer.Option(
        False, "--open", help="Allow an address other than loopback. Anyone who can reach it can read the roots."
    ),
    threads: int = typer.Option(0, min=0, help="Threads that decode and infer; 0 takes one for each core."),
    state: Path = typer.Option(None, help="Folder for uploaded prefixes; by default in the user's cache folder."),
    max_upload: float = typer.Option(2.0, min=0.001, help="Largest prefix that may be uploaded, in GB."),
    cache_size: str = typer.Option(
        "",
        help="How much of the disk rows may take that are kept for later epochs, such as 50GB; 0 keeps none. By "
        "default 10GB, or half of what is free where that is less.",
    ),
    cache_dir: Path = typer.Option(None, help="Folder for kept rows; by default `rows` in the state folder."),
    memory: str = typer.Option(
        "", help="How much memory the node may take, such as 2GB; by default what the machine or its cgroup has."
    ),
    no_adaptation: bool = typer.Option(
        False,
        "--no-adaptation",
        help="Run every job with the node batch it asks for, whatever memory there is: for benchmarks, which show what "
        "happens then.",
    ),
) -> None:
    """Serve data to trainers: read, decode, augment, and run the frozen part of their models here.

    Trainers name this node as grpc://HOST:PORT. For s3:// the usual AWS_* environment variables apply.
    """
    host = listen.rpartition(":")[0]
    if not listen.rpartition(":")[2].isdigit():
        raise ConfigError(f"--listen is {listen!r}; it must look like 127.0.0.1:8815")
    if host not in _LOOPBACK and not open_to_all:
        raise ConfigError(f"{host} can be reached by others, who could then read {', '.join(roots)}; say --open if "
                          "that is meant, on a network where everyone may")  # fmt: skip
    memory_bytes = num_bytes(memory, "--memory") if memory else None
    cache_bytes = num_bytes(cache_size, "--cache-size") if cache_size else None
    for root in roots:
        open_store(root)  # a folder that is not there is found now, not by the first trainer
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")

    def kept(node: Node) -> str:
        cache = node.cache
        if cache is None or cache.why_off is not None:
            return "rows are not kept" + (f": {cache.why_off}" if cache is not None else "")
        said = cache.to_json()
        return f"rows are kept in {cache.folder}, at most {said['cache_budget_bytes'] / 1e9:.3g} GB"

    def shared(node: Node) -> str:
        found = node.hello()["memory"]["budget_bytes"]
        return (
            "memory is not watched (--no-adaptation)" if found is None else f"jobs share {found / 1e9:.3g} GB of memory"
        )

    def announce(node: Node) -> None:
        console = Console()
        console.print(f"serving {', '.join(node.roots)} on grpc://{host}:{node.port} with {node.num_threads} threads")
        console.print(f"{shared(node)}; {kept(node)}; Ctrl-C stops it", style="dim")
        sys.stdout.flush()

    run_node(
        tuple(roots),
        listen=f"grpc://{listen}",
        state=state,
        num_threads=threads or None,
        max_upload_bytes=int(max_upload * 1e9),
        cache_bytes=cache_bytes,
        cache_folder=cache_dir,
        max_memory_bytes=memory_bytes,
        adapt=not no_adaptation,
        announce=announce,
    )
    sys.stdout.flush()
    os._exit(0)  # gRPC threads that still hold a dead stream must not keep the process

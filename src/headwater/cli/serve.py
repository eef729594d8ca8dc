"""`headwater serve`: a storage node beside the data."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import typer
from rich.console import Console

from headwater.core.access import check_exposed
from headwater.core.amount import num_bytes
from headwater.data.secrets import keep_out_of_logs, redact
from headwater.data.store import open_store
from headwater.errors import ConfigError
from headwater.node.logs import set_up_logs
from headwater.node.serve import DRAIN_S
from headwater.node.serve import serve as run_node
from headwater.node.service import Node
from headwater.node.tls import Tls
from headwater.reduce.named import NamedAggregator

LEAST_UPLOAD_BYTES = 10**6  # less is a unit that was forgotten

log = logging.getLogger(__name__)


def serve(
    roots: list[str] = typer.Argument(help="Folders or buckets to serve: a path, file://, s3://, gs:// or az:// URL."),
    listen: str = typer.Option("127.0.0.1:8815", help="Address and port to listen on; port 0 takes a free one."),
    tokens: Path = typer.Option(
        None,
        help="The tokens file (see `headwater token`): who may call, what each may read and take. Without it everyone "
        "who reaches the address may do everything.",
    ),
    tls_cert: Path = typer.Option(None, help="Speak TLS: this node's certificate, in PEM, with its chain."),
    tls_key: Path = typer.Option(None, help="The certificate's key, in PEM."),
    tls_client_ca: Path = typer.Option(
        None, help="Mutual TLS: let in only clients with a certificate of this authority, in PEM."
    ),
    insecure: bool = typer.Option(
        False, "--insecure", help="Allow an address other than loopback without tokens or without TLS, with a warning."
    ),
    threads: int = typer.Option(0, min=0, help="Threads that decode and infer; 0 takes one for each core."),
    state: Path = typer.Option(None, help="Folder for uploaded prefixes; by default in the user's cache folder."),
    max_upload: str = typer.Option("2GB", help="Largest prefix that may be uploaded."),
    cache_size: str = typer.Option(
        "",
        help="How much of the disk rows may take that are kept for later epochs, such as 50GB; 0 keeps none. By "
        "default 10GB, or half of what is free where that is less.",
    ),
    cache_dir: Path = typer.Option(None, help="Folder for kept rows; by default `rows` in the state folder."),
    http: str = typer.Option(
        "",
        help="Address and port for a page to look at, /metrics, /healthz and /readyz, such as 127.0.0.1:9815; without "
        "it there are none.",
    ),
    log_format: str = typer.Option("text", help="text for people, or json: one object a line, on standard error."),
    log_level: str = typer.Option("info", help="What is logged: debug, info, warning or error, and what is worse."),
    drain_s: float = typer.Option(
        DRAIN_S, min=0.0, help="Seconds that requests under way get on SIGTERM or Ctrl-C; a second signal ends at once."
    ),
    memory: str = typer.Option(
        "", help="How much memory the node may take, such as 2GB; by default what the machine or its cgroup has."
    ),
    hand_over: Path = typer.Option(
        None,
        help="A folder that trainers see, too (the same machine, or a shared file system): pixels are left there for "
        "them instead of crossing the wire.",
    ),
    tables: Path = typer.Option(
        None, help="A folder for embedding tables (docs/embedding.md); without it, the node keeps none."
    ),
    table_size: str = typer.Option(
        "", help="How much of the disk tables may take, such as 50GB; by default half of what is free there."
    ),
    table_memory: str = typer.Option(
        "", help="Memory for the vectors of tables that are used most; by default an eighth of what the node may take."
    ),
    reduce: str = typer.Option(
        "",
        help="HOST:PORT of an aggregator (`headwater reduce`) on which nodes that train a model's first layers may add "
        "their gradients up, if the trainer asks for it (docs/partition.md).",
    ),
    reduce_key_file: Path = typer.Option(
        None, help="With --reduce: the file with its key; by default the key is in HEADWATER_REDUCE_KEY."
    ),
    no_adaptation: bool = typer.Option(
        False,
        "--no-adaptation",
        help="Run every job with the node batch it asks for, whatever memory there is: for benchmarks, which show what "
        "happens then.",
    ),
) -> None:
    """Serve data to trainers: read, decode, augment, and run the frozen part of their models here.

    Trainers name this node as grpc://HOST:PORT, or grpc+tls://HOST:PORT with --tls-cert. For s3:// the usual AWS_*
    environment variables apply. On an address that others reach, a node needs --tokens, --tls-cert and --tls-key.
    """
    set_up_logs(log_format, log_level)
    host = listen.rpartition(":")[0]
    if not listen.rpartition(":")[2].isdigit():
        raise ConfigError(f"--listen is {listen!r}; it must look like 127.0.0.1:8815")
    if (tls_cert is None) != (tls_key is None) or (tls_client_ca is not None and tls_cert is None):
        raise ConfigError("TLS takes --tls-cert and --tls-key together, and --tls-client-ca only with them")
    tls = None if tls_cert is None else Tls(tls_cert, tls_key, tls_client_ca)
    if tls is not None:
        tls.server_options()  # files that can't be read are found now
    open_without = check_exposed(host, tokens is not None, tls is not None, insecure, roots)
    memory_bytes = num_bytes(memory, "--memory") if memory else None
    max_upload_bytes = num_bytes(max_upload, "--max-upload")
    if max_upload_bytes < LEAST_UPLOAD_BYTES:
        raise ConfigError(f"--max-upload {max_upload} is {max_upload_bytes:,} bytes, and hardly a model is so small; "
                          "give at least 1MB, such as 2GB")  # fmt: skip
    cache_bytes = num_bytes(cache_size, "--cache-size") if cache_size else None
    for root in roots:
        open_store(root)  # a folder that is not there is found now, not by the first trainer
    if reduce_key_file is not None and not reduce:
        raise ConfigError("--reduce-key-file is the key for an aggregator; name it with --reduce HOST:PORT")
    aggregator = NamedAggregator(reduce, reduce_key_file) if reduce else None
    keep_out_of_logs()
    if open_without:
        log.warning("INSECURE: %s has no %s; everyone who can reach it %s", host, " and no ".join(open_without),
                    "may read what it serves" if tokens is None else "can read tokens on their way")  # fmt: skip
    scheme = "grpc" if tls is None else "grpc+tls"

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
        pages = f"http://{http.rpartition(':')[0]}:{node.http_port}/metrics" if node.http_port else ""
        if log_format == "json":  # then everything that a node says is JSON
            log.info("serving %s", ", ".join(map(redact, node.roots)), extra={"fields": {
                "address": f"{scheme}://{host}:{node.port}", "threads": node.num_threads, "kept": kept(node),
                **({"metrics": pages} if pages else {})}})  # fmt: skip
            return
        console = Console()
        console.print(f"serving {', '.join(map(redact, node.roots))} on {scheme}://{host}:{node.port} with "
                      f"{node.num_threads} threads")  # fmt: skip
        if pages:
            console.print(f"metrics are at {pages}, a page at {pages.removesuffix('metrics')}", style="dim")
        console.print(f"{shared(node)}; {kept(node)}; Ctrl-C stops it", style="dim")
        sys.stdout.flush()

    run_node(
        tuple(roots),
        listen=f"{scheme}://{listen}",
        tokens=tokens,
        tls=tls,
        state=state,
        num_threads=threads or None,
        max_upload_bytes=max_upload_bytes,
        cache_bytes=cache_bytes,
        cache_folder=cache_dir,
        drain_s=drain_s,
        http=http,
        max_memory_bytes=memory_bytes,
        adapt=not no_adaptation,
        hand_over=hand_over,
        tables=tables,
        table_bytes=num_bytes(table_size, "--table-size") if table_size else None,
        table_memory_bytes=num_bytes(table_memory, "--table-memory") if table_memory else None,
        aggregator=aggregator,
        announce=announce,
    )
    sys.stdout.flush()
    os._exit(0)  # gRPC threads that still hold a dead stream must not keep the process

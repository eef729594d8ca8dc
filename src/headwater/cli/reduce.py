"""`headwater reduce`: an aggregator that adds up gradients in the network."""

from __future__ import annotations

import logging
from pathlib import Path

import typer

from headwater.core.access import is_loopback
from headwater.core.amount import num_bytes
from headwater.data.secrets import keep_out_of_logs
from headwater.errors import ConfigError
from headwater.node.logs import set_up_logs
from headwater.reduce.aggregator import Aggregator
from headwater.reduce.control import address, read_keys
from headwater.reduce.packets import DEFAULT_PIECE_BYTES, HEADER_BYTES
from headwater.reduce.serve import serve

_UNDERWAY_BYTES = 48  # of IPv6 and UDP, the longer of the two
_MTU = (576, 65_000)

log = logging.getLogger(__name__)


def reduce(
    listen: str = typer.Option("127.0.0.1:8816", help="Address and port, both TCP and UDP; port 0 takes a free one."),
    workers: int = typer.Option(0, min=0, help="How many workers each job has; 0 takes what the job says."),
    key_file: Path = typer.Option(
        None,
        help="Who may join: jobs that know a key in this file, one a line. A file that is not there is made, with a "
        "new key. Without it everyone who reaches the address may join.",
    ),
    root: str = typer.Option(
        "", help="Make this a leaf, for one rack: its sums go on to the aggregator at this HOST:PORT."
    ),
    place: str = typer.Option("0/1", help="With --root: which leaf this is, and how many there are, such as 0/4."),
    window: str = typer.Option(
        "",
        help="How much of each worker's data may be under way, by default 1MiB over TCP and 512KiB over "
        "UDP; more fills longer and faster links.",
    ),
    memory: str = typer.Option("1GiB", help="How much memory the slots of all jobs may take."),
    mtu: int = typer.Option(
        0, min=0, help="Largest packet of the network between workers and here, in bytes; 0 fits 1450 and more."
    ),
    insecure: bool = typer.Option(
        False, "--insecure", help="Allow an address other than loopback without a key file, with a warning."
    ),
    log_format: str = typer.Option("text", help="text for people, or json: one object a line, on standard error."),
    log_level: str = typer.Option("info", help="What is logged: debug, info, warning or error, and what is worse."),
) -> None:
    """Add up the gradients of data-parallel workers: each sends its own once, and gets the sum back.

    In the training script, one line behind DistributedDataParallel: hw.reduce.attach(model, switch="HOST:PORT"). One
    aggregator serves several jobs at once, each with a name and a key. When it is stopped, jobs go on with the ordinary
    all-reduce, and use it again once it is back.
    """
    set_up_logs(log_format, log_level)
    where = address(listen, "--listen")
    keys = read_keys(key_file) if key_file is not None else []
    if not keys and not is_loopback(where[0]):
        if not insecure:
            raise ConfigError(f"{where[0]} can be reached by others, and there is no key to keep them out; give "
                              "--key-file FILE (it is made if it is not there), or say --insecure on a network where "
                              "everyone may take part in every job")  # fmt: skip
        log.warning("INSECURE: %s has no key; everyone who can reach it may join jobs", where[0])
    piece_bytes = DEFAULT_PIECE_BYTES
    if mtu:
        if not _MTU[0] <= mtu <= _MTU[1]:
            raise ConfigError(f"--mtu is {mtu}; it must be from {_MTU[0]} to {_MTU[1]}, such as 1500 or 9000")
        piece_bytes = (mtu - _UNDERWAY_BYTES - HEADER_BYTES) // 8 * 8
    aggregator = Aggregator(
        where,
        num_workers=workers,
        keys=keys,
        window_bytes=num_bytes(window, "--window") if window else None,
        max_memory_bytes=num_bytes(memory, "--memory"),
        piece_bytes=piece_bytes,
        root=address(root, "--root") if root else None,
        place=_place(place),
    )
    keep_out_of_logs()

    def announce(made: Aggregator) -> None:
        who = f"{len(keys)} keys" if keys else "no key: everyone who reaches it may join"
        above = f", a leaf of {root}" if root else ""
        log.info("adding up on %s:%d%s; %s", where[0], made.port, above, who, extra={"fields": {
            "address": f"{where[0]}:{made.port}", "workers": workers or "any"}})  # fmt: skip

    serve(aggregator, announce)
    log.info("stopped", extra={"fields": {"added_up_mb": round(aggregator.num_bytes / 1e6, 1),
                                          **{f"dropped_{name.replace(' ', '_')}": count
                                             for name, count in aggregator.all_counts().items()}}})  # fmt: skip


def _place(text: str) -> tuple[int, int]:
    rank, _, leaves = text.partition("/")
    if not rank.isdigit() or not leaves.isdigit() or int(rank) >= int(leaves):
        raise ConfigError(f"--place is {text!r}; it must look like 0/4: the first of four leaves")
    return int(rank), int(leaves)

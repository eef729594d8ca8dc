"""`headwater token`: a token for a tenant, and the entry of the tokens file that lets it in."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import typer

from headwater.core.access import entry_text, token_digest
from headwater.core.redact import TOKEN_START
from headwater.errors import ConfigError


def token(
    tenant: str = typer.Argument(help="Who it is for: a name for the logs; tokens of one tenant share its quotas."),
    root: list[str] = typer.Option(
        [], help="What it may read, below what the node serves; give it again for more. Without it, everything."
    ),
    days: int = typer.Option(0, min=0, max=36500, help="How many days it is good for; 0: until it is taken out."),
    max_chunks: int = typer.Option(0, min=0, help="Chunks worked on at once; further ones wait. 0: no limit."),
    max_upload: str = typer.Option("", help="Largest prefix it may upload, such as 500MB."),
    max_prefixes: str = typer.Option("", help="What its prefixes may take on the node's disk, such as 2GB."),
    max_tables: str = typer.Option("", help="What its embedding tables may come to on the node's disk, such as 20GB."),
    rows_per_second: int = typer.Option(0, min=0, help="Rows a second; faster ones wait. 0: no limit."),
    weight: float = typer.Option(
        0.0,
        min=0.0,
        help="What each of its jobs gets of a node's time and memory against others; 0: as much (1).",
    ),
    operator: bool = typer.Option(
        False, "--operator", help="For whoever runs the node: `headwater ui` and `top` show what all tenants do."
    ),
    to: Path = typer.Option(None, help="Add the entry to this tokens file; then only the token is printed."),
) -> None:
    """Make a token. It is shown once: nodes know its sha256 alone.

    Without --to, the entry goes to standard output and the token to standard error:
    `headwater token vision-team >> tokens.toml`. A node notices a changed file by itself.
    """
    made = TOKEN_START + secrets.token_urlsafe(32)
    expires: date | None = datetime.now(UTC).date() + timedelta(days=days) if days else None
    entry = entry_text(tenant, token_digest(made), {
        "roots": [each if "://" in each else str(Path(each).expanduser().absolute()) for each in root],
        "expires": expires, "max_chunks": max_chunks, "max_upload": max_upload, "max_prefixes": max_prefixes,
        "max_tables": max_tables, "rows_per_second": rows_per_second, "weight": weight, "operator": operator,
    })  # fmt: skip
    if to is not None:
        _add(to, entry)
        print(made)
        return
    print(entry, end="")
    sys.stdout.flush()
    print(f"the token of {tenant}, shown this once:\n{made}", file=sys.stderr)


def _add(path: Path, entry: str) -> None:
    """Whole or not at all: a node may look at the file at any moment."""
    try:
        before = path.read_text() if path.exists() else ""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(before + ("\n" if before else "") + entry)
            os.chmod(name, path.stat().st_mode & 0o777 if before else 0o644)  # hashes are no secrets
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the tokens file {path} can't be written: {error}") from None

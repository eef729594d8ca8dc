"""The command line: verbs over files. One file a verb; this one only joins them and turns errors into plain lines."""

from __future__ import annotations

import sys
from typing import Any

import typer

from headwater.cli.compare import compare
from headwater.cli.cuts import cuts
from headwater.cli.doctor import doctor
from headwater.cli.down import down
from headwater.cli.nodes import nodes
from headwater.cli.pack import pack
from headwater.cli.plan import plan
from headwater.cli.profile import profile
from headwater.cli.reduce import reduce
from headwater.cli.serve import serve
from headwater.cli.simulate import simulate
from headwater.cli.token import token
from headwater.cli.top import top
from headwater.cli.train import train
from headwater.cli.ui import ui
from headwater.cli.up import up
from headwater.data.secrets import keep_out_of_logs, redact
from headwater.errors import HeadwaterError
from headwater.version import VERSION

typer_app = typer.Typer(
    name="headwater",
    help="Run the part of training that shrinks data where the data lives.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@typer_app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


typer_app.command()(serve)
typer_app.command()(up)
typer_app.command()(down)
typer_app.command()(token)
typer_app.command()(train)
typer_app.command()(cuts)
typer_app.command()(profile)
typer_app.command()(plan)
typer_app.command()(nodes)
typer_app.command()(top)
typer_app.command()(ui)
typer_app.command()(pack)
typer_app.command()(doctor)
typer_app.command()(reduce)
typer_app.command()(simulate)
typer_app.command()(compare)


def app(*args: Any, **kwargs: Any) -> None:
    """The `headwater` command. An error that is ours is a message, not a traceback."""
    keep_out_of_logs()
    try:
        typer_app(*args, **kwargs)
    except HeadwaterError as error:
        print(f"{type(error).__name__}: {redact(str(error))}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    app()

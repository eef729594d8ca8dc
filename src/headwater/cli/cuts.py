"""`headwater cuts MODEL`: where a model can be split, and what would cross there."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.models import SPELLING, build_model
from headwater.cli.needs import needs_torch
from headwater.errors import ConfigError
from headwater.progress import Progress


def cuts(
    model: str = typer.Argument(help=f"The model: {SPELLING}."),
    until: str = typer.Option("", help="Freeze everything before this module; by default everything is frozen."),
    size: int = typer.Option(224, help="Height and width of the pictures."),
    all_cuts: bool = typer.Option(False, "--all", help="Also cuts inside modules, and those that are not legal."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """List the places where MODEL can be split, with the bytes of a row there against those of the input pixels."""
    needs_torch()
    import torch

    from headwater.core.cut import smallest_cut
    from headwater.model.capture import capture
    from headwater.model.cuts import cuts as find_cuts
    from headwater.model.freeze import freeze

    if size < 1:
        raise ConfigError(f"--size is {size}; it must be at least 1")
    progress = Progress()
    with progress.step(f"building {model}"):
        network = freeze(build_model(model).eval(), until or None)
    with progress.step("capturing it"):
        found = find_cuts(capture(network, (torch.zeros(2, 3, size, size),)))
    if as_json:
        print(json.dumps([{**vars(cut), "boundary": [spec.to_json() for spec in cut.boundary],
                           "row_bytes": cut.row_bytes} for cut in found]))  # fmt: skip
        return
    pixels = 3 * size * size
    best = smallest_cut(found, pixel_bytes=pixels)
    table = Table(title=f"cuts of {model} at {size}×{size}", title_justify="left", caption_justify="left",
                  caption=f"a picture's pixels as bytes: {pixels:,}; ★ fewest bytes")  # fmt: skip
    for title in ("index", "cut", "what crosses", "bytes a row", "of the pixels", "prefix parameters"):
        table.add_column(title, justify="left" if title in ("cut", "what crosses") else "right", overflow="fold")
    if all_cuts:
        table.add_column("why not")
    for cut in found:
        inside = "/" in cut.name
        if not all_cuts and (inside or not cut.legal) and cut is not best:
            continue
        star = " ★" if cut is best else ""
        crosses = ", ".join("×".join(map(str, spec.shape)) + ("" if spec.dtype == "float32" else f" {spec.dtype}")
                            for spec in cut.boundary)  # fmt: skip
        row = [str(cut.index), cut.name + star, crosses, f"{cut.row_bytes:,}", f"{cut.row_bytes / pixels:.1%}",
               f"{cut.prefix_params:,}"]  # fmt: skip
        table.add_row(*row, *([cut.why_not] if all_cuts else []), style=None if cut.legal else "dim")
    Console().print(table)

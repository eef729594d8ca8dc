"""`headwater profile job.toml`: what every stage of the job costs on each side, measured; and the profile as a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.jobfile import read_job
from headwater.cli.meaning import model_of, near_options
from headwater.cli.needs import check_folders, needs_torch

if TYPE_CHECKING:
    from headwater.core.cut import Cut
    from headwater.core.profile import Profile
    from headwater.train.job import Job


def profile(
    job: Path = typer.Argument(help="The job file, in TOML; docs/job-file.md tells its fields."),
    output: Path = typer.Option(None, "-o", "--output", help="Write the profile here, for a job file's plan.profile."),
    again: bool = typer.Option(False, help="Measure even if an earlier profile of the same things is kept."),
    as_json: bool = typer.Option(False, "--json", help="Print the profile as JSON instead of a table."),
) -> None:
    """Measure what every stage of the job costs on the nodes, on the links and here.

    Model, data, nodes and this machine are measured in one pass and the result is kept for the next time. Nothing is
    trained.
    """
    needs_torch()
    import headwater as hw

    check_folders(output)
    file = read_job(job)
    planned = ("cut", "plan", "profile", "prongs", "share")  # costs are the same whatever of them is to be used
    options = {name: value for name, value in near_options(file).items() if name not in planned}
    with hw.near(model_of(file), file.url(file.data.url), **options, measure_again=again) as found:
        assert found.measured is not None
        known = replace(found.measured.profile, cuts=found.measured.offered)  # so that it can be used without the model
        if output is not None:
            output.write_text(known.dumps())
        if as_json:
            print(known.dumps())
        else:
            show(found, Console())
            if output is not None:
                Console().print(f"written: {output}")


def show(job: Job, console: Console) -> None:
    """What was measured, in milliseconds of one core."""
    assert job.measured is not None
    known, rig = job.measured.profile, job.measured.rig
    node, trainer, sizes = known.node, known.trainer, known.sizes
    table = Table(title="measured, a picture (ms of one core)", title_justify="left")
    for title in ("stage", "on a node", "here"):
        table.add_column(title, justify="left" if title == "stage" else "right")
    reads = f"{1e3 * trainer.fetch_s:.2f}" if rig.trainer_reads else "no way to the store"
    table.add_row("read", f"{1e3 * node.read_s:.2f}", reads)
    table.add_row("decode and transform", f"{1e3 * node.decode_s:.2f}", f"{1e3 * trainer.decode_s:.2f}")
    table.add_row("to the model's floats", f"{1e3 * node.finish_s:.2f}", f"{1e3 * trainer.finish_s:.2f}")
    table.add_row("take a row from the wire", "", f"{1e3 * trainer.receive_s_per_row:.2f}")
    console.print(table)
    console.print(_cuts(known, job.measured.offered))
    for device, link in zip(rig.nodes, rig.links, strict=True):
        down, up = (f"{rate * 8e-6:,.1f}" for rate in (link.down_bytes_per_s, link.up_bytes_per_s))
        console.print(f"{device.name}: {device.cores:g} cores; link {down} Mbit/s from it, {up} to it, "
                      f"{1e3 * link.latency_s:.2f} ms one way", soft_wrap=True)  # fmt: skip
    if rig.store_link is not None:
        console.print(f"the store: {rig.store_link.down_bytes_per_s * 8e-6:,.1f} Mbit/s from it; a stored picture has "
                      f"{sizes.sample_bytes:,.0f} bytes")  # fmt: skip
    console.print(f"here: {rig.trainer.cores:g} cores")
    for precision, found in known.deviations.items():
        console.print(f"{precision}: {found}", soft_wrap=True)


def _cuts(known: Profile, cuts: tuple[Cut, ...]) -> Table:
    from headwater.core.codecs import CODECS, wire_row_bytes

    table = Table(title="every cut to choose from (ms of one core; bytes a row)", title_justify="left")
    codecs = [name for name in CODECS if name in known.node.encode_s_per_byte]
    for title in ("cut", "up to it, on a node", "behind it, here", *codecs):
        table.add_column(title, justify="left" if title == "cut" else "right")
    for cut in cuts:
        in_front, behind = known.node.prefix_s["fp32"][cut.index], known.trainer.suffix_s[cut.index]
        if cut.index == 0:
            sizes = [f"{known.sizes.pixel_row_bytes:,}"] + [""] * (len(codecs) - 1)
        else:
            sizes = [f"{wire_row_bytes(name, cut.boundary):,}" for name in codecs]
        table.add_row(cut.name, *("" if s is None else f"{1e3 * s:.2f}" for s in (in_front, behind)), *sizes)
    return table

"""`headwater simulate plan.json --rig rig.toml`: the plan in virtual time, on hardware that need not be there."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.needs import check_folders, needs_simpy

if TYPE_CHECKING:
    from headwater.sim.outcome import Outcome
    from headwater.sim.rigfile import RigFile
    from headwater.sim.sweep import Swept


def simulate(
    plan: Path = typer.Argument(help="The plan, in JSON (docs/plan-format.md); `headwater plan -o` writes one."),
    rig: Path = typer.Option(..., help="The rig file, in TOML; docs/simulator.md tells its fields."),
    profile: Path = typer.Option(
        None, help="What work costs (`headwater profile -o`); the rig file's, if it names one."
    ),
    job: Path = typer.Option(None, help="A job file, for its batch size, its epochs and its watts."),
    layers: Path = typer.Option(None, help="What work costs, as a CSV of layers, for hardware that is not there."),
    stages: Path = typer.Option(None, help="A live run's trace (`headwater train --trace`): its stages' own times."),
    trace: Path = typer.Option(None, help="Write a timeline here, which ui.perfetto.dev opens."),
    sweep: list[str] = typer.Option([], help="Play it again and again: nodes=1..64, link=10,100,1000 (Mbit/s), ..."),
    picture: Path = typer.Option(None, help="Draw the sweep here, as a PNG."),
    output: Path = typer.Option(None, "-o", "--output", help="Write the outcome here, for `headwater compare`."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Carry a plan out in virtual time. All that comes out is estimated; no row is made."""
    needs_simpy()
    from headwater.sim.inputs import read_inputs
    from headwater.sim.sweep import parse_sweeps, play_all
    from headwater.sim.world import play

    check_folders(trace, picture, output)
    found = read_inputs(plan, rig, profile=profile, layers=layers, stages=stages, sweeps=parse_sweeps(sweep))
    if job is not None:
        found = replace(found, rig=_with_job(found.rig, job))
    console = Console(stderr=as_json)
    if found.sweeps:
        swept = play_all(found, lambda text: console.print(text, style="dim"))
        if picture is not None:
            from headwater.sim.picture import draw

            draw(swept, picture)
        data = [{**dict(zip(swept.names, point, strict=True)), **each.to_json()} for point, each in swept.points]
        if output is not None:
            output.write_text(json.dumps(data, indent=2) + "\n")
        print(json.dumps(data)) if as_json else _show_sweep(swept, console)
        return
    begun = time.perf_counter()
    with console.status("playing"):
        outcome = play(found.plan, found.cuts, found.profile, found.rig, trace=trace is not None,
                       node_profiles=found.node_profiles)  # fmt: skip
    if trace is not None:
        from headwater.core.trace import perfetto

        trace.write_text(perfetto(outcome.spans, outcome.places))
    if output is not None:
        output.write_text(outcome.dumps())
    if as_json:
        print(json.dumps(outcome.to_json()))
    else:
        show(outcome, console, time.perf_counter() - begun)
    for path in filter(None, (trace, output)):
        console.print(f"written: {path}")


def _with_job(rig: RigFile, path: Path) -> RigFile:
    """The rig with what a job file says of the run. Watts that the rig file states go before the job's."""
    from headwater.cli.jobfile import read_job

    job = read_job(path)
    watts = job.power.known()

    def lit(group: Any, kind: str) -> Any:
        idle, busy = watts.get(kind, (None, None))
        return group if group.idle_w is not None else replace(group, idle_w=idle, busy_w=busy)

    return replace(
        rig,
        job=replace(rig.job, batch_size=job.train.batch_size, num_epochs=job.train.epochs),
        nodes=tuple(lit(each, "node") for each in rig.nodes),
        trainers=tuple(lit(each, "trainer") for each in rig.trainers),
    )


def show(outcome: Outcome, console: Console, taken_s: float) -> None:
    """For a person."""
    table = Table(title="simulated (estimated; no clock ran)", title_justify="left")
    table.add_column("what")
    table.add_column("", justify="right")
    for name, value in _lines(outcome):
        table.add_row(name, value)
    console.print(table)
    for each in outcome.faults:
        console.print(f"did not end: {each}")
    console.print(f"limited by: {outcome.limited_by}; played in {taken_s:.2f} s")


def _lines(outcome: Outcome) -> list[tuple[str, str]]:
    rows = [
        ("time", f"{outcome.seconds:,.3f} s"),
        ("samples", f"{outcome.num_samples:,}"),
        ("samples/s", f"{outcome.samples_per_s:,.1f}"),
        ("the loop waited", f"{outcome.waited_s:,.3f} s"),
        ("bytes down, from nodes", f"{outcome.down_bytes:,.0f}"),
        ("bytes up, to nodes", f"{outcome.up_bytes:,.0f}"),
        ("bytes from the store", f"{outcome.store_bytes:,.0f}"),
        ("bytes of sums", f"{outcome.sum_bytes:,.0f}"),
        ("chunks (of these, asked again)", f"{outcome.num_chunks:,} ({outcome.num_again:,})"),
    ]
    rows += [(f"busy: {name}", f"{100 * mean:.1f} % (most {100 * top:.1f} %)")
             for name, (mean, top) in outcome.busy.items()]  # fmt: skip
    rows += [(f"memory, at most: {name}", f"{value / 1e9:.3f} GB") for name, value in outcome.memory_bytes.items()]
    rows += [(f"modelled energy: {name}", f"{value:,.1f} J") for name, value in outcome.energy_j.items()]
    rows += [(f"money: {name}", f"{value:,.4f}") for name, value in outcome.money.items()]
    return rows


def _show_sweep(swept: Swept, console: Console) -> None:
    table = Table(title="simulated (estimated; no clock ran)", title_justify="left")
    for name in (*swept.names, "samples/s", "seconds", "bytes down", "J a sample", "money", "limited by"):
        table.add_column(name, justify="left" if name == "limited by" else "right")
    for point, each in swept.points:
        joules = sum(each.energy_j.values()) / each.num_samples if each.energy_j and each.num_samples else None
        cells = [f"{value:g}" for value in point]
        cells += [f"{each.samples_per_s:,.1f}", f"{each.seconds:,.2f}", f"{each.down_bytes:,.3g}"]
        cells += ["" if joules is None else f"{joules:.3g}"]
        cells += [f"{sum(each.money.values()):.4g}" if each.money else "", each.limited_by]
        table.add_row(*cells)
    console.print(table)

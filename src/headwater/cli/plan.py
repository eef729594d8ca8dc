"""`headwater plan job.toml`: what would run where, why, and how fast; and the plan as a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from headwater.cli.jobfile import read_job
from headwater.cli.meaning import model_of, near_options
from headwater.cli.needs import check_folders, needs_torch
from headwater.errors import ConfigError
from headwater.train.report import planned, ranked

if TYPE_CHECKING:
    from headwater.core.plan import Plan
    from headwater.train.job import Job


def plan(
    job: Path = typer.Argument(help="The job file, in TOML; docs/job-file.md tells its fields."),
    output: Path = typer.Option(
        None,
        "-o",
        "--output",
        help="Write the best plan (or the one that the job file pins) here, for a job file's plan.file.",
    ),
    picture: Path = typer.Option(None, help="Draw the load on each resource against the cut, as a PNG."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table; `headwater ui` shows it."),
) -> None:
    """Measure the model, the nodes, the links and this machine, and rank the ways to carry the job out.

    Times are estimates from measured costs. Nothing is trained. Where the job file pins a plan or a cut, its plan is
    shown among the others, and is what -o writes: the one that `headwater train` carries out.
    """
    needs_torch()
    import headwater as hw

    check_folders(output, picture)
    file = read_job(job)
    options, model = near_options(file), model_of(file)
    pinned = None
    if options.get("cut") is not None or "plan" in options:
        # As training does it, with all of its checks, before anything is measured.
        with hw.near(model, file.url(file.data.url), **options) as fixed:
            pinned = fixed.plan
    free = {name: value for name, value in options.items() if name not in ("cut", "plan")}
    with hw.near(model, file.url(file.data.url), **free) as found:
        assert found.ranking is not None
        if output is not None:
            output.write_text((pinned or found.plan).dumps())
        if picture is not None:
            draw(found, picture, pinned or found.plan)
        if as_json:
            print(json.dumps(planned(found, pinned)))
        else:
            show(found, Console(), pinned)
            for path in filter(None, (output, picture)):
                Console().print(f"written: {path}")


def show(job: Job, console: Console, pinned: Plan | None = None) -> None:
    """The table and the sentences."""
    from headwater.core.search import placement, share_words

    rows = ranked(job, pinned)
    has_energy = any(each.energy_j for _, each in rows)
    numbers = ["pictures/s", "bytes down a picture", *(["modelled J a picture"] if has_energy else [])]
    table = Table(title="plans, best first (estimated from measured costs)", title_justify="left")
    for title in ("", "what moves", "cut", "precision", *numbers, "limited by"):
        table.add_column(title, justify="right" if title in ("", *numbers) else "left")
    for place, each in rows:
        cut, precision = (each.plan.cut_name, each.plan.precision) if each.plan.cut else ("", "")
        joules = sum(each.energy_j.values()) / (each.job.num_samples * each.job.num_epochs)
        energy = [f"{joules:.3g}"] if has_energy else []
        what = placement(each.plan)
        if each.plan.host_share:
            what += f", {share_words(each.plan)} of it here"
        table.add_row(place, what, cut, precision, f"{each.samples_per_s:,.1f}",
                      f"{each.down_bytes:,.0f}", *energy, each.limiting)  # fmt: skip
    console.print(table)
    if has_energy:
        console.print("energy is modelled from estimated busy time and the watts of [power]; nothing was metered")
    for precision, found in job.deviations.items():
        console.print(f"{precision}: {found}", soft_wrap=True)
    assert job.ranking is not None
    console.print(job.ranking.explain(), soft_wrap=True)
    if pinned is not None:
        known = any(each.plan == pinned for _, each in rows)
        cut = f", up to {pinned.cut_name}" if pinned.has_prefix else ""
        console.print(f"The job file pins a plan ({placement(pinned)}{cut}), which `headwater train` carries out"
                      f"{'' if known else ', and of which there is no estimate'}; leave out file and cut in [plan] "
                      "to have the best one.", soft_wrap=True)  # fmt: skip


def draw(job: Job, path: Path, chosen: Plan) -> None:
    """Load per resource against the cut: the highest line at a cut is what limits it there."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("a picture needs matplotlib; install it: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    from headwater.core.search import sweep

    assert job.measured is not None
    assert job.ranking is not None
    size = replace(job.ranking.best.job, counts_setup=False)
    if chosen.precision not in job.measured.profile.node.prefix_s:  # a plan that is pinned was not measured for
        chosen = replace(chosen, precision="fp32")
    estimates = sweep(job.measured.cuts, job.measured.profile, job.measured.rig, size, like=chosen)
    estimates = tuple(
        each for each in estimates if not job.cuts[each.plan.cut].name.count("/") or each.plan.cut == chosen.cut
    )
    lines: dict[str, list[float]] = {}
    for each in estimates:
        for load in each.loads:
            lines.setdefault(load.resource, [])
    for each in estimates:
        here = {load.resource: load.s for load in each.loads}
        for name, line in lines.items():
            line.append(1e3 * here.get(name, 0.0))
    tallest = max(max(line) for line in lines.values())
    figure, axis = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    for name, line in lines.items():
        if max(line) > 0.002 * tallest:
            axis.plot(line, label=name, linewidth=1.6)
    places = [each.plan.cut for each in estimates]
    if chosen.cut in places:
        axis.axvline(places.index(chosen.cut), color="black", linestyle=":", label=f"chosen: {chosen.cut_name}")
    step = max(1, len(places) // 24)
    names = [each.plan.cut_name for each in estimates]
    axis.set_xticks(range(0, len(places), step), names[::step], rotation=60, ha="right", fontsize=7)
    axis.set(title="load on each resource against the cut (estimated)", ylabel="ms a picture", yscale="log")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)

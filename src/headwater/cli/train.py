"""`headwater train job.toml`: the whole job from the shell, with progress, checkpoints and resume."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headwater.cli.ctrlc import CtrlC
from headwater.cli.jobfile import JobFile, read_job
from headwater.cli.meaning import model_of, near_options, transforms_of
from headwater.cli.needs import needs_torch
from headwater.errors import ConfigError, HeadwaterError

if TYPE_CHECKING:
    import torch

    from headwater.train.job import Job
    from headwater.train.usage import Usage


def train(
    job: Path = typer.Argument(help="The job file, in TOML; docs/job-file.md tells its fields."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the checkpoint in the job's output folder."),
    trace: Path = typer.Option(None, help="Write a timeline of the run to this file; ui.perfetto.dev opens it."),
) -> None:
    """Train a model as a job file says: its frozen part near the data, the rest here.

    Writes model.pt (the model's own state_dict), checkpoint.pt and metrics.jsonl to the job's output folder, and
    meanwhile run.json, which `headwater ui FOLDER` shows. After each epoch it prints what it took, and what validation
    and the checkpoint took after it: CPU-seconds and memory of the trainer and of each node (for all of a node's jobs),
    and energy, which is modelled from the watts of trainer and nodes in the job file's part called power.
    """
    needs_torch()
    if trace is not None and not trace.resolve().parent.is_dir():
        raise ConfigError(f"the timeline can't be written to {trace}: there is no folder {trace.resolve().parent}")
    run(read_job(job), resume, trace)


def run(file: JobFile, resume: bool, trace: Path | None = None) -> None:
    """Train, epoch by epoch."""
    import torch

    import headwater as hw

    console = Console()
    output = file.path(file.train.output)
    checkpoint = output / "checkpoint.pt"
    if resume and not checkpoint.exists():
        raise ConfigError(f"there is no {checkpoint} to resume from; start without --resume")
    if not resume and checkpoint.exists():
        raise ConfigError(f"{output} has the checkpoint of an earlier run; go on with --resume, or name another output")
    torch.manual_seed(file.train.seed)
    model = model_of(file)
    optimizer = _optimizer(file, [each for each in model.parameters() if each.requires_grad])
    common = near_options(file)
    with ExitStack() as stack:
        ctrl_c = stack.enter_context(CtrlC())
        job = stack.enter_context(
            hw.near(
                model,
                file.url(file.data.url),
                shuffle=file.train.shuffle,
                drop_last=file.train.drop_last,
                trace=trace is not None,
                **common,
            )
        )
        if trace is not None:
            stack.callback(_write_trace, job, trace, console)
        check = None
        if file.data.validation:  # now, so that what is wrong with it is found before the first step
            planned = ("cut", "codec", "plan", "profile", "precision", "tolerance", "prongs")
            same = {name: value for name, value in common.items() if name not in planned}
            if file.data.validation_transforms is not None:
                same |= {"transforms": transforms_of(file, file.data.validation_transforms), "views": 0}
            plan = replace(job.plan, precision="fp32")  # as the trained model will be used
            check = stack.enter_context(
                hw.near(model, file.url(file.data.validation), shuffle=False, plan=plan, **same)
            )
            _check_classes(job.samples.classes, check.samples.classes)
        if resume:
            _load(checkpoint, {"model": model, "optimizer": optimizer, "loader": job.loader})
        position = dict(job.loader.state_dict())  # after the last whole step; the loader may already be at the next
        output.mkdir(parents=True, exist_ok=True)
        job.report(output)
        console.print(f"{len(job.samples):,} pictures of {len(job.samples.classes)} classes; {job.describe()}")

        def save() -> None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": position,
                     "random": torch.get_rng_state()}  # fmt: skip
            _write(checkpoint, lambda path: torch.save(state, path))

        job.usage()  # what planning took is no part of an epoch
        try:
            while job.loader.state_dict()["epoch"] < file.train.epochs:
                line = _epoch(job, optimizer, file, console, position, save, ctrl_c)
                taken = {"tiers": job.usage()}
                if check is not None:
                    check.usage()
                    line["accuracy"] = _accuracy(check)
                save()
                # No part of the epoch. Nodes that started beside this process are not the same for both.
                after = {} if check is None else check.usage()
                taken["checkpoint" if check is None else "validation"] = {**after, **job.usage()}
                told = {what: {name: each.to_json() for name, each in tiers.items()} for what, tiers in taken.items()}
                with (output / "metrics.jsonl").open("a") as metrics:
                    metrics.write(json.dumps({**line, **told}) + "\n")
                console.print("  ".join(f"{name} {_shown(value)}" for name, value in line.items()))
                for what, tiers in taken.items():
                    for name, each in tiers.items():
                        console.print(f"  {'' if what == 'tiers' else f'{what}, '}{name}: {_usage(each)}", style="dim")
        except KeyboardInterrupt:
            save()
            console.print(f"stopped; the checkpoint is {checkpoint}, go on with --resume")
            raise
        _write(output / "model.pt", lambda path: torch.save(model.state_dict(), path))
        console.print(f"the trained model is {output / 'model.pt'}")


def _epoch(
    job: Job,
    optimizer: torch.optim.Optimizer,
    file: JobFile,
    console: Console,
    position: dict[str, Any],
    save: Callable[[], None],
    ctrl_c: CtrlC,
) -> dict[str, Any]:
    from torch.nn.functional import cross_entropy

    epoch = job.loader.state_dict()["epoch"]
    job.model.train()
    batches = iter(job.loader)
    visit = job.loader.visit  # with its meeting point, from which the order repeats
    start, rows, num_bytes, total, steps = time.perf_counter(), 0, job.counts.num_bytes, 0.0, 0
    columns = (TextColumn(f"epoch {epoch}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        done = len(job.loader) - job.loader.num_steps_left()
        task = bar.add_task("starting", total=len(job.loader), completed=done)
        for x, y in batches:
            with ctrl_c.step():
                loss = cross_entropy(job.model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                _follow(position, job)
            steps, rows, total = steps + 1, rows + len(y), total + float(loss.detach())
            rate = rows / (time.perf_counter() - start)
            bar.update(task, advance=1, description=f"loss {total / steps:.4f}  {rate:,.0f} pictures/s")
            if file.train.checkpoint_every and steps % file.train.checkpoint_every == 0:
                save()
    _follow(position, job)
    taken_s = time.perf_counter() - start
    return {
        "epoch": epoch,
        "loss": total / max(steps, 1),
        "pictures_per_s": rows / taken_s,
        "bytes_per_picture": (job.counts.num_bytes - num_bytes) / max(rows, 1),
        "skipped": len(job.loader.skipped),
        "prongs": visit.strategy,
        **({} if visit.meeting is None else {"meeting": visit.meeting}),
    }


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _follow(position: dict[str, Any], job: Job) -> None:
    """The run stands where the loader stands. What a state had before and has no more is gone with it."""
    state = job.loader.state_dict()
    position.clear()
    position.update(state)


def _usage(each: Usage) -> str:
    """In words, for a person."""
    parts = [f"{each.cpu_s:,.3g} s of CPU", f"{each.resident_bytes / 1e6:,.0f} MB"]
    if each.page_cache_bytes is not None:
        parts.append(f"{each.page_cache_bytes / 1e6:,.0f} MB of file pages")
    if each.modelled_j is not None:
        parts.append(f"{each.modelled_j:,.3g} J (modelled)")
    return ", ".join(parts)


def _write_trace(job: Job, path: Path, console: Console) -> None:
    assert job.trace is not None
    job.trace.write(path)
    left_out = f"; {job.trace.num_left_out:,} further spans were left out" if job.trace.num_left_out else ""
    console.print(f"the timeline is {path}; ui.perfetto.dev opens it{left_out}")


def _load(path: Path, parts: Mapping[str, Any]) -> None:
    """Go on from a checkpoint."""
    import torch

    try:
        saved = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
    except HeadwaterError:
        raise
    except Exception as error:
        raise ConfigError(f"the checkpoint {path} can't be used with this job ({type(error).__name__}: "
                          f"{str(error)[:300]}); use the job file it was made with, or begin anew in another output"
                          ) from error  # fmt: skip


def _check_classes(trained: tuple[str, ...], found: tuple[str, ...]) -> None:
    """A label is a place among its own data set's classes: it means the same in both only if the names agree."""
    if found != trained[: len(found)]:
        odd = next(place for place, name in enumerate(found) if trained[place : place + 1] != (name,))
        there = repr(trained[odd]) if odd < len(trained) else "no class"
        raise ConfigError(
            f"[data] validation: its class {odd} is {found[odd]!r}, and {there} in the training data, so the accuracy "
            "would mean nothing; give both the same class folders (an empty one counts for nothing), or number the "
            "labels in a manifest"
        )


def _accuracy(job: Job) -> float:
    import torch

    job.model.eval()
    right = total = 0
    with torch.inference_mode():
        for x, y in job.loader:
            right += int((job.model(x).argmax(1) == y).sum())
            total += len(y)
    return right / max(total, 1)


def _optimizer(file: JobFile, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    if file.train.optimizer == "sgd":
        return torch.optim.SGD(parameters, file.train.lr, momentum=file.train.momentum,
                               weight_decay=file.train.weight_decay)  # fmt: skip
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[file.train.optimizer]
    return kind(parameters, file.train.lr, weight_decay=file.train.weight_decay)


def _write(path: Path, write: Any) -> None:
    """Whole or not at all: a run that dies while saving keeps its last checkpoint."""
    # torch.save takes no name that begins with a dot.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="saving-", suffix=".part")
    os.close(handle)
    try:
        write(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)

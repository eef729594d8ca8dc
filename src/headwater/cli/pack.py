"""`headwater pack SRC DST`: do the part of the transforms that never changes once, and keep the result as shards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from headwater.cli.ctrlc import CtrlC
from headwater.cli.jobfile import JobFile, read_job
from headwater.cli.meaning import transforms_of
from headwater.data.shards.pack import SHARD_BYTES, Packing
from headwater.data.shards.pack import pack as pack_set
from headwater.data.shards.verify import verify_set
from headwater.data.store import redact
from headwater.data.torchvision import as_transforms, from_torchvision
from headwater.data.transforms import CenterCrop, Resize, Transforms
from headwater.data.transforms.op import Op
from headwater.errors import ConfigError, DataError
from headwater.progress import Progress

_MEGA = 1_000_000


def pack(
    urls: list[str] = typer.Argument(
        metavar="[SRC] DST",
        help="The data set (a path, file://, s3://, gs:// or az:// URL) and the folder for the shards. With --job, SRC "
        "is the job's data unless given.",
    ),
    job: Path = typer.Option(None, help="Take transforms, layout and columns from this job file."),
    resize: int = typer.Option(0, help="Without a job file: resize the short side to this."),
    crop: int = typer.Option(0, help="Without a job file: crop this square from the middle."),
    layout: str = typer.Option("", help="How SRC is laid out: auto, folders, table or tars; by default auto."),
    shard_size: float = typer.Option(SHARD_BYTES / _MEGA, help="About how large a shard gets, in MB."),
    threads: int = typer.Option(0, help="Threads that decode; 0 takes one for each core."),
    on_bad_sample: str = typer.Option(
        "", help="raise: stop at a picture that can't be read. skip: leave it out. By default raise."
    ),
    verify: bool = typer.Option(
        False, "--verify", help="Check every shard of DST; with SRC, pack the damaged ones again."
    ),
) -> None:
    """Write SRC as shards that a node reads without decoding, to be used like any other data set.

    Decoding and the leading transforms that draw no random numbers and make no floats are done here, once; a job must
    begin with the same ones. Run it again to go on after an interruption: whole shards are kept. docs/shards.md
    tells the format.
    """
    file = read_job(job) if job is not None else None
    source, target = _urls(urls, file, verify)
    if source is None:
        _verify(target)
        return
    if shard_size * _MEGA < 1:
        raise ConfigError(f"--shard-size is {shard_size:g} MB; it must be above 0")
    if threads < 0:
        raise ConfigError(f"--threads is {threads}; it must be 0 or more")
    options: dict[str, Any] = {"layout": layout or "auto", "on_bad_sample": on_bad_sample or "raise"}
    if file is not None:
        options = {
            "layout": layout or file.data.layout,
            "path_column": file.data.path_column,
            "label_column": file.data.label_column,
            "on_bad_sample": on_bad_sample or file.data.on_bad_sample,
        }
    transforms = _transforms(file, resize, crop)
    with CtrlC() as ctrl_c, _telling() as tell:

        def told(what: str, count: int) -> None:
            with ctrl_c.step():
                tell(what, count)

        try:
            done = pack_set(source, target, transforms, shard_bytes=int(shard_size * _MEGA), tell=told, verify=verify,
                            num_threads=threads or len(os.sched_getaffinity(0)), **options)  # fmt: skip
        except KeyboardInterrupt:
            Console(stderr=True).print("stopped; finished shards are kept, and the same command goes on from there")
            raise
    _report(done, target)


def _urls(urls: list[str], file: JobFile | None, verify: bool) -> tuple[str | None, str]:
    if len(urls) == 2:
        return urls[0], urls[1]
    if len(urls) == 1 and file is not None:
        return file.url(file.data.url), urls[0]
    if len(urls) == 1 and verify:
        return None, urls[0]
    raise ConfigError(f"pack takes SRC and DST, not {len(urls)} URLs; SRC may be left out with --job, or with --verify "
                      "to check DST")  # fmt: skip


def _transforms(file: JobFile | None, resize: int, crop: int) -> Transforms:
    if file is None:
        if resize < 0 or crop < 0:
            raise ConfigError(f"--resize {resize} and --crop {crop} must be above 0")
        ops: list[Op] = [*([Resize(resize)] if resize else []), *([CenterCrop(crop)] if crop else [])]
        if not ops:
            raise ConfigError("say what is to be done to the pictures: --job job.toml, or --resize 256 --crop 224")
        return Transforms(ops)
    if resize or crop:
        raise ConfigError("--resize and --crop are for packing without a job file; with --job its transforms are used")
    given = transforms_of(file, file.data.transforms)
    steps = given if isinstance(given, list | tuple) else [given]
    ours = isinstance(given, Transforms) or all(isinstance(step, Op | dict) for step in steps)
    return as_transforms(given) if ours else from_torchvision(given)[0]


@contextmanager
def _telling() -> Iterator[Callable[[str, int], None]]:
    """One line of progress for each thing that is done, one after the other."""
    progress, ticks = Progress(), dict[str, Callable[[int], None]]()
    with ExitStack() as stack:

        def tell(what: str, count: int) -> None:
            if what not in ticks:
                stack.close()  # the line of what was done before
                ticks[what] = stack.enter_context(progress.step(what))
            ticks[what](count)

        yield tell


def _report(done: Packing, target: str) -> None:
    manifest, console = done.manifest, Console()
    for fault in done.damaged:
        console.print(f"was damaged: {fault}", soft_wrap=True, highlight=False)
    size = sum(shard.num_bytes for shard in manifest.shards)
    what = f"{manifest.num_samples:,} pictures in {len(manifest.shards):,} shards, {size / 1e9:,.2f} GB"
    if not done.num_made:
        console.print(f"{redact(target)} is finished: {what}; nothing to do", soft_wrap=True)
    else:
        kept = f", {done.num_kept:,} shards kept" if done.num_kept else ""
        console.print(f"packed: {what}{kept}", soft_wrap=True)
    if done.touched:
        what = f"{len(done.touched):,} pictures of the source, such as {done.touched[0]}, were written or copied since"
        console.print(f"{what}; if they show something else now, pack into another folder", soft_wrap=True)
    steps = ", ".join(step["op"] for step in manifest.note.steps)
    console.print(f"done in them: {steps}; a job's transforms must begin with these", soft_wrap=True)
    if manifest.left_out:
        console.print(f"left out: {len(manifest.left_out):,} pictures that can't be read (manifest.json lists them), so"
                      " batches are those of the source without them", soft_wrap=True)  # fmt: skip
        for key, why in manifest.left_out[:5]:
            console.print(f"  {key}: {why}", soft_wrap=True, highlight=False)


def _verify(target: str) -> None:
    with Progress().step(f"checking {redact(target)}") as tick:
        faults = verify_set(target, tick)
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise DataError(f"{redact(target)} has {len(faults):,} damaged shards:{lines}\npack them again with the command"
                        " that made the set and --verify")  # fmt: skip
    Console().print(f"{redact(target)} is whole: every shard has its checksum", soft_wrap=True)

"""A job: a model, data, nodes and a plan, joined into a loader and a model for the user's own loop.

Owns `near` and `Job`. Everything that can be wrong is found here, before the first step.
"""

from __future__ import annotations

import os
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import nn

from headwater.core.cut import Cut, find_cut, smallest_cut
from headwater.core.loads import JobSize
from headwater.core.plan import Plan, check, near_plan
from headwater.core.search import Ranking, search
from headwater.data.layouts import list_samples, root_of
from headwater.data.samples import Samples
from headwater.data.store import full_url, open_store
from headwater.data.torchvision import as_transforms, from_torchvision
from headwater.data.transforms import Transforms
from headwater.data.transforms.op import Op
from headwater.data.wire import Chunk, Extraction, Listing
from headwater.errors import ConfigError, ImpureError, TransformError
from headwater.model.capture import Captured, capture
from headwater.model.cuts import cuts as find_cuts
from headwater.model.freeze import keep_frozen
from headwater.model.near import NearModel, Rows
from headwater.model.ship import ship
from headwater.model.split import prefix_module
from headwater.progress import Progress
from headwater.train.client import NodeClient
from headwater.train.embedded import EmbeddedNode
from headwater.train.feed import Feed
from headwater.train.host import HostWorker
from headwater.train.inline import InlineWorker
from headwater.train.loader import Loader
from headwater.train.measure import Measured, measure
from headwater.train.reply import Reply, Worker

PATIENCE_S = 60.0
EPOCHS_AHEAD = 3  # over which the planner spreads the cost of setting a prefix up
_HELD_BACK = "some transforms stay on the trainer, in front of the model; use ones that can run near the data"


@dataclass
class Counts:
    """What a job has moved so far; measured."""

    num_rows: int = 0
    num_bytes: int = 0  # requests and rows, as handed to the wire and before any compression there


class Job:
    """What `near` returns. `loader` and `model` go into the user's loop; `close` (or `with`) lets go of everything."""

    def __init__(
        self,
        model: NearModel,
        loader: Loader,
        plan: Plan,
        cuts: tuple[Cut, ...],
        samples: Samples,
        counts: Counts,
        resources: ExitStack,
        ranking: Ranking | None = None,
        measured: Measured | None = None,
    ) -> None:
        self.model = model
        self.loader = loader
        self.plan = plan
        self.cuts = cuts
        self.samples = samples
        self.counts = counts
        self.ranking = ranking
        self.measured = measured
        # With the loader, which the job holds: who keeps only `job.loader` can still iterate.
        self._close = weakref.finalize(loader, resources.close)

    def close(self) -> None:
        """Hang up, and end the embedded node if there is one. The model stays as it is."""
        self._close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def near(
    model: nn.Module,
    data: str | os.PathLike[str],
    *,
    transforms: Any,
    nodes: Sequence[str] | str | None = None,
    batch_size: int = 32,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    cut: str | int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    codec: str = "raw",
    on_bad_sample: str = "raise",
    layout: str = "auto",
    path_column: str | int | None = None,
    label_column: str | int | None = None,
    rank: int | None = None,
    world: int | None = None,
    node_threads: int | None = None,
    patience_s: float = PATIENCE_S,
) -> Job:
    """Train `model` on the pictures at `data`, with its frozen part beside them.

    model          any module that torch.export can capture; freeze its first part (`hw.freeze` or requires_grad)
    data           file://, s3://, gs:// or az:// URL (or a path) of class folders, a CSV/Parquet manifest, or tars
    transforms     a torchvision or timm Compose, `weights.transforms()`, or a list of Headwater transforms
    nodes          addresses such as ["grpc://store-1:8815"]; None starts a node beside this process;
                   "inline" does everything slowly in this process, as a yardstick
    cut            where to split the model, by name or index; by default where the fewest bytes cross
    plan           a Plan, a file with one, or "auto" to measure nodes, links and this machine and take the fastest
                   (`job.ranking` tells why); then cut and codec may not be given as well
    codec          how rows travel: "raw" (exact), "fp16", "bf16", "int8"
    on_bad_sample  "raise", or "skip" and list it in `job.loader.skipped`
    rank, world    which of how many trainers this is; taken from torch.distributed if it is initialised
    patience_s     how long to wait for a node to come back once none answers
    """
    if plan is not None and (cut is not None or codec != "raw"):
        raise ConfigError("a plan fixes cut and codec; give either a plan, or cut and codec")
    if node_threads is not None and nodes is not None:
        raise ConfigError("node_threads is for the node that nodes=None starts; a node of your own takes --threads")
    rank, world = _place(rank, world)
    pipeline, rest = _read_transforms(transforms)
    url = full_url(os.fspath(data))
    progress = Progress()
    with ExitStack() as stack:
        clients: list[NodeClient] = []
        if nodes is None:
            node = EmbeddedNode(root_of(url), node_threads)
            stack.callback(node.close)
            clients = [NodeClient(node.address)]
        elif nodes != "inline":
            if isinstance(nodes, str) or not nodes:
                raise ConfigError(f'nodes is {nodes!r}; it must be a list of addresses, None, or "inline"')
            clients = [NodeClient(address) for address in nodes]
        memories = []
        for client in clients:
            stack.callback(client.close)
            memories.append(int(client.hello().get("memory_bytes", 0)))

        with progress.step(f"listing {url}") as tick:
            listing = Listing(url, layout, path_column, label_column)
            samples = clients[0].list_samples(listing, tick) if clients else list_samples(
                url, layout, path_column=path_column, label_column=label_column, on_page=tick)  # fmt: skip
        with progress.step("capturing the model"):
            keep_frozen(model)
            captured = capture(model, _example(model, pipeline))
            all_cuts = find_cuts(captured)
        ranking, measured = None, None
        if plan == "auto":
            if not clients:
                raise ConfigError('plan="auto" measures nodes, and there are none; name some, or leave nodes out')
            open_cuts = all_cuts
            if rest:  # what stays on the trainer comes before the model, so no part of the model can go ahead of it
                held = tuple(replace(each, legal=False, why_not=_HELD_BACK) for each in all_cuts[1:])
                open_cuts = all_cuts[:1] + held
            measured = measure(captured, open_cuts, pipeline, samples, clients, batch_size=batch_size, seed=seed,
                               progress=progress)  # fmt: skip
            ranking = search(open_cuts, measured.profile, measured.rig, JobSize(len(samples), batch_size, EPOCHS_AHEAD))
            plan = ranking.best.plan
        chosen = _plan(plan, model, all_cuts, cut, codec, bool(rest), pipeline.pixel_spec.row_bytes)
        check(chosen, all_cuts, node_memory_bytes=min(memories, default=None))
        the_cut = all_cuts[chosen.cut]
        if chosen.prefix != "storage" and chosen.codec != "raw":
            warnings.warn(f"codec {chosen.codec!r} has nothing to do: rows are pixels, which travel as they are",
                          stacklevel=2)  # fmt: skip
        boundary = the_cut.boundary if chosen.prefix == "storage" else (pipeline.pixel_spec,)

        digest = None
        if chosen.prefix == "storage" and clients:
            with progress.step(f"exporting the prefix up to {the_cut.name}"):
                shipped = ship(captured, the_cut)
            digest = shipped.digest
            for client in clients:
                with progress.step(f"sending the prefix ({shipped.num_bytes / 1e6:.1f} MB) to {client.name}"):
                    client.needs(shipped.digest, shipped.path)
                    client.prepare()

        extraction = Extraction(samples.url, pipeline, digest, boundary, chosen.precision, chosen.codec,
                                chosen.compression, chosen.node_batch)  # fmt: skip
        counts = Counts()
        source = _source(chosen, captured, the_cut, clients, extraction, samples, seed, counts, patience_s, stack)
        loader = Loader(
            samples,
            source,
            _finish(chosen, pipeline, rest),
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            rank=rank,
            world=world,
            chunk_rows=chosen.chunk_rows,
            on_bad_sample=on_bad_sample,
        )
        return Job(NearModel(captured), loader, chosen, all_cuts, samples, counts, stack.pop_all(), ranking, measured)


def _place(rank: int | None, world: int | None) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise ConfigError("give rank and world together, or neither")
    if rank is not None and world is not None:
        return rank, world
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _read_transforms(transforms: Any) -> tuple[Transforms, list[Any]]:
    """The transforms that run near the data, and those that stay here."""
    steps = transforms if isinstance(transforms, list | tuple) else [transforms]
    ours = isinstance(transforms, Transforms) or all(isinstance(step, Op | dict) for step in steps)
    pipeline, rest = (as_transforms(transforms), []) if ours else from_torchvision(transforms)
    if not rest and not pipeline.is_float:
        raise TransformError("the transforms end in pixels; add ToFloat(), and Normalize(…) if the model needs it")
    pipeline.pixel_spec  # noqa: B018  pictures of different sizes are found now, not in the middle of an epoch
    return pipeline, rest


def _example(model: nn.Module, pipeline: Transforms) -> tuple[torch.Tensor, ...]:
    height, width, channels = pipeline.pixel_spec.shape
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    return (torch.zeros(2, channels, height, width, device=device),)


def _plan(
    plan: Plan | str | os.PathLike[str] | None,
    model: nn.Module,
    cuts: tuple[Cut, ...],
    cut: str | int | None,
    codec: str,
    has_rest: bool,
    pixel_bytes: int,
) -> Plan:
    """The plan that was given, or the one that moves the fewest bytes."""
    if plan is not None:
        given = plan if isinstance(plan, Plan) else _read_plan(plan)
        if has_rest and given.prefix == "storage":
            raise _rest_fault(given.cut_name)
        return given
    if has_rest:
        if cut not in (None, 0, "input"):
            raise _rest_fault(cut)
        return near_plan(cuts[0], codec=codec)
    if cut is not None:
        return near_plan(find_cut(cuts, cut), codec=codec)
    for name, module in model.named_modules():
        params = list(module.parameters(recurse=False))
        is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if is_norm and module.training and params and not any(each.requires_grad for each in params):
            raise ImpureError(
                f"{name} is frozen but in training mode, so its result depends on the batch and it can't run near the "
                f"data: call hw.freeze(model, until=...), or model.get_submodule({name!r}).eval()"
            )
    return near_plan(smallest_cut(cuts, codec, pixel_bytes), codec=codec)


def _read_plan(path: str | os.PathLike[str]) -> Plan:
    try:
        return Plan.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"the plan {os.fspath(path)!r} can't be read: {error}") from error


def _rest_fault(cut: str | int) -> ConfigError:
    return ConfigError(f"cut {cut!r} needs all transforms near the data, but some of them stay on the trainer; cut at "
                       "'input', or leave out the transforms that the warning names")  # fmt: skip


def _source(
    plan: Plan,
    captured: Captured,
    cut: Cut,
    clients: list[NodeClient],
    extraction: Extraction,
    samples: Samples,
    seed: int,
    counts: Counts,
    patience_s: float,
    stack: ExitStack,
) -> Callable[[int, list[np.ndarray]], Iterator[Reply]]:
    """Where replies come from under this plan."""
    job = uuid.uuid4().hex
    workers: dict[str, Worker] = {client.name: client for client in clients}
    inline: InlineWorker | None = None
    if not clients:
        prefix = _torch_prefix(captured, cut) if plan.prefix == "storage" else None
        inline = InlineWorker(open_store(samples.url), prefix)
    elif not plan.uses_storage:
        host = HostWorker(open_store(samples.url))
        stack.callback(host.close)
        workers = {host.name: host}

    feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
    closed = Event()

    def close_feeds() -> None:
        closed.set()
        for feed in list(feeds):
            feed.close()

    stack.callback(close_feeds)  # before the nodes go: an iterator that somebody still holds must not wait for them

    def replies(epoch: int, chunks: list[np.ndarray]) -> Iterator[Reply]:
        if closed.is_set():
            raise ConfigError("the job is closed; start another one with hw.near")

        def chunk(index: int) -> Chunk:
            return Chunk(extraction, job, seed, epoch, index, tuple(samples.take(chunks[index])))

        if inline is not None:
            stream: Iterator[Reply] = (inline.rows(chunk(index), Event()) for index in range(len(chunks)))
        else:
            feed = Feed(workers, len(chunks), chunk, per_worker=plan.prefetch, patience_s=patience_s)
            feeds.add(feed)
            stream = iter(feed)
        for reply in stream:
            counts.num_rows += int(reply.good.sum())
            counts.num_bytes += reply.num_bytes
            yield reply

    return replies


def _torch_prefix(captured: Captured, cut: Cut) -> Callable[[np.ndarray], Sequence[np.ndarray]]:
    module = prefix_module(captured, cut)
    device = captured.example[0].device

    def run(rows: np.ndarray) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [tensor.cpu().numpy() for tensor in module(torch.from_numpy(rows).to(device))]

    return run


def _finish(plan: Plan, pipeline: Transforms, rest: list[Any]) -> Callable[[list[np.ndarray], np.ndarray], Any]:
    """How a batch's arrays become what the user's loop gets."""
    if plan.prefix == "storage":
        return lambda tensors, ids: Rows(
            tuple(torch.from_numpy(tensor) for tensor in tensors), plan.cut, torch.from_numpy(ids)
        )
    if not rest:
        return lambda tensors, ids: torch.from_numpy(pipeline.finish(tensors[0]))

    def run_rest(tensors: list[np.ndarray], ids: np.ndarray) -> torch.Tensor:
        from PIL import Image

        done = []
        for pixels in tensors[0]:
            value: Any = torch.from_numpy(pipeline.finish(pixels)) if pipeline.is_float else Image.fromarray(pixels)
            for step in rest:
                value = step(value)
            done.append(value)
        return torch.stack(done)

    return run_rest

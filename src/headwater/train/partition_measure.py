"""What a step would cost at each cut: measured on every node, on this machine, and on the links between.

Owns `measure_steps` and `choose`. It takes some seconds: a few rows through the prefix on each node and through what is
behind each cut here, forwards and backwards; a few pictures read and decoded on both sides; and transfers that mean
nothing.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from headwater.core.codecs import wire_row_bytes
from headwater.core.cut import Cut, offered_cuts
from headwater.core.partition_cost import CutCosts, StepCosts, fastest
from headwater.core.partition_plan import PartitionPlan
from headwater.data.extract import Extractor
from headwater.data.holdings import Holdings
from headwater.data.parcel import TRAINING, Parcel
from headwater.data.pixels import pixels_of
from headwater.data.samples import SampleRef, Samples
from headwater.data.store import open_store
from headwater.data.transforms import Transforms
from headwater.data.wire import MAX_BLOB_BYTES, Chunk, Extraction
from headwater.errors import ConfigError, DamagedError, DataError, HeadwaterError
from headwater.model.capture import Captured
from headwater.model.flow import flow, uses_batch_statistics
from headwater.model.split import suffix_from
from headwater.model.trainable import Trainable, trainable
from headwater.progress import Progress
from headwater.train.client import NodeClient
from headwater.train.peer import Event, Peer

ROWS = 32  # that are measured with; more say little more, and a slow device takes long for them
MAX_CUTS = 8
LINK_S = 0.4  # for each direction of each link
MEASURED_WITHIN_S = 600.0


def choose(
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    clients: Sequence[NodeClient],
    holdings: Holdings | None,
    *,
    batch_size: int,
    seed: int,
    codec: str,
    micro_batches: int | None,
    sums: str,
    progress: Progress,
) -> tuple[PartitionPlan, list[tuple[float, PartitionPlan]]]:
    """The plan to take; and all that were considered, with their estimated seconds a step."""
    costs = measure_steps(captured, cuts, pipeline, samples, clients, holdings, batch_size=batch_size, seed=seed,
                          codecs=tuple(dict.fromkeys(("raw", codec))), progress=progress)  # fmt: skip
    ranking = fastest(costs, tuple(dict.fromkeys(("raw", codec))), micro_batches, sums)
    return ranking[0][1], ranking


def measure_steps(
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    clients: Sequence[NodeClient],
    holdings: Holdings | None,
    *,
    batch_size: int,
    seed: int,
    codecs: Sequence[str],
    progress: Progress,
) -> StepCosts:
    """Costs at the input and at the ends of the model's blocks."""
    offered = [cut for cut in offered_cuts(cuts, MAX_CUTS) if cut.index]
    rows = min(ROWS, batch_size, len(samples))
    prefix = trainable(captured, offered) if offered else None
    ask = partial(_on_node, prefix=prefix, pipeline=pipeline, samples=samples, holdings=holdings, rows=rows, seed=seed)
    with progress.step("measuring nodes"), ThreadPoolExecutor(len(clients)) as pool:
        told = list(pool.map(ask, clients))
    with progress.step("measuring links"):
        links = [client.measure_link(LINK_S) for client in clients]
        port = together(clients, links)
    with progress.step("measuring this machine"):
        read_s, pixels_s = _pixels_here(pipeline, samples, holdings, rows, seed)
        suffixes = {cut.index: _suffix_s(captured, cut, rows) for cut in (cuts[0], *offered)}
    nothing = (0.0,) * len(clients)
    found = [CutCosts(cuts[0].index, cuts[0].name, nothing, nothing, suffixes[cuts[0].index],
                      {"raw": pipeline.pixel_spec.row_bytes}, {"raw": 0}, 0)]  # fmt: skip
    for cut in offered:
        assert prefix is not None
        end = prefix.graph.end(cut.name)
        needs = prefix.needs_grad[cut.name]
        learning = tuple(spec for spec, each in zip(cut.boundary, needs, strict=True) if each)
        weights = sum(
            prefix.graph.weights[name].row_bytes for name in prefix.graph.used(end) if name in prefix.graph.trained
        )
        each = [said["ends"][cut.name] for said in told]
        found.append(CutCosts(
            cut.index, cut.name, _per_row(each, 0, rows), _per_row(each, 1, rows),
            suffixes[cut.index], {codec: wire_row_bytes(codec, cut.boundary) for codec in codecs},
            {codec: wire_row_bytes(codec, learning) for codec in codecs}, weights if any(needs) else 0,
            prefix.graph.num_norms(end),
        ))  # fmt: skip
    looks = any(uses_batch_statistics(node) for node in captured.graph_module.graph.nodes)
    return StepCosts(batch_size, tuple(found), tuple(float(said["pixels_s"]) for said in told),
                     tuple(link[:2] for link in links), port, min(link[2] for link in links), read_s, pixels_s,
                     not looks)  # fmt: skip


def _per_row(each: Sequence[Sequence[float]], way: int, rows: int) -> tuple[float, ...]:
    """Of each node."""
    return tuple(float(one[way]) / rows for one in each)


def _refs(samples: Samples, holdings: Holdings | None, client: NodeClient | None, rows: int) -> list[SampleRef]:
    """Some samples that this node has."""
    ids = np.linspace(0, len(samples) - 1, rows).astype(np.int64)
    if holdings is None or client is None:
        return samples.take(np.unique(ids))
    own = np.flatnonzero(holdings.rows[client.name] >= 0)
    return holdings.refs(client.name, own[:rows].tolist())


def _on_node(
    client: NodeClient,
    prefix: Trainable | None,
    pipeline: Transforms,
    samples: Samples,
    holdings: Holdings | None,
    rows: int,
    seed: int,
) -> dict[str, Any]:
    refs = _refs(samples, holdings, client, rows)
    about = {"training": TRAINING, "url": samples.url, "transforms": pipeline.to_json(), "seed": seed, "codec": "raw",
             "job": f"measure-{os.getpid()}", "max_rows": len(refs), "depth": 1, "measure": len(refs),
             "graph": None if prefix is None else prefix.graph.to_json()}  # fmt: skip
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    peer = Peer(0, client, events)
    try:
        peer.send("open", about)
        peer.send("fetch", {"key": 1, "epoch": 0, "samples": [ref.to_json() for ref in refs]})
        peer.send("measure", {"key": 1})
        deadline = time.monotonic() + MEASURED_WITHIN_S
        while True:
            try:
                _, said = events.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise ConfigError(
                    f"{client.name} has not measured within {MEASURED_WITHIN_S:g} s; name a cut"
                ) from None
            if isinstance(said, HeadwaterError):
                raise said
            if said.kind == "measured":
                return _checked(client, said, prefix)
    finally:
        peer.close()


def _checked(client: NodeClient, said: Parcel, prefix: Trainable | None) -> dict[str, Any]:
    """Its answer has a time for everything."""
    names = [] if prefix is None else [end.name for end in prefix.graph.ends]
    ends, pixels_s = said.about.get("ends"), said.about.get("pixels_s")
    if not isinstance(ends, dict) or not isinstance(pixels_s, float) or not 0 <= pixels_s < 1e6:
        raise DamagedError(f"{client.name} sent times that can't be read")
    for name in names:
        pair = ends.get(name)
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(each, float) and 0 <= each < 1e6 for each in pair)
        ):
            raise DamagedError(f"{client.name} sent no times for {name}")
    return {"pixels_s": pixels_s, "ends": ends}


def together(clients: Sequence[NodeClient], links: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Bytes a second from all nodes at once, and to all at once: what this machine's own port allows."""
    if len(clients) == 1:
        return links[0][:2]
    found = []
    for way, move in ((0, NodeClient.download), (1, NodeClient._upload)):
        amounts = [min(MAX_BLOB_BYTES, max(1 << 16, int(link[way] * LINK_S))) for link in links]  # of fast links: less
        with ThreadPoolExecutor(len(clients)) as pool:
            start = time.perf_counter()
            list(pool.map(partial(_move, move), clients, amounts))
            found.append(sum(amounts) / (time.perf_counter() - start))
    return found[0], found[1]


def _move(move: object, client: NodeClient, num_bytes: int) -> None:
    move(client, num_bytes)  # type: ignore[operator]


def _pixels_here(
    pipeline: Transforms, samples: Samples, holdings: Holdings | None, rows: int, seed: int
) -> tuple[float | None, float]:
    """Seconds of a row: to be read here (None if it can't be), and to be decoded here."""
    if holdings is not None and holdings.is_split:
        return None, 0.0
    extractor = Extractor(len(os.sched_getaffinity(0)))
    pattern = Extraction(samples.url, pipeline, None, (pipeline.output_spec,))
    try:
        store = open_store(samples.url)
        for _ in range(2):  # the first one opens connections
            chunk = Chunk(pattern, "measure", seed, 0, 0, tuple(_refs(samples, None, None, rows)))
            before, start = extractor.busy.decode_s, time.perf_counter()
            pixels_of(extractor, lambda: store, chunk, lambda: False, 1.0)
            wall = time.perf_counter() - start
            decode = extractor.busy.decode_s - before
    except (DataError, ConfigError):  # only nodes may read it
        return None, 0.0
    finally:
        extractor.close()
    count = len(chunk.samples)
    return wall / count, decode / extractor.num_threads / count


def _suffix_s(captured: Captured, cut: Cut, rows: int) -> float:
    """Seconds of a row behind a cut, forwards and backwards. Random numbers of the run stay what they were."""
    device = captured.example[0].device
    with torch.random.fork_rng([] if device.type == "cpu" else [device]):
        return _timed_suffix_s(captured, cut, rows, device)


def _timed_suffix_s(captured: Captured, cut: Cut, rows: int, device: torch.device) -> float:
    whole = flow(captured)
    suffix = suffix_from(whole, cut.index, whole.alive(cut.index))
    specs = captured.inputs if cut.index == 0 else cut.boundary
    inputs = [torch.rand((rows, *spec.shape), device=device).to(getattr(torch, spec.dtype)) for spec in specs]
    learning = [each.requires_grad_() for each in inputs if cut.index and each.is_floating_point()]
    learning += [each for each in suffix.parameters() if each.requires_grad]
    buffers = [(each, each.detach().clone()) for each in suffix.buffers()]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        made = [each for each in torch.utils._pytree.tree_leaves(suffix(*inputs)) if isinstance(each, torch.Tensor)]
        total = sum(each.float().mean() for each in made)
        if learning and isinstance(total, torch.Tensor) and total.requires_grad:
            torch.autograd.grad(total, learning, allow_unused=True)
        best = min(best, time.perf_counter() - start)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return best / rows

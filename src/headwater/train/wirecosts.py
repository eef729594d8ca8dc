"""What bytes and rows cost on their way, and what a trainer does with them.

Owns these measurements: what all links carry together, the CPU of sending and receiving, of codecs, and of reading and
decoding here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Any

import numpy as np

from headwater.core import codecs
from headwater.core.rig import Link
from headwater.core.spec import TensorSpec
from headwater.data.transforms import Transforms
from headwater.data.wire import MAX_BLOB_BYTES, Chunk
from headwater.train.client import NodeClient
from headwater.train.reads import Fetched, decode_s
from headwater.train.steps import cpu_s

LONE_ROWS = 8
RECEIVE_S = 0.25  # of a transfer whose CPU is measured


def measure_port(clients: Sequence[NodeClient], links: Sequence[Link]) -> Link | None:
    """What all nodes together get through to this machine; None if that is as much as each by itself."""
    sizes = [int(link.down_bytes_per_s) for link in links]  # about a second's worth of each
    sizes = [min(max(size // len(links), 1 << 16), MAX_BLOB_BYTES) for size in sizes]
    start = time.perf_counter()
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(lambda client, size: client.download(size), clients, sizes))
    down = sum(sizes) / (time.perf_counter() - start)
    if down > 0.9 * sum(link.down_bytes_per_s for link in links):
        return None
    return Link(down, max(link.up_bytes_per_s for link in links))


def local_costs(pipeline: Transforms, fetched: Fetched | None, seed: int) -> dict[str, float]:
    """What reading and decoding costs here; without reading where this machine has no way to the store."""
    found: dict[str, float] = {"finish_s": 0.0}
    pixels = np.zeros((8, *pipeline.pixel_spec.shape), pipeline.pixel_spec.dtype)
    if pipeline.is_whole:
        found["finish_s"] = cpu_s(lambda: pipeline.finish(pixels)) / len(pixels)
    if fetched is None:
        return found
    found["fetch_s"] = fetched.cpu_s
    found["decode_s"] = decode_s(pipeline, fetched, seed)
    return found


def decode_costs(names: Iterable[str], pipeline: Transforms) -> dict[str, float]:
    """CPU-seconds here for each byte that a codec gives back."""
    spec = TensorSpec("rows", pipeline.pixel_spec.shape, "float32")
    rows = np.random.default_rng(0).random((8, *spec.shape), np.float32)
    costs = {}
    for name in names:
        columns = codecs.encode(name, [rows], (spec,))
        costs[name] = cpu_s(partial(codecs.decode, name, columns, (spec,)), 0.1) / rows.nbytes
    return costs


def byte_costs(client: NodeClient, link: Link) -> tuple[float, float]:
    """CPU-seconds a byte, of taking bytes from the wire here and of sending them on the node."""
    client.download(1 << 16)  # the first may find nothing loaded yet
    num_bytes = min(max(int(link.down_bytes_per_s * RECEIVE_S), 1 << 18), MAX_BLOB_BYTES)
    earlier, before = (float(client.hello()["cpu_s"]) for _ in range(2))
    cpu = time.process_time()
    client.download(num_bytes)
    receive_s = time.process_time() - cpu
    send_s = float(client.hello()["cpu_s"]) - before - (before - earlier)  # less what the question itself costs
    return receive_s / num_bytes, max(0.0, send_s) / num_bytes


def wire_costs(
    client: NodeClient, chunk: Chunk, found: dict[str, Any], receive_s_per_byte: float
) -> tuple[float, float, float]:
    """From chunks that are really asked for: the node's CPU for one beyond its rows', and ours a row and a chunk beyond
    bytes."""
    stopped = Event()

    def ours_s(*chunks: Chunk) -> float:
        cpu = time.process_time()
        num_bytes = sum(client.rows(each, stopped).num_bytes for each in chunks)
        return max(0.0, time.process_time() - cpu - num_bytes * receive_s_per_byte) / len(chunks)

    client.rows(replace(chunk, samples=chunk.samples[:1]), stopped)  # loads the engine
    whole_s = ours_s(chunk)
    before = float(client.hello()["cpu_s"])
    lone = [replace(chunk, samples=(ref,)) for ref in chunk.samples[:LONE_ROWS]]
    lone_s = ours_s(*lone)
    nodes_s = (float(client.hello()["cpu_s"]) - before) / len(lone)
    row_s, chunk_s = _split(whole_s, len(chunk.samples), lone_s)
    return max(0.0, nodes_s - float(found["pipeline_cpu_s"])), row_s, chunk_s


def _split(whole_s: float, num_rows: int, lone_s: float) -> tuple[float, float]:
    """Seconds a row and a chunk, of what a chunk of so many rows took and one of a single row."""
    row_s = max(0.0, (whole_s - lone_s) / (num_rows - 1)) if num_rows > 1 else 0.0
    chunk_s = min(max(0.0, lone_s - row_s), whole_s)
    return (whole_s - chunk_s) / num_rows, chunk_s

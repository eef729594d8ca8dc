"""The best plain PyTorch loop we can write: class folders, read one picture a request with many under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from obstore.store import from_url
from torch import Tensor

from bench.peers.common import Learner, Place, in_batches

# Requests under way: below which Mbit/s, how many. Threads only wait here, the reads run outside of Python. Many hide
# the store's latency on a fast link, but crowd a thin one: at 2 Mbit/s, 16 of them gave 9.2 pictures/s, 4 gave 9.8 and
# 2 gave 10.3; at 1000 Mbit/s 159, 126 and 62 (MobileNetV3-small, a shared machine). Decoding stays in the loop's own
# thread: there is one core, and a thread beside it would only take turns.
READERS = ((10, 2), (50, 4), (float("inf"), 16))
AHEAD = 128  # pictures under way or waiting: four steps, so that the link never rests while a step runs


def prepare(samples: list[tuple[str, int, bytes]], folder: Path) -> None:
    """The pictures as they are, in class folders."""
    for key, _, data in samples:
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def open_bucket(url: str) -> Any:
    return from_url(url, client_options={"allow_http": True}, virtual_hosted_style_request=False)


@lru_cache
def listing(url: str) -> tuple[Any, list[str], list[int]]:
    """The store, its keys and their labels; listed once, as a script would before its first epoch."""
    store = open_bucket(url)
    keys = sorted(meta["path"] for page in obstore.list(store) for meta in page)
    classes = sorted({key.partition("/")[0] for key in keys})
    return store, keys, [classes.index(key.partition("/")[0]) for key in keys]


def batches(place: Place, learner: Learner, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    store, keys, labels = listing(place.url("plain"))
    readers = next(count for below, count in READERS if place.mbit_per_s < below)
    order = np.random.default_rng(epoch).permutation(len(keys))

    def samples() -> Iterator[tuple[np.ndarray, int]]:
        pool = ThreadPoolExecutor(readers)
        try:
            under_way: deque[Any] = deque()
            for number in order:
                under_way.append((pool.submit(lambda key: store.get(key).bytes(), keys[number]), labels[number]))
                if len(under_way) == AHEAD:
                    future, label = under_way.popleft()
                    yield learner.pixels(future.result()), label
            for future, label in under_way:
                yield learner.pixels(future.result()), label
        finally:
            pool.shutdown(cancel_futures=True)

    return in_batches(samples())

"""What reading and decoding samples costs on the trainer, and how fast the way to the store is.

Owns the reads that are made for it: some samples, several at once, as a trainer that moves nothing reads them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from headwater.core.draw import Draw
from headwater.data.extract import NUM_READERS
from headwater.data.samples import SampleRef, Samples
from headwater.data.shards.reading import read_sample
from headwater.data.store import open_store
from headwater.data.transforms import Transforms
from headwater.errors import BadSampleError, ChangedError, HeadwaterError, StoreError

log = logging.getLogger(__name__)

NUM_SAMPLES = 192  # of which a quarter is used for each stage by itself
ENOUGH_READS, MANY_READS = 2 * NUM_READERS, 4 * NUM_READERS
FETCH_S, FETCH_AT_LEAST_S, FETCH_AT_MOST_S = 2.0, 1.0, 6.0  # no read is begun after the last
SLOW_READ_S, FEW_READERS = 0.5, 4  # a first read that takes so long: many at once would take for ever
MAX_FETCHED = 4000  # samples; more than are read in that time
SETTLES = 0.3  # of the time of reading: connections are made, and a shaped link lets a first burst through


@dataclass(frozen=True)
class Fetched:
    """Samples that were read from here, several at once."""

    refs: Sequence[SampleRef]
    data: dict[int, bytes]  # of the first of them, by their place
    bytes_per_s: float
    cpu_s: float  # of one


def fetch(samples: Samples) -> Fetched | None:
    """Read some as a trainer that moves nothing would; None where this machine has no way to the store.

    In a random order, always the same, and none twice while there are others: what was just read is answered sooner.
    """
    order = np.random.default_rng(0).permutation(len(samples))[:MAX_FETCHED]
    refs = samples.take(order)
    failed: StoreError | None = None

    def read(ref: SampleRef) -> bytes:
        try:
            return bytes(read_sample(store, ref))
        except BadSampleError:
            return b""  # a job meets it in its turn

    def read_on(ref: SampleRef) -> bytes:
        """Once the way there is known, a read that fails is one that a job would try again."""
        nonlocal failed
        try:
            return read(ref)
        except StoreError as error:
            failed = error
            return b""

    done: list[tuple[float, int]] = []
    data: dict[int, bytes] = {}
    start = cpu = last_start = 0.0

    def timed(number: int) -> None:
        nonlocal last_start
        taken_s, enough = time.perf_counter() - start, number >= NUM_SAMPLES
        is_thin = taken_s > FETCH_S and (len(done) >= ENOUGH_READS or taken_s > FETCH_AT_MOST_S)
        if (enough and taken_s > FETCH_AT_LEAST_S) or is_thin:
            return  # long enough; or a thin link and large samples: these will do
        last_start = max(last_start, taken_s)
        found = read_on(refs[number % len(refs)])
        done.append((time.perf_counter() - start, len(found)))
        if number < min(NUM_SAMPLES, len(refs)):
            data[number] = found

    try:
        store = open_store(samples.url)
        start = time.perf_counter()
        read(refs[0])  # connects; and where nothing answers, one read tells
        num_readers = NUM_READERS if time.perf_counter() - start < SLOW_READ_S else FEW_READERS
        with ThreadPoolExecutor(num_readers) as pool:
            start, cpu = time.perf_counter(), time.process_time()
            list(pool.map(timed, range(MAX_FETCHED)))
            cpu_s = time.process_time() - cpu
    except (StoreError, ChangedError) as error:  # no way there, or to something else of the same name
        log.info("plans that move nothing are left out, since samples can't be read from here: %s", error)
        return None
    if failed is not None:
        log.warning("some reads failed while the way to the store was measured; the last: %s", failed)
        if 2 * sum(size == 0 for _, size in done) > len(done):
            return None
    return Fetched(refs, data, rate_of(done, last_start), cpu_s / len(done))


def rate_of(done: Sequence[tuple[float, int]], last_start: float) -> float:
    """Bytes a second of reads under way together, from when each ended and its bytes.

    Of many, those between the end of one read and of another with as many under way at both moments: what had come of
    them by the first is counted with those that end, what has come of them by the second is not. Of a few, all: the
    way is thin, and the last of them alone keeps it full.
    """
    skip = max(sum(when < SETTLES * last_start for when, _ in done), NUM_READERS)
    counted = [(when, size) for when, size in done[skip:] if when <= last_start]
    begin = done[skip - 1][0] if len(counted) >= MANY_READS else 0.0
    if not begin:
        counted = list(done)
    return max(sum(size for _, size in counted), 1) / max(counted[-1][0] - begin, 1e-6)


def decode_s(pipeline: Transforms, fetched: Fetched, seed: int) -> float:
    """CPU-seconds here for one sample."""
    start, done = time.thread_time(), 0
    for number, each in fetched.data.items():
        ref = fetched.refs[number]
        try:
            pipeline.pixels(each, ref.key, Draw(seed, 0, ref.id))
            done += 1
        except HeadwaterError:
            continue
    return (time.thread_time() - start) / max(done, 1)

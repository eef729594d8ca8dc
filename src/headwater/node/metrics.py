"""What a node shows of itself at /metrics: every number, its meaning, and where it is from.

Owns the catalogue `METRICS`; docs/operations.md has the same names, and a test compares them. Labels are few: tenants
are bounded by `core.tally`, prefixes by what a node has loaded at once; jobs and chunks are none.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core.access import Grant
from headwater.core.exposition import Metric, Sample, exposition
from headwater.core.looks import Key
from headwater.node.calls import Calls

STAGES = ("read", "decode", "infer", "send")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

METRICS = (
    Metric("headwater_build_info", "gauge", "1, with the version of Headwater, of its protocol and of Python",
           ("version", "protocol", "python")),
    Metric("headwater_ready", "gauge", "1 while the node takes requests, 0 once it drains"),
    Metric("headwater_cores", "gauge", "cores that the node may use, a fraction where a cgroup says so"),
    Metric("headwater_threads", "gauge", "threads that decode and infer"),
    Metric("headwater_memory_limit_bytes", "gauge", "memory that the node may have: the machine's, or its cgroup's"),
    Metric("headwater_requests_total", "counter", "requests that are over, by how they ended",
           ("tenant", "request", "outcome")),
    Metric("headwater_request_seconds_total", "counter", "time that requests took, from their beginning to their end",
           ("tenant", "request")),
    Metric("headwater_requests_under_way", "gauge", "requests that were begun and are not over", ("tenant", "request")),
    Metric("headwater_chunks_working", "gauge", "chunks that are worked on"),
    Metric("headwater_chunks_waiting", "gauge", "chunks that wait for their turn, or for their prefix to be loaded"),
    Metric("headwater_chunks_stalled", "gauge", "chunks whose trainer has stopped reading; others go on meanwhile"),
    Metric("headwater_chunks_limit", "gauge", "chunks that are worked on at once, at most"),
    Metric("headwater_rows_sent_total", "counter", "rows sent to trainers", ("tenant",)),
    Metric("headwater_row_bytes_sent_total", "counter", "bytes of these rows, before Arrow compresses them",
           ("tenant",)),
    Metric("headwater_bad_samples_total", "counter", "samples that could not be read or decoded", ("tenant",)),
    Metric("headwater_errors_total", "counter", "requests that failed, by the kind of error", ("tenant", "kind")),
    Metric("headwater_upload_bytes_total", "counter", "bytes of prefixes that were uploaded", ("tenant",)),
    Metric("headwater_group_rows", "gauge", "rows that go through the prefix together, in the newest chunk",
           ("tenant",)),
    Metric("headwater_engine_batch_rows", "gauge", "rows that the engine takes at once, as chosen for a loaded prefix",
           ("prefix", "precision", "engine")),
    Metric("headwater_rows_made_total", "counter", "rows that were made, rather than taken from the cache"),
    Metric("headwater_read_bytes_total", "counter", "bytes read from the store"),
    Metric("headwater_reads_hanging", "gauge", "reads that have had no answer for more than a minute"),
    Metric("headwater_listings_hanging", "gauge", "listings that have found nothing for more than a minute"),
    Metric("headwater_busy_seconds_total", "counter", "time that threads spent in a stage", ("stage",)),
    Metric("headwater_prefixes", "gauge", "prefixes on disk"),
    Metric("headwater_prefixes_bytes", "gauge", "bytes of these"),
    Metric("headwater_prefixes_loaded", "gauge", "prefixes in memory, counted by cut and precision"),
    Metric("headwater_cache_on", "gauge", "1 while rows are kept on disk; if it is 0, the log says why"),
    Metric("headwater_cache_full", "gauge", "1 once rows were not kept for want of room"),
    Metric("headwater_cache_bytes", "gauge", "bytes of kept rows"),
    Metric("headwater_cache_limit_bytes", "gauge", "bytes that kept rows may take"),
    Metric("headwater_cache_hits_total", "counter", "rows that were sent from the cache"),
    Metric("headwater_cache_misses_total", "counter", "rows that the cache was asked for and did not have"),
    Metric("headwater_cache_evicted_bytes_total", "counter", "bytes of kept rows that made room for others"),
    Metric("headwater_cache_unkept_total", "counter", "rows that were not kept, for want of room or of time to write"),
    Metric("headwater_cache_damaged_total", "counter", "kept rows that failed their checksum and were made again"),
    Metric("headwater_http_turned_away_total", "counter", "HTTP clients that were too many, too slow or too long"),
    Metric("process_start_time_seconds", "gauge", "when the node was started, in seconds since 1970"),
    Metric("process_cpu_seconds_total", "counter", "CPU time of the node"),
    Metric("process_resident_memory_bytes", "gauge", "memory that the node holds"),
    Metric("process_open_fds", "gauge", "files and connections that are open"),
    Metric("process_threads", "gauge", "threads of the node"),
)  # fmt: skip

# Of what a node says of itself under "busy"; a node without a cache says nothing of one.
_BUSY = {
    "num_rows": "headwater_rows_made_total",
    "read_bytes": "headwater_read_bytes_total",
    "cache_bytes": "headwater_cache_bytes",
    "cache_budget_bytes": "headwater_cache_limit_bytes",
    "cache_full": "headwater_cache_full",
    "num_cache_hits": "headwater_cache_hits_total",
    "num_cache_misses": "headwater_cache_misses_total",
    "cache_evicted_bytes": "headwater_cache_evicted_bytes_total",
    "num_cache_unkept": "headwater_cache_unkept_total",
    "num_cache_damaged": "headwater_cache_damaged_total",
}
_GAUGES_BY_TENANT = ("requests_under_way", "group_rows")


@dataclass(frozen=True)
class Shown:
    """One look at a node: its numbers, and what else it says of itself to whoever has this grant."""

    samples: tuple[Sample, ...]
    about: Callable[[Grant | None], Mapping[str, Any]]

    def text(self) -> str:
        """/metrics"""
        return exposition(METRICS, self.samples)

    def numbers(self) -> dict[Key, float]:
        """The same as data."""
        return {(each.metric, *each.labels): float(each.value) for each in self.samples}


def shown(hello: dict[str, Any], calls: Calls, num_turned_away: int) -> tuple[Sample, ...]:
    """Every number, from what the node says of itself and what it has counted."""
    return (*_of_the_node(hello), *_of_requests(calls.items(), hello["chunks"]), *_of_the_process(hello["cpu_s"]),
            Sample("headwater_http_turned_away_total", num_turned_away))  # fmt: skip


def metrics_text(hello: dict[str, Any], calls: Calls, num_turned_away: int) -> str:
    """/metrics"""
    return exposition(METRICS, shown(hello, calls, num_turned_away))


_OF_A_TENANT = frozenset(metric.name for metric in METRICS if "tenant" in metric.labels)
_OF_A_PREFIX = frozenset(metric.name for metric in METRICS if "prefix" in metric.labels)


def may_see(tenant: str, about: Mapping[str, Any]) -> Callable[[Key], bool]:
    """Which numbers are this tenant's to see: the node's own, and those of the tenant and its prefixes."""
    prefixes = {each["digest"][:12] for each in about["prefixes"]}

    def may(key: Key) -> bool:
        if key[0] in _OF_A_TENANT:
            return key[1] == tenant
        return key[0] not in _OF_A_PREFIX or key[1] in prefixes

    return may


def _of_the_node(hello: dict[str, Any]) -> Iterator[Sample]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Sample("headwater_build_info", 1, (hello["headwater"], str(hello["protocol"]), python))
    yield Sample("headwater_ready", not hello["draining"])
    yield Sample("headwater_cores", hello["cores"])
    yield Sample("headwater_threads", hello["num_threads"])
    yield Sample("headwater_memory_limit_bytes", hello["memory_bytes"])
    yield Sample("headwater_cache_on", hello["cache_fault"] is None and "cache_bytes" in hello["busy"])
    for name, metric in _BUSY.items():
        yield Sample(metric, hello["busy"].get(name, 0))
    for stage in STAGES:
        yield Sample("headwater_busy_seconds_total", hello["busy"][f"{stage}_s"], (stage,))
    yield Sample("headwater_reads_hanging", hello["hanging"]["reads"])
    yield Sample("headwater_listings_hanging", hello["hanging"]["listings"])
    yield Sample("headwater_prefixes", hello["prefix_files"]["num"])
    yield Sample("headwater_prefixes_bytes", hello["prefix_files"]["bytes"])
    yield Sample("headwater_prefixes_loaded", len(hello["prefixes"]))
    batches = {(each["digest"][:12], each["precision"], each["engine"]): each["batch"] for each in hello["prefixes"]}
    for labels, batch in batches.items():
        yield Sample("headwater_engine_batch_rows", batch, labels)


def _of_requests(counted: list[tuple[str, tuple[str, ...], float]], chunks: dict[str, int]) -> Iterator[Sample]:
    for name, labels, amount in counted:
        yield Sample(f"headwater_{name}" + ("" if name in _GAUGES_BY_TENANT else "_total"), amount, labels)
    begun = sum(amount for name, labels, amount in counted if name == "requests_under_way" and labels[1] == "rows")
    yield Sample("headwater_chunks_waiting", max(0, begun - chunks["working"] - chunks["stalled"]))
    for name, num in chunks.items():
        yield Sample(f"headwater_chunks_{name}", num)


def _of_the_process(cpu_s: float) -> Iterator[Sample]:
    words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from the third field on: the state
    since_boot_s = float(words[19]) / os.sysconf("SC_CLK_TCK")
    running_s = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s
    yield Sample("process_start_time_seconds", round(time.time() - running_s, 2))
    yield Sample("process_cpu_seconds_total", cpu_s)
    yield Sample("process_resident_memory_bytes", int(words[21]) * _PAGE_BYTES)
    yield Sample("process_open_fds", len(os.listdir("/proc/self/fd")))
    yield Sample("process_threads", int(words[17]))

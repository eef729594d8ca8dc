"""Embedding tables by the storage: what a training step takes, against fetching vectors, and against tables of one's
own.

Claim: with tables of 10 GB on a node that has 1 GB of memory, batches of 64 and ids as recommenders have them, a step
of training takes at least 44.7 % less time where pooled vectors cross the link than where each distinct vector of the
batch does. Both ways are ours, with prefetching, on the same node, and with the same losses; so what differs is what
crosses.

The third way has the tables on the trainer's own disk, mapped into memory, within the same 1 GB: no link at all.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.bags import BATCH, DIM, POOLING, ZIPF, batch
from bench.result import Result
from bench.rig import Host, Link, Rig, RigUp

LINKS = (30, 100, 300, 1000)
QUICK_LINKS = (100, 1000)
TABLE_BYTES, MEMORY_BYTES, FREE_BYTES = 10 * 10**9, 10**9, 20 * 10**9
CACHE, LITTLE = "160MB", "16MB"
WAYS = ("pooled", "rows", "local")


def run(*, quick: bool, console: Console) -> Result:
    links, rounds, steps, warm = (QUICK_LINKS, 2, 24, 30) if quick else (LINKS, 5, 40, 100)
    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
        free = shutil.disk_usage(scratch).free
        table_bytes = TABLE_BYTES if free >= FREE_BYTES else int(free * TABLE_BYTES / FREE_BYTES)
        # Sparse files: three of the first kind and one mapped; what is trained takes room.
        rig = Rig(
            storage=(Host("storage", cores=(0,), memory_bytes=MEMORY_BYTES),),
            trainers=(Host("trainer", cores=(1,), memory_bytes=MEMORY_BYTES),),
            links={"trainer": Link(links[-1])},
        )
        with RigUp(rig) as up:
            folder = Path(scratch, "data")
            folder.mkdir()
            options = ["--tables", f"{scratch}/tables", "--table-size", "100GB", "--table-memory", "400MB",
                       "--threads", "1"]  # fmt: skip
            env = {"XDG_CACHE_HOME": f"{scratch}/cache"}
            node = up.start_node("storage", [folder], options=options, env=env)
            caches = {"pooled": CACHE, "rows": CACHE, "little": LITTLE}
            with up.open("trainer", "bench.bags:Trainer", env=env, address=node.address, table_bytes=table_bytes,
                         scratch=scratch, caches=caches) as trainer:  # fmt: skip
                losses: dict[str, list[float]] = {way: [] for way in (*WAYS, "little")}

                def take(way: str, count: int) -> dict[str, Any]:
                    found: dict[str, Any] = trainer.ask(way=way, steps=count)
                    losses[way] += found.pop("losses")
                    return found

                shape = _shape()
                for way in losses:
                    take(way, warm if way != "little" else steps)
                cases = [case for link in links for case in _link(up, take, link, rounds, steps, console)]
                little = [take("little", steps) for _ in range(2)][-1]
                kills = up.usage("storage").num_memory_kills
                peak = up.usage("storage").max_memory_bytes
    return result(cases, losses, little, shape, table_bytes, kills, peak, links, rounds, steps, warm, quick)


def _shape() -> dict[str, float]:
    """What a batch is, in the mean of ten."""
    num = TABLE_BYTES // (DIM * 4)
    distinct = [len(np.unique(batch(number, num)[0])) for number in range(10)]
    return {"ids": sum(POOLING) * BATCH, "bags": len(POOLING) * BATCH, "distinct": statistics.fmean(distinct)}


def _link(up: RigUp, take: Any, link: int, rounds: int, steps: int, console: Console) -> list[dict[str, Any]]:
    """Rounds of all ways in turn over one link."""
    up.set_rate("trainer", link)
    cases = []
    for number in range(rounds):
        order = WAYS if number % 2 == 0 else WAYS[::-1]
        found = {way: take(way, steps) for way in order}
        pooled, rows, local = (found[way]["step_s"] for way in WAYS)
        cases.append({"link_mbit": link, "round": number, "pooled_ms": 1e3 * pooled, "rows_ms": 1e3 * rows,
                      "local_ms": 1e3 * local, "over_rows": pooled / rows, "over_local": pooled / local,
                      "pooled_mean_ms": 1e3 * found["pooled"]["mean_s"], "rows_mean_ms": 1e3 * found["rows"]["mean_s"],
                      "local_mean_ms": 1e3 * found["local"]["mean_s"],
                      "pooled_kb": found["pooled"]["step_bytes"] / 1e3, "rows_kb": found["rows"]["step_bytes"] / 1e3,
                      "disk_mb": found["pooled"]["disk_bytes"] / 1e6,
                      "in_memory": found["pooled"]["found"] / max(1, found["pooled"]["asked"])})  # fmt: skip
        console.print(f"{link} Mbit/s: pooled {1e3 * pooled:.1f} ms a step, rows {1e3 * rows:.1f}, local "
                      f"{1e3 * local:.1f}", style="dim")  # fmt: skip
    return cases


def result(
    cases: list[dict[str, Any]], losses: dict[str, list[float]], little: dict[str, Any], shape: dict[str, float],
    table_bytes: int, kills: int, peak: int, links: tuple[int, ...], rounds: int, steps: int, warm: int, quick: bool,
) -> Result:  # fmt: skip
    def median(link: int, key: str) -> float:
        return statistics.median(case[key] for case in cases if case["link_mbit"] == link)

    def total(link: int, way: str) -> float:
        return statistics.fmean(case[f"{way}_mean_ms"] for case in cases if case["link_mbit"] == link)

    least = max(median(link, "over_rows") for link in links)
    length = min(map(len, losses.values()))
    apart = {way: float(np.max(np.abs(np.array(losses[way][:length]) / np.array(losses["local"][:length]) - 1)))
             for way in losses}  # fmt: skip
    wire_s = {
        way: {link: median(link, f"{way}_kb") * 8e3 / (link * 1e6) for link in links} for way in ("pooled", "rows")
    }
    numbers = {"reduction_vs_rows": 1 - least}
    numbers |= {f"reduction_vs_rows_{link}mbit": 1 - median(link, "over_rows") for link in links}
    numbers["reduction_with_checkpoints"] = 1 - max(total(link, "pooled") / total(link, "rows") for link in links)
    numbers |= {
        f"over_local_with_checkpoints_{link}mbit": total(link, "pooled") / total(link, "local") for link in links
    }
    numbers |= {f"over_local_{link}mbit": median(link, "over_local") for link in links}
    numbers |= {
        "bytes_vs_rows": median(links[0], "pooled_kb") / median(links[0], "rows_kb"),
        "over_little_cache": median(links[-1], "pooled_ms") / (1e3 * little["step_s"]),
        "largest_loss_difference": max(apart.values()),
        "table_gb": table_bytes / 1e9,
        "memory_kills": kills,
    }
    slowest = links[0]
    return Result(
        name="embedding",
        quick=quick,
        numbers=numbers,
        goals={"reduction_vs_rows": "≥ 0.447", "largest_loss_difference": "≤ 1e-4", "memory_kills": "0"},
        cases=cases,
        bound=f"at {slowest} Mbit/s, if the link alone counted and its two ways did not overlap: "
        f"{1 - wire_s['pooled'][slowest] / wire_s['rows'][slowest]:.3f}, from the bytes that crossed",
        limited_by=f"the node's and the trainer's one core each at {links[-1]} Mbit/s, where the bytes of pooled "
        f"vectors take {1e3 * wire_s['pooled'][links[-1]]:.1f} of {median(links[-1], 'pooled_ms'):.1f} ms; the link at "
        f"{slowest} Mbit/s ({1e3 * wire_s['pooled'][slowest]:.1f} of {median(slowest, 'pooled_ms'):.1f} ms)",
        notes=[
            f"batches of {BATCH}; {len(POOLING)} features with 1 to 100 ids each, {sum(POOLING)} for a sample (the "
            f"multi-hot sizes of MLPerf's DLRM-DCNv2): {shape['ids']:,.0f} ids a step in {shape['bags']:,.0f} bags, "
            f"{shape['distinct']:,.0f} of them distinct; Zipf {ZIPF}, {DIM} floats a vector, SGD",
            f"a table of {table_bytes / 1e9:.3g} GB for each way, all on one node with one core and "
            f"{MEMORY_BYTES / 1e9:g} GB of memory, of which the node used {peak / 1e9:.2f} GB at most, page cache "
            "included; "
            f"{CACHE} of it are for vectors of each of the first two tables"
            + ("" if table_bytes == TABLE_BYTES else "; less than 10 GB, since the disk has less than 20 GB free"),
            "files are sparse: vectors that were never trained take no room and are computed when they are read, on "
            "each "
            f"side by the same function; {cases[-1]['disk_mb']:,.0f} MB of the first table had been written in the end",
            "rows: each distinct vector of the batch is fetched, pooled here, and its gradient sent back; the node "
            "trains "
            "it. local: the table is mapped from the trainer's own disk, with 1 GB of memory and no log",
            f"all train the same dense model from the same batches, {warm} steps before the first that is timed; "
            f"{rounds} rounds of {steps} steps a link, ways in turn; medians of steps, ratios within a round, medians "
            "of "
            "those; reduction_vs_rows is that of the link where it is least",
            "with_checkpoints: the same from means over all rounds. A checkpoint writes a page of the disk for each "
            "trained "
            "vector, on both sides of the ratio, and most of a batch's distinct vectors are from the tail: such steps "
            "wait "
            "for the node's disk, whatever crosses the link",
            f"over_little_cache: a step with {CACHE} of memory for vectors ÷ one with {LITTLE}, at {links[-1]} Mbit/s; "
            f"{100 * cases[-1]['in_memory']:.0f} % of the distinct vectors of a batch were in memory when they were "
            "asked "
            f"for, and {100 * little['found'] / max(1, little['asked']):.0f} % with {LITTLE}",
        ],
        draw=lambda path: draw(cases, links, path),
    )


def draw(cases: list[dict[str, Any]], links: tuple[int, ...], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    looks = {"rows": ("#c0504d", "distinct vectors cross"), "local": ("#9aa5b1", "tables on the trainer's own disk"),
             "pooled": ("#1f77b4", "pooled vectors cross")}  # fmt: skip
    for way, (color, label) in looks.items():
        medians = [
            statistics.median(case[f"{way}_ms"] for case in cases if case["link_mbit"] == link) for link in links
        ]
        axis.plot(links, medians, "o-", color=color, label=label)
    axis.set(title="A training step with 10 GB of tables, 1 GB of memory", xlabel="link, Mbit/s", ylabel="ms",
             xscale="log", yscale="log")  # fmt: skip
    axis.set_xticks(links, [f"{link}" for link in links])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=130)

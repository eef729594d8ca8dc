"""The simulator's own speed: how large a fleet can be played, on one core.

Claim: 1,000 nodes, 100 trainers and a million samples take less than two minutes and 4 GB on one core, and the cost
grows linearly with the events. Each point is played in a process of its own, whose memory is what it needed.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.result import Result
from headwater.core.plan import Plan
from headwater.core.rig import Link
from headwater.sim.inputs import from_layers
from headwater.sim.layers import Layer
from headwater.sim.rigfile import RING, Chip, Data, Nodes, RigFile, Trainers, Work
from headwater.sim.world import play

SIZES, QUICK = (125, 250, 500, 1000), (250, 1000)
NODES_EACH = 32  # of all nodes; each serves about three trainers
# A network of ResNet50's size in four parts, frozen but for its head: assumed, 8 ms in front of the cut on one core.
LAYERS = (Layer("stem", 1e-3, 0.0, 3.2e6, 1e6), Layer("middle", 4e-3, 0.0, 8e5, 3e7), Layer("top", 3e-3, 0.0, 8e3, 6e7),
          Layer("head", 1e-5, 2e-5, 4e3, 8e6))  # fmt: skip


def rig_of(num_nodes: int) -> RigFile:
    """A tenth as many trainers as nodes, and a thousand samples for each node."""
    return RigFile(
        trainers=(Trainers(count=num_nodes // 10, cores=32, port=Link(12.5e9, 12.5e9, 5e-5), nodes_each=NODES_EACH,
                           accelerator=Chip()),),
        job=Work(1000 * num_nodes, 128, gradient_bytes=8e6, reduce=RING),
        nodes=(Nodes(Link(1.25e9, 1.25e9, 5e-5), count=num_nodes, cores=16, disk_bytes_per_s=2e9),),
        data=Data(1.1e5, 150528, {"node_read_s": 5e-5, "node_decode_s": 4e-3, "node_chunk_s": 1e-3,
                                  "trainer_receive_s_per_byte": 1e-9, "trainer_step_s": 2e-3}),
        layers="given",
    )  # fmt: skip


PLAN = Plan("storage", "storage", "storage", "storage", cut=3, cut_name="top", node_batch=32, chunk_rows=64)


def one(num_nodes: int) -> dict[str, Any]:
    """Play it, here."""
    file = rig_of(num_nodes)
    profile, cuts, _ = from_layers(file, LAYERS)
    begin, cpu = time.perf_counter(), time.process_time()
    outcome = play(PLAN, cuts, profile, file)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "num_nodes": num_nodes,
        "num_trainers": file.num_trainers,
        "num_samples": outcome.num_samples,
        "num_chunks": outcome.num_chunks,
        "num_events": outcome.num_events,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "us_per_event": 1e6 * cpu_s / outcome.num_events,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "simulated_s": outcome.seconds,
        "simulated_per_s": outcome.samples_per_s,
        "limited_by": outcome.limited_by,
    }


def run(*, quick: bool, console: Console) -> Result:
    cases = []
    for number in QUICK if quick else SIZES:
        done = subprocess.run([sys.executable, "-m", "bench.scale", str(number)], capture_output=True, text=True,
                              check=True, cwd=Path(__file__).parents[1])  # fmt: skip
        cases.append(json.loads(done.stdout))
        console.print(f"{number} nodes: {cases[-1]['seconds']:.1f} s", style="dim")
    last = cases[-1]
    dearest = max(case["us_per_event"] for case in cases) / min(case["us_per_event"] for case in cases)
    return Result(
        name="scale",
        quick=quick,
        numbers={"num_nodes": last["num_nodes"], "seconds": last["seconds"], "peak_bytes": last["peak_bytes"],
                 "cpu_s": last["cpu_s"], "num_events": last["num_events"],
                 "cost_of_an_event_over_sizes": dearest},
        goals={"num_nodes": "1000", "seconds": "≤ 120", "peak_bytes": "≤ 4e9"},
        cases=cases,
        bound="none: what an event costs in SimPy and in the policies of core, which are the product's own",
        limited_by="one core of Python: events of the clock, and the dispatch's look at each node for each chunk",
        notes=[
            f"each trainer uses {NODES_EACH} nodes; a chunk has 64 rows in two groups; gradients go round a ring after "
            "each step",
            "seconds (the wall's), cpu_s (of one core) and bytes are measured, each size in a process of its own; "
            "simulated_ are the fleet's, estimated",
        ],
    )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(one(int(sys.argv[1]))))

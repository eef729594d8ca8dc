"""`python -m bench NAME [--quick] [--json]`."""

from __future__ import annotations

import argparse
import signal
import sys
from importlib import import_module

from rich.console import Console

from bench.rig import RigError

# name → what it claims
BENCHMARKS = {
    "path": "near-data pictures/s against a bare loop of Pillow and ONNX Runtime; bytes across against the JPEG's",
    "planner": "the planner's choice against every other cut, run for real on the rig: regret, error of the estimate",
    "nodes": "1 to 6 devices of 0.2 core: do they add up, what one slow one costs, and a node against a bare loop",
    "cache": "epochs from the node's cache against a cold one and the plain loop, over a link of 50 Mbit/s",
    "engine": "a prefix on one core, in the engine and precision that a node chooses, against eager PyTorch",
    "offload": "training over links of 2 to 1000 Mbit/s against the best plain loop, other loaders, and the bound",
    "tenants": "eight jobs on a node with too little memory: do all finish, how fairly, and how fast; 1 to 10 jobs",
    "faults": "kills, cut links, a failing store, full disks, flipped bits: rows lost or doubled, loss, time lost",
    "soak": "many short epochs with tenants that come and go: does the memory of node and trainer stay flat?",
    "prongs": "nodes and the trainer preprocess from two ends, nothing frozen: against the trainer alone; the bound",
    "agreement": "the simulator against live runs: 32 plans on rigs, costs measured once beforehand",
    "scale": "the simulator's own speed: 1,000 nodes, 100 trainers, a million samples on one core",
    "partition": "the first layers train on four storage devices: time of a step against everything on the trainer",
    "reduce": "gradients added up in the network against Gloo's all-reduce: time, CPU, lost packets, DDP",
    "embedding": "a step with 10 GB of embedding tables by the storage, against fetching vectors and a mapped file",
    "page": "what it costs a node with 50 tenants that its page is looked at; and what the page looks like",
    "pack": "rows/s of a node on one core from packed shards against JPEGs, and against the engine alone",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure a claim, both sides in one run.")
    parser.add_argument("name", nargs="?", choices=BENCHMARKS, help="which benchmark")
    parser.add_argument("--quick", action="store_true", help="fewer points, within four minutes on two cores")
    parser.add_argument("--json", action="store_true", help="the last line of output is one JSON object")
    parser.add_argument("--list", action="store_true", help="show the benchmarks")
    arguments = parser.parse_args()
    if arguments.list or not arguments.name:
        for name, claim in BENCHMARKS.items():
            print(f"{name:10} {claim}")
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that scratch folders go, too
    console = Console(stderr=arguments.json)
    try:
        result = import_module(f"bench.{arguments.name}").run(quick=arguments.quick, console=console)
    except RigError as error:
        print(f"RigError: {error}", file=sys.stderr)
        return 1
    result.show(console)
    for path in result.keep():
        console.print(f"written: {path.relative_to(path.parents[2])}")
    if arguments.json:
        print(result.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())

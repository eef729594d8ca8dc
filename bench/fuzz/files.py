"""Files that a user is handed: jobs, rigs, layers, traces, runs and checkpoints."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.fuzz.target import Harness, Room, Target
from headwater.cli.jobfile import read_job
from headwater.cli.runfiles import RunFiles
from headwater.core.plan import Plan
from headwater.core.profile import Key, NodeCosts, Profile, Sizes, TrainerCosts
from headwater.core.trace import Span, perfetto
from headwater.errors import ConfigError, HeadwaterError, PlanError
from headwater.sim.comparing import compare
from headwater.sim.inputs import read_inputs
from headwater.train.report import FORMAT as RUN_FORMAT
from headwater.train.report import VERSION as RUN_VERSION

_BEHIND = b"\n-- the next file --\n"
_JOB = """
[model]
name = "timm:resnet18"
arguments = { num_classes = 3 }
freeze_until = "layer3"
[data]
url = "photos"
transforms = [{ op = "Resize", size = [8, 8] }, { op = "ToFloat" }]
path_column = 1
[train]
epochs = 2
lr = 0.1
output = "run"
[nodes]
addresses = ["grpc://127.0.0.1:1"]
token = "x"
[plan]
cut = "auto"
tolerance = 0.5
[power]
node_idle_w = 5
node_busy_w = 10.5
"""
_RIG = """format = "headwater-rig"
version = 1
seed = 3
[job]
num_samples = 640
gradient_bytes = 1e6
reduce = "ring"
[[nodes]]
name = "near"
count = 3
cores = 4
memory_bytes = 4000000000
accelerator = { speed = 2.0, flops_per_s = { conv = 1e12 }, memory_bytes_per_s = 1e11 }
link = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8, latency_s = 0.0002 }
[[trainers]]
port = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8 }
[store]
link = { down_bytes_per_s = 1.25e8, up_bytes_per_s = 1.25e8 }
[[faults]]
at_s = 5.0
node = "near-2"
what = "dies"
[data]
sample_bytes = 110000
pixel_bytes = 150528
costs = { node_decode_s = 0.004, trainer_decode_s = 0.004 }
"""
_LAYERS = """layer,forward_s,backward_s,bytes_out,weight_bytes,kind,flops
# a remark
one,0.004,0,800000,1000,conv,1e9
two,0.004,0,4000,1000,conv,1e9
head,0.0001,0.0002,40,4000,linear,1e6
"""


def _job(room: Room) -> Harness:
    path = room.root / "job.toml"

    def harness(data: bytes) -> None:
        path.write_bytes(data)
        job = read_job(path)
        _ = job.power.known(), job.path(job.train.output), job.url(job.data.url)

    return harness


def _job_seeds() -> Sequence[bytes]:
    return [_JOB.encode()]


def _simulation(room: Room) -> Harness:
    """A rig file, layers, and a live run's trace; read together with a plan that fits."""
    names = ("rig.toml", "layers.csv", "trace.json")
    plan = room.root / "plan.json"
    plan.write_text(Plan("storage", "storage", "storage", "storage", cut=1, cut_name="one", codec="fp16").dumps())

    def harness(data: bytes) -> None:
        for name, content in zip(names, [*data.split(_BEHIND, 2), b"", b""], strict=False):
            (room.root / name).write_bytes(content)
        paths: dict[str, Path] = {"layers": room.root / names[1], "stages": room.root / names[2]}
        found = read_inputs(plan, room.root / names[0], **paths)
        _ = found.rig.priced(4)

    return harness


def _spans() -> list[Span]:
    return [Span(place, "1", name, at, 0.5, 3) for at, (place, name) in enumerate(
        [("node-1", "read"), ("node-1", "decode"), ("trainer", "step"), ("trainer", "wait")])]  # fmt: skip


def _simulation_seeds() -> Sequence[bytes]:
    trace = perfetto(_spans(), ("trainer",)).encode()
    queued, fewer = _RIG.replace("\n[data]", "\n[network]\nqueue_s = 1\n[data]"), _LAYERS.replace(",kind,flops", "")
    return [_BEHIND.join([_RIG.encode(), _LAYERS.encode(), trace]),
            _BEHIND.join([queued.encode(), fewer.encode(), trace])]  # fmt: skip


def _runs(room: Room) -> Harness:
    """A file that is shown by `headwater ui`, and compared with itself."""
    path = room.root / "run.json"
    path.write_bytes(b"{}")

    def harness(data: bytes) -> None:
        path.write_bytes(data)
        errors: list[HeadwaterError] = []
        for look in (lambda: RunFiles([path]).read(), lambda: compare(path, path)):
            try:
                look()
            except (ConfigError, PlanError) as error:
                errors.append(error)
        for error in errors:
            raise error

    return harness


def _runs_seeds() -> Sequence[bytes]:
    plan = json.loads(Plan().dumps())
    outcome = {"format": "headwater-simulated", "version": 1, "seconds": 5.0, "busy": {"node": [0.5, 0.7]},
               "faults": ["x"]}  # fmt: skip
    key = Key("m", "t", "d", "n", "h", "0")
    profile = Profile(key, 1e9, NodeCosts(0.1, 0.2, {"fp32": (0.0,)}), TrainerCosts(0.1, (0.3,)), Sizes(1e5, 100, 400))
    report = {"format": RUN_FORMAT, "version": RUN_VERSION, "plan": plan, "timeline": {"bin_s": 1.0, "strips": []}}
    planned: dict[str, Any] = {"plan": plan, "estimates": [], "cuts": []}
    every = (plan, outcome, report, planned, json.loads(perfetto(_spans())), json.loads(profile.dumps()))
    return [json.dumps(each).encode() for each in every]


def _checkpoint(room: Room) -> Harness:
    """What `headwater train --resume` loads, and what a job that trains on nodes does."""
    import torch

    from headwater.cli.train import _load
    from headwater.train.partition import PartitionJob

    path = room.root / "checkpoint.pt"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = object.__new__(PartitionJob)
    job.__dict__ |= {"model": model, "device": torch.device("cpu"), "_seed": 0, "_fetched": {}}
    job.__dict__ |= {"samples": _Nothing(), "_replicas": _Nothing()}

    def harness(data: bytes) -> None:
        path.write_bytes(data)
        errors: list[HeadwaterError] = []
        for load in (lambda: _load(path, {"model": model, "optimizer": optimizer}), lambda: job.load(path, optimizer)):
            try:
                with torch.random.fork_rng([]):
                    load()
            except ConfigError as error:
                errors.append(error)
        for error in errors:
            raise error

    return harness


class _Nothing:
    """In the place of samples, and of replicas on nodes."""

    fingerprint = "f"

    def __init__(self) -> None:
        self.peers: dict[int, Any] = {}


def _checkpoint_seeds() -> Sequence[bytes]:
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = {"format": 1, "epoch": 1, "position": 2, "steps": 3, "seed": 0, "fingerprint": "f"}
    state = {"model": model.state_dict(), "job": job, "optimizer": optimizer.state_dict()}
    state["random"] = torch.get_rng_state()
    seeds = []
    for way in (True, False):
        sink = io.BytesIO()
        torch.save(state, sink, _use_new_zipfile_serialization=way)
        seeds.append(sink.getvalue())
    return seeds


TARGETS = (
    Target("job", "a job file", _job, _job_seeds, (ConfigError,), 30, "lines"),
    Target("simulation", "a rig file, layers and a trace for `headwater simulate`", _simulation, _simulation_seeds,
           (ConfigError,), 30, "lines"),
    Target("runs", "a run's files, as they are shown and compared", _runs, _runs_seeds, (ConfigError, PlanError), 30,
           "json"),
    Target("checkpoint", "a checkpoint", _checkpoint, _checkpoint_seeds, (ConfigError,), 15),
)  # fmt: skip

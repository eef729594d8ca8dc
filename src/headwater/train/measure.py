"""Measures a job: what its stages cost on the nodes, on the links and here. Fills a `Profile` and a `Rig`.

Owns the order of measurements and the cache of their results. One pass times every part of the model on each side;
no cut is run by itself. Seconds are CPU-seconds of one core, so that a share of a core and several cores can be told
apart.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.core.cost import estimate
from headwater.core.cut import Cut, legal_cuts
from headwater.core.loads import JobSize, upload_s
from headwater.core.plan import Plan
from headwater.core.precision import FULL, Deviation
from headwater.core.profile import (
    Key,
    NodeCosts,
    Profile,
    Sizes,
    TrainerCosts,
    cheaper,
    check_profile,
    least,
    profile_faults,
    spread,
)
from headwater.core.rig import Device, Link, Rig
from headwater.core.spec import ITEM_BYTES
from headwater.core.tuning import AUTO, ENGINES, rather
from headwater.data.cores import machine, usable_cores
from headwater.data.holdings import Holdings
from headwater.data.memory import memory_bytes, resident_bytes
from headwater.data.samples import SampleRef, Samples
from headwater.data.store import store_name
from headwater.data.transforms import Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    ModelError,
    PlanError,
    RefusedError,
)
from headwater.model.capture import Captured
from headwater.model.near import NearModel
from headwater.model.places import kernel_places, place_seconds
from headwater.model.ship import Shipped, cuts_to_ship, ship
from headwater.progress import Progress
from headwater.train.client import NodeClient
from headwater.train.own import OwnNode
from headwater.train.precision import calibrated, check_possible, deviation, spread_out
from headwater.train.reads import NUM_SAMPLES, Fetched, fetch
from headwater.train.speeds import NODE_BATCH, speeds_now, within
from headwater.train.steps import model_costs
from headwater.train.wirecosts import byte_costs, decode_costs, local_costs, measure_port, wire_costs
from headwater.version import VERSION

log = logging.getLogger(__name__)
_NOT_SHIPPED = "the prefix up to there can't be written as one ONNX file, or is larger than a node takes"

NUM_ASKED = 48  # in a chunk that is asked for as a job would
HERE_ROWS = 8  # to measure an engine here: over a thin link, more would take long, and the pixels don't matter
MAX_DRIFT = 3.0  # more than this is no longer the same machine: it is measured again
MOMENT_S = 10.0  # what took longer is not measured twice: all is to end within half a minute
MAX_BATCH = 32  # a training batch beyond this costs the same a row, and more time to measure
ASK_S = 2.0  # that the chunk may take which is asked for as a job would; a row more than a group at least


@dataclass(frozen=True)
class Measured:
    """A job's costs and what it runs on."""

    profile: Profile
    rig: Rig
    shipped: Shipped | None  # serves every cut to choose from
    missing: tuple[str, ...]  # nodes that don't have it yet
    cuts: tuple[Cut, ...]  # all of the model's; those that can't be shipped are not legal here
    own: OwnNode | None = None  # started to be measured; whoever asked lets go of it

    @property
    def setup_s(self) -> float:
        """What is left to do, once, before nodes can run any of the cuts: it is exported already."""
        return upload_s(self.rig, self.missing, self.shipped.num_bytes) if self.shipped else 0.0

    @property
    def offered(self) -> tuple[Cut, ...]:
        """The cuts to choose from."""
        here = {0} | set(self.shipped.cuts if self.shipped else ())
        return tuple(cut for cut in self.cuts if cut.index in here and cut.legal)


def measure(
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    clients: Sequence[NodeClient],
    *,
    batch_size: int,
    seed: int,
    progress: Progress,
    world: int = 1,
    embedded: bool = False,
    given: Profile | None = None,
    again: bool = False,
    holdings: Holdings | None = None,
    precision: str = FULL,
    power: Mapping[str, tuple[float, float]] | None = None,
    share: bool = True,
    start_own: Callable[[], OwnNode] | None = None,
) -> Measured:
    """Measure the links now, and the rest unless an earlier measurement of the same things can be used.

    `share` says whether this machine may do a share of what nodes do, and `start_own` starts a node beside this process
    for it, whose engine is then measured. `power` has what a node, the trainer and its
    accelerator draw, in watts, idle and busy: stated, not measured.

    `precision` is measured beside full precision; where that can't be, a warning says why, and the profile is without.
    `given` is a profile to use instead; ConfigError if it is of anything else, or too old. `again` uses no earlier one.
    """
    hellos = [client.hello() for client in clients]
    links: list[Link] = []
    for client in clients:
        with progress.step(f"measuring the link to {client.name}"):
            down, up, latency_s = client.measure_link()
            links.append(Link(down, up, latency_s))
    port = None
    if len(clients) > 1:
        with progress.step("measuring the trainer's port"):
            port = measure_port(clients, links)
    refs = spread_out(samples, NUM_SAMPLES, holdings, clients[0].name)
    fetched = None
    if holdings is None:  # what is on the nodes' own disks can't be read from here
        with progress.step("measuring the way to the store"):
            fetched = fetch(samples)
    shipped, export_s = None, 0.0
    offered = cuts_to_ship(cuts, (int(hello["max_upload_bytes"]) for hello in hellos))
    if offered:
        with progress.step(f"exporting the prefix up to {offered[-1].name}"):
            start = time.perf_counter()
            shipped = _ship(captured, offered)
            export_s = time.perf_counter() - start
    cuts = _within_reach(cuts, max(shipped.cuts, default=0) if shipped else 0)
    key = _key(captured, cuts, pipeline, samples, hellos, batch_size, precision, reads=fetched is not None)
    path = _path(key)
    if given is not None:
        check_profile(given, cuts, key=key, age_s=time.time() - given.measured_at)
    profile = given or (None if again else _load(path, cuts, key))
    kept = profile if given is None else None  # what is in the cache, as it is there
    speeds, own_speed = [1.0] * len(clients), 1.0
    reads = dict[str, Any]()
    if profile is not None:
        with progress.step("measuring how fast the machines are today"):
            speeds, own_speed, reads = speeds_now(profile, pipeline, samples, holdings, clients, refs, fetched, seed)
        if not all(1 / MAX_DRIFT <= each <= MAX_DRIFT for each in (speeds[0], own_speed)):
            said = (f"the profile was measured when the node was {1 / speeds[0]:.2g} times and the trainer "
                    f"{1 / own_speed:.2g} times as fast as now")  # fmt: skip
            if given is not None:
                warnings.warn(f"{said}; measure again with `headwater profile`", stacklevel=3)
            else:
                log.warning("measuring again: %s", said)
                profile, kept, speeds, own_speed = None, None, [1.0] * len(clients), 1.0
    if profile is not None:
        if reads:
            log.warning("reading on %s no longer costs what it did when the profile was measured; as it is now: %s",
                        clients[0].name, ", ".join(f"{name} {now_s:.3g}" for name, now_s in reads.items()))  # fmt: skip
            profile = replace(profile, node=replace(profile.node, **reads))
        if shipped is not None and precision in profile.deviations:
            deviations = {}
            with progress.step(f"measuring the error of {precision}"):
                try:
                    deviations[precision] = _deviation(captured, cuts, pipeline, samples, seed, shipped, clients,
                                                       holdings, precision)  # fmt: skip
                except (RefusedError, PlanError) as error:
                    warnings.warn(f"fp32 is used: {error}", stacklevel=3)
            profile = replace(profile, deviations=deviations)
    else:
        profile = _profile(captured, cuts, pipeline, samples, clients, key, batch_size, seed, shipped, export_s,
                           float(hellos[0]["cores"]), refs, fetched, links[0], progress, precision,
                           holdings)  # fmt: skip
        if len(clients) > 1:  # only the first was measured
            speeds, *_ = speeds_now(profile, pipeline, samples, holdings, clients, refs, None, seed, just_now=True)
        if precision in profile.node.prefix_s or shipped is None:  # without it, the reason is wanted again next time
            _save(path, profile)
            kept = profile
    own = None
    if start_own is not None and shipped is not None and fetched is not None and profile.trainer.engine_ratio is None:
        with progress.step("measuring an engine here"):
            own, ratio = _engine_here(start_own, cuts, pipeline, samples, seed, shipped, profile, own_speed)
        profile = replace(profile, trainer=replace(profile.trainer, engine_ratio=ratio))
        if kept is not None:
            _save(path, replace(kept, trainer=replace(kept.trainer, engine_ratio=ratio)))
    watts: dict[str, Any] = {name: {"idle_w": idle, "busy_w": busy} for name, (idle, busy) in (power or {}).items()}
    nodes = tuple(
        Device(client.name, cores=float(hello["cores"]) / world, memory_bytes=int(hello["memory_bytes"]), speed=speed,
               **watts.get("node", {}))
        for client, hello, speed in zip(clients, hellos, speeds, strict=True)
    )  # fmt: skip
    beside = trainers_here(world)
    trainer = Device("trainer", cores=usable_cores() / beside, memory_bytes=memory_bytes() // beside, speed=own_speed,
                     **watts.get("trainer", {}))  # fmt: skip
    accelerator = None
    if profile.trainer.suffix_on == "accelerator":
        accelerator = Device("accelerator", **watts.get("accelerator", {}))
    way = Link(fetched.bytes_per_s, fetched.bytes_per_s) if fetched else None
    rig = Rig(nodes, tuple(links), trainer, accelerator, trainer_link=port, store_link=way,
              trainer_reads=fetched is not None, trainer_shares=share, shared_cores=embedded)  # fmt: skip
    if shipped is not None:
        for client in clients:
            client.needs(shipped.digest, shipped.path)
    missing = tuple(client.name for client in clients if shipped is not None and not client.has_prefix())
    return Measured(profile, rig, shipped, missing, tuple(cuts), own)


def trainers_here(world: int) -> int:
    """How many of the job's trainers share this machine, as torchrun tells it."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(told), world) if told.isdigit() and int(told) > 0 else 1


def _ship(captured: Captured, offered: tuple[Cut, ...]) -> Shipped | None:
    """All of these in one file; or the earlier ones, where what comes later has no ONNX form or mixes rows."""
    while offered:
        try:
            return ship(captured, *offered)
        except ModelError as error:
            log.warning("planning with earlier cuts only: %s", error)
            offered = offered[: len(offered) // 2]
    return None


def _layout(captured: Captured) -> str:
    """Convolutions run at another speed where the weights are channels-last."""
    images = [each for each in captured.model.parameters() if each.dim() == 4 and each.shape[1] > 1]
    last = any(not each.is_contiguous() and each.is_contiguous(memory_format=torch.channels_last) for each in images)
    return " channels-last" if last else ""


def _within_reach(cuts: Sequence[Cut], reach: int) -> tuple[Cut, ...]:
    """What can't be shipped can't be chosen."""
    return tuple(cut if cut.index <= reach or not cut.legal else replace(cut, legal=False, why_not=_NOT_SHIPPED)
                 for cut in cuts)  # fmt: skip


def _key(
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    hellos: Sequence[Mapping[str, Any]],
    batch_size: int,
    precision: str,
    *,
    reads: bool,
) -> Key:
    """What these costs are of. It is written to files and shown in errors: nothing secret may be in it."""
    return Key(
        model=_model_digest(captured, cuts),
        transforms=pipeline.digest,
        data=f"{samples.fingerprint} at {store_name(samples.url)}{' packed' if samples.packed else ''}",
        node="; ".join(sorted({f"{hello.get('machine')}, {hello.get('engine_versions')}" for hello in hellos}))
        + ("" if precision == FULL else f"; {precision}"),
        trainer=f"{machine()} torch {torch.__version__} {torch.get_num_threads()} threads, batch "
        f"{min(batch_size, MAX_BATCH)}, {captured.example[0].device.type}{_layout(captured)}, "
        f"{'reads the store' if reads else 'no way to the store'}",
        headwater=VERSION,
    )


def _path(key: Key) -> Path:
    """Where a profile of it is kept."""
    return _cache() / f"{hashlib.sha256(json.dumps(vars(key)).encode()).hexdigest()}.json"


def check_room(
    plan: Plan,
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    clients: Sequence[NodeClient],
    *,
    batch_size: int,
    precision: str,
    world: int,
) -> None:
    """PlanError with every device that has too little memory for a plan that nothing is measured for.

    As an earlier profile of the same things tells; where none is kept, or it does not know this plan, nothing is said.
    """
    hellos = [client.hello() for client in clients]
    offered = cuts_to_ship(cuts, (int(hello["max_upload_bytes"]) for hello in hellos))
    cuts = _within_reach(cuts, max((cut.index for cut in offered), default=0))
    keys = [_key(captured, cuts, pipeline, samples, hellos, batch_size, precision, reads=reads)
            for reads in (True, False)]  # fmt: skip
    known = next((found for key in keys if (found := _kept(key, cuts)) is not None), None)
    if known is None:
        return
    beside = trainers_here(world)
    any_link = Link(1e9, 1e9)  # memory does not depend on it
    nodes = tuple(Device(client.name, float(hello["cores"]) / world, int(hello["memory_bytes"]))
                  for client, hello in zip(clients, hellos, strict=True))  # fmt: skip
    trainer = Device("trainer", usable_cores() / beside, memory_bytes() // beside)
    chip = Device("accelerator") if known.trainer.suffix_on == "accelerator" else None
    rig = Rig(nodes, (any_link,) * len(nodes), trainer, chip, store_link=any_link)
    try:
        needs = estimate(plan, cuts, known, rig, JobSize(-(-len(samples) // world), batch_size))
    except PlanError:
        log.debug("whether the plan fits is not known: it was not measured")
        return
    if needs.faults:
        raise PlanError(needs.faults)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headwater" / "profiles"


def _load(path: Path, cuts: Sequence[Cut], key: Key) -> Profile | None:
    """An earlier profile of the same things; None if there is none, or it no longer fits."""
    try:
        profile = Profile.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        log.warning("measuring again: the profile that was kept can't be read (%s)", error)
        return None
    faults = profile_faults(profile, cuts, key=key, age_s=time.time() - profile.measured_at)
    if faults:
        log.warning("measuring again: a profile was kept, but %s", "; ".join(faults))
        return None
    return profile


def _kept(key: Key, cuts: Sequence[Cut]) -> Profile | None:
    """The same for a job that measures nothing: one that can't be used is of no interest to it."""
    try:
        profile = Profile.loads(_path(key).read_bytes())
    except (OSError, ConfigError):
        return None
    return None if profile_faults(profile, cuts, key=key, age_s=time.time() - profile.measured_at) else profile


def _save(path: Path, profile: Profile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_text(profile.dumps())
    scratch.replace(path)


def _engine_here(
    start_own: Callable[[], OwnNode],
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    seed: int,
    shipped: Shipped,
    profile: Profile,
    speed: float,
) -> tuple[OwnNode | None, float | None]:
    """A node beside this process, and what its engine takes for the prefix ÷ what the nodes' takes.

    Without both, if that can't be found out: it is then taken to be as for decoding. `speed` is this machine's now,
    against the time of the profile.
    """
    deepest = legal_cuts(cuts)[-1]
    want = Extraction(samples.url, pipeline, shipped.digest, deepest.boundary, node_batch=NODE_BATCH,
                      outputs=shipped.names_at(deepest), engine=rather(profile.node.engine))  # fmt: skip
    there_s = profile.node.prefix_s[FULL][deepest.index]
    own = None
    try:
        own = start_own()
        own.needs(shipped.digest, shipped.path)
        own.prepare()
        chunk = Chunk(want, "probe", seed, 0, 0, spread_out(samples, HERE_ROWS, None, ""), reuse=False)
        here_s = speed * min(float(own.probe(chunk)["prefix_s"]) for _ in range(2))  # the better of two moments
    except HeadwaterError as error:
        log.warning("what an engine takes here is taken from decoding, since it can't be measured: %s", error)
        if own is not None:
            own.close()
        return None, None
    return own, within(here_s / there_s) if there_s and here_s > 0 else None


def _model_digest(captured: Captured, cuts: Sequence[Cut]) -> str:
    digest = hashlib.sha256(captured.graph_module.code.encode())
    places = [[cut.name, cut.legal, cut.row_bytes] for cut in cuts]
    # What learns behind the last cut makes no cut illegal, and decides how much of a step is going backwards.
    weights = [[name, list(each.shape), str(each.dtype), each.requires_grad]
               for name, each in captured.model.named_parameters()]  # fmt: skip
    digest.update(json.dumps([places, weights]).encode())
    return digest.hexdigest()


def _profile(
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    clients: Sequence[NodeClient],
    key: Key,
    batch_size: int,
    seed: int,
    shipped: Shipped | None,
    export_s: float,
    cores: float,
    refs: tuple[SampleRef, ...],
    fetched: Fetched | None,
    link: Link,
    progress: Progress,
    precision: str,
    holdings: Holdings | None,
) -> Profile:
    deepest = legal_cuts(cuts)[-1]
    boundary = deepest.boundary if shipped else (pipeline.pixel_spec,)
    extraction = Extraction(samples.url, pipeline, shipped.digest if shipped else None, boundary, node_batch=NODE_BATCH,
                            outputs=shipped.names_at(deepest) if shipped else None)  # fmt: skip
    chunk = Chunk(extraction, "probe", seed, 0, 0, refs, reuse=False)  # what is measured is making rows
    client = clients[0]
    if shipped:
        client.needs(shipped.digest, shipped.path)
        if not client.has_prefix():
            with progress.step(f"sending the prefix ({shipped.num_bytes / 1e6:.1f} MB) to {client.name}"):
                client.prepare()
    with progress.step(f"measuring work on {client.name}"):
        client.prepare()
        start = time.perf_counter()
        found = client.probe(chunk)
    batch = min(batch_size, MAX_BATCH)
    base_bytes = resident_bytes()
    with progress.step("measuring work here"):
        suffix_s, step_bytes = model_costs(captured, cuts, deepest, batch)
        local = local_costs(pipeline, fetched, seed)
    if time.perf_counter() - start < MOMENT_S:
        others = spread_out(samples, NUM_SAMPLES, holdings, client.name, other=True)
        with progress.step("measuring both again, in another moment"):
            found = cheaper(found, client.probe(replace(chunk, samples=others)))
            suffix_s = least(suffix_s, model_costs(captured, cuts, deepest, batch)[0])
            local = least(local, local_costs(pipeline, fetched, seed))
    reduced, deviations = dict[str, tuple[float | None, ...]](), dict[str, Deviation]()
    if shipped is None and precision != FULL:
        warnings.warn(f"{precision} has nothing to do: no cut of the model can be sent to a node", stacklevel=4)
    if shipped and precision != FULL:
        with progress.step(f"measuring {precision} on {client.name}"):
            try:
                check_possible(clients, precision, "auto")
                for each in clients[1:]:
                    each.needs(shipped.digest, shipped.path)
                    each.prepare()
                want = calibrated(replace(extraction, precision=precision), samples, seed, clients, holdings)
                reduced[precision] = _prefix_curve(client.probe(replace(chunk, extraction=want)), captured, deepest,
                                                   shipped)  # fmt: skip
                deviations[precision] = deviation(want, deepest, samples, seed, clients, NearModel(captured),
                                                  holdings)  # fmt: skip
            except (RefusedError, PlanError) as error:
                warnings.warn(f"fp32 is used: {error}", stacklevel=4)
    with progress.step("measuring what a row costs on its way"):
        receive_s_per_byte, send_s_per_byte = byte_costs(client, link)
        num_asked = min(NUM_ASKED, max(NODE_BATCH + 1, int(ASK_S / max(float(found["pipeline_s"]), 1e-6))))
        asked = replace(chunk, samples=refs[:num_asked])
        wire_s, receive_s_per_row, receive_s_per_chunk = wire_costs(client, asked, found, receive_s_per_byte)
    rows = sum(len(json.dumps(ref.to_json(), separators=(",", ":"))) + 1 for ref in refs) / len(refs)
    return Profile(
        key=key,
        measured_at=time.time(),
        node=_node_costs(found, cores, wire_s, captured, cuts, deepest, shipped, send_s_per_byte, reduced),
        trainer=TrainerCosts(
            decode_s=local.get("decode_s", float(found["decode_s"])),
            finish_s=local["finish_s"],
            fetch_s=local.get("fetch_s", 0.0),
            receive_s_per_byte=receive_s_per_byte,
            receive_s_per_row=receive_s_per_row,
            receive_s_per_chunk=receive_s_per_chunk,
            decode_s_per_byte=decode_costs(found["encode_s_per_byte"], pipeline),
            suffix_s=suffix_s,
            suffix_on="host" if captured.example[0].device.type == "cpu" else "accelerator",
            suffix_row_bytes=step_bytes,
            base_bytes=base_bytes,
            num_threads=torch.get_num_threads(),
        ),
        sizes=Sizes(
            sample_bytes=float(np.where(samples.lengths < 0, samples.sizes, samples.lengths).mean()),
            pixel_row_bytes=pipeline.pixel_spec.row_bytes,
            input_row_bytes=pipeline.pixel_spec.num_items * ITEM_BYTES["int64" if pipeline.text else "float32"],
            request_row_bytes=rows,
            request_chunk_bytes=max(0.0, len(chunk.dumps()) - rows * len(refs)),
        ),
        export_s=export_s,
        deviations=deviations,
    )


def _deviation(
    captured: Captured,
    cuts: Sequence[Cut],
    pipeline: Transforms,
    samples: Samples,
    seed: int,
    shipped: Shipped,
    clients: Sequence[NodeClient],
    holdings: Holdings | None,
    precision: str,
) -> Deviation:
    """Of the model as it is now: a profile is kept for a model of this shape, whatever its weights."""
    deepest = legal_cuts(cuts)[-1]
    for client in clients:
        client.needs(shipped.digest, shipped.path)
        client.prepare()
    want = Extraction(samples.url, pipeline, shipped.digest, deepest.boundary, precision, node_batch=NODE_BATCH,
                      outputs=shipped.names_at(deepest))  # fmt: skip
    want = calibrated(want, samples, seed, clients, holdings)
    return deviation(want, deepest, samples, seed, clients, NearModel(captured), holdings)


def _prefix_curve(
    found: dict[str, Any], captured: Captured, deepest: Cut, shipped: Shipped
) -> tuple[float | None, ...]:
    """CPU-seconds a row up to each cut: what the whole prefix takes, spread by what its kernels took."""
    kernels = [(str(name), float(taken_s)) for name, taken_s in found["kernels"]]
    seconds = place_seconds(kernels, kernel_places(captured, shipped.path), deepest.index)
    return spread(float(found["prefix_s"]), seconds)


def _node_costs(
    found: dict[str, Any],
    cores: float,
    wire_s: float,
    captured: Captured,
    cuts: Sequence[Cut],
    deepest: Cut,
    shipped: Shipped | None,
    send_s_per_byte: float,
    reduced: dict[str, tuple[float | None, ...]],
) -> NodeCosts:
    stages = sum(float(found.get(name, 0.0)) for name in ("read_s", "decode_s", "finish_s", "prefix_s"))
    # What all stages at once take beyond their sum, however it comes about: every row costs it, whatever the cut.
    together = max(float(found["pipeline_cpu_s"]), float(found["pipeline_s"]) * min(cores, 1.0))
    extra_s = max(0.0, together - stages)
    overhead_s = min(extra_s, max(0.0, float(found["pipeline_cpu_s"]) - stages))  # of the node's own process
    prefix_s: tuple[float | None, ...] = (0.0,)
    fixed_bytes: tuple[int | None, ...] = (0,)
    row_bytes: tuple[int | None, ...] = (0,)
    if shipped is not None:
        prefix_s = _prefix_curve(found, captured, deepest, shipped)
        share = [cut.prefix_bytes / max(deepest.prefix_bytes, 1) for cut in cuts[: deepest.index + 1]]
        fixed_bytes = tuple(int(found["fixed_bytes"] * each) for each in share)
        row_bytes = (0,) + (int(found["row_bytes"]),) * deepest.index
    beyond = len(cuts) - len(prefix_s)
    return NodeCosts(
        read_s=float(found["read_s"]) + extra_s - overhead_s,
        overhead_s=overhead_s,
        read_wait_s=float(found["read_wait_s"]),
        lone_read_s=float(found["read_s"]),
        decode_s=float(found["decode_s"]),
        finish_s=float(found.get("finish_s", 0.0)),
        prefix_s={name: each + (None,) * beyond for name, each in {FULL: prefix_s, **reduced}.items()},
        encode_s_per_byte={name: float(cost) for name, cost in found["encode_s_per_byte"].items()},
        send_s_per_byte=send_s_per_byte,
        chunk_s=wire_s,
        base_bytes=int(found["base_bytes"]),
        fixed_bytes=fixed_bytes + (None,) * beyond,
        row_bytes=row_bytes + (None,) * beyond,
        engine=engine if (engine := found.get("engine")) in ENGINES else AUTO,
    )

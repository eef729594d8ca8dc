"""Reduced precision on the nodes: what an int8 prefix is calibrated on, and how far its rows are from fp32's.

Owns the choice of samples and the measurement. `core.precision` decides whether that is near enough.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.cut import Cut
from headwater.core.precision import FULL, Deviation
from headwater.core.tuning import wish
from headwater.data.holdings import Holdings
from headwater.data.samples import SampleRef, Samples
from headwater.data.wire import MIN_CALIBRATION, Calibrate, Chunk, Extraction
from headwater.errors import PlanError, RefusedError
from headwater.model.near import NearModel, Rows
from headwater.train.client import NodeClient
from headwater.train.own import OwnNode

NUM_CALIBRATION = 64  # samples for the ranges of values; more hardly widen them
NUM_CHECKED = 100  # samples for the error: one of them is 1 %
MIN_OTHERS = 50  # that int8 was not calibrated on: with fewer, all samples are checked


def calibrated(
    extraction: Extraction,
    samples: Samples,
    seed: int,
    clients: Sequence[NodeClient],
    holdings: Holdings | None = None,
) -> Extraction:
    """The same extraction, with every node ready for its precision."""
    if extraction.precision != "int8" or extraction.prefix is None:
        return extraction
    if holdings is not None:
        raise RefusedError("int8 is calibrated on the same samples everywhere; these nodes have disks of their own: "
                           "use fp32")  # fmt: skip
    if len(samples) < MIN_CALIBRATION:
        raise RefusedError(f"int8 is calibrated on at least {MIN_CALIBRATION} samples, and there are {len(samples)}; "
                           "use fp32")  # fmt: skip
    # The samples decide what the calibration is called, and codec, batch and outputs have nothing to do with it.
    plain = replace(extraction, precision=FULL, calibration=None)
    request = Calibrate(Chunk(plain, "calibrate", seed, 0, 0, spread_out(samples, NUM_CALIBRATION)))
    for client in clients:
        client.calibrate(request)
    return replace(extraction, calibration=request.digest)


def deviation(
    extraction: Extraction,
    cut: Cut,
    samples: Samples,
    seed: int,
    clients: Sequence[NodeClient],
    model: NearModel,
    holdings: Holdings | None = None,
) -> Deviation:
    """Of the node whose rows are furthest off: one of each kind is asked, since engines and CPUs round differently."""
    kinds = dict[tuple[object, ...], NodeClient]()
    for client in clients:
        said = client.hello()
        kinds.setdefault((said.get("machine"), said.get("engine_versions")), client)
    found = [_deviation(extraction, cut, samples, seed, each, model, holdings) for each in kinds.values()]
    return min(found, key=lambda each: (each.agreement, each.cosine))


def _deviation(
    extraction: Extraction,
    cut: Cut,
    samples: Samples,
    seed: int,
    client: NodeClient,
    model: NearModel,
    holdings: Holdings | None,
) -> Deviation:
    """Ask a node for the same rows twice, and run the rest of the model on both."""
    refs = spread_out(samples, NUM_CHECKED, holdings, client.name, other=True)
    exact = replace(extraction, precision=FULL, calibration=None, codec="raw")
    replies = [
        client.rows(Chunk(want, "check", seed, 0, 0, refs, reuse=False), threading.Event())
        for want in (exact, replace(extraction, codec="raw"))
    ]
    both = replies[0].good & replies[1].good
    found = [[tensor[both[reply.good]] for tensor in reply.tensors] for reply in replies]
    if not both.any():
        raise RefusedError(f"none of {len(refs)} samples could be read, so the error of {extraction.precision} is not "
                           "known; use fp32")  # fmt: skip
    full, reduced = ([each for each in tensors if each.dtype.kind == "f"] for tensors in found)
    rows = [np.concatenate([each.reshape(len(each), -1) for each in part], 1).astype(np.float64)
            for part in (full, reduced)]  # fmt: skip
    if not np.isfinite(rows[1]).all():
        raise RefusedError(f"{client.name}: in {extraction.precision} some values of rows are no numbers any more; use "
                           "fp32")  # fmt: skip
    lengths = np.linalg.norm(rows[0], axis=1) * np.linalg.norm(rows[1], axis=1)
    equal = (rows[0] == rows[1]).all(1)  # rows of zeros have no direction
    cosines = np.where(equal, 1.0, (rows[0] * rows[1]).sum(1) / np.maximum(lengths, 1e-300))
    first, second = (_first_choice(model, [torch.from_numpy(each.copy()) for each in part], cut) for part in found)
    return Deviation(
        cosine=float(cosines.mean()),
        max_abs=float(np.abs(rows[0] - rows[1]).max()),
        agreement=float((first == second).float().mean()),
        num_samples=len(rows[0]),
        cut=cut.name,
    )


def spread_out(
    samples: Samples, count: int, holdings: Holdings | None = None, node: str = "", *, other: bool = False
) -> tuple[SampleRef, ...]:
    """Samples from all over the data set, or of what a node holds. `other`: none that int8 is calibrated on, unless too
    few are left."""
    ids = np.arange(len(samples)) if holdings is None else np.flatnonzero(holdings.rows[node] >= 0)
    if other:
        left = np.delete(ids, _places(len(ids), NUM_CALIBRATION))
        ids = left if len(left) >= min(count, MIN_OTHERS) else ids
    ids = ids[_places(len(ids), count)]
    return tuple(samples.take(ids) if holdings is None else holdings.refs(node, ids))


def _places(num: int, count: int) -> np.ndarray:
    """`count` numbers below `num`, or all of them, evenly apart."""
    count = min(count, num)
    return (np.arange(count) * (num / max(count, 1))).astype(np.int64)


def check_possible(clients: Sequence[NodeClient | OwnNode], precision: str, engine: str) -> None:
    """One PlanError for all nodes that can't run a prefix so."""
    engine, must = wish(engine)
    faults = []
    for client in clients:
        said = client.hello()
        if precision not in said.get("precisions", ()):
            why = said.get("precision_faults", {}).get(precision, "it does not know it")
            faults.append(f"{client.name} can't do precision {precision}: {why}")
        if must and engine not in said.get("engines", ()):
            faults.append(
                f"{client.name} has no engine {engine} (it has {', '.join(said.get('engines', ()))}); install it there "
                f"(pip install '.[{engine}]' in a checkout), or set engine to \"auto\""
            )
    if faults:
        raise PlanError(faults)


def _first_choice(model: NearModel, tensors: Sequence[Tensor], cut: Cut) -> Tensor:
    """What the model says of each row, in evaluation mode; the modes are as before afterwards."""
    modes = [(module, module.training) for module in model.original.modules()]
    device = next((each.device for each in model.original.parameters()), torch.device("cpu"))
    try:
        nn.Module.train(model.original, False)
        with torch.no_grad():
            said = _first_tensor(model(Rows(tuple(tensors), cut.index).to(device)))
    finally:
        for module, training in modes:
            module.training = training
    flat = said.reshape(len(said), -1)
    return (flat > 0).squeeze(1) if flat.shape[1] == 1 else flat.argmax(1)


def _first_tensor(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output
    values = list(output.values()) if isinstance(output, dict) else list(output)  # type: ignore[call-overload]
    return _first_tensor(values[0])

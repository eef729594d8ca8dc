"""What a step of the model costs on the trainer: seconds and bytes a row of what is behind each cut.

Owns the clock around the model. Nothing of it is left in the model: weights, running statistics and gradients are as
they were.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from headwater.core.cut import Cut
from headwater.core.profile import spread
from headwater.data.memory import peak_bytes, reset_peak
from headwater.model.capture import Captured
from headwater.model.near import NearModel, Rows
from headwater.model.places import time_places
from headwater.model.split import prefix_module

PASS_S = 0.75  # that one run of the model may take here; of a slower one, fewer rows are run
LEAST_ROWS = 2
ENOUGH_S, FEW_S, MAX_RUNS = 0.5, 0.1, 100  # a clock needs no more than that
LEAST_RUNS = 3


def model_costs(
    captured: Captured, cuts: Sequence[Cut], deepest: Cut, batch: int
) -> tuple[tuple[float | None, ...], tuple[int | None, ...]]:
    """Of what is behind each cut, forward, and backward where something is trainable: seconds a row, and bytes a row.

    Seconds are of CPU; of the accelerator, where the model is on one. Bytes are those that come on top of what is
    there anyway; on an accelerator they are not measured.
    """
    device = captured.example[0].device
    seconds = partial(_seconds, device)
    near = NearModel(captured)
    tensors_of = (*near.original.named_parameters(), *near.original.named_buffers())
    state = [(tensor, tensor.detach().clone()) for _, tensor in tensors_of]
    grads = {name: each.grad for name, each in near.original.named_parameters()}
    for each in near.original.parameters():
        each.grad = None  # what is there must not be added to
    shapes = deepest.boundary if deepest.index else captured.inputs
    tensors = tuple(
        torch.zeros((batch, *spec.shape), dtype=getattr(torch, spec.dtype), device=device) for spec in shapes
    )

    def step(tensors: tuple[torch.Tensor, ...]) -> None:
        output = near(Rows(tensors, deepest.index)) if deepest.index else near(*tensors)
        loss = sum(each.float().square().mean() for each in _tensors(output))
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()

    try:
        with _same_draws(device):
            behind_s, rows = row_s(seconds, lambda rows: step(_first(tensors, rows)), batch)
            behind_bytes = _row_bytes(device, lambda: step(_first(tensors, rows)), rows)
    finally:  # running statistics and gradients as they were
        with torch.no_grad():
            for tensor, kept in state:
                tensor.copy_(kept)
        for name, each in near.original.named_parameters():
            each.grad = grads[name]
    none = (None,) * (len(cuts) - deepest.index - 1)
    if not deepest.index:
        return (behind_s, *none), (behind_bytes, *none)
    inputs = tuple(
        torch.zeros((batch, *spec.shape), dtype=getattr(torch, spec.dtype), device=device) for spec in captured.inputs
    )
    prefix = prefix_module(captured, deepest)
    with torch.inference_mode():
        # As many rows as in training where there is time: with fewer, layers that cost by their weights or their number
        # seem too dear.
        whole_s, rows = row_s(seconds, lambda rows: prefix(*_first(inputs, rows)), batch)
        inputs = _first(inputs, rows)
        whole_bytes = _row_bytes(device, lambda: prefix(*inputs), rows)
    curve = spread(whole_s, time_places(captured, inputs, deepest.index, partial(_settle, device)))
    # Earlier cuts run some of the prefix here, without gradients and before the rest: the larger of the two counts.
    row_bytes = (max(whole_bytes, behind_bytes),) * deepest.index + (behind_bytes,)
    return tuple(behind_s + whole_s - each for each in curve) + none, row_bytes + none


def _first(tensors: tuple[torch.Tensor, ...], rows: int) -> tuple[torch.Tensor, ...]:
    return tuple(each[:rows] for each in tensors)


def row_s(
    seconds: Callable[[Callable[[], Any], float], float], run: Callable[[int], Any], batch: int
) -> tuple[float, int]:
    """Seconds a row in a batch, and how many rows that was measured with.

    Where a batch would take too long, from two smaller ones: what a step costs whatever its rows (weights that are
    read, gradients that are written) is told apart from what each row costs.
    """
    few = min(LEAST_ROWS, batch)
    few_s = seconds(lambda: run(few), FEW_S)
    rows = min(batch, max(2 * few, int(PASS_S * few / max(few_s, 1e-9))))
    taken_s = seconds(lambda: run(rows), ENOUGH_S)
    if rows < batch:
        taken_s += max(0.0, taken_s - few_s) / (rows - few) * (batch - rows)
    return taken_s / batch, rows


def _row_bytes(device: torch.device, work: Callable[[], Any], rows: int) -> int:
    """What this takes for each row at its peak; 0 where that can't be told from here."""
    if device.type != "cpu" or (before := reset_peak()) is None:
        return 0
    work()
    return max(0, peak_bytes() - before) // rows


def _same_draws(device: torch.device) -> Any:
    """What is drawn inside (by dropout, say) is not missing afterwards, here or on the device."""
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)


def _settle(device: torch.device) -> None:
    """Wait until what was begun on an accelerator is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _seconds(device: torch.device, work: Callable[[], Any], at_least_s: float) -> float:
    """Of one run: CPU-seconds; on an accelerator, its own."""
    if device.type == "cpu":
        return cpu_s(work, at_least_s)

    def finished() -> None:
        work()
        _settle(device)

    return cpu_s(finished, at_least_s, time.perf_counter)


def cpu_s(
    work: Callable[[], Any], at_least_s: float = ENOUGH_S, clock: Callable[[], float] = time.process_time
) -> float:
    """CPU-seconds of one run, in the median; the first warms up and does not count.

    The second may still fetch memory that all later ones find: a mean of few would have that in it. One that takes
    very long is not run again.
    """
    work()
    taken: list[float] = []
    while sum(taken) < at_least_s or len(taken) < LEAST_RUNS:
        start = clock()
        work()
        taken.append(clock() - start)
        if len(taken) == MAX_RUNS or taken[0] > 2 * PASS_S:
            break
    return statistics.median(taken)


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = tuple(output.values())
    return [each for part in output for each in _tensors(part)] if isinstance(output, (tuple, list)) else []

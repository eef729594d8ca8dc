"""A prefix on one core, as a node runs it, against eager PyTorch.

Claim: over six models, the engine that a node chooses by itself runs the frozen part at least 1.5 times as fast as
eager PyTorch does at equal results (1e-4), and at least 2.0 times with int8 where that is faster and a head trained on
fp32 rows makes the same first choice for 99 % of pictures it has not seen. Both are geometric means over all six; where
int8 does not win, fp32 counts. bf16 stands beside them where the CPU computes in it.

Everything runs on one core. Eager PyTorch is the user's own model without its head, contiguous and in inference mode,
at the batch that suits it best of those tried; channels-last stands beside it. Ours goes through the node's own code:
upload, trials, calibration on samples, engine. Rounds go through all sides in turn; medians count.

Weights are random but for EfficientNet-lite0, with batch-norms settled on the pictures, so that values have the range
they have in a trained model. The head is a ridge regression on fp32 rows of some pictures, tried on others; it tells
apart what is in them.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import nn

from bench import models, pictures
from bench.result import Result
from headwater.core.cut import Cut, legal_cuts
from headwater.core.draw import Draw
from headwater.core.precision import TOLERANCE
from headwater.core.spec import Boundary
from headwater.data.layouts import list_samples
from headwater.data.samples import Samples
from headwater.data.transforms import Transforms
from headwater.data.wire import Calibrate, Chunk, Extraction
from headwater.errors import RefusedError
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.model.ship import ship
from headwater.node import engines
from headwater.node.engine import Engine
from headwater.node.prefixes import Prefixes, Wanted
from headwater.node.quantise import has_vnni

HEADS = {"alexnet": "classifier.6", "resnet18": "fc", "resnet50": "fc", "mobilenet": "classifier", "lite0": "_fc",
         "vit": "head"}  # fmt: skip
REDUCED = ("int8", "bf16")
QUICK = ("resnet18", "mobilenet", "lite0")
EQUAL = 1e-4
BATCHES = (1, 4, 16, 32)  # that eager PyTorch is tried with
ROUND_S = 1.0  # of each side in each round
NUM_CLASSES = 10
NUM_CALIBRATION = 64
NEAR_PEAK = 0.5


@dataclass(frozen=True)
class Side:
    """One way to run the prefix: `run` takes rows and gives theirs."""

    name: str
    batch: int
    run: Callable[[np.ndarray], Any]


def run(*, quick: bool, console: Console) -> Result:
    before = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, {max(before)})
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch:
            return _run(quick, console, Path(scratch))
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def _run(quick: bool, console: Console, scratch: Path) -> Result:
    names = QUICK if quick else tuple(HEADS)
    fitted, tried, rounds = (120, 120, 3) if quick else (300, 300, 7)
    folder, what = pictures.folder(scratch / "data", fitted + tried, num_classes=NUM_CLASSES)
    samples = list_samples(str(folder))
    peak = peak_flops()
    console.print(
        f"{what}; one core, {peak / 1e9:.0f} GFLOP/s in a large matrix product; engines: {engines.versions()}"
    )
    cases = []
    for name in names:
        prefixes = Prefixes(scratch / name / "prefixes", 1 << 30, num_threads=1)
        try:
            cases.append(one_model(name, samples, prefixes, peak, fitted, rounds))
        finally:
            prefixes.close()
        console.print(tell(cases[-1]), style="dim")
    return result(cases, quick, what, peak)


def one_model(name: str, samples: Samples, prefixes: Prefixes, peak: float, fitted: int, rounds: int) -> dict[str, Any]:
    model, transforms = models.build(name, NUM_CLASSES)
    images = load(samples, transforms)
    settle(model, images[:64])
    cut, boundary, digest = upload(model, prefixes)
    bare = headless(model, HEADS[name])
    fp32 = Wanted(digest)
    engine = prefixes.engine(fp32)
    extraction = Extraction(samples.url, transforms, digest, boundary)
    known, _ = halves(len(samples), fitted)
    refs = tuple(samples.take(np.sort(known)[:: max(1, fitted // NUM_CALIBRATION)]))[:NUM_CALIBRATION]
    request = Calibrate(Chunk(extraction, "bench", 0, 0, 0, refs))
    reduced: dict[str, Engine] = {}
    refused: dict[str, str] = {}
    for precision in REDUCED:
        try:
            if precision == "int8":
                prefixes.calibrate(request)
            calibration = request.digest if precision == "int8" else None
            reduced[precision] = prefixes.engine(Wanted(digest, None, precision, calibration=calibration))
        except RefusedError as error:
            refused[precision] = str(error)
    wanted = rows_of(runner(engine, boundary), images)
    off = difference(wanted[:32], rows_of(eager(bare), images[:32]))
    if off > EQUAL:
        raise RuntimeError(f"{name}: rows differ from eager PyTorch's by {off:.2g} of the largest value")
    near = {precision: agree(wanted, rows_of(runner(each, boundary), images), samples.labels, fitted)
            for precision, each in reduced.items()}  # fmt: skip
    ways = {each["precision"]: each for each in prefixes.in_use()}
    sides = [
        fastest("eager", eager(bare), images),
        fastest("channels-last", eager(bare, last=True), images),
        Side("fp32", ways["fp32"]["batch"], runner(engine, boundary)),
        *(Side(each, ways[each]["batch"], runner(reduced[each], boundary)) for each in reduced),
    ]
    rates = measure(sides, images, rounds)

    def gain(ours: str, theirs: str) -> float:
        """The median of ratios within a round; 0 for what can't be run."""
        if ours not in rates:
            return 0.0
        return statistics.median(mine / other for mine, other in zip(rates[ours], rates[theirs], strict=True))

    gains = {precision: gain(precision, "eager") for precision in ("fp32", *REDUCED)}
    wins = gains["int8"] > gains["fp32"] and near["int8"].agreement >= TOLERANCE
    return {
        "model": name,
        **{f"{side}_per_s": statistics.median(each) for side, each in rates.items()},
        **{f"{precision}_over_eager": each for precision, each in gains.items()},
        "fp32_over_channels_last": gain("fp32", "channels-last"),
        **{f"{each}_agreement": near[each].agreement if each in near else 0.0 for each in REDUCED},
        **{f"{each}_cosine": near[each].cosine if each in near else 0.0 for each in REDUCED},
        "head_accuracy": agree(wanted, wanted, samples.labels, fitted).accuracy,
        "taken": "int8" if wins else "fp32",
        **{f"{each}_way": way(ways[each]) if each in ways else refused[each] for each in ("fp32", *REDUCED)},
        "eager_batch": sides[0].batch,
        "max_diff": off,
        "of_peak": statistics.median(rates["fp32"]) * flops(bare, images) / peak,
        "cut": cut.name,
    }


def runner(engine: Engine, boundary: Boundary) -> Callable[[np.ndarray], Any]:
    return lambda rows: engine.run(rows, boundary)


def way(chosen: dict[str, Any]) -> str:
    return f"{chosen['engine']}, batch {chosen['batch']}"


def load(samples: Samples, transforms: Transforms) -> np.ndarray:
    """Every picture as the model takes it."""
    root = Path(samples.url.removeprefix("file://"))
    keys = samples.keys.to_pylist()
    return np.stack(
        [transforms.apply((root / key).read_bytes(), key, Draw(0, 0, number)) for number, key in enumerate(keys)]
    )


def settle(model: nn.Module, images: np.ndarray) -> None:
    """Running statistics of random weights' batch-norms, from pictures; trained ones are left alone."""
    norms = [each for each in model.modules() if isinstance(each, nn.BatchNorm2d)]
    if not norms or any(bool((each.running_mean != 0).any()) for each in norms if each.running_mean is not None):
        return
    for norm in norms:
        norm.momentum, norm.training = 1.0, True
    with torch.no_grad():
        model(torch.from_numpy(images))
    for norm in norms:
        norm.momentum, norm.training = 0.1, False


def upload(model: nn.Module, prefixes: Prefixes) -> tuple[Cut, Boundary, str]:
    """The deepest legal cut with one tensor: all but the head; on the node."""
    captured = capture(model, (torch.zeros(2, 3, 224, 224),))
    cut = [each for each in legal_cuts(cuts(captured)) if len(each.boundary) == 1][-1]
    shipped = ship(captured, cut)
    prefixes.put(shipped.digest, [shipped.path.read_bytes()])
    return cut, cut.boundary, shipped.digest


def headless(model: nn.Module, head: str) -> nn.Module:
    """The user's model up to its head, in evaluation mode."""
    parent, _, last = head.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, last, nn.Identity())
    return model.eval()


def eager(model: nn.Module, *, last: bool = False) -> Callable[[np.ndarray], Any]:
    form = torch.channels_last if last else torch.contiguous_format
    model = copy.deepcopy(model).to(memory_format=form)

    def run(rows: np.ndarray) -> Any:
        with torch.inference_mode():
            return [model(torch.from_numpy(rows).contiguous(memory_format=form)).numpy()]

    return run


def rows_of(run: Callable[[np.ndarray], Any], images: np.ndarray) -> np.ndarray:
    parts = [run(images[start : start + 16])[0] for start in range(0, len(images), 16)]
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts])


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(1e-6, float(np.abs(wanted).max())))


def halves(count: int, fitted: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures that a head is fitted to, and int8 calibrated on; and the others."""
    order = np.random.default_rng(0).permutation(count)
    return order[:fitted], order[fitted:]


class Near(NamedTuple):
    """On pictures the head has not seen: first choices that stay the same, the mean cosine of rows, right choices."""

    agreement: float
    cosine: float
    accuracy: float


def agree(full: np.ndarray, reduced: np.ndarray, labels: np.ndarray, fitted: int) -> Near:
    """How near rows of a reduced precision are, for a head that is fitted to `fitted` of the full ones."""
    known, new = halves(len(full), fitted)
    centre, scale = full[known].mean(0), full[known].std(0) + 1e-6
    inputs = np.concatenate([(full - centre) / scale, np.ones((len(full), 1))], 1).astype(np.float64)
    others = np.concatenate([(reduced - centre) / scale, np.ones((len(full), 1))], 1).astype(np.float64)
    wanted = np.eye(NUM_CLASSES)[labels][known]
    gram = inputs[known] @ inputs[known].T
    weights = inputs[known].T @ np.linalg.solve(gram + 0.1 * np.trace(gram) / fitted * np.eye(fitted), wanted)
    chosen = (inputs[new] @ weights).argmax(1)
    same = chosen == (others[new] @ weights).argmax(1)
    full, reduced = full.astype(np.float64), reduced.astype(np.float64)
    cosines = (full * reduced).sum(1) / (np.linalg.norm(full, axis=1) * np.linalg.norm(reduced, axis=1) + 1e-300)
    return Near(float(same.mean()), float(cosines[new].mean()), float((chosen == labels[new]).mean()))


def fastest(name: str, run: Callable[[np.ndarray], Any], images: np.ndarray) -> Side:
    """With the batch that suits it best."""
    sides = [Side(name, batch, run) for batch in BATCHES]
    return max(sides, key=lambda side: rate(side, images, ROUND_S / 2))


def measure(sides: Sequence[Side], images: np.ndarray, rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 else sides[::-1]:
            found[side.name].append(rate(side, images, ROUND_S))
    return found


def rate(side: Side, images: np.ndarray, at_least_s: float) -> float:
    """Rows a second; the first run warms up and does not count."""
    rows = np.ascontiguousarray(images[: side.batch])
    side.run(rows)
    start, runs = time.perf_counter(), 0
    while runs < 2 or time.perf_counter() - start < at_least_s:
        side.run(rows)
        runs += 1
    return runs * len(rows) / (time.perf_counter() - start)


def peak_flops() -> float:
    """What one core gets out of a large product of two matrices."""
    left, right = (torch.rand(1024, 1024) for _ in range(2))
    best = 0.0
    for _ in range(10):
        start = time.perf_counter()
        torch.mm(left, right)
        best = max(best, 2 * 1024**3 / (time.perf_counter() - start))
    return best


def flops(model: nn.Module, images: np.ndarray) -> float:
    """Of one row, as PyTorch counts them in convolutions and products."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.from_numpy(images[:1]))
    return float(counter.get_total_flops())


def tell(case: dict[str, Any]) -> str:
    return (f"{case['model']}: eager {case['eager_per_s']:.1f}/s, fp32 × {case['fp32_over_eager']:.2f} "
            f"({case['fp32_way']}), "
            + ", ".join(f"{each} × {case[f'{each}_over_eager']:.2f} ({case[f'{each}_way']}; "
                        f"{100 * case[f'{each}_agreement']:.1f} % agree)" for each in REDUCED)
            + f": {case['taken']}")  # fmt: skip


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def result(cases: list[dict[str, Any]], quick: bool, what: str, peak: float) -> Result:
    best = [case[f"{case['taken']}_over_eager"] for case in cases]
    slower = [case["model"] for case in cases if case["int8_over_eager"] <= case["fp32_over_eager"]]
    apart = [case["model"] for case in cases if case["model"] not in slower and case["int8_agreement"] < TOLERANCE]
    taken = [case["int8_over_eager"] for case in cases if case["taken"] == "int8"]
    halves = [case["model"] for case in cases if case["bf16_agreement"] >= TOLERANCE]
    of_peak = ", ".join(f"{case['model']} {100 * case['of_peak']:.0f} %" for case in cases)
    return Result(
        name="engine",
        quick=quick,
        numbers={
            "geomean_fp32": geomean([case["fp32_over_eager"] for case in cases]),
            "geomean_int8": geomean(best),
            "geomean_int8_where_it_wins": geomean(taken) if taken else 0.0,
            "geomean_fp32_over_channels_last": geomean([case["fp32_over_channels_last"] for case in cases]),
        },
        goals={"geomean_fp32": "≥ 1.5", "geomean_int8": "≥ 2.0"},
        cases=cases,
        bound=f"the core's {peak / 1e9:.0f} GFLOP/s in a large matrix product, measured; fp32 reaches of it: {of_peak}",
        limited_by=limits(cases),
        notes=[
            f"{what}; 224 px; random weights but for lite0; agreement is of a ridge head with {NUM_CLASSES} classes, "
            "and head_accuracy is how often it is right on fp32 rows",
            f"engines on this machine: {engines.versions()}",
            f"int8 is not faster than fp32 for: {', '.join(slower) or 'none'}; faster but below "
            f"{100 * TOLERANCE:.0f} % agreement: {', '.join(apart) or 'none'}",
            f"bf16 has {100 * TOLERANCE:.0f} % agreement for: {', '.join(halves) or 'none'}",
            "a head on rows of random weights has thin margins: the less often it is right, the more of its first "
            "choices a small error turns over",
        ],
        draw=lambda path: draw(cases, path),
    )


def limits(cases: Sequence[dict[str, Any]]) -> str:
    """From what was measured: how near to the core's peak fp32 comes, and whether the CPU multiplies bytes."""
    near, far = ([case["model"] for case in cases if (case["of_peak"] >= NEAR_PEAK) == is_near]
                 for is_near in (True, False))  # fmt: skip
    parts = [f"arithmetic: {', '.join(near)}"] if near else []
    if far:
        parts.append(f"what is not arithmetic (memory, small kernels; under {NEAR_PEAK:.0%} of the core's peak): "
                     f"{', '.join(far)}")  # fmt: skip
    parts.append("int8: the CPU has instructions for products of bytes" if has_vnni() else
                 "int8: the CPU has no instruction that multiplies and adds bytes in one step (VNNI)")  # fmt: skip
    return "; ".join(parts)


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
    places = np.arange(len(cases))
    bars = (("channels-last", [case["channels-last_per_s"] / case["eager_per_s"] for case in cases], "#9aa5b1"),
            ("fp32", [case["fp32_over_eager"] for case in cases], "#1f77b4"),
            ("bf16", [case["bf16_over_eager"] for case in cases], "#8fbf6a"),
            ("int8", [case["int8_over_eager"] for case in cases], "#ff7f0e"))  # fmt: skip
    for number, (label, heights, colour) in enumerate(bars):
        axis.bar(places + (number - 1.5) * 0.2, heights, 0.18, label=label, color=colour)
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(places, [f"{case['model']}\ntakes {case['taken']}" for case in cases])
    axis.set(title="pictures/s on one core ÷ eager PyTorch")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)

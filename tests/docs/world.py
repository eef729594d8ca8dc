"""What the blocks in the documents speak of, and what stands in for it. Owns `World`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from tests.reduce.processes import Running

if TYPE_CHECKING:
    from tests.conftest import NodeProcess


@dataclass(frozen=True)
class World:
    """Everything is on this machine, small, and downloads nothing."""

    folder: Path
    nodes: tuple[NodeProcess, ...]
    aggregator: Running

    @property
    def instead(self) -> dict[str, str]:
        """What is written → what runs in its place."""
        first, second = (f'"{node.address}"' for node in self.nodes)
        return {
            '"s3://photos/train"': f'"{self.folder}/photos/train"',
            '"s3://reviews/train"': f'"{self.folder}/reviews"',
            '"/data/train"': f'"{self.folder}/photos/train"',
            '"grpc+tls://store-1:8815"': first,
            '"grpc://store-1:8815"': first,
            '"grpc://store-2:8815"': second,
            '"ray://photos"': f"[{first}]",  # a fleet takes half a minute to come up; tests/fleet has one
            '"10.0.0.5:8816"': f'"{self.aggregator.address}"',
            '"tokenizer.json"': f'"{self.folder}/tokenizer.json"',
            # smaller, so that a block takes seconds: a model of the same family, one epoch, a short table
            "pretrained=True": "pretrained=False",
            '"resnet50"': '"test_resnet"',
            "torchvision.models.vgg11(": "small_vgg(",
            "range(10)": "range(1)",
            "range(90)": "range(1)",
            "20_000_000": "20_000",
            "num_workers=4": "num_workers=1",  # of the aggregator; a worker alone waits for nobody
        }


def write_photos(folder: Path, count: int) -> None:
    """Pictures of three classes, each with a colour of its own."""
    generator = np.random.default_rng(count)
    for number in range(count):
        path = folder / ("roses", "lilies", "daisies")[number % 3] / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 156, (64, 72, 3), np.uint8)
        pixels[..., number % 3] += 100
        Image.fromarray(pixels).save(path, quality=90)

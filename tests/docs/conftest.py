"""What the blocks in the documents speak of, made up: class folders, texts, nodes, an aggregator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.conftest import NodeProcess
from tests.reduce.processes import KEY, Running
from tests.text.conftest import reviews, wordpiece


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
            '"10.0.0.5:8816"': f'"{self.aggregator.address}"',
            '"tokenizer.json"': f'"{self.folder}/tokenizer.json"',
            # smaller, so that a block takes seconds: a model of the same family, one epoch, a short table
            "pretrained=True": "pretrained=False",
            '"resnet50"': '"resnet10t"',
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


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    write_photos(folder / "photos" / "train", 48)
    write_photos(folder / "photos" / "val", 12)
    (folder / "reviews").mkdir()
    lines = [json.dumps({"text": text, "label": label}) for text, label in reviews(32)]
    (folder / "reviews" / "reviews.jsonl").write_text("\n".join(lines))
    (folder / "tokenizer.json").write_bytes(wordpiece())
    return folder


@pytest.fixture(scope="module")
def world(made_up: Path, start_node_once: Callable[..., NodeProcess]) -> Iterator[World]:
    nodes = [
        start_node_once(made_up, options=("--state", str(made_up / name), "--tables", str(made_up / f"{name}-tables")))
        for name in ("store-1", "store-2")
    ]
    aggregator = Running(made_up)
    yield World(made_up, tuple(nodes), aggregator)
    aggregator.kill()
    assert aggregator.process.stderr is not None
    aggregator.process.stderr.close()


@pytest.fixture
def here(world: World, moments: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """In an empty folder, with one thread, and jobs that measure for a moment."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADWATER_REDUCE_KEY", KEY)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return world

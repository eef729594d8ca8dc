"""The world of the documents, made up once: class folders, texts, nodes, an aggregator."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tests.docs.world import World, write_photos
from tests.reduce.processes import KEY, Running
from tests.text.conftest import reviews, wordpiece

if TYPE_CHECKING:
    from tests.conftest import NodeProcess


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

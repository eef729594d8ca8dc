"""The examples, to be imported; one thread; a node for all tests of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were started: their folder comes first."""
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Fills with the samples of every batch that a loader hands out."""
    from headwater.train.loader import Loader

    seen: list[list[int]] = []
    original = Loader.__iter__

    def noted(self):
        inner = original(self)

        def each():
            for x, y in inner:
                seen.append(x.samples.tolist())
                yield x, y

        return each()

    monkeypatch.setattr(Loader, "__iter__", noted)
    return seen

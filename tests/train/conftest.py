"""Jobs of these tests measure their machines for a moment only: what is found is not what is tested."""

import pytest

from headwater.train import measure, reads
from headwater.train.client import NodeClient


@pytest.fixture(autouse=True)
def moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "FETCH_AT_LEAST_S", 0.25)
    monkeypatch.setattr(measure, "LOOK_AGAIN_S", 0.1)
    monkeypatch.setattr(NodeClient.measure_link, "__defaults__", (0.1,))

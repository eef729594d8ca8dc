"""What the model tests share: one thread, one small network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


class Small(nn.Module):
    """A bit of everything that a cut has to get right: batch-norm, in-place ReLU, a residual, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x * self.scale)))
        x = self.relu(x + self.block(x))
        return self.fc(self.drop(x.mean((2, 3))))


@pytest.fixture(autouse=True)
def one_thread_and_one_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def small() -> nn.Module:
    return Small()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))

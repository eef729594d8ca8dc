"""In which order samples are visited, how trainers share them, and where a run stands.

Owns the permutation, the split of a step over trainers, and the position. All three are pure functions, so any
process can work them out alone and agree with every other.

- The order of an epoch depends on (dataset fingerprint, seed, epoch) and on nothing else.
- The position in an epoch is one integer: how many entries of the order the job, all trainers together, is done with.
- A step takes the next entries of the order and deals them to the trainers in contiguous slices. How many it takes
  depends only on how many are left, so a run may stop at any step and go on with any number of trainers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headwater.errors import ConfigError

Ids = npt.NDArray[np.int64]

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Order:
    """The order of samples 0 … num_samples-1 in each epoch."""

    num_samples: int
    fingerprint: str
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed is {self.seed}; it must lie between 0 and 2**63 - 1")

    def epoch(self, epoch: int) -> Ids:
        """The sample ids of this epoch, in order; each id exactly once."""
        if not self.shuffle:
            return np.arange(self.num_samples, dtype=np.int64)
        name = f"{self.fingerprint}/{self.seed}/{epoch}".encode()
        key = int.from_bytes(hashlib.sha256(name).digest()[:16], "little")
        # Sorting raw counter output is stable across NumPy versions; Generator.permutation makes no such promise.
        return np.argsort(np.random.Philox(key=key).random_raw(self.num_samples), kind="stable").astype(np.int64)


@dataclass(frozen=True)
class Step:
    """The entries [start, stop) of the order that one step takes, all trainers together."""

    start: int
    stop: int

    def slice(self, rank: int, world: int) -> tuple[int, int]:
        """The contiguous part of trainer `rank` out of `world`; sizes differ by one at the most."""
        size = self.stop - self.start
        return self.start + size * rank // world, self.start + size * (rank + 1) // world


@dataclass(frozen=True)
class Dealing:
    """How the order is cut into steps and dealt to trainers."""

    num_samples: int
    batch_size: int
    world: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.world < 1:
            raise ConfigError(f"batch_size {self.batch_size} and world {self.world} must both be at least 1")
        if self.num_samples < self.world:
            raise ConfigError(
                f"{self.num_samples} samples can't be shared by {self.world} trainers: each needs at least one; "
                f"use at most {self.num_samples} trainers"
            )

    def step_at(self, position: int) -> Step | None:
        """The step that starts at `position`, or None at the end of the epoch.

        Every trainer takes part in every step with at least one sample, so no collective ever waits for a trainer
        that has run out. Where the rest would leave somebody empty-handed it is merged with the full step before
        and halved; with batches of one, that step deals two samples to some trainers.
        """
        left = self.num_samples - position
        full = self.batch_size * self.world
        if left <= 0 or (self.drop_last and left < full):
            return None
        if left < self.world:
            raise ConfigError(
                f"{left} samples are left in this epoch, fewer than the {self.world} trainers: somebody would have "
                f"none and the others would wait; finish the epoch with at most {left} trainers, or start the next one"
            )
        if self.drop_last or left == full or left >= full + self.world:
            size = full
        elif left < full:
            size = left
        else:  # a full step and 1 … world-1 more
            half = -(-left // 2)
            size = half if left - half >= self.world else left
        return Step(position, position + size)

    def steps(self, position: int = 0) -> Iterator[Step]:
        """Every step from `position` to the end of the epoch."""
        while (step := self.step_at(position)) is not None:
            yield step
            position = step.stop

    def num_steps(self, position: int = 0) -> int:
        """How many steps are left from `position`, without walking them."""
        left = self.num_samples - position
        full = self.batch_size * self.world
        if left <= 0:
            return 0
        whole, rest = divmod(left, full)
        if self.drop_last or rest == 0:
            return whole
        if whole == 0 or rest >= self.world:
            return whole + 1
        return whole - 1 + sum(1 for _ in self.steps(self.num_samples - full - rest))

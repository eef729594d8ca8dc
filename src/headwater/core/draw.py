"""Random draws that depend on what is drawn for, never on where or when.

Owns `Draw`: a counter-based generator keyed by (seed, epoch, sample). The same key gives the same numbers in every
process, on every machine and in any order of work; that is what lets augmentation move between tiers.
"""

from __future__ import annotations

import hashlib
import struct

_WORDS = 8  # 64-bit words in one blake2b digest


class Draw:
    """Uniform numbers for one sample in one epoch.

    Each step of a pipeline takes its own stream, `draw.stream(step)`, so a step that draws more or fewer numbers
    never shifts those of the next.
    """

    __slots__ = ("_block", "_key", "_next", "_words")

    def __init__(self, seed: int, epoch: int, sample: int, step: int = 0) -> None:
        self._key = struct.pack("<4q", seed, epoch, sample, step)
        self._block = 0
        self._next = _WORDS
        self._words: tuple[int, ...] = ()

    def stream(self, step: int) -> Draw:
        """A fresh stream for the pipeline's step number `step`."""
        seed, epoch, sample, _ = struct.unpack("<4q", self._key)
        return Draw(seed, epoch, sample, step)

    def _word(self) -> int:
        if self._next == _WORDS:
            digest = hashlib.blake2b(struct.pack("<q", self._block), key=self._key, digest_size=64).digest()
            self._words = struct.unpack("<8Q", digest)
            self._block += 1
            self._next = 0
        word = self._words[self._next]
        self._next += 1
        return word

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """A float in [low, high), from 53 random bits."""
        return low + (high - low) * ((self._word() >> 11) * 2.0**-53)

    def integer(self, low: int, high: int) -> int:
        """An int in [low, high). The bias of the modulus is below 2**-32 for ranges below 2**32."""
        return low + self._word() % (high - low)

    def permutation(self, count: int) -> list[int]:
        """The numbers 0 … count-1 in random order (Fisher–Yates)."""
        items = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.integer(0, last + 1)
            items[last], items[other] = items[other], items[last]
        return items

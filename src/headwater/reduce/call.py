"""One all-reduce under way: which values are which block's. Owns `Call`: the way from an array to packets and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.sums import EXPONENTS, SCALED, Format, from_integers, to_integers
from headwater.reduce.packets import Layout, Packets, flags_of


class Call:
    """A flat array that is added up in place, block by block."""

    def __init__(
        self,
        values: npt.NDArray[Any],
        number: Format,
        layout: Layout,
        first: int,
        *,
        mean: bool,
        total: int,
        finished: Callable[[Call], None] | None = None,
    ) -> None:
        """`number` is what travels: it may be narrower than the array. Its blocks are `first` and those behind it."""
        self.values, self.number, self.mean = values, number, mean
        self.first = first
        self._total = total
        self._finished = finished
        self._piece_values = layout.piece_bytes // number.wire.itemsize
        self._block_values = layout.pieces * self._piece_values
        self._pieces = layout.pieces
        self.num_blocks = max(1, -(-len(values) // self._block_values))
        self.num_left = self.num_blocks
        self.flags = flags_of(number, mean and number is not SCALED and number is not EXPONENTS)
        self._is_as_it_travels = values.dtype == number.wire
        self._bytes: memoryview = values.view(np.uint8).data if self._is_as_it_travels else memoryview(b"")
        self.exponents: npt.NDArray[np.int16] | None = None  # of `scaled`, once all workers' are known
        self.held: list[int] = []  # blocks that wait for them

    @property
    def stop(self) -> int:
        """Behind its last block."""
        return self.first + self.num_blocks

    @property
    def is_done(self) -> bool:
        return self.num_left == 0

    @property
    def block_values(self) -> int:
        return self._block_values

    def sizes(self) -> Iterator[int]:
        """Pieces of each block."""
        for block in range(self.first, self.stop):
            start, stop = self.span(block)
            yield max(1, -(-(stop - start) // self._piece_values))

    def span(self, block: int) -> tuple[int, int]:
        """The block's values, from and to."""
        start = (block - self.first) * self._block_values
        return start, min(start + self._block_values, len(self.values))

    def fill(self, block: int, first: int, count: int, packets: Packets) -> tuple[int, int] | None:
        if self.number is SCALED and self.exponents is None:
            self.held.append(block)
            return None
        start, stop = self.span(block)
        start += first * self._piece_values
        values = self.values[start : min(start + count * self._piece_values, stop)]
        if self.number is SCALED:
            assert self.exponents is not None
            values = to_integers(values, int(self.exponents[block - self.first]), self._total)
        rows, width = packets.values(self.number), self._piece_values
        whole, rest = divmod(len(values), width)
        if whole:
            rows[:whole] = values[: whole * width].reshape(whole, width)
        if rest:
            rows[whole, :rest] = values[whole * width :]
        return (rest or (width if whole else 0)) * self.number.wire.itemsize, self.flags

    def take(self, block: int, packets: Packets, num_pieces: int, last_bytes: int) -> bool:
        """The sum of a block; whether it is as long as it should be, and could have come."""
        if self.number is SCALED and self.exponents is None:  # the block has not even been sent
            return False
        start, stop = self.span(block)
        width = self._piece_values
        whole, rest = divmod(stop - start, width)
        if last_bytes != (rest or (width if whole else 0)) * self.number.wire.itemsize:
            return False
        rows = packets.values(self.number)
        if self.number is SCALED:
            assert self.exponents is not None
            exponent, divisor = int(self.exponents[block - self.first]), self._total if self.mean else 1
            flat = rows[: whole + bool(rest)].reshape(-1)[: stop - start]
            self.values[start:stop] = from_integers(flat, exponent, self._total, divisor)
        else:
            middle = start + whole * width
            if whole:
                self.values[start:middle].reshape(whole, width)[:] = rows[:whole]
            if rest:
                self.values[middle:stop] = rows[whole, :rest]
        self.done()
        return True

    # In a lane that sends from where values are

    def give(self, block: int, held: memoryview) -> tuple[memoryview, memoryview, int] | None:
        """A block's bytes, and where those of its sum go: into the array, if its own numbers travel, or to `held`."""
        start, stop = self.span(block)
        size = self.number.wire.itemsize
        if self._is_as_it_travels:
            place = self._bytes[start * size : stop * size]
            return place, place, self.flags
        if self.number is SCALED:
            if self.exponents is None:
                self.held.append(block)
                return None
            made = to_integers(self.values[start:stop], int(self.exponents[block - self.first]), self._total)
        else:
            made = self.values[start:stop].astype(self.number.wire)
        return made.view(np.uint8).data, held[: (stop - start) * size], self.flags

    def took(self, block: int, held: memoryview) -> None:
        """The sum of a block is where `give` said."""
        if not self._is_as_it_travels:
            start, stop = self.span(block)
            found = np.frombuffer(held, self.number.wire, stop - start)
            if self.number is SCALED:
                assert self.exponents is not None
                exponent, divisor = int(self.exponents[block - self.first]), self._total if self.mean else 1
                self.values[start:stop] = from_integers(found, exponent, self._total, divisor)
            else:
                self.values[start:stop] = found
        self.done()

    def sum_in_array(self, block: int) -> memoryview | None:
        """The bytes of a sum that is here, in the array; None if it was held elsewhere."""
        if not self._is_as_it_travels:
            return None
        start, stop = self.span(block)
        return self._bytes[start * self.number.wire.itemsize : stop * self.number.wire.itemsize]

    def done(self, num_blocks: int = 1) -> None:
        """So many of its blocks have their sums."""
        self.num_left -= num_blocks
        if self.num_left == 0 and self._finished is not None:
            self._finished(self)

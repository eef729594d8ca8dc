"""The arithmetic of a slot: numbers of several formats, added in rank order. Owns `FORMATS`, `add_up`, block exponents.

Floats are what a server adds: each worker's contribution is kept until all are there, and they are added in the order
of ranks, so that the order of arrival changes nothing, every worker gets the same bits and two runs agree. fp16 and
bf16 are added, and divided, as fp32 and rounded once.

Integers are what a switch adds (`scaled`): a block's floats become int32 by a power of two that all workers share. Each
sends the exponents of its blocks ahead, the switch takes the largest of each, and INT32_MAX / (n·2^e) is the scale: no
sum of n can overflow, and a mean is off by less than n·2^e / INT32_MAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Format:
    """How numbers are on the wire, and what they are added as. NumPy has no bfloat16: its bits travel as uint16."""

    code: int
    name: str
    wire: np.dtype[Any]
    added: np.dtype[Any]


def _format(code: int, name: str, wire: str, added: str) -> Format:
    return Format(code, name, np.dtype(wire), np.dtype(added))


FP32 = _format(0, "fp32", "<f4", "<f4")
FP64 = _format(1, "fp64", "<f8", "<f8")
FP16 = _format(2, "fp16", "<f2", "<f4")
BF16 = _format(3, "bf16", "<u2", "<f4")
INT32 = _format(4, "int32", "<i4", "<i4")
INT64 = _format(5, "int64", "<i8", "<i8")
SCALED = _format(6, "scaled", "<i4", "<i4")  # fp32 as int32 with block exponents
EXPONENTS = _format(7, "exponents", "<i2", "<i2")  # of the blocks that follow; the largest counts
FORMATS = (FP32, FP64, FP16, BF16, INT32, INT64, SCALED, EXPONENTS)

_OF_DTYPE = {"float32": FP32, "float64": FP64, "float16": FP16, "int32": INT32, "int64": INT64}


def format_of(dtype: np.dtype[Any]) -> Format | None:
    """The format in which an array of this dtype travels as it is; None if there is none."""
    return _OF_DTYPE.get(dtype.name)


def add_up(parts: Sequence[Values], number: Format, divisor: int, out: Values) -> None:
    """The sum of one contribution a worker, in rank order, divided by `divisor`, into `out`; all in wire form.

    Behind the end of a short block there may be anything, so whatever floats do there is no matter.
    """
    with np.errstate(all="ignore"):
        if number is EXPONENTS:
            np.copyto(out, parts[0])
            for part in parts[1:]:
                np.maximum(out, part, out=out)
            return
        if number.wire == number.added:
            if len(parts) == 1:
                np.copyto(out, parts[0])
            else:
                np.add(parts[0], parts[1], out=out)
                for part in parts[2:]:
                    np.add(out, part, out=out)
            if divisor != 1:
                assert number.added.kind == "f"  # whoever asks for a mean of integers is told before
                np.divide(out, number.added.type(divisor), out=out)
            return
        total = widen(parts[0], number)
        for part in parts[1:]:
            np.add(total, widen(part, number), out=total)
        if divisor != 1:
            np.divide(total, np.float32(divisor), out=total)
        np.copyto(out, narrow(total, number))


def widen(values: Values, number: Format) -> npt.NDArray[np.float32]:
    """fp16 or bf16 from the wire as fp32; always a copy."""
    if number is BF16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def narrow(values: npt.NDArray[np.float32], number: Format) -> Values:
    """fp32 as fp16 or as the bits of bf16, rounded to nearest even."""
    if number is not BF16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)  # rounding could carry one into infinity
    return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


# Block exponents

ZEROS = -1074  # of a block of zeros: below every other
WILD = 2000  # of a block with infinities or NaNs: above every other; such a block's sum is NaN on every worker
_INT32_MAX = 2.0**31 - 1


def exponents(values: Values, block_values: int) -> npt.NDArray[np.int16]:
    """Per block of so many values: the least e with |x| <= 2^e for all of its finite values."""
    starts = np.arange(0, len(values), block_values)
    with np.errstate(invalid="ignore"):
        largest = np.maximum.reduceat(np.abs(values), starts)  # a NaN stays one
    found = np.frexp(largest)[1].astype(np.int16)
    found[largest == 0] = ZEROS
    found[~np.isfinite(largest)] = WILD
    return found


def to_integers(values: Values, exponent: int, num_workers: int) -> npt.NDArray[np.int32]:
    if exponent >= WILD or exponent <= ZEROS:
        return np.zeros(len(values), np.int32)
    factor = float(np.ldexp(_INT32_MAX / num_workers, -exponent))
    scaled: npt.NDArray[np.float64] = values.astype(np.float64) * factor
    return np.trunc(scaled).astype(np.int32)


def from_integers(total: npt.NDArray[np.int32], exponent: int, num_workers: int, divisor: int) -> Values:
    """The sum as fp64, divided by `divisor`."""
    if exponent >= WILD:
        return np.full(total.shape, np.nan)
    if exponent <= ZEROS:
        return np.zeros(total.shape)
    found: Values = total.astype(np.float64) * (float(np.ldexp(num_workers / _INT32_MAX, exponent)) / divisor)
    return found

"""Embedding tables: what a table is, which node has which vector, and what a vector is before anybody trained it.

Owns `TableSpec`, the rule by which vectors are dealt to nodes, and their initial values. All are pure functions, so a
node needs no file to know what is in it, and a trainer no answer to know whom to ask.

The rule ("modulo"): with N parts, vector `id` is in part `id % N`, at place `id // N` there. Popular ids, which many
data sets number from 0, spread evenly; and a table that grows puts its new vectors at the ends of all parts.

An initial value is a hash of (seed, id, column): no generator's state, so any vector alone has a value in any order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headwater.core.form import Number, Text, check_record, formed
from headwater.core.spec import ITEM_BYTES

RULE = "modulo"
OPTIMIZERS = ("sgd", "rowwise_adagrad")
DTYPES = ("float32", "float64")
INITS = ("normal", "uniform", "zeros")
MAX_VECTORS = 2**40
MAX_DIM = 1 << 14
MAX_PARTS = 1024

Ids = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.floating]
_Words = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_PIECE = 1 << 18  # numbers made at once: the intermediate ones take some 40 bytes each


@dataclass(frozen=True)
class TableSpec:
    """A whole table. `scale` is the deviation of normal values, or half the width of uniform ones."""

    num_embeddings: int = field(metadata=formed(Number(1, MAX_VECTORS, whole=True)))
    dim: int = field(metadata=formed(Number(1, MAX_DIM, whole=True)))
    dtype: str = field(default="float32", metadata=formed(Text(DTYPES)))
    optimizer: str = field(default="sgd", metadata=formed(Text(OPTIMIZERS)))
    eps: float = field(default=1e-8, metadata=formed(Number(0, 1)))
    init: str = field(default="normal", metadata=formed(Text(INITS)))
    scale: float = field(default=1.0, metadata=formed(Number(0, 1e6)))
    seed: int = field(default=0, metadata=formed(Number(0, 2**63 - 1, whole=True)))
    num_parts: int = field(default=1, metadata=formed(Number(1, MAX_PARTS, whole=True)))
    rule: str = field(default=RULE, metadata=formed(Text((RULE,))))
    # A vector without a value of its own: what `padding_idx` is to `nn.EmbeddingBag` when it is made; zeros.
    zero_id: int | None = field(default=None, metadata=formed(Number(0, MAX_VECTORS, whole=True, optional=True)))

    def __post_init__(self) -> None:
        check_record(self, "table")

    @property
    def vector_bytes(self) -> int:
        return self.dim * ITEM_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps for a vector."""
        return ITEM_BYTES[self.dtype] if self.optimizer == "rowwise_adagrad" else 0

    def num_in(self, part: int) -> int:
        """Vectors of one part."""
        return max(0, (self.num_embeddings - part + self.num_parts - 1) // self.num_parts)

    def part_bytes(self, part: int) -> int:
        """What a part's files may come to, once every vector was trained."""
        # Beside a vector: a mark, and the seat of its record (`node.part`).
        return self.num_in(part) * (self.vector_bytes + self.state_bytes + ITEM_BYTES[self.dtype] + 4)

    def ids_of(self, part: int, places: Ids) -> Ids:
        """The ids of the vectors at these places of a part."""
        return places * self.num_parts + part


def part_of(ids: Ids, num_parts: int) -> Ids:
    """Who has them."""
    return ids % num_parts


def place_of(ids: Ids, num_parts: int) -> Ids:
    """Where they are there."""
    return ids // num_parts


def initial(spec: TableSpec, ids: Ids) -> Vectors:
    """The values that these vectors have until they are trained."""
    values = np.zeros((len(ids), spec.dim), spec.dtype)
    if spec.init == "zeros" or spec.scale == 0:
        return values
    step = max(1, _PIECE // spec.dim)
    columns = np.arange(spec.dim, dtype=np.uint64)
    for start in range(0, len(ids), step):
        some = ids[start : start + step].astype(np.uint64)
        counters = some[:, None] * np.uint64(spec.dim) + columns
        values[start : start + step] = _drawn(spec, counters)
    if spec.zero_id is not None:
        values[ids == spec.zero_id] = 0
    return values


def _drawn(spec: TableSpec, counters: _Words) -> Vectors:
    first = _uniform(_mixed(counters, _key(spec.seed, "first")))
    if spec.init == "uniform":
        return (2 * first - 1) * spec.scale
    second = _uniform(_mixed(counters, _key(spec.seed, "second")))
    # Box and Muller; 1 - first lies in (0, 1], whose logarithm is finite.
    normal: Vectors = np.sqrt(-2 * np.log(1 - first)) * np.cos(2 * np.pi * second) * spec.scale
    return normal


def _key(seed: int, stream: str) -> np.uint64:
    return np.uint64(
        int.from_bytes(hashlib.blake2b(f"table {seed} {stream}".encode(), digest_size=8).digest(), "little")
    )


def _mixed(counters: _Words, key: np.uint64) -> _Words:
    """SplitMix64's finalizer over counters that are a golden ratio apart (Steele, Lea and Flood, 2014)."""
    words = counters * np.uint64(_GOLDEN) + key
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _uniform(words: _Words) -> npt.NDArray[np.float64]:
    """In [0, 1), from 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""What a table's steps would take on its nodes, and with a copy of it here: measured with a batch of the run.

Owns `measure_table`. It takes some tenths of a second for each node, once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.core.bags import Bags
from headwater.core.embedding_cost import PartCosts, Rates, TableCosts
from headwater.core.travel import Shape
from headwater.data import tablespeed
from headwater.data.memory import available_bytes
from headwater.data.tablewire import bags_arrays
from headwater.errors import DamagedError
from headwater.train.partition_measure import together
from headwater.train.tablecopy import copy_bytes
from headwater.train.tables import Line, Table

LINK_S = 0.1  # for each direction of each link
MEMORY_SHARE = 0.5  # of what is free here; the rest is the model's, and the batches'
_SCRATCH_BYTES = 64 << 20  # vectors lie as far apart as in a copy, up to here: beyond, no cache holds them either
_NAMES = ("id_s", "vector_s", "disk_s", "cold_s", "outside")


def shape_of(bags: Bags, vector_bytes: int) -> Shape:
    return Shape(len(bags), len(bags.ids), len(np.unique(bags.ids)), vector_bytes)


def fits_here(table: Table) -> bool:
    return copy_bytes(table.spec) <= MEMORY_SHARE * available_bytes()


def measure_table(table: Table, bags: Bags) -> TableCosts:
    spec, parts, copied = table.spec, [], 0
    clients = [line.client for line in table.lines]
    links = [client.measure_link(LINK_S) for client in clients]
    for number, (line, link) in enumerate(zip(table.lines, links, strict=True)):
        own, _ = bags.of_part(number, spec.num_parts)
        said = _said(line, own)
        shape = shape_of(own, spec.vector_bytes)
        rates = Rates(said["id_s"], said["vector_s"])
        parts.append(PartCosts(shape, rates, said["disk_s"], said["cold_s"], shape.num_distinct * said["outside"],
                               link[:2]))  # fmt: skip
        copied += min(copy_bytes(spec), int(line.now({"what": "about"})[0].get("disk_bytes", 0)))
    return TableCosts(shape_of(bags, spec.vector_bytes), tuple(parts), _here(table, bags), together(clients, links),
                      min(link[2] for link in links), copied, fits_here(table))  # fmt: skip


def _said(line: Line, own: Bags) -> dict[str, float]:
    if not len(own):
        return dict.fromkeys(_NAMES, 0.0)
    said: dict[str, Any] = line.now({"what": "measure"}, bags_arrays(own))[0]
    found = {name: said.get(name) for name in _NAMES}
    if not all(isinstance(each, int | float) and 0 <= each < 1e6 for each in found.values()):
        raise DamagedError(f"{line.client.name} sent times about a table that can't be read")
    return {name: float(each or 0) for name, each in found.items()}


def _here(table: Table, bags: Bags) -> Rates:
    """This machine's, with vectors in as much memory as a copy would take."""
    spec, unique = table.spec, np.unique(bags.ids)
    num = max(1, min(spec.num_embeddings, _SCRATCH_BYTES // spec.vector_bytes, int(unique[-1]) + 1))
    return tablespeed.measure(spec, bags, np.zeros((num, spec.dim), spec.dtype), unique % num)

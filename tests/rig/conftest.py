"""A rig for tests to share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.rig import Host, Link, Rig, RigUp, missing


@pytest.fixture(scope="session")
def can_rig() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def up(can_rig: None) -> Iterator[RigUp]:
    """One storage host, one trainer behind a link of 100 Mbit/s, and a host for the store."""
    rig = Rig(
        storage=(Host("storage", cores=(0,)),),
        trainers=(Host("trainer", cores=(1,)),),
        links={"trainer": Link(100)},
        store=Host("store", cores=(0, 1), cpu=2.0),
    )
    with RigUp(rig) as up:
        yield up

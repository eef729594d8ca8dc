"""A rig's description is checked before anything starts, and all at once."""

from __future__ import annotations

import os
import shutil

import pytest
from bench.rig import Host, Link, Rig, RigError, RigUp
from bench.rig.network import token_bucket

ONE = Rig(storage=(Host("storage"),), trainers=(Host("trainer"),))


def test_every_fault_of_a_description_is_in_one_error() -> None:
    rig = Rig(
        storage=(Host("a", cpu=2.0), Host("a"), Host("Über")),
        trainers=(Host("b", cores=()), Host("c", memory_bytes=10)),
        links={"nobody": Link(10), "c": Link(0, 1), "b": Link(5, up_mbit_per_s=-1)},
    )
    with pytest.raises(RigError) as caught:
        RigUp(rig)
    said = str(caught.value)
    assert said.startswith("the rig has 8 faults")
    for part in ("cpu 2 on 1 cores", "2 hosts are named a", "'Über'", "cores ()", "'nobody'", "0 Mbit/s down",
                 "-1 Mbit/s up", "memory_bytes 10"):  # fmt: skip
        assert part in said


def test_a_link_is_as_fast_up_as_down_unless_told() -> None:
    assert Link(10).up == 10
    assert Link(10, 2).up == 2


@pytest.mark.parametrize("mbit_per_s", [0.01, 2, 10, 100, 1000, 40_000])
def test_a_bucket_passes_whole_frames_and_little_for_free(mbit_per_s: float) -> None:
    burst, limit = token_bucket(mbit_per_s)
    assert burst >= 2 * 1514
    assert limit - burst >= 64_000
    assert burst <= max(2 * 1514, mbit_per_s * 1e6 / 8 * 0.004)


def test_without_root_it_says_what_it_needs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RigError, match="needs root: it makes network namespaces"), RigUp(ONE):
        pass


def test_without_tc_it_says_what_it_needs_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **rest: None if name == "tc" else which(name, **rest))
    with pytest.raises(RigError, match=r"needs .*tc \(iproute2; shapes the links\)"), RigUp(ONE):
        pass

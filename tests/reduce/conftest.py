"""Aggregators and workers that end with their test."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.reduce.processes import ENV, HERE, Running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def begin(*options: str, **about: Any) -> Running:
        started.append(Running(tmp_path, *options, **about))
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        assert each.process.stderr is not None
        each.process.stderr.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an aggregator that nobody ends: importing takes most of the time of a small test."""
    running = Running(tmp_path_factory.mktemp("shared"))
    yield running.address
    running.kill()
    assert running.process.stderr is not None
    running.process.stderr.close()


@pytest.fixture
def workers() -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    """Processes that run a script of this folder, each with its arguments as JSON."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str, arguments: list[dict[str, Any]]) -> list[subprocess.Popen[str]]:
        made = [
            subprocess.Popen([sys.executable, str(HERE / script), json.dumps(each)], env=ENV, text=True,
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for each in arguments
        ]  # fmt: skip
        started.extend(made)
        return made

    yield begin
    for each in started:
        if each.poll() is None:
            each.kill()
        if each.stdout is not None and not each.stdout.closed:
            each.communicate()

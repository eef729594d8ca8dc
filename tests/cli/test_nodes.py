"""`headwater nodes` against real nodes: what they do, and who does not answer."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.data.transforms import Normalize, Resize, ToFloat

TRANSFORMS = [Resize((32, 32)), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)]


def run(*arguments, columns=200):
    return subprocess.run([sys.executable, "-m", "headwater.cli", "nodes", *arguments], capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": str(columns)}, timeout=60, check=False)  # fmt: skip


def test_a_working_node_shows_rows_and_busy_stages(pictures, start_node):
    node = start_node(pictures, options=("--cache-size", "0"))  # or later epochs would be no work
    model = hw.freeze(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)), until="3"
    )
    began, ended = threading.Event(), threading.Event()

    def train():
        with hw.near(model, pictures, transforms=TRANSFORMS, nodes=[node.address], plan=None) as job, torch.no_grad():
            while not ended.is_set():
                for x, _ in job.loader:
                    job.model(x)
                    began.set()

    worker = threading.Thread(target=train)
    worker.start()
    try:
        began.wait(60)  # nobody need ask before
        for _ in range(20):
            result = run(node.address, "--seconds", "0.5", "--json")
            (seen,) = json.loads(result.stdout)
            if seen["per_s"]["num_rows"]:
                break
        shown, narrow = (run(node.address, "--seconds", "0.5", columns=columns) for columns in (200, 80))
    finally:
        ended.set()
        worker.join()
    assert result.returncode == 0
    assert all(seen["per_s"][f"{stage}_s"] > 0 for stage in ("read", "decode", "infer", "send"))
    assert shown.returncode == 0
    assert node.address in shown.stdout
    assert str(pictures) in shown.stdout.replace("\n", "")
    assert f"on {node.address}: " in " ".join(narrow.stdout.split()), "why a prefix runs as it does, in one piece"
    assert all(title in narrow.stdout for title in ("rows/s", "kept/s", "decode", "MB/s read")), "nothing is cut off"
    assert node.address[:12] in narrow.stdout


def test_a_node_that_does_not_answer_is_shown_and_the_others_too(pictures, start_node):
    dead, alive = start_node(pictures), start_node(pictures)
    dead.kill()
    result = run(dead.address, alive.address, "--seconds", "0.2")
    assert result.returncode == 1
    assert "does not answer" in " ".join(result.stdout.split()) or "can't be reached" in result.stdout
    assert "rows/s" in result.stdout
    assert alive.address in result.stdout


@pytest.mark.parametrize("address", ["store-1:8815", "http://store-1"])
def test_an_address_that_is_none_is_explained(address):
    result = run(address)
    assert result.returncode == 1
    assert "grpc://host:8815" in result.stderr

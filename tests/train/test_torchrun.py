"""Trainers that torchrun starts share an epoch, and end it together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from headwater.core.prongs import STRATEGIES

SCRIPT = Path(__file__).with_name("uneven.py")
NUM_SAMPLES, WORLD, BATCH = 1001, 2, 64


@pytest.fixture
def labelled(tmp_path):
    """1 001 pictures whose label is their own number, so that labels tell which samples came."""
    root = tmp_path / "data"
    (root / "all").mkdir(parents=True)
    rows = ["path,label"]
    for number in range(NUM_SAMPLES):
        Image.fromarray(np.full((4, 4, 3), number % 256, np.uint8)).save(root / "all" / f"{number:04d}.png")
        rows.append(f"all/{number:04d}.png,{number}")
    (root / "list.csv").write_text("\n".join(rows))
    return root


@pytest.mark.parametrize("prongs", STRATEGIES)
def test_two_trainers_end_an_uneven_epoch_together_and_visit_each_sample_once(labelled, tmp_path, start_node, prongs):
    node = start_node(labelled, options=("--state", str(tmp_path / "state")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--max-restarts", "0"]  # fmt: skip
    done = subprocess.run([*command, str(SCRIPT), str(labelled / "list.csv"), node.address, str(tmp_path),
                           prongs],
                          capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    sizes = [sorted((len(batch) for batch in each["batches"]), reverse=True) for each in said]
    assert sizes[0][:7] == sizes[1][:7] == [BATCH] * 7
    assert len(sizes[0]) == len(sizes[1]) == 8, "as many steps on both, or one would wait for the other"
    assert sizes[0][7] + sizes[1][7] == NUM_SAMPLES - 7 * WORLD * BATCH
    assert abs(sizes[0][7] - sizes[1][7]) <= 1
    seen = [sample for each in said for batch in each["batches"] for sample in batch]
    assert sorted(seen) == list(range(NUM_SAMPLES))
    assert said[0]["weights"] == said[1]["weights"]
    assert said[0]["state"] == said[1]["state"]
    assert said[0]["state"]["epoch"] == 1

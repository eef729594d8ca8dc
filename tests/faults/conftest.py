"""A model small enough to be captured and exported in a second, and the tools of a bad day."""

import os
import threading
import time
from functools import cache

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.plan import near_plan
from headwater.data.transforms import Normalize, Resize, ToFloat, Transforms
from headwater.model.capture import capture
from headwater.model.cuts import cuts

TINY = Transforms([Resize((32, 32)), ToFloat(), Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])


def tiny_model():
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return nn.Sequential(body, nn.Linear(16, 3))


@cache
def last_cut():
    """Right before the head."""
    model = hw.freeze(tiny_model().eval(), until="1")
    return [cut for cut in cuts(capture(model, (torch.zeros(2, 3, 32, 32),))) if cut.legal][-1]


@pytest.fixture
def model():
    """Frozen up to its head."""
    return hw.freeze(tiny_model().eval(), until="1")


@pytest.fixture
def bare_model():
    """As it comes, with nothing frozen."""
    return tiny_model()


@pytest.fixture
def near(model):
    """near(data, nodes=…): a job with the tiny model and chunks of 4; closed after the test."""
    jobs = []

    def start(data, nodes=None, chunk_rows=4, prefetch=2, **options):
        if "plan" not in options:
            options["plan"] = near_plan(last_cut(), chunk_rows=chunk_rows, node_batch=chunk_rows, prefetch=prefetch)
        the_model = options.pop("model", model)
        jobs.append(
            hw.near(the_model, data, nodes=nodes, transforms=TINY, **{"batch_size": 4, "patience_s": 30, **options})
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture
def eventually():
    """eventually(holds): wait for an event, with a deadline that is far away."""

    def wait(holds, within_s=20.0):
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, "it never came to hold"
            time.sleep(0.02)

    return wait


@pytest.fixture
def our_threads():
    """The names of the threads that a feed or an extractor has started."""
    prefixes = ("fetch-", "revive", "compute-", "read-")
    return lambda: sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(prefixes))


@pytest.fixture
def alive():
    """alive(pid): is there such a process, other than as a zombie?"""

    def look(pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    assert look(os.getpid())
    return look


@pytest.fixture
def ids_of():
    """The sample ids of an epoch, batch by batch, as they come."""
    return lambda loader: [sample for x, _ in loader for sample in x.samples.tolist()]

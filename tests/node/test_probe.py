"""A probe measures in a process of its own; what it is asked is checked as any other request."""

import json
import time

import numpy as np
import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.tuning import Candidate
from headwater.data import wire
from headwater.data.layouts import list_samples
from headwater.data.transforms import CenterCrop, Resize, ToFloat, Transforms
from headwater.errors import ConfigError, RefusedError
from headwater.model.capture import capture
from headwater.model.cuts import cuts
from headwater.model.ship import ship
from headwater.node import probe
from headwater.node.child import Children
from headwater.train.client import NodeClient

TRANSFORMS = Transforms([Resize(36), CenterCrop(32), ToFloat()])


def chunk_of(pictures, prefix=None, count=5):
    samples = list_samples(str(pictures))
    extraction = wire.Extraction(samples.url, TRANSFORMS, prefix, (TRANSFORMS.pixel_spec,), node_batch=4)
    return wire.Chunk(extraction, "test", 0, 0, 0, tuple(samples.take(range(count))))


def test_pixels_have_their_costs_measured(pictures, start_node):
    found = NodeClient(start_node(pictures).address).probe(chunk_of(pictures))
    assert found["read_s"] > 0
    assert found["decode_s"] > 0
    assert found["base_bytes"] > 1e6
    assert set(found["encode_s_per_byte"]) == {"raw", "fp16", "bf16", "int8"}


def test_a_prefix_that_the_node_does_not_have_is_refused(pictures, start_node):
    with pytest.raises(RefusedError, match="unknown prefix"):
        NodeClient(start_node(pictures).address).probe(chunk_of(pictures, "0" * 64))


def test_a_probe_stays_below_the_roots(pictures, start_node, tmp_path):
    node = NodeClient(start_node(tmp_path).address)
    with pytest.raises(RefusedError, match="is not below"):
        node.probe(chunk_of(pictures))


def test_a_link_is_measured_both_ways(pictures, start_node):
    down, up, latency_s = NodeClient(start_node(pictures).address).measure_link(at_least_s=0.05)
    assert down > 1e5
    assert up > 1e5
    assert 0 < latency_s < 5


@pytest.mark.parametrize("num_bytes", [0, -1, wire.MAX_BLOB_BYTES + 1, "many", None, 1.5])
def test_a_blob_is_bounded(num_bytes):
    with pytest.raises(ConfigError):
        wire.loads(json.dumps({"kind": "blob", "protocol": wire.PROTOCOL, "num_bytes": num_bytes}).encode())


def test_a_probe_is_bounded(pictures):
    request = json.loads(wire.Probe(chunk_of(pictures)).dumps())
    request["samples"] = [[number, *request["samples"][0][1:]] for number in range(wire.MAX_PROBE_SAMPLES + 1)]
    with pytest.raises(ConfigError, match="the limit is"):
        wire.loads(json.dumps(request).encode())


def test_memory_that_loading_left_free_does_not_hide_what_rows_take(tmp_path):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    captured = capture(hw.freeze(nn.Sequential(body, nn.Linear(64, 2)), until="1"), (torch.zeros(2, 3, 128, 128),))
    (cut,) = (each for each in cuts(captured) if each.name == "0")
    shipped = ship(captured, cut, cache_dir=tmp_path)
    found, rows = {}, np.ones((16, 3, 128, 128), np.float32)
    want = wire.Extraction("file:///nowhere", TRANSFORMS, shipped.digest, cut.boundary)
    probe._probe_prefix(found, probe.Model(shipped.path.read_bytes(), None, Candidate(batch=4)), rows, want)
    between = 64 * 128 * 128 * 4  # what the convolution gives
    assert found["row_bytes"] > between / 2


def test_a_child_that_nobody_waits_for_is_ended():
    begin = time.monotonic()
    ended = Children().run("code", b"", 300.0, lambda: time.monotonic() > begin + 0.5)  # reads until its input ends
    assert ended.code < 0
    assert ended.in_time

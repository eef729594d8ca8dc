"""Embeddings by the storage train as `nn.EmbeddingBag` does, on one node and on three."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import ConfigError, RefusedError

spec = importlib.util.spec_from_file_location("embedding_peers", Path(__file__).with_name("embedding.py"))
side = importlib.util.module_from_spec(spec)
spec.loader.exec_module(side)

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


@pytest.fixture(scope="module")
def nodes(start_node_once, tmp_path_factory):
    """Three, each with a folder for tables."""
    folders = [tmp_path_factory.mktemp("node") for _ in range(3)]
    return [start_node_once(each, options=("--tables", str(each / "tables"))).address for each in folders]


@pytest.fixture
def name(request):
    return "t-" + "".join(letter if letter.isalnum() else "-" for letter in request.node.name)[-60:]


def train(module, optimizer, head, batches):
    losses = []
    for batch in batches:
        loss = head(module(*batch))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad() if hasattr(optimizer, "zero_grad") else None
        head.weight.grad = None
        losses.append(loss.item())
    return np.array(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("count", [1, 3])
def test_fifty_steps_have_the_losses_and_the_vectors_of_a_local_one(nodes, name, count, mode, optimizer, dtype):
    near, local, local_step = side.peers(nodes[:count], name, dtype=dtype, optimizer=optimizer, mode=mode)
    generator, head = np.random.default_rng(0), side.Head(8, dtype)
    batches = [side.ragged(generator, 200) for _ in range(50)]
    with near:
        ours = train(near, None, head, near.ahead(batches, lambda batch: batch))
        theirs = train(local, local_step, head, batches)
        np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE[dtype])
        torch.testing.assert_close(near.export(), local.weight.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert near.version == 50

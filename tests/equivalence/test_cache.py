"""A cache never changes the numbers: losses over epochs are those of the inline runtime, which has none."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.plan import Plan
from headwater.data.transforms import HorizontalFlip, Normalize, RandomResizedCrop, Resize, ToFloat, Transforms
from headwater.errors import ConfigError
from headwater.train.client import NodeClient

FLOATS = [ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)]
RANDOM = Transforms([RandomResizedCrop(32), HorizontalFlip(0.5), *FLOATS])
FIXED = Transforms([Resize((32, 32)), *FLOATS])
EPOCHS, NUM_PICTURES = 5, 50


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 4, 3), nn.ReLU()]
    return hw.freeze(nn.Sequential(nn.Sequential(*body), nn.Sequential(nn.Flatten(), nn.Linear(144, 3))), until="1.1")


def losses(model, folder, transforms, num_epochs=EPOCHS, **options):
    model = copy.deepcopy(model)
    options = {"plan": None, **options}
    found = []
    with hw.near(model, folder, transforms=transforms, batch_size=10, seed=3, **options) as job:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        job.model.train()
        for _ in range(num_epochs):
            for x, y in job.loader:
                loss = cross_entropy(job.model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
    return found


@pytest.fixture
def caching(start_node, pictures, tmp_path):
    """A node that keeps rows, and its counts."""
    node = start_node(pictures, options=("--state", str(tmp_path / "state"), "--cache-size", "50MB"))
    client = NodeClient(node.address)
    yield [node.address], lambda: client.hello()["busy"]
    client.close()


def test_epochs_from_the_cache(model, pictures, caching):
    nodes, busy = caching
    expected = losses(model, pictures, FIXED, nodes="inline")
    assert losses(model, pictures, FIXED, nodes=nodes) == pytest.approx(expected, rel=1e-5)
    assert busy()["num_cache_hits"] == (EPOCHS - 1) * NUM_PICTURES
    assert losses(model, pictures, FIXED, nodes=nodes) == pytest.approx(expected, rel=1e-5)
    assert busy()["num_rows"] == NUM_PICTURES


@pytest.mark.parametrize("views", [1, 2, 3])
def test_views_are_the_same_with_and_without_a_cache(model, pictures, caching, views):
    nodes, busy = caching
    expected = losses(model, pictures, RANDOM, nodes="inline", views=views)
    assert losses(model, pictures, RANDOM, nodes=nodes, views=views) == pytest.approx(expected, rel=1e-5)
    assert busy()["num_rows"] == views * NUM_PICTURES
    assert busy()["num_cache_hits"] == (EPOCHS - views) * NUM_PICTURES
    host = losses(model, pictures, RANDOM, nodes=nodes, views=views, plan=Plan())
    assert host == pytest.approx(expected, rel=1e-5)
    pixels = losses(model, pictures, RANDOM, nodes=nodes, views=views, cut="input")
    assert pixels == pytest.approx(expected, rel=1e-5)


def test_without_views_every_epoch_draws_anew_and_nothing_is_kept(model, pictures, caching):
    nodes, busy = caching
    assert losses(model, pictures, RANDOM, nodes=nodes) == pytest.approx(
        losses(model, pictures, RANDOM, nodes="inline"), rel=1e-5
    )
    assert (busy()["num_cache_hits"], busy()["cache_bytes"]) == (0, 0)


def test_a_view_is_what_an_epoch_without_views_draws(model, pictures):
    once = losses(model, pictures, RANDOM, 2, nodes="inline")
    assert losses(model, pictures, RANDOM, 2, nodes="inline", views=2) == once
    assert losses(model, pictures, RANDOM, 2, nodes="inline", views=1)[5:] != pytest.approx(once[5:], rel=1e-5)


def test_through_an_embedded_node(model, pictures):
    expected = losses(model, pictures, RANDOM, nodes="inline", views=2)
    for cache in ("20MB", "0"):
        found = losses(model, pictures, RANDOM, views=2, node_cache=cache)
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_run_that_begins_in_a_later_epoch_sees_the_same_view(model, pictures, caching):
    def rows(epoch):
        options = {"transforms": RANDOM, "nodes": caching[0], "batch_size": 10, "plan": None, "views": 2}
        with hw.near(model, pictures, **options) as job:
            job.loader.set_epoch(epoch)
            batches = [x for x, _ in job.loader]
        order = torch.argsort(torch.cat([x.samples for x in batches]))
        return torch.cat([x.tensors[0] for x in batches])[order]

    assert torch.equal(rows(3), rows(1))
    assert not torch.equal(rows(3), rows(2))


def test_views_without_random_transforms_have_nothing_to_do(model, pictures):
    with pytest.warns(UserWarning, match="views=2 has nothing to do"):
        losses(model, pictures, FIXED, 1, nodes="inline", views=2)


@pytest.mark.parametrize("options", [{"views": -1}, {"views": 1.5}, {"node_cache": "much"}, {"node_cache": "1GB"}])
def test_settings_that_can_not_be_are_errors(model, pictures, options):
    nodes = "inline" if options != {"node_cache": "much"} else None
    with pytest.raises(ConfigError, match=r"views is|node_cache is"):
        losses(model, pictures, RANDOM, 1, nodes=nodes, **options)

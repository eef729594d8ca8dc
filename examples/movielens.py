"""A small DLRM on MovieLens, its tables beside the storage: which films will somebody like, after those they saw?

    python examples/movielens.py ratings.csv [--nodes grpc://store-1:8815 …]

ratings.csv is of a MovieLens set (grouplens.org/datasets/movielens). Without --nodes, a node is started
beside this script.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

import headwater as hw

BATCH, DIM, HISTORY = 64, 32, 20
Sample = tuple[int, list[int], float]  # who; the films they rated last, the one in question at the end; how
Batch = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]


def read(path: str) -> list[Sample]:
    with open(path, newline="") as file:
        ratings = sorted(csv.DictReader(file), key=lambda row: int(row["timestamp"]))
    seen: dict[int, list[int]] = {}
    samples = []
    for row in ratings:
        films = seen.setdefault(int(row["userId"]), [])
        films.append(int(row["movieId"]))
        samples.append((int(row["userId"]), films[-HISTORY:], float(row["rating"])))
    return samples


def batches(samples: list[Sample], seed: int) -> Iterator[Batch]:
    order = np.random.default_rng(seed).permutation(len(samples))
    for start in range(0, len(order), BATCH):
        some = [samples[each] for each in order[start : start + BATCH]]
        films = torch.tensor([film for _, bag, _ in some for film in bag])
        offsets = torch.tensor(np.cumsum([0, *(len(bag) for _, bag, _ in some[:-1])]))
        yield torch.tensor([[user] for user, _, _ in some]), (films, offsets), torch.tensor([each for *_, each in some])


def main() -> None:
    parser = argparse.ArgumentParser(description="A small DLRM on MovieLens, its tables beside the storage.")
    parser.add_argument("ratings", help="ratings.csv of a MovieLens set")
    parser.add_argument("--nodes", nargs="*", default=None, help="started with `headwater serve … --tables FOLDER`")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    samples = read(arguments.ratings)
    held_out = len(samples) // 10
    names = ("users", "films") if arguments.nodes else (None, None)
    sizes = (max(user for user, _, _ in samples) + 1, max(bag[-1] for _, bag, _ in samples) + 1)
    users, films = (
        hw.EmbeddingBag(size, DIM, mode="mean", name=name, nodes=arguments.nodes, optimizer="rowwise_adagrad", lr=0.05,
                        scale=0.05)
        for size, name in zip(sizes, names, strict=True)
    )  # fmt: skip
    with users, films:
        top = nn.Sequential(nn.Linear(2 * DIM + 1, 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.Adagrad(top.parameters(), 0.02)

        def predict(user: torch.Tensor, bags: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            left, right = users(user), films(*bags)
            answer: torch.Tensor = top(torch.cat([left, right, (left * right).sum(1, keepdim=True)], 1))
            return 3.5 + answer.squeeze(1)

        for epoch in range(arguments.epochs):
            stream = batches(samples[:-held_out], epoch)
            losses = []
            for user, bags, rating in films.ahead(users.ahead(stream, lambda batch: batch[0]), lambda batch: batch[1]):
                loss = nn.functional.mse_loss(predict(user, bags), rating)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            with torch.no_grad():
                errors = [predict(user, bags) - rating for user, bags, rating in batches(samples[-held_out:], 0)]
            rmse = torch.cat(errors).square().mean().sqrt().item()
            print(
                f"epoch {epoch}: training loss {np.mean(losses[-200:]):.3f}, error on the latest tenth {rmse:.3f} stars"
            )


if __name__ == "__main__":
    main()

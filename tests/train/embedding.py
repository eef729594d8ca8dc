"""A table and its peer in memory, side by side: what more than one test of embeddings needs."""

import numpy as np
import torch

import headwater as hw


class LocalAdagrad:
    """Row-wise Adagrad over `nn.EmbeddingBag`, in plain torch."""

    def __init__(self, weight, lr, eps=1e-8):
        self.weight, self.lr, self.eps = weight, lr, eps
        self.state = torch.zeros(len(weight), dtype=weight.dtype)

    def step(self):
        grad, self.weight.grad = self.weight.grad, None
        self.state += grad.square().mean(1)
        with torch.no_grad():
            self.weight -= self.lr * grad / (self.state.sqrt() + self.eps)[:, None]


def local_optimizer(kind, weight, lr):
    return LocalAdagrad(weight, lr) if kind == "rowwise_adagrad" else torch.optim.SGD([weight], lr)


def peers(nodes, name, *, num=200, dim=8, dtype=torch.float64, optimizer="sgd", lr=0.1, mode="sum", **more):
    """Ours, `nn.EmbeddingBag` with the same values, and its optimizer."""
    near = hw.EmbeddingBag(num, dim, mode=mode, dtype=dtype, name=name, nodes=nodes, optimizer=optimizer, lr=lr,
                           scale=0.1, **more)  # fmt: skip
    return near, *local_of(near, optimizer, lr, mode, more.get("padding_idx"))


def local_of(near, optimizer, lr, mode, padding_idx=None):
    local = torch.nn.EmbeddingBag(near.num_embeddings, near.embedding_dim, mode=mode, dtype=near._dtype,
                                  padding_idx=padding_idx)  # fmt: skip
    with torch.no_grad():
        local.weight.copy_(near.export())
    return local, local_optimizer(optimizer, local.weight, lr)


def ragged(generator, num, bags=16, most=9):
    """Ids and offsets: popular ids first, some bags empty."""
    lengths = generator.integers(0, most, bags)
    ids = np.minimum(generator.zipf(1.3, lengths.sum()) - 1, num - 1)
    return torch.from_numpy(ids), torch.from_numpy(np.cumsum(lengths) - lengths)


class Head(torch.nn.Module):
    """A small model on pooled vectors, so that gradients differ from bag to bag."""

    def __init__(self, dim, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(dim, 1, dtype=dtype, generator=generator))

    def forward(self, pooled):
        return torch.tanh(pooled @ self.weight).square().mean()

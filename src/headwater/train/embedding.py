"""`EmbeddingBag`: as `torch.nn.EmbeddingBag`, with its vectors on the disks of storage nodes.

Owns the module: what a call means, and autograd around it. The forward pass sends ids and gets pooled vectors; the
backward pass sends their gradients, and the nodes do the optimizer's step on the vectors behind them.
"""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from headwater.core.amount import num_bytes
from headwater.core.bags import Bags, as_bags
from headwater.core.embedding_cost import Priced
from headwater.core.form import to_json
from headwater.core.table import DTYPES, TableSpec
from headwater.errors import ConfigError
from headwater.train import tablefile
from headwater.train.access import Access
from headwater.train.client import NodeClient
from headwater.train.embedded import EmbeddedNode
from headwater.train.tables import PATIENCE_S, Table
from headwater.train.way import PLACED, TRAVELS, Way, Went

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")


class EmbeddingBag(nn.Module):
    """Sums or means of embedding vectors that live near the storage. See `docs/embedding.md`.

    It is called as `torch.nn.EmbeddingBag` is. What differs: it has no parameter; each backward pass through a call is
    a step of `optimizer` ("sgd" or "rowwise_adagrad") with `lr`, done by the nodes.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
        nodes: Sequence[str] | str | None = None,
        folder: str | None = None,
        optimizer: str = "sgd",
        lr: float = 0.01,
        eps: float = 1e-8,
        init: str = "normal",
        scale: float = 1.0,
        seed: int = 0,
        cache: str = "",
        travels: str = "auto",
        place: str = "nodes",
        token: str | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """ConfigError for what is not done near the storage or makes no sense; NodeError where a node does not answer
        or says no, now and in each step.

        num_embeddings, embedding_dim   how many vectors there are, and how many numbers each has
        mode          "sum" or "mean" of a bag's vectors
        include_last_offset, padding_idx, device, dtype   as there; dtype is float32 or float64
        max_norm, norm_type, scale_grad_by_freq, sparse   are there for calls that give them; the first and the third
                      are refused, the others change nothing
        name          the table's, on the nodes; a table of that name is taken up where it stands
        nodes         addresses, over which the vectors are dealt; None starts one beside this process
        folder        where that one keeps the table; without it, the table goes when the module is closed
        optimizer, lr, eps   the nodes' step: "sgd" or "rowwise_adagrad"
        init, scale, seed   what vectors are before they are trained: "normal" with deviation `scale`, "uniform" between
                      -scale and scale, or "zeros", drawn by (seed, id)
        cache         how much memory each node shall give the table, such as "256MB"
        travels       what crosses the link: "pooled" vectors, each distinct vector of a batch ("vectors"), or what the
                      first steps showed to be faster ("auto")
        place         where the table is trained: on its "nodes"; "here", in a copy in this process's memory, which is
                      written back by `sync`, `state_dict`, `save` and `close`; or "auto", wherever the first batch was
                      measured to be faster, here only if it fits
        patience_s    how long a node may be away before a step fails
        token, tls_ca, tls_cert, tls_key   as for `near`
        """
        super().__init__()
        if mode not in ("sum", "mean"):
            raise ConfigError(f"mode is {mode!r}; near the storage there are sum and mean (max: keep nn.EmbeddingBag)")
        for what, given in (("max_norm", max_norm is not None), ("scale_grad_by_freq", scale_grad_by_freq)):
            if given:
                raise ConfigError(f"{what} is not done near the storage; leave it out, or keep nn.EmbeddingBag")
        kind = str(dtype or torch.get_default_dtype()).removeprefix("torch.")
        if kind not in DTYPES:
            raise ConfigError(f"dtype is {kind}; vectors are {' or '.join(DTYPES)}")
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ConfigError(f"padding_idx is {padding_idx}; there are {num_embeddings} embeddings")
            padding_idx %= num_embeddings
        if travels not in TRAVELS:
            raise ConfigError(f"travels is {travels!r}; it must be one of {', '.join(TRAVELS)}")
        if place not in PLACED:
            raise ConfigError(f"place is {place!r}; it must be one of {', '.join(PLACED)}")
        if nodes is not None and (name is None or folder is not None):
            raise ConfigError("with nodes=[…], give the table a name=…, by which they keep it (and no folder)")
        self.embedding_dim, self.mode, self.include_last_offset = embedding_dim, mode, include_last_offset
        self.padding_idx, self.lr, self.trainable = padding_idx, lr, True
        self.name = name or (f"bag-{uuid.uuid4().hex[:12]}" if folder is None else "bag")
        self._device = torch.device(device or "cpu")
        self._dtype = getattr(torch, kind)
        self._anchor = torch.zeros((), requires_grad=True)  # what makes autograd come back to us
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._node: EmbeddedNode | None = None
        access = Access.of(token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
        if nodes is None:
            if folder is None:
                self._scratch = tempfile.TemporaryDirectory(prefix="headwater-tables-")
                folder = self._scratch.name
            self._node = EmbeddedNode(folder, cache_bytes=0, tables=folder)
            nodes, access = [self._node.address], self._node.access
        nodes = [nodes] if isinstance(nodes, str) else list(nodes)
        if not nodes:
            raise ConfigError("nodes is empty; name at least one, or leave it out")
        try:
            spec = TableSpec(num_embeddings, embedding_dim, kind, optimizer, eps, init, scale, seed, len(nodes),
                             zero_id=padding_idx)  # fmt: skip
            clients = [NodeClient(each, access) for each in nodes]
            for client in clients:
                client.hello()
            cache_bytes = num_bytes(cache, "cache") if cache else 0
            self.table = Table(spec, self.name, clients, cache_bytes, patience_s)
            self._way = Way(self.table, travels, place)
            if _weight is not None:
                self.load_tensor(_weight)
        except BaseException:
            if "table" in self.__dict__:
                self.table.close()
            self._end_node()
            raise

    @property
    def num_embeddings(self) -> int:
        """How many vectors the table has."""
        return self.table.spec.num_embeddings

    @property
    def version(self) -> int:
        """How many steps the table has behind it on its nodes. Writing back a copy makes a step, or several."""
        return self.table.version

    @property
    def ranking(self) -> list[Priced]:
        """With `place="auto"`, what was considered, each with its estimated seconds a step; the first one was taken."""
        return list(self._way.ranking)

    def extra_repr(self) -> str:
        spec = self.table.spec
        return (f"{spec.num_embeddings}, {spec.dim}, mode={self.mode!r}, name={self.name!r}, on "
                f"{', '.join(line.client.name for line in self.table.lines)}")  # fmt: skip

    def requires_grad_(self, requires_grad: bool = True) -> EmbeddingBag:
        """Whether backward passes train the table."""
        self.trainable = requires_grad
        return self

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002 (as torch calls it)
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        bags, which, lengths = self._bags(input, offsets, per_sample_weights)
        trains = self.trainable and torch.is_grad_enabled()
        if not len(bags):
            size = len(lengths), self.embedding_dim
            return torch.zeros(size, dtype=self._dtype, device=input.device, requires_grad=trains)
        went, pooled = self._way.pooled(bags)
        vectors = np.zeros((len(lengths), self.embedding_dim), self.table.spec.dtype)
        vectors[which] = pooled
        if self.mode == "mean":
            vectors /= np.maximum(lengths, 1)[:, None].astype(vectors.dtype)
        result = torch.from_numpy(vectors).to(input.device)
        if not trains:
            return result
        return _Near.apply(self._anchor, result, self, went, which, lengths)

    def prefetch(
        self,
        input: torch.Tensor,  # noqa: A002
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> bool:
        """Tell the nodes what a coming call will ask for; whether there was room for it. Results stay the same."""
        bags, _, _ = self._bags(input, offsets, per_sample_weights)
        trains = self.training and self.trainable and torch.is_grad_enabled()
        return len(bags) == 0 or self._way.stage(bags, pooled=not trains)

    def ahead(self, batches: Iterable[_Item], pick: Callable[[_Item], Any], depth: int = 1) -> Iterator[_Item]:
        """The batches, each prefetched `depth` before its turn; `pick(batch)` are the arguments that the module will
        be called with, one or a tuple of them."""
        waiting: list[tuple[_Item, tuple[Any, ...]]] = []
        try:
            for batch in batches:
                picked = pick(batch)
                waiting.append((batch, picked if isinstance(picked, tuple) else (picked,)))
                self.prefetch(*waiting[-1][1])
                if len(waiting) > depth:
                    yield waiting.pop(0)[0]
            while waiting:
                yield waiting.pop(0)[0]
        finally:
            for _, asked in waiting:  # a loop that was left early: nodes would bring these along for ever
                self._way.unstage(self._bags(*asked)[0])

    def _bags(
        self, given: torch.Tensor, offsets: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> tuple[Bags, np.ndarray, np.ndarray]:
        if given.dtype not in (torch.int64, torch.int32):
            raise ConfigError(f"ids are {given.dtype}; they must be int64 or int32")
        if given.dim() == 2:
            if offsets is not None:
                raise ConfigError("ids of two dimensions are bags already: leave offsets out")
            starts = np.arange(given.shape[0], dtype=np.int64) * given.shape[1]
        elif given.dim() == 1:
            if offsets is None:
                raise ConfigError("ids of one dimension need offsets: where each bag begins")
            starts = self._starts(offsets, len(given))
        else:
            raise ConfigError(f"ids have {given.dim()} dimensions; they must have one or two")
        if weights is not None:
            if self.mode != "sum":
                raise ConfigError(f"per_sample_weights go with mode='sum' alone; this is {self.mode!r}")
            if weights.shape != given.shape:
                raise ConfigError(f"per_sample_weights are {tuple(weights.shape)}, ids {tuple(given.shape)}")
            if weights.requires_grad and torch.is_grad_enabled():
                raise ConfigError("gradients of per_sample_weights are not made near the storage; detach them")
        ids = given.detach().cpu().reshape(-1).numpy().astype(np.int64, copy=False)
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.num_embeddings):
            raise ConfigError(f"ids reach from {ids.min()} to {ids.max()}; the table has {self.num_embeddings:,}")
        plain = None if weights is None else weights.detach().cpu().to(self._dtype).reshape(-1).numpy()
        return as_bags(ids, starts, plain, self.padding_idx)

    def _starts(self, offsets: torch.Tensor, num_ids: int) -> np.ndarray:
        starts = offsets.detach().cpu().numpy().astype(np.int64)
        right = starts.ndim == 1 and len(starts) and starts[0] == 0 and (np.diff(starts) >= 0).all()
        if not right or starts[-1] > num_ids:
            raise ConfigError(f"offsets must begin with 0, never fall, and end within the {num_ids} ids")
        if self.include_last_offset:
            if starts[-1] != num_ids:
                raise ConfigError(f"the last offset is {starts[-1]}; with include_last_offset it is {num_ids}")
            return starts[:-1]
        return starts

    def _train(self, went: Went, grads: torch.Tensor, which: np.ndarray, lengths: np.ndarray) -> None:
        some = grads.detach().cpu().numpy()[which].astype(self.table.spec.dtype, copy=False)
        if self.mode == "mean":
            some = some / lengths[which][:, None].astype(some.dtype)
        self._way.train(went, some, self.lr)

    # The table as a whole

    def sync(self) -> None:
        """Until every step that was begun is on the nodes' disks, those that were done in a copy here included."""
        self._way.write_back()
        self.table.settle()

    def export(self) -> torch.Tensor:
        """All vectors: what `nn.EmbeddingBag` has as its weight. For tables that fit into memory."""
        self.sync()
        return torch.from_numpy(self.table.read(np.arange(self.num_embeddings))[0])

    def load_tensor(self, weight: torch.Tensor) -> None:
        """Vectors from the weight of an `nn.EmbeddingBag`; ConfigError if it has another shape."""
        if tuple(weight.shape) != (self.num_embeddings, self.embedding_dim):
            raise ConfigError(
                f"the weight is {tuple(weight.shape)}; the table {self.num_embeddings, self.embedding_dim}"
            )
        self._way.forget()
        self.table.write(np.arange(len(weight)), weight.detach().cpu().to(self._dtype).numpy())

    def save(self, url: str) -> int:
        """Write what was trained to a folder or URL, with the optimizer's state; how many vectors that is."""
        self.sync()
        return tablefile.save(self.table, url)

    def load(self, url: str) -> int:
        """Vectors that were saved, on whatever number of nodes, into this table, which has no steps behind it."""
        self.sync()
        self._way.forget()
        return tablefile.load(self.table, url)

    def get_extra_state(self) -> dict[str, Any]:
        """What a `state_dict` has of the table: where it is, and which version; not its vectors."""
        self.sync()
        spec = to_json(self.table.spec)
        return {"table": self.name, "version": self.version, "spec": spec,
                "nodes": [line.client.name for line in self.table.lines]}  # fmt: skip

    def set_extra_state(self, state: Any) -> None:
        """Go back to that version, if the nodes still know it."""
        if not isinstance(state, dict) or type(state.get("version")) is not int or state["version"] < 0:
            raise ConfigError("the state of an EmbeddingBag names a table and its version; this is another module's")
        if state.get("table") != self.name:
            raise ConfigError(f"the state is of table {state.get('table')!r}; this is {self.name!r}: make the module "
                              "with "
                              "that name, or load what was saved")  # fmt: skip
        if state["version"] > self.version:
            raise ConfigError(f"the state is of version {state['version']} of table {self.name}, which is at "
                              f"{self.version}: it was dropped or replaced; load what was saved")  # fmt: skip
        self._way.forget()  # what was trained in a copy since is not of that version
        self.table.settle()
        if state["version"] != self.version:
            self.table.go_back(state["version"])

    def resize(self, num_embeddings: int) -> None:
        """Grow the table; new vectors are what they are initially."""
        self.sync()
        self._way.forget()
        self.table.grow(num_embeddings)

    def drop(self) -> None:
        """Take the table away from its nodes, and close."""
        self._way.forget()
        self.table.drop()
        self.close()

    def close(self) -> None:
        """Hang up; nodes keep the table, unless it had neither a name nor a folder. NodeError if a copy that was
        trained here can't be written back."""
        try:
            if self.table.is_open:
                self._way.write_back()
        finally:
            self._way.forget()
            self.table.close()
            self._end_node()

    def _end_node(self) -> None:
        if self._node is not None:
            self._node.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def __enter__(self) -> EmbeddingBag:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Near(torch.autograd.Function):
    """Pooled vectors that came; their gradients go."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, vectors: torch.Tensor, bag: EmbeddingBag, went: Went, which: np.ndarray,
        lengths: np.ndarray,
    ) -> torch.Tensor:  # fmt: skip
        ctx.near = bag, went, which, lengths
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        bag, went, which, lengths = ctx.near
        bag._train(went, grads[0], which, lengths)
        return (None,) * 6

"""Where the statistics of a batch are asked for, in the middle of a prefix: a batch-norm waits here for all nodes.

Owns `Meeting` (`training.norm.Meet`, over a trainer's session). Nodes don't know each other; the trainer adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headwater.core.form import shown
from headwater.data.parcel import Parcel
from headwater.errors import DamagedError
from headwater.node.exchange import Exchange


class DroppedError(Exception):
    """The step that is under way has not happened."""


class Meeting:
    """Rounds of one step, forwards and then backwards; every node of a step has the same ones in the same order."""

    def __init__(self, exchange: Exchange, fetch: Callable[[Parcel], None]) -> None:
        """`fetch` begins with rows of a later batch, which may be asked for while statistics are waited for."""
        self._exchange = exchange
        self._fetch = fetch
        self._step = -1
        self._round = 0
        self._alone = True

    def begin(self, step: int, alone: bool) -> None:
        """`alone`: all rows of the batch are here, so that nobody has to be waited for."""
        if step != self._step:
            self._step, self._round = step, 0
        self._alone = alone

    def forward(self, number: int, count: int, mean: Any, squares: Any) -> tuple[int, Any, Any]:
        """(count, mean, biased variance) of all rows; tensors of torch, of which this file knows no more than that."""
        sums = np.stack([mean.numpy(), squares.numpy()])
        if self._alone:
            self._send("forward", number, count, sums)
            return count, mean, squares / count
        found = self._meet("forward", number, count, sums)
        both = found.array("sums", sums.shape, str(sums.dtype))
        return found.number("count", 1), mean.new_tensor(both[0]), mean.new_tensor(both[1])

    def backward(self, number: int, sums: Any) -> Any:
        if self._alone:
            return sums
        plain = sums.numpy()
        found = self._meet("backward", number, 0, plain)
        return sums.new_tensor(found.array("sums", plain.shape, str(plain.dtype)))

    def _send(self, way: str, number: int, count: int, sums: np.ndarray) -> None:
        about = {"step": self._step, "round": self._round, "way": way, "norm": number, "count": count}
        self._exchange.send(Parcel("norm", about, {"sums": sums}))
        self._round += 1

    def _meet(self, way: str, number: int, count: int, sums: np.ndarray) -> Parcel:
        wanted = (self._step, self._round)
        self._send(way, number, count, sums)
        early: list[Parcel] = []
        while True:
            parcel = self._exchange.take()
            if parcel.kind == "norm" and (parcel.about.get("step"), parcel.about.get("round")) == wanted:
                self._exchange.put_off(early)
                return parcel
            # The trainer asks while gradients are still on their way back.
            if parcel.kind in ("collect", "add") and not early:
                early.append(parcel)
            elif parcel.kind == "fetch":
                self._fetch(parcel)
            elif parcel.kind == "drop":
                self._exchange.send(Parcel("dropped"))
                raise DroppedError
            elif parcel.kind != "norm":  # one of a step that was dropped is no news
                raise DamagedError(f"{shown(parcel.kind)} where statistics of a batch were waited for")

"""One step of partitioned training as state machines: the trainer's side of it, and a node's.

Owns `Step` (who computes what next, and whether the step is finished or was never there), `Replica` (what a node may be
told, and in which order) and `deal` (which node makes which rows). A step's results are applied by the trainer alone,
in one go, when `Finish` is decided; until then nothing of it is kept anywhere, so a step that ends otherwise leaves no
trace.

What holds (tests/core/test_partition.py explores it exhaustively):
1. A step ends in exactly one of `Finish` and `RolledBack`; `Finish` only after every part was computed forward, its
   rows went through the suffix once, its gradients went back to whoever made it, and every node's sum has come: by
   itself, or within the one sum that nodes made among themselves.
2. After a node is lost nothing more is asked of anybody but to drop the step.
3. A node has at most `depth` micro-batches under way, and is told things in an order that `Replica` accepts.
4. Until it ends, something is under way.
5. Nodes that add up among themselves do so at most once in a step. Once one of them can't, each is asked for its own
   sum, and nodes keep theirs until they are told what comes after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headwater.errors import ConfigError


@dataclass(frozen=True)
class Forward:
    """Tell this node to compute the prefix for its rows of a micro-batch."""

    node: int
    micro: int


@dataclass(frozen=True)
class Suffix:
    """Run the rest of the model on this micro-batch, and the gradients of its rows."""

    micro: int


@dataclass(frozen=True)
class Backward:
    """Send this node the gradients of its rows."""

    node: int
    micro: int


@dataclass(frozen=True)
class Collect:
    """Ask this node for the sum of its gradients."""

    node: int


@dataclass(frozen=True)
class Add:
    """Tell this node to add its gradients up with the others'. `passes`: it sends the sum of all."""

    node: int
    passes: bool


@dataclass(frozen=True)
class Join:
    """All parts of these statistics are here: add them up, and tell everybody."""

    round: int


@dataclass(frozen=True)
class Drop:
    """Tell this node to forget the step."""

    node: int


@dataclass(frozen=True)
class Finish:
    """Everything has come: apply the step."""


@dataclass(frozen=True)
class RolledBack:
    """The step has not happened: this node was lost."""

    node: int


Decision = Forward | Suffix | Backward | Collect | Add | Join | Drop | Finish | RolledBack


class Step:
    """The trainer's side. `parts` says for each micro-batch which nodes make rows of it."""

    def __init__(
        self, parts: Sequence[frozenset[int]], *, depth: int, trains: bool, circle: frozenset[int] = frozenset()
    ) -> None:
        """`trains`: is there anything to train in front of the cut? If not, nothing goes back. `circle`: nodes that can
        add up among themselves; they do if it is they who make this batch, all of them and no others."""
        assert parts
        assert all(parts)
        assert depth >= 1
        self._parts = tuple(parts)
        self._depth = depth
        self._trains = trains
        self._nodes = sorted(frozenset[int]().union(*parts))
        self._come: list[set[int]] = [set() for _ in parts]
        self._asked = 0  # micro-batches that nodes were told to compute
        self._next = 0  # the one that the suffix takes next
        self._in_suffix = False
        self._grads: set[int] = set()
        self._together = len(circle) > 1 and circle == frozenset(self._nodes)  # as far as is known
        self._added = False  # they were told to add up
        self._norms: dict[int, set[int]] = {}
        self.ended = False

    def begin(self) -> list[Decision]:
        return [each for _ in range(min(self._depth, len(self._parts))) for each in self._ask()]

    def rows(self, node: int, micro: int) -> list[Decision]:
        """A node's rows of a micro-batch are here."""
        if self.ended:
            return []
        if not (0 <= micro < self._asked and node in self._parts[micro]) or node in self._come[micro]:
            raise ConfigError(f"rows of micro-batch {micro}, which nobody asked for")
        self._come[micro].add(node)
        return self._go_on()

    def norm(self, node: int, number: int) -> list[Decision]:
        """A node has come to a batch-norm, forwards or backwards, and sent its part of the statistics."""
        if self.ended:
            return []
        come = self._norms.setdefault(number, set())
        if len(self._parts) != 1 or node not in self._parts[0] or node in come or number > len(self._norms):
            raise ConfigError(f"statistics of round {number}, which is not its turn")
        come.add(node)
        return [Join(number)] if come == self._parts[0] else []

    def suffixed(self, micro: int) -> list[Decision]:
        """The suffix is done with a micro-batch."""
        assert self._in_suffix
        assert micro == self._next
        self._in_suffix = False
        self._next += 1
        if self.ended:
            return []
        found: list[Decision] = []
        if self._trains:
            found += [Backward(node, micro) for node in sorted(self._parts[micro])]
        found += self._ask()
        if self._next == len(self._parts):
            if self._trains and self._together:
                self._added = True
                found += [Add(node, node == self._nodes[0]) for node in self._nodes]
            elif self._trains:
                found += self._collect()
            else:
                self.ended = True
                found.append(Finish())
        return found + self._go_on()

    def grads(self, node: int) -> list[Decision]:
        """A node's sum of gradients is here."""
        if self.ended:
            return []
        if not self._trains or self._next < len(self._parts) or node not in self._nodes or node in self._grads:
            raise ConfigError("gradients that nobody asked for")
        if self._together:
            raise ConfigError("gradients of its own, where the sum of all was asked for")
        self._grads.add(node)
        if len(self._grads) < len(self._nodes):
            return []
        self.ended = True
        return [Finish()]

    def summed(self, node: int) -> list[Decision]:
        """The sum of all nodes' gradients is here, by way of this one."""
        if self.ended:
            return []
        if not self._added or node != self._nodes[0]:
            raise ConfigError("a sum of all gradients that nobody asked for")
        self.ended = True
        return [Finish()]

    @property
    def awaits_sum(self) -> bool:
        """Nodes were told to add up, and none is known to be apart."""
        return self._added and self._together and not self.ended

    def apart(self, node: int) -> list[Decision]:
        """A node can't add up with the others, now or when it will be told to."""
        if self.ended or node not in self._nodes or not self._together:
            return []
        self._together = False
        return self._collect() if self._added else []

    def _collect(self) -> list[Decision]:
        return [Collect(node) for node in self._nodes]

    def lost(self, node: int) -> list[Decision]:
        """A node is gone, or can't go on."""
        if self.ended or node not in self._nodes:
            return []
        self.ended = True
        return [*(Drop(other) for other in self._nodes if other != node), RolledBack(node)]

    def abandon(self) -> list[Decision]:
        """The trainer itself can't go on, or does not want to."""
        if self.ended:
            return []
        self.ended = True
        return [Drop(node) for node in self._nodes]

    def _ask(self) -> list[Decision]:
        """The next micro-batch, if there is one."""
        if self._asked == len(self._parts):
            return []
        micro = self._asked
        self._asked += 1
        return [Forward(node, micro) for node in sorted(self._parts[micro])]

    def _go_on(self) -> list[Decision]:
        if self._in_suffix or self._next == len(self._parts) or self._come[self._next] != self._parts[self._next]:
            return []
        self._in_suffix = True
        return [Suffix(self._next)]


MAX_MICRO = 1024
MAX_UNDER_WAY = 16  # micro-batches of a job on a node; each holds what its backward pass needs


@dataclass
class Replica:
    """A node's side: its copy of the prefix has exactly one version, and a step runs from beginning to end on it."""

    version: int = -1  # none yet
    depth: int = MAX_UNDER_WAY  # micro-batches under way that there is memory for
    staged: int | None = None  # the version that is coming in
    step: int | None = None
    added: int | None = None  # the step whose sum was made with other nodes; it may be asked for again, by itself
    _forward: set[int] = field(default_factory=set)
    _backward: set[int] = field(default_factory=set)

    def stage(self, version: int, base: int) -> None:
        """Tensors of the next version come; the others stay as they are in `base`."""
        if self.step is not None:
            raise ConfigError("weights in the middle of a step")
        self.added = None
        if version <= self.version or base not in (self.version, -1):
            raise ConfigError(f"weights of version {version} on top of {base}, where {self.version} is there")
        if self.staged not in (None, version):
            raise ConfigError(f"weights of version {version} while {self.staged} is coming in")
        self.staged = version

    def commit(self, version: int) -> None:
        """All of them are here, and take the place of the old ones at once."""
        if version != self.staged:
            raise ConfigError(f"version {version} can't be taken over: {self.staged} came in")
        self.version, self.staged = version, None

    def forward(self, step: int, version: int, micro: int) -> None:
        if version != self.version or self.staged is not None:
            raise ConfigError(f"a step on version {version}, where {self.version} is there")
        self.added = None
        if self.step is None:
            self.step, self._forward, self._backward = step, set(), set()
        if step != self.step or micro in self._forward or not 0 <= micro < MAX_MICRO:
            raise ConfigError(f"micro-batch {micro} of step {step}, in the middle of step {self.step}")
        if len(self._forward) - len(self._backward) >= self.depth:
            raise ConfigError(f"{self.depth} micro-batches are under way already, as many as the session began with")
        self._forward.add(micro)

    def passes(self, version: int) -> None:
        """Rows of a prefix with nothing to train: no step, as nothing comes back."""
        if version != self.version or self.staged is not None or self.step is not None:
            raise ConfigError(f"rows of version {version}, where {self.version} is there")

    def backward(self, step: int, micro: int) -> None:
        if step != self.step or micro not in self._forward or micro in self._backward:
            raise ConfigError(f"gradients of micro-batch {micro} of step {step}, which is not under way")
        self._backward.add(micro)

    def collect(self, step: int) -> None:
        """The sum is asked for; with that the step is over here."""
        if step != self.added:
            self._finish(step)
        self.added = None

    def add(self, step: int) -> None:
        """The sum is to be added to other nodes'; the step is over here but for that."""
        self._finish(step)
        self.added = step

    def _finish(self, step: int) -> None:
        if step != self.step or self._forward != self._backward:
            raise ConfigError(f"the sum of step {step}, which is not done")
        self.step = None

    def drop(self) -> None:
        """The step has not happened, and weights that came in halfway neither."""
        self.step, self.staged, self.added = None, None, None


def micro_bounds(num_rows: int, num_micro: int) -> list[tuple[int, int]]:
    """Where micro-batches begin and end; as many as asked for, or as there are rows, and of equal size but for one
    row."""
    count = max(1, min(num_micro, num_rows))
    return [(num_rows * place // count, num_rows * (place + 1) // count) for place in range(count)]


def deal(
    num_rows: int, shares: Mapping[int, float], holds: Callable[[int, int], bool] | None = None
) -> dict[int, npt.NDArray[np.int64]]:
    """Which rows each node makes, by place; in consecutive runs, where every node can make every row.

    Otherwise `holds(node, row)` says who can, and a row goes to whoever of these is furthest below its share.
    ConfigError if nobody can. Where nobody who is left was given a share, all get the same.
    """
    if not any(share > 0 for share in shares.values()):
        shares = dict.fromkeys(shares, 1.0)
    nodes = sorted(node for node, share in shares.items() if share > 0)
    total = sum(shares[node] for node in nodes)
    if holds is None:
        ends = np.rint(np.cumsum([shares[node] for node in nodes]) / total * num_rows).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        runs = {node: np.arange(start, end) for node, start, end in zip(nodes, starts, ends, strict=True)}
        return {node: rows for node, rows in runs.items() if len(rows)}
    dealt: dict[int, list[int]] = {node: [] for node in sorted(shares)}
    for row in range(num_rows):
        able = [node for node in dealt if holds(node, row)]
        if not able:
            raise ConfigError(f"nobody holds row {row}")
        dealt[min(able, key=lambda node: ((len(dealt[node]) + 1) / max(shares[node], 1e-6), node))].append(row)
    return {node: np.array(rows, np.int64) for node, rows in dealt.items() if rows}


@dataclass(frozen=True)
class Moments:
    """What a batch-norm needs of some rows: how many values each channel has, their mean and summed squared
    deviation."""

    count: int
    mean: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]

    @property
    def variance(self) -> npt.NDArray[np.float64]:
        """The biased one, which normalises."""
        return self.squares / self.count


def merged(parts: Sequence[Moments]) -> Moments:
    """Of all rows together, added up in the order given (Chan, Golub and LeVeque's rule)."""
    total = parts[0]
    for part in parts[1:]:
        count = total.count + part.count
        delta = part.mean - total.mean
        mean = total.mean + delta * (part.count / count)
        squares = total.squares + part.squares + delta * delta * (total.count * part.count / count)
        total = Moments(count, mean, squares)
    return total

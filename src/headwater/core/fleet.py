"""How many nodes a fleet has: more while its nodes are short of time, fewer while one of them could go.

Owns `Scaler`, a state machine: what each node said goes in, with the time; who is added and who is drained comes out.
And `Starts`, which says when another one may be started where one could not be. They know no clock, no Ray and no
socket; whoever places nodes (`fleet.keeper`) feeds them.

A node is short of time when chunks wait there and its threads, or its cores, are busy. Chunks alone don't say it:
behind a slow link they wait for the wire, and another node would not help. As long as nodes limit the run, every node
has chunks waiting, however many nodes there are, so the queue does not say how many are missing: there will be twice as
many, and then it is looked again. Downwards it goes one by one, and far more slowly: a loop that evaluates asks for
nothing for a while.

What holds, whatever is seen and in whatever order (tests/core/test_fleet.py):
1. There are never fewer nodes than `least`, those that are starting counted, nor more than `most`.
2. While a node is starting, or does not answer, none is added beyond `least`.
3. Nodes are added only after `up_after_s` of nothing but hurry, and one is drained only after `down_after_s` of nothing
   but calm; both are counted anew after each change.
4. Where the work stays the same, it comes to rest: a fleet never goes back to the size that it has just outgrown.
5. A node that answers is not drained while one is there that does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.errors import ConfigError

MOST_NODES = 1_000
# Chosen, none of them measured:
QUEUE = 2.0  # chunks that a node has: one is worked on, and another one waits
BUSY = 0.7  # of its threads' time: from here on it is short of it
CALM = 0.5  # of the threads of those that would be left; less than BUSY, so that a fleet comes to rest
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # after one that could not be started; doubled each time


@dataclass(frozen=True)
class Load:
    """What a node has to do: the chunks it was asked for and has not sent, and how much of its threads' or its cores'
    time they took since it was last looked at."""

    queue: float
    busy: float


@dataclass(frozen=True)
class Scaling:
    """Between how many nodes, and after how long."""

    least: int = 1
    most: int = 1
    up_after_s: float = 5.0
    down_after_s: float = 120.0
    queue: float = QUEUE
    busy: float = BUSY

    def __post_init__(self) -> None:
        faults = []
        if not 1 <= self.least <= MOST_NODES:
            faults.append(f"the least number of nodes is {self.least}; it must be between 1 and {MOST_NODES:,}")
        if not self.least <= self.most <= MOST_NODES:
            faults.append(f"the most nodes are {self.most}; it must be between {self.least} and {MOST_NODES:,}")
        if not 0 <= self.up_after_s < float("inf") or not 0 <= self.down_after_s < float("inf"):
            faults.append("the time before a fleet grows or shrinks is in seconds, 0 or more")
        if not 0 < self.busy <= 1 or not 0 <= self.queue < float("inf"):
            faults.append("busy is a part of the time, above 0 and at most 1; queue is chunks, 0 or more")
        if faults:
            raise ConfigError("; ".join(faults))


@dataclass(frozen=True)
class Add:
    """Start so many nodes more."""

    num: int


@dataclass(frozen=True)
class Drain:
    """This node takes nothing new, finishes what it has, and goes."""

    node: str


Decision = Add | Drain


class Scaler:
    """Decides for one fleet."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._nodes: frozenset[str] | None = None  # when it was last looked
        self._since: dict[str, float] = {}  # "hurry" and "calm", while it is nothing but that

    def look(self, now_s: float, loads: Mapping[str, Load | None]) -> list[Decision]:
        """What every node of the fleet said just now; None for one that is starting or does not answer. Nodes that
        drain are left out: they are no longer of the fleet."""
        want = self._scaling
        if frozenset(loads) != self._nodes:  # what was seen of others says nothing about these
            self._nodes = frozenset(loads)
            self._since.clear()
        if len(loads) < want.least:
            return [Add(want.least - len(loads))]
        if len(loads) > want.most:
            return [Drain(node) for node in self._first_to_go(loads)[: len(loads) - want.most]]
        there = [load for load in loads.values() if load is not None]
        hurry = (
            len(there) == len(loads)
            and sum(load.queue for load in there) >= want.queue * len(there)
            and sum(load.busy for load in there) >= want.busy * len(there)
        )
        left = min(len(loads) - 1, len(there))  # that would be there without the one that goes
        calm = left >= 1 and sum(load.busy for load in there) <= CALM / BUSY * want.busy * left
        if self._lasts("hurry", hurry, now_s, want.up_after_s) and len(loads) < want.most:
            self._since.clear()
            return [Add(min(len(loads), want.most - len(loads)))]
        if self._lasts("calm", calm, now_s, want.down_after_s) and len(loads) > want.least:
            self._since.clear()
            return [Drain(self._first_to_go(loads)[0])]
        return []

    def _lasts(self, what: str, holds: bool, now_s: float, for_s: float) -> bool:
        """Has it held for so long, at every look?"""
        if not holds:
            self._since.pop(what, None)
            return False
        return now_s - self._since.setdefault(what, now_s) >= for_s

    def _first_to_go(self, loads: Mapping[str, Load | None]) -> list[str]:
        """Those that are not there yet, then those with the least to finish; of equals the last one by name."""
        names = sorted(loads, reverse=True)
        return sorted(names, key=lambda node: -1.0 if (load := loads[node]) is None else load.queue)


class Starts:
    """Nodes that can't be started (a port that is taken, a root that is not there) are tried more and more seldom,
    until one of those that were started answers. Others that are there say nothing about it."""

    def __init__(self) -> None:
        self._pause_s, self._not_before_s = FIRST_PAUSE_S, float("-inf")

    def may(self, now_s: float) -> bool:
        return now_s >= self._not_before_s

    def failed(self, now_s: float) -> None:
        """One could not be started."""
        self._not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def came(self) -> None:
        """One that was being started answers."""
        self._pause_s = FIRST_PAUSE_S

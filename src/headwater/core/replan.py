"""When to plan again: measured rates that have left what the plan was made for.

Owns `Replanner`, a state machine: windows of measurements in, at most one decision out. It knows no clock; a window is
reported at a chunk boundary, so that is where every decision falls. It only says that the rig has changed and how; the
caller searches again, asks `worth_switching`, and tells the plan it goes on with.

What holds (tests/core/test_replan.py explores it exhaustively):
1. A rate within a quarter of what is believed never leads to a decision, nor does one window alone.
2. After a decision the new rate is what is believed: the same rate, sustained, leads to no second one, unless it is
   measured anew (`believe`) and found to be as before.
3. Between two decisions at least `min_chunks` chunks pass; twice as many after each that left the plan as it was,
   could not be carried out, or went back to a plan that was left before.
4. A rate that is lower only because nobody asked for more (the trainer did not wait), because there was no more to
   carry (the node made no more) or because the run was never meant to fill the link is not taken for a slow link.
   Nor is a loop that mostly waits taken for a slow trainer, or for a fast one.
5. A link or a trainer that is believed as fast as when the run began is never tried; one that was tried is never
   believed slower.
6. A trainer is never believed faster than it was profiled, or when the run began, nor slower than half of that: a loop
   may do less than it was profiled with, and more, and neither says how fast the machine is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headwater.core.cost import Estimate
from headwater.core.cut import Cut
from headwater.core.loads import LINK_DOWN, LOOP, SHARED, TRAINER, JobSize, Pricing, most
from headwater.core.plan import LEAST_SHARE, MOST_SHARE, Plan
from headwater.core.profile import Profile
from headwater.core.rig import Device, Link, Rig
from headwater.errors import ConfigError

TOLERANCE = 0.25  # "more than a quarter"
IN_A_ROW = 2
WAITING = 0.05  # a trainer that waits less is not held up by its feed
STARVED = 0.5  # one that waits more is not what limits the run
SLOWEST_TRAINER = 0.5  # of what was planned for; what takes longer is something else that the loop does
MIN_CHUNKS = 16
_MAX_PAUSE = 1 << 12  # chunks
MIN_GAIN = 0.05  # estimates differ from the truth by more than smaller gains
_TRAINER = ("trainer", "")


@dataclass(frozen=True)
class Window:
    """What was measured over a few chunks.

    link_bytes_per_s   per node, what came over its link in the window; less than the link could carry if there was not
                       always something on it
    node_rows_per_s    per node, of its cores while they worked (`Replanner.node_rows_per_s`)
    wait_fraction      of the window's time that the training loop stood waiting for rows
    store_bytes_per_s  of samples that the trainer read by itself, where the plan moves nothing
    loop_s             of the training loop for one row, without waiting; where the trainer's own cores do the work
    own_s              of the threads of the trainer's own node for one row that it made
    own_share          of the rows that came: those that the trainer's own node made
    A node that was idle, or whose rate can't be told, is left out.
    """

    num_chunks: int
    wait_fraction: float
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    node_rows_per_s: Mapping[str, float] = field(default_factory=dict)
    store_bytes_per_s: float | None = None
    loop_s: float | None = None
    own_s: float | None = None
    own_share: float | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.num_chunks < 0:
            faults.append(f"num_chunks is {self.num_chunks}; it must be 0 or more")
        if not 0 <= self.wait_fraction <= 1:
            faults.append(f"wait_fraction is {self.wait_fraction}; it must lie between 0 and 1")
        for what in ("link_bytes_per_s", "node_rows_per_s"):
            faults += [f"{what} of {name} is {rate}; it must be 0 or more" for name, rate in getattr(self, what).items()
                       if not 0 <= rate < float("inf")]  # fmt: skip
        for what, taken_s in (("loop_s", self.loop_s), ("own_s", self.own_s)):
            if taken_s is not None and not 0 < taken_s < float("inf"):
                faults.append(f"{what} is {taken_s}; it must be above 0")
        if faults:
            raise ConfigError("; ".join(faults))


@dataclass(frozen=True)
class Replan:
    """The rig is no longer what the plan was made for; `why` says what changed.

    `of_links` where a way between machines changed: a run tells that it did, and hardly by how much.
    """

    rig: Rig
    why: tuple[str, ...]
    of_links: bool = True


@dataclass(frozen=True)
class _Streak:
    """Windows in a row whose rate was off to one side."""

    sign: int = 0
    length: int = 0
    ratio: float = 1.0  # of the latest


class Replanner:
    """Watches one plan being carried out on one rig."""

    def __init__(
        self,
        plan: Plan,
        cuts: Sequence[Cut],
        profile: Profile,
        rig: Rig,
        *,
        min_chunks: int = MIN_CHUNKS,
        batch_size: int = 32,
    ) -> None:
        assert min_chunks >= 1
        self._batch_size = batch_size
        self._cuts = tuple(cuts)
        self._profile = profile
        self._min_chunks = self._pause = min_chunks
        self._rig = self._first = rig
        self._since = min_chunks  # chunks since the last decision; the first may come as soon as it is sure
        self._before = rig  # before the last decision
        self._streaks: dict[tuple[str, str], _Streak] = {}
        self._left: list[Plan] = []  # plans that were in use before
        self._plan = plan
        self._price()

    @property
    def rig(self) -> Rig:
        """What is believed now."""
        return self._rig

    @property
    def plan(self) -> Plan:
        """That is carried out."""
        return self._plan

    def rebalanced(self, plan: Plan) -> None:
        """The plan has another share from here on, by what its last epoch took: no decision, and no switch."""
        self._plan = plan
        self._price()

    def believe(self, rig: Rig) -> None:
        """The rig was measured anew."""
        self._rig = rig
        self._price()

    def withdraw(self) -> None:
        """The last decision could not be carried out: what it believed is forgotten; it may be taken again later."""
        self._rig = self._before
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._price()

    def adopted(self, plan: Plan) -> None:
        """The plan that is carried out from here on, a new one or the old."""
        if plan != self._plan:
            # To and fro between two plans, it slows down.
            self._pause = min(2 * self._pause, _MAX_PAUSE) if plan in self._left else self._min_chunks
            self._left.append(self._plan)
        elif self._since == 0:  # just decided, and for nothing: don't come back so soon
            self._pause = min(2 * self._pause, _MAX_PAUSE)
        self._plan = plan
        self._price()

    def _price(self) -> None:
        """What the plan should do on the rig as it is believed to be."""
        self._streaks.clear()
        self._expect(self._plan)

    def _expect(self, plan: Plan) -> None:
        # How many samples there are does not matter for what one costs.
        pricing = Pricing(self._cuts, self._profile, self._rig, JobSize(1 << 40, self._batch_size))
        choice = pricing.choice(plan)
        self._work = pricing.work(plan, choice)
        loads = pricing.price(plan, choice).loads
        steady_s = most(*(s for _, _, s in loads))
        # What the loop takes for a row: its own work at least; at most all that its cores do meanwhile.
        host = self._rig.trainer
        threads = min(max(host.cores, 1.0), self._profile.trainer.num_threads)
        alone_s = (self._work.loop_s + self._work.suffix_s / threads) / host.speed
        beside_s = [s for kind, _, s in loads if kind in (TRAINER, LOOP, SHARED)]
        self._loop_s = (alone_s, most(alone_s, *beside_s))
        self._own_s = self._own_bounds(most(0.0, *(s for kind, _, s in loads if kind == TRAINER)))
        self._shared_s = most(0.0, *(s for kind, _, s in loads if kind == SHARED))
        self._bytes_per_s = self._work.down_bytes / steady_s
        # Of each node's link, how much of its time the run should keep it busy.
        self._link_share = {name: s / steady_s for kind, each, s in loads if kind == LINK_DOWN and each is not None
                            for name in each.names}  # fmt: skip

    def _own_bounds(self, trainer_s: float) -> tuple[float, float]:
        """What the own node's threads take for a row: alone; and beside all that the trainer's cores do for it."""
        work, trainer, host = self._work, self._profile.trainer, self._rig.trainer
        if not work.share:
            return 0.0, 0.0
        timed_s = trainer.decode_s + (trainer.finish_s if self._plan.has_prefix else 0.0) + work.own_engine_s
        alone_s = timed_s / host.speed
        return alone_s, max(alone_s, max(1, round(host.cores)) * trainer_s / work.share)

    def node_rows_per_s(self, name: str, thread_s: float, num_threads: float) -> float:
        """What a node could make of the plan's rows, whose threads took `thread_s` for decoding and inference of each.

        Those threads share the cores with what else a row costs there: reading, sending, the store, the trainer if it
        is the same machine. So at the speed that is believed they take anything from that work alone, where the node
        has time to spare, to what a row costs in all, where it has none. Only what lies outside says that the node is
        slower or faster.
        """
        (device,) = (each for each in self._rig.nodes if each.name == name)
        node = self._profile.node
        timed_s = node.decode_s + (node.finish_s if self._plan.has_prefix else 0.0) + self._work.engine_s
        alone_s = timed_s / device.speed
        beside_all_s = max(alone_s, num_threads * max(self._work.node_s / device.capacity, self._shared_s))
        as_believed_s = min(max(thread_s, alone_s), beside_all_s)
        return float(device.capacity / self._work.node_s * as_believed_s / thread_s)

    def window(self, seen: Window) -> list[Replan]:
        """A window has ended, at a chunk boundary."""
        if self._plan.is_share_open and seen.own_share is not None:  # as both sides were, not as was planned
            share = min(max(seen.own_share, LEAST_SHARE), MOST_SHARE)
            self._expect(replace(self._plan, host_share=share))
        self._since = min(self._since + seen.num_chunks, _MAX_PAUSE)
        waited = seen.wait_fraction >= WAITING
        self._streaks = {
            key: self._longer(key, ratio, waited or key == _TRAINER) for key, ratio in self._readings(seen).items()
        }
        sure = {key: streak for key, streak in self._streaks.items() if streak.length >= IN_A_ROW}
        return self._decide(sure)

    def lowered(self) -> dict[str, float]:
        """The nodes whose links are believed to be slower than when the run began, and what they are believed to carry.

        A plan for a slow link may ask so little of it that nothing tells when it is fast again; these are worth a try.
        """
        links = zip(self._rig.nodes, self._first.links, self._rig.links, strict=True)
        return {
            device.name: now.down_bytes_per_s
            for device, first, now in links
            if now.down_bytes_per_s < first.down_bytes_per_s * (1 - TOLERANCE)
        }

    @property
    def is_trainer_lowered(self) -> bool:
        """Whether the trainer is believed to be slower than when the run began; it may do so little under the plan for
        it that nothing tells when it is as before."""
        return self._rig.trainer.speed < self._first.trainer.speed * (1 - TOLERANCE)

    def tried(self, link_bytes_per_s: Mapping[str, float], trainer_speed: float | None = None) -> list[Replan]:
        """Links were tried beside the run, and carried at least so much; so was the trainer, where a speed is given."""
        sure: dict[tuple[str, str], _Streak] = {
            ("link", device.name): _Streak(1, IN_A_ROW, ratio)
            for device, link in zip(self._rig.nodes, self._rig.links, strict=True)
            if (ratio := link_bytes_per_s.get(device.name, 0.0) / self._believed_down(link)[1]) > 1 + TOLERANCE
        }
        if trainer_speed is not None:
            again = min(trainer_speed, self._first.trainer.speed) / self._rig.trainer.speed
            if again > 1 + TOLERANCE:
                sure[_TRAINER] = _Streak(1, IN_A_ROW, again)
        return self._decide(sure)

    def _decide(self, sure: Mapping[tuple[str, str], _Streak]) -> list[Replan]:
        """Believe what is sure, unless the last decision was just now."""
        if not sure or self._since < self._pause:
            return []
        self._before = self._rig
        self._rig, why = self._changed(sure)
        self._since = 0
        self._price()
        return [Replan(self._rig, why, any(kind in ("link", "store") for kind, _ in sure))]

    def _readings(self, seen: Window) -> dict[tuple[str, str], float]:
        """Measured ÷ believed, for every rate that says something."""
        found: dict[tuple[str, str], float] = {}
        if (trainer := self._trainer_reading(seen)) is not None:
            found[_TRAINER] = trainer
        if not self._plan.uses_storage:
            # Against what the run as a whole should do: who decodes by himself may be busy while the link is not. More
            # than that says nothing.
            if seen.store_bytes_per_s is not None and found.get(_TRAINER, 1.0) >= 1 - TOLERANCE:
                found["store", ""] = min(seen.store_bytes_per_s / self._bytes_per_s, 1.0)
            return found
        for device, link in zip(self._rig.nodes, self._rig.links, strict=True):
            made = seen.node_rows_per_s.get(device.name)
            carried = seen.link_bytes_per_s.get(device.name)
            if made is not None:
                found["node", device.name] = made * self._work.node_s / device.capacity
            if carried is not None:
                believed_made = device.capacity / self._work.node_s if self._work.node_s > 0 else float("inf")
                supply = (believed_made if made is None else made) * self._work.down_bytes
                least, most = self._believed_down(link)
                expected = min(least, self._link_share[device.name] * link.down_bytes_per_s)
                short = carried < expected * (1 - TOLERANCE) and supply > carried * (1 + TOLERANCE)
                if carried >= least or short:
                    found["link", device.name] = max(carried / most, min(carried / least, 1.0))
        return found

    def _trainer_reading(self, seen: Window) -> float | None:
        """The speed of its cores ÷ what is believed, from the loop and from the node beside it; the slower counts."""
        taken = []
        if self._plan.uses_storage and seen.loop_s is not None and seen.wait_fraction < STARVED:
            taken += [(seen.loop_s, self._loop_s)] if self._profile.trainer.suffix_on == "host" else []
        if seen.own_s is not None and self._work.share:
            taken.append((seen.own_s, self._own_s))
        if not taken:
            return None
        ratio: float = min(min(max(s, least_s), most_s) / s for s, (least_s, most_s) in taken)
        first, now = max(self._first.trainer.speed, 1.0), self._rig.trainer.speed
        return min(max(ratio, SLOWEST_TRAINER * first / now), first / now)

    def _believed_down(self, link: Link) -> tuple[float, float]:
        """What a node's link should carry: at least its part of the trainer's port, at most all of it."""
        port = self._rig.trainer_link
        if port is None:
            return link.down_bytes_per_s, link.down_bytes_per_s
        whole = min(link.down_bytes_per_s, port.down_bytes_per_s)
        return min(whole, port.down_bytes_per_s / len(self._rig.nodes)), whole

    def _longer(self, key: tuple[str, str], ratio: float, may_be_slow: bool) -> _Streak:
        high, low = ratio > 1 + TOLERANCE, ratio < 1 - TOLERANCE and may_be_slow
        sign = 1 if high else -1 if low else 0
        before = self._streaks.get(key, _Streak())
        length = 0 if sign == 0 else before.length + 1 if sign == before.sign else 1
        return _Streak(sign, length, ratio)

    def _changed(self, sure: Mapping[tuple[str, str], _Streak]) -> tuple[Rig, tuple[str, ...]]:
        """The rig as it is now, and what changed."""
        rig, why = self._rig, []
        nodes, links, port, store = list(rig.nodes), list(rig.links), rig.trainer_link, rig.store_link
        slower = [streak.ratio for key, streak in sure.items() if key[0] == "link" and streak.sign < 0]
        all_slower = len(slower) == len(nodes) > 0
        trainer = rig.trainer
        if streak := sure.get(_TRAINER):
            trainer = _scaled_device(trainer, streak.ratio)
            why.append(f"the trainer works at {streak.ratio:.2g} times the speed it was planned for")
        for index, device in enumerate(rig.nodes):
            if streak := sure.get(("node", device.name)):
                nodes[index] = _scaled_device(device, streak.ratio)
                why.append(f"{device.name} works at {streak.ratio:.2g} times the speed it was planned for")
            if streak := sure.get(("link", device.name)):
                least, most = self._believed_down(links[index])
                rate = streak.ratio * (least if streak.sign < 0 else most)
                links[index] = _scaled_link(links[index], rate, streak.ratio)
                if port is not None and rate > port.down_bytes_per_s:
                    port = replace(port, down_bytes_per_s=rate)
                why.append(f"the link from {device.name} carries {rate / 1e6:.3g} MB/s, "
                           f"{streak.ratio:.2g} times what was planned for")  # fmt: skip
        if streak := sure.get(("store", "")):
            rate = streak.ratio * self._bytes_per_s
            store = _scaled_link(rig.to_store, min(rate, rig.to_store.down_bytes_per_s), streak.ratio)
            why.append(f"{rate / 1e6:.3g} MB/s come from the store, {streak.ratio:.2g} times what was planned for")
        if all_slower:
            # What slows every node's link is most likely what they share, and the way to the store shares it, too.
            port = _scaled_link(port, max(slower) * port.down_bytes_per_s, max(slower)) if port is not None else None
            store = (
                _scaled_link(store, max(slower) * store.down_bytes_per_s, max(slower)) if store is not None else None
            )
        changed = replace(rig, nodes=tuple(nodes), links=tuple(links), trainer=trainer, trainer_link=port,
                          store_link=store)  # fmt: skip
        return changed, tuple(why)


def worth_switching(now: Estimate, then: Estimate) -> bool:
    """Go over from the plan in use to another? Both estimated for an epoch on the rig as it is now.

    `then` counts its setup (export and upload), `now` has none left.
    """
    return then.total_s < (now.total_s - now.setup_s) * (1 - MIN_GAIN)


def _scaled_device(device: Device, ratio: float) -> Device:
    # A rate of nearly zero is a stall; believed as a thousandth, it makes every plan without this node better.
    return replace(device, speed=min(max(device.speed * max(ratio, 1e-3), 1e-4), 1e4))


def _scaled_link(link: Link, down_bytes_per_s: float, ratio: float) -> Link:
    """Only downwards is measured; what slows one direction mostly slows the other, what speeds it up says nothing."""
    up = link.up_bytes_per_s * min(ratio, 1.0)
    return Link(min(max(down_bytes_per_s, 1.0), 1e13), max(up, 1.0), link.latency_s)

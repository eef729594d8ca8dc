"""The planner: which plan to carry out.

Owns `search` and the rule that ranks plans. Every legal cut it is given, with every codec and precision that is
allowed, "move only decoded pixels" and "move nothing" are priced, each with every setting of the knobs below; where the
trainer can read the data, also every cut with an engine beside the trainer, and with a share of the work on each side.

The rule. Plans with a share of the trainer's own count only where the best of them is estimated more than 8 % faster
than all without one. Plans that take at most 2 % longer than the fastest count as equal, since no estimate is better
than that. Among them "move nothing" comes first: work that stays where it was can't go wrong. Then the fewest bytes a
row on the wire, the least node memory, the earlier cut, the fewest rows ahead. Of the shares that a plan may have, the
fastest: one that is too small leaves the trainer idle, and no estimate
tells how much too small. So the winner is never estimated slower than moving nothing.

A chunk is one group, so that chunks end one after the other. Groups of fewer than 16 rows and fewer than three chunks
ahead are only tried where memory leaves nothing else: a run needs some slack for moments that no average shows.

A share is kept to, chunk by chunk, where bytes are scarce. Where every link would have room to spare though the trainer
took far more or less of the work than planned, whoever is done takes the next chunk instead (`split` in a plan).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.codecs import CODECS
from headwater.core.cost import Estimate, estimate_with
from headwater.core.cut import Cut
from headwater.core.loads import LINK_DOWN, PORT_DOWN, STORE_DOWN, Choice, JobSize, Pricing, stack
from headwater.core.plan import PACE, PLACE, PRECISIONS, Plan, here_plan, near_plan
from headwater.core.profile import Profile
from headwater.core.prongs import ORDERED
from headwater.core.rig import Rig
from headwater.core.share import SHARES
from headwater.core.tuning import rather
from headwater.errors import ConfigError, PlanError

EQUAL = 0.02
# A few values of each knob, some way apart: between neighbours the estimate hardly moves.
NODE_BATCHES = (1, 4, 16, 32, 64)
PREFETCH = (1, 3, 8, 24)
STEADY_AHEAD = 3  # chunks: one being sent, one worked on, one waiting
STEADY_BATCH = 16  # assumed, not measured: below it the fixed cost of a group weighs most, and is known least

# Assumed, not measured: how far from its share a trainer may turn out to be, and how busy a link may be then.
MORE_SHARE, ROOM = 0.25, 0.6

# A plan in which both sides work has to be estimated so much faster than the best of the others. Chosen: it leaves out
# shares of a sixteenth, which promise 7 % at most, less than estimates may be off.
SHARE_PAYS = 0.08

NOTHING, PIXELS, PREFIX = "move nothing", "move decoded pixels", "run the prefix near the data"
HERE = "run the prefix here, on an engine"


@dataclass(frozen=True)
class Dropped:
    """A choice that can't be carried out, with the reason for its least demanding plan."""

    plan: Plan
    reason: str


@dataclass(frozen=True)
class Ranking:
    """The best plans, each with another placement, cut, codec or precision; and the two extremes to compare with."""

    plans: tuple[Estimate, ...]
    nothing: Estimate | None
    pixels: Estimate | None
    dropped: tuple[Dropped, ...]

    @property
    def best(self) -> Estimate:
        return self.plans[0]

    def map(self, change: Callable[[Estimate], Estimate]) -> Ranking:
        """With every estimate changed."""
        nothing, pixels = (None if each is None else change(each) for each in (self.nothing, self.pixels))
        return replace(self, plans=tuple(map(change, self.plans)), nothing=nothing, pixels=pixels)

    def explain(self) -> str:
        """Two sentences: what was chosen and what limits it."""
        best = self.best
        text = placement(best.plan)
        if best.plan.has_prefix:
            text += f", up to {best.plan.cut_name}"
        if best.plan.host_share:
            text += f", and {share_words(best.plan)} of the pictures here"
        if best.plan.prongs != ORDERED:
            text += f", from both ends ({best.plan.prongs}; times are estimated as for {ORDERED})"
        if self.nothing is not None and best is not self.nothing:
            text += f", an estimated {self.nothing.total_s / best.total_s:.3g} times as fast as moving nothing"
        return f"{text[0].upper()}{text[1:]}. {best.explain()[0].upper()}{best.explain()[1:]}"


def share_words(plan: Plan) -> str:
    """How much of the work is the trainer's."""
    return f"{'about ' if plan.is_share_open else ''}{100 * plan.host_share:.3g} %"


def placement(plan: Plan) -> str:
    """What a plan moves, in words."""
    if plan.has_prefix:
        return PREFIX if plan.uses_storage else HERE
    return PIXELS if plan.uses_storage else NOTHING


def search(
    cuts: Sequence[Cut],
    profile: Profile,
    rig: Rig,
    job: JobSize,
    *,
    codecs: Sequence[str] = ("raw",),
    precisions: Sequence[str] = ("fp32",),
    keep: int = 5,
    shared: bool = False,
    prongs: str = ORDERED,
    may_grow: bool = False,
) -> Ranking:
    """The best plans for this job, best first. PlanError, with every reason, if none can be carried out. With `shared`,
    of those in which both sides make rows; `prongs` is how they will go through an epoch (`carried`). `may_grow` says
    that other nodes may join, so all shall prefer one engine."""
    _check_allowed(codecs, precisions, keep)
    pricing = Pricing(cuts, profile, rig, job, prongs=prongs)
    measured: list[tuple[Plan, Choice]] = []
    dropped: list[Dropped] = []
    for plan in choices(cuts, rig, profile, codecs=codecs, precisions=precisions):
        try:
            measured.append((plan, pricing.choice(plan)))
        except PlanError as error:
            dropped.append(Dropped(plan, "; ".join(error.faults)))
    table = _Table(may_grow or len(rig.nodes) > 1, rather(profile.node.engine))
    for kind in (NOTHING, PIXELS, PREFIX, HERE):
        alike = [(plan, choice) for plan, choice in measured if placement(plan) == kind]
        if alike:
            table.add(pricing, [plan for plan, _ in alike], stack([choice for _, choice in alike]), can_share(rig))
    dropped += [_why_dropped(pricing, plan) for plan in table.too_large()]
    if table.is_empty:
        raise PlanError([f"no plan can be carried out ({len(dropped)} tried)", *_reasons(dropped)])
    plans: list[Estimate] = []
    left = table.whole()
    if shared:
        left = {name: column[left["share"] > 0] for name, column in left.items()}
        if not len(left["share"]):
            raise PlanError(["both sides shall make rows, and no such plan can be carried out: the trainer has to read "
                             "the data by itself, on other cores than the nodes'"])  # fmt: skip
    while len(left["total_s"]) and len(plans) < keep:
        best = _pick(left)
        plans.append(_estimate(pricing, table.plan(left, best)))
        left = {name: column[left["choice"] != left["choice"][best]] for name, column in left.items()}
    own = {kind: _own_best(pricing, table, kind) for kind in (NOTHING, PIXELS)}
    return Ranking(tuple(plans), own[NOTHING], own[PIXELS], tuple(dropped))


def pick(estimates: Sequence[Estimate]) -> Estimate:
    """The one to take, by the rule at the top of this file."""
    rows = [(each.plan, each.total_s, each.row_bytes, each.node_bytes) for each in estimates]
    columns = _columns([row[0] for row in rows])
    for index, name in enumerate(("total_s", "row_bytes", "node_bytes"), start=1):
        columns[name] = np.array([row[index] for row in rows], np.float64)
    return estimates[_pick(columns)]


def choices(
    cuts: Sequence[Cut],
    rig: Rig,
    profile: Profile,
    *,
    codecs: Sequence[str] = ("raw",),
    precisions: Sequence[str] = ("fp32",),
) -> Iterator[Plan]:
    """One plan for each placement, cut, codec and precision, with the smallest knobs."""
    tier = profile.trainer.suffix_on
    rest: dict[str, Any] = {"suffix": tier, "loss": tier, "gradients": tier}
    knobs: dict[str, Any] = {"node_batch": NODE_BATCHES[0], "chunk_rows": NODE_BATCHES[0], "prefetch": PREFETCH[0]}
    first = next((cut for cut in cuts if cut.index == 0), None)
    if rig.trainer_reads:
        yield replace(Plan(), **rest, **knobs)
    if not rig.nodes:
        return
    if first is not None:
        yield near_plan(first, **rest, **knobs)
    for cut in cuts:
        if cut.legal and cut.index > 0:
            for precision in precisions:
                for codec in codecs:
                    yield near_plan(cut, codec=codec, precision=precision, **rest, **knobs)
            if can_share(rig) and "fp32" in precisions:
                yield here_plan(cut, **rest, **knobs)


def can_share(rig: Rig) -> bool:
    """Whether the trainer may do what nodes do, and can: it reads the data, and its cores are not theirs anyway."""
    return rig.trainer_shares and rig.trainer_reads and not rig.shared_cores and bool(rig.nodes)


def settings(choice: Plan, shared: bool = False) -> Iterator[Plan]:
    """A choice with every setting of the knobs; `shared` if the trainer may do a share of it."""
    for rows in NODE_BATCHES:
        for prefetch in PREFETCH:
            plan = replace(choice, node_batch=rows, chunk_rows=rows, prefetch=prefetch)
            yield plan
            if shared and plan.uses_storage and plan.precision == "fp32" and not _unsteady(plan):
                for share in SHARES:
                    yield replace(plan, host_share=share)


def sweep(cuts: Sequence[Cut], profile: Profile, rig: Rig, job: JobSize, *, like: Plan) -> tuple[Estimate, ...]:
    """The estimate at every legal cut with the settings of `like`: what a picture of load against cut needs."""
    pricing = Pricing(cuts, profile, rig, job)
    same = ("node_batch", "chunk_rows", "prefetch", "host_share", "split", "prongs", "engine")
    knobs: dict[str, Any] = {name: getattr(like, name) for name in same}
    wanted = choices(cuts, rig, profile, codecs=(like.codec,), precisions=(like.precision,))
    return tuple(estimate_with(pricing, replace(plan, **knobs)) for plan in wanted if plan.uses_storage)


def carried(each: Estimate, prongs: str, hand_over: str) -> Estimate:
    """As a job carries the plan out that goes through epochs so, and whose nodes hand pixels over so.

    The numbers stay those of the plan itself: times are not estimated otherwise for other strategies, nor for files.
    """
    plan = each.plan
    if plan.host_share and prongs != ORDERED:
        plan = replace(plan, prongs=prongs, split=PLACE)
    if plan.uses_storage and not plan.has_prefix:
        plan = replace(plan, hand_over=hand_over)
    return replace(each, plan=plan)


_Columns = dict[str, npt.NDArray[Any]]
# The rule's order, after time; the last ones only make it complete.
_RULE = ("moves", "row_bytes", "unsteady", "node_bytes", "cut", "rows_ahead", "precision", "codec",
         "node_batch", "prefetch")  # fmt: skip
_BUT_SHARE = ("moves", "cut", "precision", "codec", "node_batch", "prefetch")  # what tells plans apart beside the share


def _columns(plans: Sequence[Plan]) -> _Columns:
    """What the rule needs to know of plans beside what they cost."""
    codecs, precisions = list(CODECS), list(PRECISIONS)
    rows = [
        (placement(plan) != NOTHING, round(1e6 * plan.host_share), _unsteady(plan), plan.cut,
         plan.prefetch * plan.chunk_rows, precisions.index(plan.precision), codecs.index(plan.codec), plan.node_batch,
         plan.prefetch)
        for plan in plans
    ]  # fmt: skip
    names = ("moves", "share", "unsteady", "cut", "rows_ahead", "precision", "codec", "node_batch",
             "prefetch")  # fmt: skip
    return dict(zip(names, np.array(rows, np.int64).reshape(-1, len(names)).T, strict=True))


def _unsteady(plan: Plan) -> int:
    return (plan.node_batch < STEADY_BATCH) + (plan.prefetch < STEADY_AHEAD)


def _pick(columns: _Columns) -> int:
    """The row to take, by the rule."""
    both = columns["share"] > 0
    if both.any() and not both.all():
        most_s = columns["total_s"][both].min() * (1 + SHARE_PAYS)
        if columns["total_s"][~both].min() <= most_s:
            alone = np.flatnonzero(~both)
            return int(alone[_pick({name: column[alone] for name, column in columns.items()})])
    equal = np.flatnonzero(columns["total_s"] <= columns["total_s"].min() * (1 + EQUAL))
    first = int(equal[np.lexsort([columns[name][equal] for name in reversed(_RULE)])[0]])
    if not columns["share"][first]:
        return first
    alike = [columns[name] == columns[name][first] for name in _BUT_SHARE] + [columns["share"] > 0]
    shares = np.flatnonzero(np.logical_and.reduce(alike))
    return int(shares[np.lexsort([columns[name][shares] for name in ("share", "total_s")])[0]])


class _Table:
    """Every plan that fits, as columns."""

    def __init__(self, are_several: bool, engine: str) -> None:
        """`engine` is preferred where several machines make rows: two engines differ in the last bits of a row.
        `are_several`: nodes, now or later."""
        self._are_several, self._engine = are_several, engine
        self._choices: list[Plan] = []
        self._knobs: list[Plan] = []
        self._parts: list[_Columns] = []

    def add(self, pricing: Pricing, plans: list[Plan], choice: Choice, shared: bool) -> None:
        """Price many choices of one placement with every setting of the knobs."""
        fp32 = np.array([plan.precision == "fp32" for plan in plans])
        first = len(self._choices)
        self._choices += plans
        of_choice = {name: column for name, column in _columns(plans).items() if name in _OF_CHOICE}
        for knobs in settings(replace(plans[0], precision="fp32"), shared):
            priced = pricing.price(knobs, choice)
            fits = np.flatnonzero(np.broadcast_to(priced.fits, len(plans)) & (fp32 if knobs.host_share else True))
            of_knobs = {**_columns([knobs]), "total_s": priced.total_s, "node_bytes": np.rint(priced.node_bytes),
                        "row_bytes": np.rint(pricing.row_bytes(knobs, choice))}  # fmt: skip
            columns = {name: np.broadcast_to(column, len(plans)) for name, column in (of_knobs | of_choice).items()}
            columns["choice"] = first + np.arange(len(plans))
            columns["knobs"] = np.full(len(plans), len(self._knobs))
            self._knobs.append(knobs)
            self._parts.append({name: column[fits] for name, column in columns.items()})

    @property
    def is_empty(self) -> bool:
        return not any(len(part["choice"]) for part in self._parts)

    def too_large(self) -> list[Plan]:
        """The choices of which no plan fits."""
        fitting = set(self.whole()["choice"].tolist()) if self._parts else set()
        return [plan for index, plan in enumerate(self._choices) if index not in fitting]

    def whole(self) -> _Columns:
        """Each choice with the steadiest knobs that memory leaves it."""
        columns = {name: np.concatenate([part[name] for part in self._parts]) for name in self._parts[0]}
        steadiest = np.full(len(self._choices), 9)
        np.minimum.at(steadiest, columns["choice"], columns["unsteady"])
        kept = columns["unsteady"] == steadiest[columns["choice"]]
        return {name: column[kept] for name, column in columns.items()}

    def plan(self, columns: _Columns, row: int) -> Plan:
        knobs = self._knobs[int(columns["knobs"][row])]
        chosen = self._choices[int(columns["choice"][row])]
        plan = replace(chosen, node_batch=knobs.node_batch, chunk_rows=knobs.chunk_rows, prefetch=knobs.prefetch,
                       host_share=knobs.host_share)  # fmt: skip
        several = plan.uses_storage and (self._are_several or plan.host_share > 0)
        return replace(plan, engine=self._engine) if several and plan.has_prefix and plan.precision == "fp32" else plan

    def of(self, kind: str) -> _Columns:
        """The plans of one placement."""
        columns = self.whole()
        wanted = np.array([placement(plan) == kind for plan in self._choices])[columns["choice"]]
        return {name: column[wanted] for name, column in columns.items()}


_OF_CHOICE = ("moves", "cut", "precision", "codec")


def _own_best(pricing: Pricing, table: _Table, kind: str) -> Estimate | None:
    columns = table.of(kind)
    return _estimate(pricing, table.plan(columns, _pick(columns))) if len(columns["total_s"]) else None


def _estimate(pricing: Pricing, plan: Plan) -> Estimate:
    """Of the plan, with the split that suits its links."""
    return replace(estimate_with(pricing, plan), plan=replace(plan, split=suited_split(pricing, plan)))


def suited_split(pricing: Pricing, plan: Plan) -> str:
    """Whether the trainer's share has to be kept to, with the links as they are."""
    if not plan.host_share:
        return PLACE
    steady_s = estimate_with(pricing, plan).steady_s
    shares = (max(plan.host_share - MORE_SHARE, SHARES[0]), plan.host_share,
              min(plan.host_share + MORE_SHARE, SHARES[-1]))  # fmt: skip
    estimates = [estimate_with(pricing, replace(plan, host_share=share)) for share in shares]
    busiest_s = max(each.load(kind) for each in estimates for kind in (LINK_DOWN, PORT_DOWN, STORE_DOWN))
    return PACE if busiest_s <= ROOM * steady_s else PLACE


def _why_dropped(pricing: Pricing, choice: Plan) -> Dropped:
    """With the knobs that need the least, which are the smallest."""
    least = next(settings(choice))
    return Dropped(least, "; ".join(estimate_with(pricing, least).faults))


def _check_allowed(codecs: Sequence[str], precisions: Sequence[str], keep: int) -> None:
    faults = [f"codec {name!r} is not one of {', '.join(CODECS)}" for name in codecs if name not in CODECS]
    faults += [f"precision {name!r} is not one of {', '.join(PRECISIONS)}"
               for name in precisions if name not in PRECISIONS]  # fmt: skip
    if not codecs or not precisions:
        faults.append("at least one codec and one precision must be allowed")
    if keep < 1:
        faults.append(f"keep is {keep}; it must be at least 1")
    if faults:
        raise ConfigError("; ".join(faults))


def _reasons(dropped: Sequence[Dropped], most: int = 8) -> list[str]:
    """The reasons that cost the least to mend, each once."""
    seen = list(dict.fromkeys(each.reason for each in dropped))
    return seen[:most] + ([f"and {len(seen) - most} more like these"] if len(seen) > most else [])

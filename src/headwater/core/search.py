"""The planner: which plan to carry out.

Owns `search` and the rule that ranks plans. It tries every legal cut with every codec and precision that is allowed,
"move only decoded pixels" and "move nothing", each with every setting of the knobs below; a bound on what knobs can
bring keeps it from pricing most of them.

The rule. The plans that take at most 2 % longer than the fastest count as equal, since no estimate is better than that.
Among them, "move nothing" comes first: work that stays where it was can't go wrong. Then the fewest bytes a row on the
wire, then at least three chunks ahead, then the least node memory, the earlier cut, the least rows ahead, the shorter
time. So the winner is never estimated slower than moving nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.core.codecs import CODECS
from headwater.core.cost import Estimate, JobSize, Pricing
from headwater.core.cut import Cut
from headwater.core.plan import PRECISIONS, Plan, near_plan
from headwater.core.profile import Profile
from headwater.core.rig import Rig
from headwater.errors import ConfigError, PlanError

EQUAL = 0.02
# A few values of each knob, a factor of about four apart: between neighbours the estimate hardly moves.
NODE_BATCHES = (1, 4, 16, 32, 64)
CHUNK_ROWS = (16, 64, 256)
PREFETCH = (1, 3, 8, 24)
STEADY_AHEAD = 3  # with fewer chunks ahead a moment's delay is felt at once, which no average shows

NOTHING, PIXELS, PREFIX = "move nothing", "move decoded pixels", "run the prefix near the data"


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
    num_priced: int

    @property
    def best(self) -> Estimate:
        return self.plans[0]

    def explain(self) -> str:
        """Two sentences: what was chosen and what limits it."""
        best = self.best
        text = placement(best.plan)
        if best.plan.prefix == "storage":
            text += f", up to {best.plan.cut_name}"
        if self.nothing is not None and best is not self.nothing:
            text += f", an estimated {self.nothing.total_s / best.total_s:.3g} times as fast as moving nothing"
        return f"{text[0].upper()}{text[1:]}. {best.explain()[0].upper()}{best.explain()[1:]}"


def placement(plan: Plan) -> str:
    """What a plan moves, in words."""
    return PREFIX if plan.prefix == "storage" else PIXELS if plan.uses_storage else NOTHING


def search(
    cuts: Sequence[Cut],
    profile: Profile,
    rig: Rig,
    job: JobSize,
    *,
    codecs: Sequence[str] = ("raw",),
    precisions: Sequence[str] = ("fp32",),
    keep: int = 5,
) -> Ranking:
    """The best plans for this job, best first. PlanError, with every reason, if none can be carried out."""
    _check_allowed(codecs, precisions, keep)
    pricing = Pricing(cuts, profile, rig, job)
    tops: list[float] = []  # a heap of the `keep` shortest times, negated
    found: dict[Plan, list[Estimate]] = {}
    dropped: list[Dropped] = []
    num_priced = 0
    queue: list[tuple[float, int, Plan]] = []
    for number, choice in enumerate(choices(cuts, rig, profile, codecs=codecs, precisions=precisions)):
        try:
            floor_s = pricing.floor_s(_largest(choice))
        except PlanError as error:
            dropped.append(Dropped(choice, "; ".join(error.faults)))
            continue
        # The extremes are always priced, whatever their bound.
        queue.append((floor_s if placement(choice) == PREFIX else 0.0, number, choice))
    for floor_s, _, choice in sorted(queue):
        if len(tops) == keep and floor_s * (1 - 1e-9) > -tops[0] * (1 + EQUAL):
            break
        estimates = [pricing.estimate(plan) for plan in settings(choice)]
        num_priced += len(estimates)
        fitting = [each for each in estimates if each.fits]
        if not fitting:
            least = min(estimates, key=lambda each: (sum(part.need_bytes for part in each.memory), each.total_s))
            dropped.append(Dropped(least.plan, "; ".join(least.faults)))
            continue
        found[choice] = fitting
        heapq.heappush(tops, -min(each.total_s for each in fitting))
        if len(tops) > keep:
            heapq.heappop(tops)
    if not found:
        raise PlanError([f"no plan can be carried out ({len(dropped)} tried)", *_reasons(dropped)])
    own = {placement(choice): pick(found[choice]) for choice in found if placement(choice) != PREFIX}
    ranked: list[Estimate] = []
    while found and len(ranked) < keep:
        best = pick([each for estimates in found.values() for each in estimates])
        ranked.append(best)
        del found[_choice_of(best.plan)]
    return Ranking(tuple(ranked), own.get(NOTHING), own.get(PIXELS), tuple(dropped), num_priced)


def pick(estimates: Sequence[Estimate]) -> Estimate:
    """The one to take, by the rule at the top of this file."""
    limit = min(each.total_s for each in estimates) * (1 + EQUAL)
    return min((each for each in estimates if each.total_s <= limit), key=_preference)


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
    knobs: dict[str, Any] = {"node_batch": NODE_BATCHES[0], "chunk_rows": CHUNK_ROWS[0], "prefetch": PREFETCH[0]}
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


def settings(choice: Plan) -> Iterator[Plan]:
    """A choice with every setting of the knobs. Nothing is gained by groups of different sizes on the trainer."""
    batches: Iterable[int] = NODE_BATCHES if choice.uses_storage else (CHUNK_ROWS[0],)
    if choice.uses_storage and choice.prefix != "storage":
        batches = (CHUNK_ROWS[0],)
    for chunk_rows in CHUNK_ROWS:
        for node_batch in batches:
            for prefetch in PREFETCH:
                if node_batch <= chunk_rows:
                    yield replace(choice, node_batch=node_batch, chunk_rows=chunk_rows, prefetch=prefetch)


def sweep(cuts: Sequence[Cut], profile: Profile, rig: Rig, job: JobSize, *, like: Plan) -> tuple[Estimate, ...]:
    """The estimate at every legal cut with the knobs of `like`: what a picture of load against cut needs."""
    pricing = Pricing(cuts, profile, rig, job)
    knobs: dict[str, Any] = {"node_batch": like.node_batch, "chunk_rows": like.chunk_rows, "prefetch": like.prefetch}
    wanted = choices(cuts, rig, profile, codecs=(like.codec,), precisions=(like.precision,))
    return tuple(pricing.estimate(replace(plan, **knobs)) for plan in wanted if plan.uses_storage)


def _preference(each: Estimate) -> tuple[object, ...]:
    plan = each.plan
    ahead = plan.prefetch * plan.chunk_rows
    return (placement(plan) != NOTHING, each.row_bytes, plan.prefetch < STEADY_AHEAD, each.node_bytes, plan.cut, ahead,
            each.total_s, plan.precision, plan.codec, plan.node_batch, plan.prefetch)  # fmt: skip


def _largest(choice: Plan) -> Plan:
    return replace(choice, node_batch=NODE_BATCHES[-1], chunk_rows=CHUNK_ROWS[-1], prefetch=PREFETCH[-1])


def _choice_of(plan: Plan) -> Plan:
    return replace(plan, node_batch=NODE_BATCHES[0], chunk_rows=CHUNK_ROWS[0], prefetch=PREFETCH[0])


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

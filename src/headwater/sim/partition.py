"""One training step of a partitioned model, part by part: devices near the storage, a link, a trainer.

Owns `step` and the search over cuts. The schedule is that of the published system as we read it: a batch's forward
part on all devices at once, the boundary over the link that they share, the rest forward and backward on the trainer,
gradients of the boundary back, the devices' backward part, a sum of the devices' gradients. Nothing of it overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import simpy

from headwater.sim.layers import Layer, seconds_on
from headwater.sim.reduction import ring_parts
from headwater.sim.rigfile import Chip
from headwater.sim.sharing import Done, Line, Shared, carry, together


@dataclass(frozen=True)
class Setting:
    """What a step runs on. `here_bytes` travel for each sample where nothing is cut off: decoded pixels, or rows."""

    layers: Sequence[Layer]
    devices: Sequence[Chip]
    trainer: Chip
    link_bytes_per_s: float
    batch: int
    here_bytes: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """How long a step takes with this cut, and what its parts take."""

    cut: int
    name: str
    seconds: float
    parts: dict[str, float]


def step(setting: Setting, cut: int) -> Step:
    """Play one step with the first `cut` layers on the devices; none of them for 0."""
    env = simpy.Environment()
    link = Line(env, setting.link_bytes_per_s, setting.latency_s)
    chips = [Shared(env, 1.0, 1.0) for _ in setting.devices]
    trainer = Shared(env, 1.0, 1.0)
    front, rest = setting.layers[:cut], setting.layers[cut:]
    rows = [setting.batch // len(chips) + (number < setting.batch % len(chips)) for number in range(len(chips))]
    crossing = front[-1].bytes_out if cut else setting.here_bytes
    parts: dict[str, float] = {}
    since = 0.0

    def near(backward: bool) -> Callable[[Done], None]:
        def begin(then: Done) -> None:
            together(
                [lambda one, chip=chip, kind=kind, count=count: chip.use(  # type: ignore[misc]
                    count * sum(seconds_on(each, kind, count, backward) for each in front), one)
                 for chip, kind, count in zip(chips, setting.devices, rows, strict=True)], then)  # fmt: skip

        return begin

    def over(num_bytes: float) -> Callable[[Done], None]:
        return lambda then: together(
            [lambda one, count=count: carry(env, [link], count * num_bytes, _nothing, one) for count in rows if count],  # type: ignore[misc]
            then,
        )

    def train(then: Done) -> None:
        both = [seconds_on(each, setting.trainer, setting.batch, back) for each in rest for back in (False, True)]
        trainer.use(setting.batch * sum(both), then)

    def sync(then: Done) -> None:
        share = ring_parts(len(chips)) if len(chips) > 1 else 0.0
        carry(env, [link], share * len(chips) * sum(each.weight_bytes for each in front), _nothing, then)

    steps: list[tuple[str, Callable[[Done], None]]] = []
    steps += [("forward, near", near(False)), ("boundary over", over(crossing)), ("trainer", train)]
    if cut:
        steps += [("gradients back", over(crossing)), ("backward, near", near(True)), ("sum, near", sync)]

    def follow(number: int) -> None:
        nonlocal since
        if number:
            parts[steps[number - 1][0]] = env.now - since
            since = env.now
        if number < len(steps):
            steps[number][1](lambda: follow(number + 1))

    follow(0)
    env.run()
    return Step(cut, setting.layers[cut - 1].name if cut else "input", since, parts)


def best(setting: Setting, cuts: Sequence[int]) -> tuple[Step, Step]:
    """The fastest of these cuts, and what it takes with nothing cut off."""
    return min((step(setting, cut) for cut in cuts), key=lambda each: each.seconds), step(setting, 0)


def clean_cuts(layers: Sequence[Layer]) -> list[int]:
    """Where one tensor crosses: behind every layer, but in residual networks only behind whole blocks."""

    def block(layer: Layer) -> str:
        parts = layer.name.split(".")
        return ".".join(parts[:2]) if parts[0].startswith("layer") and len(parts) > 2 else layer.name

    return [number for number, (one, other) in enumerate(zip(layers, [*layers[1:], None], strict=True), start=1)
            if other is None or block(one) != block(other)]  # fmt: skip


def _nothing() -> None:
    pass

"""How fast machines are today, against the time when they were profiled.

Owns the comparison: some pictures are decoded again, on nodes and here, and a profile's seconds are scaled by it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from headwater.core.profile import NodeCosts, Profile
from headwater.core.rig import Link
from headwater.data.holdings import Holdings
from headwater.data.samples import SampleRef, Samples
from headwater.data.transforms import Transforms
from headwater.data.wire import Chunk, Extraction
from headwater.train.client import NodeClient
from headwater.train.precision import spread_out
from headwater.train.reads import NUM_SAMPLES, Fetched, decode_s, fetch

NODE_BATCH = 16
NO_DRIFT = 1.5  # decoding the same pictures seemed up to a third slower in moments of a shared core (measured)
SLOWEST = 1e-3  # against the first node
TINY_S = 3e-4  # of a sample: CPU of a read that takes less is never the same twice (0.1 to 0.2 ms of files, measured)
TINY_WAIT_S = 1e-4  # the same of waiting for a store (assumed)
LOOKS, LOOK_AGAIN_S = 3, 1.0  # at a machine that seems to have changed; a bad moment may last as long as a look


def speeds_now(
    profile: Profile,
    pipeline: Transforms,
    samples: Samples,
    holdings: Holdings | None,
    clients: Sequence[NodeClient],
    refs: Sequence[SampleRef],
    fetched: Fetched | None,
    seed: int,
    just_now: bool = False,
) -> tuple[list[float], float, dict[str, Any]]:
    """Of each node and of this machine, against the time of the profile: from decoding some pictures again.

    And what reading costs the first node now, where that is no longer what it was: fields of its `NodeCosts`. It is the
    store's doing, which may be another one, and no speed of the node.

    A ratio below NO_DRIFT, either way, counts as the same speed; one beyond it is looked at again. Other nodes than the
    first, which was profiled, are compared with it, and every difference counts. `just_now` says that the profile is
    so new that only those are wanted.
    """
    extraction = Extraction(samples.url, pipeline, None, (pipeline.pixel_spec,), node_batch=NODE_BATCH)

    reads: list[dict[str, Any]] = []  # of the first node: each look's

    def look(client: NodeClient) -> float:
        held = refs if holdings is None else spread_out(samples, NUM_SAMPLES, holdings, client.name)
        found = client.probe(Chunk(extraction, "probe", seed, 0, 0, tuple(held), reuse=False))
        if client is clients[0]:
            reads.append(found)
        return float(found["decode_s"])

    first, own = 1.0, 1.0
    if not just_now:
        first = speed_of(profile.node.decode_s, partial(look, clients[0]))
        if fetched is not None:
            own = speed_of(profile.trainer.decode_s, partial(decode_s, pipeline, fetched, seed))
    changed = {} if just_now else reads_now(profile.node, reads, first)
    if len(clients) == 1:
        return [first], own, changed
    with ThreadPoolExecutor(len(clients)) as pool:
        looks = [list(pool.map(look, clients)) for _ in range(2)]  # all at once; the better of two moments
    taken_s = [min(each) for each in zip(*looks, strict=True)]
    return [first * within(taken_s[0] / each if each > 0 else 1.0) for each in taken_s], own, changed


def reads_now(node: NodeCosts, looks: Sequence[Mapping[str, float]], speed: float) -> dict[str, Any]:
    """Of what reading costs, that which has changed by NO_DRIFT or more, in the look that is nearest to then.

    `speed` is the node's, which its CPU-seconds are divided by wherever they are used, and a store's waits are not.
    """
    found: dict[str, Any] = {}
    waits_s = [each["read_wait_s"] for each in looks]
    if (
        wait_s := _changed(node.read_wait_s, waits_s, node.num_readers * TINY_WAIT_S)
    ) is not None:  # so many wait at once
        found["read_wait_s"] = wait_s
    if node.lone_read_s is not None:
        lone_s = _changed(node.lone_read_s, [each["read_s"] * speed for each in looks], TINY_S)
        if lone_s is not None:  # what all stages take together beyond their sum stays
            found |= {"lone_read_s": lone_s, "read_s": max(lone_s, node.read_s - node.lone_read_s + lone_s)}
    return found


def _changed(then_s: float, looks: Sequence[float], tiny_s: float) -> float | None:
    """The look nearest to then, if even that is far from it; what is below `tiny_s` counts as that."""
    ratios = {max(each, tiny_s) / max(then_s, tiny_s): each for each in looks}
    nearest = min(ratios, key=lambda ratio: abs(math.log(ratio)), default=1.0)
    return None if 1 / NO_DRIFT < nearest < NO_DRIFT else ratios[nearest]


def within(ratio: float) -> float:
    return min(max(ratio, SLOWEST), 1 / SLOWEST)


def speed_of(then_s: float, look: Callable[[], float], no_drift: float = NO_DRIFT) -> float:
    """Of now, against then: of a few looks the one nearest to then, since a bad moment is soon over."""
    ratios = []
    for number in range(LOOKS if no_drift > 1 else 1):
        if number:
            time.sleep(LOOK_AGAIN_S)
        now_s = look()
        ratios.append(then_s / now_s if then_s > 0 and now_s > 0 else 1.0)
        if 1 / no_drift < ratios[-1] < no_drift:
            return 1.0
    return within(min(ratios, key=lambda ratio: abs(math.log(ratio))))


def measure_here(
    samples: Samples, pipeline: Transforms, profile: Profile, seed: int, holdings: Holdings | None = None
) -> tuple[Link | None, float | None]:
    """The way to the store and this machine's speed as they are now; None where there is no way there.

    Only downwards is measured: requests are small.
    """
    fetched = None if holdings is not None else fetch(samples)
    if fetched is None:
        return None, None
    speed = speed_of(profile.trainer.decode_s, lambda: decode_s(pipeline, fetched, seed), 1.0)
    return Link(fetched.bytes_per_s, fetched.bytes_per_s), speed

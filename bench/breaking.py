"""The faults of `bench faults`. Owns what strikes in the middle of an epoch, and what is mended afterwards.

A fault that outlasts the epoch, or stops it, is mended by `mend`; one that passes by itself is over when `strike`
returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench.badstore import GOOD
from bench.scene import CACHED, NODES, TRAINING, Scene

LINK_S = 5.0
STORE_S = 2.0
SLOW_CPU = 0.033  # a tenth of what it has while three nodes share a core
FLIPS = 8


def nothing(scene: Scene) -> None:
    pass


@dataclass(frozen=True)
class Fault:
    name: str
    strike: Callable[[Scene], None]
    mend: Callable[[Scene], None] = nothing
    prepare: Callable[[Scene], None] = nothing  # before the epoch
    job: str = "pictures"
    stops: bool = False  # is it right that the job stops, with a reason, and goes on when it is told to?
    kills_trainer: bool = False
    # Answers spoiled, rows found damaged, a disk found full, steps done again, calls repeated: without any it did not
    # strike.
    is_counted: bool = False

    def struck(self, num_hits: int, has_stopped: bool, was_killed: bool) -> bool:
        """Whether the epoch met anything of it."""
        is_seen = num_hits > 0 or not self.is_counted
        return is_seen and has_stopped >= self.stops and was_killed >= self.kills_trainer


def restart_one(scene: Scene) -> None:
    scene.restart(scene.random.choice(NODES))


def restart_one_of_two(scene: Scene) -> None:
    scene.restart(scene.random.choice(TRAINING))


def ready(job: str, scene: Scene) -> None:
    """All nodes take part, or the table is as it was made."""
    scene.ask("ready", job)


def restart_all(scene: Scene) -> None:
    scene.restart(*NODES)


def cut_link(host: str | None, scene: Scene) -> None:
    """Of this host, or of any node."""
    host = host or scene.random.choice(NODES)
    scene.up.link_down(host)
    try:
        time.sleep(LINK_S)
    finally:
        scene.up.link_up(host)


def slow_down(scene: Scene) -> None:
    scene.up.set_cpu(scene.random.choice(NODES), SLOW_CPU)


def full_speed(scene: Scene) -> None:
    for name in NODES:
        scene.up.set_cpu(name, 1.0)


def spoil(mode: str, scene: Scene) -> None:
    scene.answer(mode)
    try:
        time.sleep(STORE_S)
    finally:
        scene.answer(GOOD)


def make_room(scene: Scene) -> None:
    scene.count_full()
    scene.free_disk()


def flip(scene: Scene) -> None:
    scene.flip_bits(FLIPS)


def flip_and_restart(scene: Scene) -> None:
    """Its files are read anew, with what was flipped in them since they were written."""
    scene.flip_bits(FLIPS)
    scene.restart(CACHED)


FAULTS = (
    Fault("one of three nodes killed and restarted", restart_one),
    Fault("all nodes killed and restarted", restart_all),
    Fault("trainer killed, another resumes", nothing, kills_trainer=True),
    Fault("link of a node down for 5 s", partial(cut_link, None)),
    Fault("link of the trainer down for 5 s", partial(cut_link, "trainer")),
    Fault("a node at a tenth of its speed", slow_down, full_speed),
    Fault("store answers 500 for 2 s", partial(spoil, "500"), is_counted=True),
    Fault("store answers 503 for 2 s", partial(spoil, "503"), is_counted=True),
    Fault("store answers 1.5 s late for 2 s", partial(spoil, "slow"), is_counted=True),
    Fault("store sends half of each body for 2 s", partial(spoil, "half"), is_counted=True),
    Fault("store says the credentials expired for 2 s", partial(spoil, "expired"), is_counted=True),
    Fault("the trainer's token expires; renewed", Scene.expire, Scene.renew, stops=True),
    Fault("bit flips in shards from the store; repaired", lambda scene: scene.answer("flip"),
          lambda scene: scene.answer(GOOD), job="packed", stops=True,
          is_counted=True),
    Fault("bit flips in the cache, in use", flip, Scene.count_damaged, job="cached", is_counted=True),
    Fault("bit flips in the cache, then a restart", flip_and_restart, Scene.count_damaged, job="cached",
          is_counted=True),
    Fault("cache disk full", Scene.fill_disk, make_room, Scene.empty_cache, job="cold", is_counted=True),
    Fault("node killed in a step of partitioned training", restart_one_of_two, prepare=partial(ready, "partitioned"),
          job="partitioned", is_counted=True),
    Fault("trainer killed in partitioned training, resumes", nothing, prepare=partial(ready, "partitioned"),
          job="partitioned", kills_trainer=True),
    Fault("node killed in a step of an embedding table", restart_one_of_two, prepare=partial(ready, "embedded"),
          job="embedded", is_counted=True),
    Fault("trainer of an embedding table killed, resumes", nothing, prepare=partial(ready, "embedded"),
          job="embedded", kills_trainer=True),
)  # fmt: skip

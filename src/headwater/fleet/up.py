"""A fleet is started, changed and taken away.

Owns `up` and `down`, which the verbs of the same names call. What keeps the fleet afterwards is `fleet.keeper`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from headwater.core.fleet import Scaling
from headwater.data.cluster import NAMESPACE, RESOURCE, Cluster, check_name
from headwater.errors import ConfigError, UnreachableError
from headwater.fleet.keeper import CALLS, DRAIN_MORE_S, Keeper, member_names
from headwater.fleet.member import NodeOptions

UP_WITHIN_S = 120.0
GONE_WITHIN_S = 30.0
_POLL_S = 0.2

Tell = Callable[[str], None]


def _tell_nobody(what: str) -> None:
    """For scripts."""


def up(
    cluster: Cluster,
    name: str,
    options: NodeOptions,
    scaling: Scaling,
    tell: Tell = _tell_nobody,
    within_s: float = UP_WITHIN_S,
) -> list[str]:
    """Start a fleet, or give one that runs other bounds; its nodes' addresses, once as many answer as must be."""
    check_name(name)
    machines = cluster.machines()
    if not machines:
        raise ConfigError(f"no machine of this Ray cluster has the resource {RESOURCE}, which says where nodes may "
                          f"run; start Ray there with --resources='{{\"{RESOURCE}\": 1}}'")  # fmt: skip
    for host in machines:
        options.check_exposed(host)
    tell("starting the keeper")
    _replace_keeper(cluster, name, options)
    keeper = _start_keeper(cluster, name, options, scaling)
    deadline = time.monotonic() + within_s
    while True:
        state = _ask_keeper(cluster, keeper)
        ready = [each["address"] for each in state["nodes"].values() if each["address"] and not each["draining"]]
        if len(ready) >= scaling.least:
            return sorted(ready)
        tell(f"{len(ready)} of {scaling.least} nodes are up")
        if state["fault"] and not ready:
            down(cluster, name)
            raise ConfigError(f"no node of {name} could be started: {state['fault']}")
        if time.monotonic() > deadline:
            room = sum(int(num) for num in machines.values())
            raise UnreachableError(
                f"{len(ready)} of {scaling.least} nodes of {name} are up after {within_s:g} s; the cluster's machines "
                f"have room for {room} ({', '.join(sorted(machines))}). The others start as soon as they can; "
                f"`headwater down --ray … --name {name}` takes all of them away. {state['fault']}".strip()
            )
        time.sleep(_POLL_S)


def down(cluster: Cluster, name: str, tell: Tell = _tell_nobody) -> int:
    """Take a fleet away: nodes finish what is under way; how many there were."""
    check_name(name)
    keeper, members = cluster.find(name), member_names(cluster, name)
    if keeper is None and not members:
        raise ConfigError(f"there is no fleet called {name} on this Ray cluster")
    drain_s = NodeOptions.drain_s
    if keeper is not None:
        with contextlib.suppress(UnreachableError, ConfigError):  # it goes anyway
            drain_s = cluster.ask(keeper.about.remote())[0].drain_s
        _end(cluster, keeper)  # first: it would start others
    _wait_gone(cluster, [name])
    members = member_names(cluster, name)
    left = {each: actor for each in members if (actor := cluster.find(each)) is not None}
    deadline = time.monotonic() + drain_s + DRAIN_MORE_S
    for actor in left.values():
        actor.drain.remote()
    while left:
        tell(f"draining {len(left)} of {len(members)} nodes")
        for each, actor in list(left.items()):
            if time.monotonic() > deadline or _is_over(cluster, actor):
                _end(cluster, actor)
                del left[each]
        time.sleep(_POLL_S if left else 0.0)
    _wait_gone(cluster, members)
    return len(members)


def _is_over(cluster: Cluster, actor: Any) -> bool:
    """Has it let go of everything? One that can't be asked has nothing left to finish."""
    try:
        told = cluster.ask(actor.look.remote(), within_s=5.0)
    except (UnreachableError, ConfigError):
        return True
    if not told["draining"]:  # it was started anew meanwhile
        actor.drain.remote()
    return bool(told["ended"])


def _replace_keeper(cluster: Cluster, name: str, options: NodeOptions) -> None:
    """A fleet of that name may run: then its nodes stay, and its keeper makes way for one with other bounds."""
    before = cluster.find(name)
    if before is None:
        return
    running, _ = cluster.ask(before.about.remote(), within_s=UP_WITHIN_S)
    if differs := running.unlike(options):
        raise ConfigError(f"a fleet called {name} runs already, with other {', '.join(differs)}; take it away first "
                          f"(`headwater down --ray … --name {name}`), or choose another name")  # fmt: skip
    _end(cluster, before)
    _wait_gone(cluster, [name])


def _start_keeper(cluster: Cluster, name: str, options: NodeOptions, scaling: Scaling) -> Any:
    """Where this is called from, if Ray can: Headwater is installed there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = cluster.ray.get_runtime_context().get_node_id()
    actor = cluster.ray.remote(Keeper).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        max_concurrency=CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=here, soft=True),
    )
    return actor.remote(name, options, scaling)


def _ask_keeper(cluster: Cluster, keeper: Any) -> dict[str, Any]:
    """What it says of its nodes."""
    found: dict[str, Any] = cluster.ask(keeper.state.remote(), within_s=UP_WITHIN_S)
    return found


def _end(cluster: Cluster, actor: Any) -> None:
    """For good: Ray does not start it anew."""
    cluster.ray.kill(actor, no_restart=True)


def _wait_gone(cluster: Cluster, names: list[str]) -> None:
    """Until Ray has let go of these names."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while left := set(names) & set(cluster.names()):
        if time.monotonic() > deadline:
            raise UnreachableError(f"Ray has not ended {', '.join(sorted(left))} after {GONE_WITHIN_S:g} s")
        time.sleep(_POLL_S)

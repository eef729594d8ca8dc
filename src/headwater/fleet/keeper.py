"""Keeps a fleet's nodes between their bounds, and tells trainers where they are.

Owns `Keeper`, a Ray actor with the fleet's name: the clock, the calls and the names around `core.fleet`, which decides.
It has no state of its own that matters. Its nodes are actors that outlive it, and one that is started anew finds them
by their names.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from headwater.core.fleet import Add, Drain, Load, Scaler, Scaling, Starts
from headwater.data.cluster import NAMESPACE, RESOURCE, Cluster
from headwater.fleet.member import Member, NodeOptions
from headwater.node.logs import set_up_logs

LOOK_S = 1.0
ANSWER_WITHIN_S = 1.0  # those that take longer are waited for while others are looked at
SILENT_S = 5.0  # a node that says nothing for longer is not named to trainers
DRAIN_MORE_S = 10.0  # beyond its own time, until it is ended
CALLS = 8  # that an actor answers at once

log = logging.getLogger(__name__)


def member_names(cluster: Cluster, fleet: str) -> list[str]:
    """Of the actors that are this fleet's nodes."""
    return [name for name in cluster.names() if name.startswith(f"{fleet}/")]


class _Node:
    """What the keeper knows of one node. All of it is found out again after a restart."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.call: Any = None  # that it has not answered yet
        self.told: dict[str, Any] | None = None  # when it was last heard; None while it is being started
        self.heard_s = 0.0
        self.load: Load | None = None
        self.drain_until_s: float | None = None  # once it drains

    def hear(self, told: dict[str, Any], now_s: float) -> None:
        """Its answer. What its threads did counts from the answer before, of the same process."""
        before, before_s, self.told, self.heard_s = self.told, self.heard_s, told, now_s
        if before is None or before["pid"] != told["pid"] or now_s <= before_s:
            return
        taken_s = now_s - before_s
        # Threads that wait for cores which others have are busy; so is an engine that has all cores for one thread.
        threads = (told["busy_s"] - before["busy_s"]) / (taken_s * told["num_threads"])
        cores = (told["cpu_s"] - before["cpu_s"]) / (taken_s * told["cores"])
        self.load = Load(told["queue"], min(1.0, max(0.0, threads, cores)))

    def lose(self) -> None:
        """It does not answer: Ray is starting it anew, perhaps elsewhere."""
        self.told, self.load = None, None


class Keeper:
    """One fleet. Its methods are what trainers and `headwater up` ask."""

    def __init__(self, fleet: str, options: NodeOptions, scaling: Scaling) -> None:
        set_up_logs("text", "info")
        self._fleet, self._options, self._scaling = fleet, options, scaling
        self._cluster = Cluster()
        self._scaler = Scaler(scaling)
        self._nodes: dict[str, _Node] = {}
        self._starts = Starts()
        self._fault = ""  # of the last node that could not be started, until there are as many as there must be
        self._begun_s = time.monotonic()
        self._lock = threading.Lock()  # of what is answered, which the thread writes
        self._answer: dict[str, Any] = {"nodes": {}, "fault": "", "is_whole": False}
        threading.Thread(target=self._run, name="keep", daemon=True).start()

    def addresses(self) -> list[str]:
        """Of the nodes that may be asked for rows; none as long as that can't be told: a keeper that was started anew
        has to hear them first."""
        with self._lock:
            answer = self._answer
        nodes = answer["nodes"].values() if answer["is_whole"] else ()
        return sorted(each["address"] for each in nodes if each["address"] and not each["draining"])

    def state(self) -> dict[str, Any]:
        """Each node with its address, if it answers; and why the last one could not be started."""
        with self._lock:
            return self._answer

    def about(self) -> tuple[NodeOptions, Scaling]:
        """What the fleet was started with."""
        return self._options, self._scaling

    def _run(self) -> None:
        while True:
            begun_s = time.monotonic()
            try:
                self._look()
            except Exception:  # a fleet that is no longer kept is worse than one that is looked at again
                log.exception("unexpected error while the fleet %s was looked at", self._fleet)
            time.sleep(max(0.0, begun_s + LOOK_S - time.monotonic()))

    def _look(self) -> None:
        """One look at all nodes, and what follows from it."""
        self._find()
        self._hear()
        now_s = time.monotonic()
        serving = {name: node.load for name, node in self._nodes.items() if node.drain_until_s is None}
        for decision in self._scaler.look(now_s, serving):
            match decision:
                case Add(num):
                    if self._starts.may(now_s):
                        self._start(num)
                case Drain(name):
                    log.info("%s is drained", name)
                    self._nodes[name].drain_until_s = now_s + self._options.drain_s + DRAIN_MORE_S
        self._drain(now_s)
        if len(serving) >= self._scaling.least and all(self._nodes[name].told is not None for name in serving):
            self._fault = ""
        nodes = {name: {"address": node.told["address"] if node.told is not None else "",
                        "draining": node.drain_until_s is not None} for name, node in self._nodes.items()}  # fmt: skip
        is_whole = all(node.told is not None for node in self._nodes.values()) or now_s - self._begun_s > SILENT_S
        with self._lock:
            self._answer = {"nodes": nodes, "fault": self._fault,
                            "is_whole": is_whole or self._answer["is_whole"]}  # fmt: skip

    def _find(self) -> None:
        """The actors that there are, those of an earlier keeper included; who is gone for good is forgotten."""
        names = member_names(self._cluster, self._fleet)
        for name in names:
            if name not in self._nodes and (actor := self._cluster.find(name)) is not None:
                self._nodes[name] = _Node(actor)
        for name in self._nodes.keys() - set(names):
            node = self._nodes.pop(name)
            if node.drain_until_s is None:
                self._failed(name, node)

    def _hear(self) -> None:
        """What each of them says."""
        ray = self._cluster.ray
        for node in self._nodes.values():
            if node.call is None:
                node.call = node.actor.look.remote()
        if not self._nodes:
            return
        calls = [node.call for node in self._nodes.values()]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=ANSWER_WITHIN_S)
        for name, node in self._nodes.items():
            if node.call in ready:
                call, node.call = node.call, None
                try:
                    told = ray.get(call)
                except ray.exceptions.RayError as error:
                    if node.told is not None:
                        log.info("%s is gone; Ray starts it anew: %s", name, _last_line(error))
                    node.lose()
                else:
                    if node.told is None:
                        self._starts.came()
                    node.hear(told, time.monotonic())
                    if told["draining"] and node.drain_until_s is None:  # an earlier keeper told it so
                        node.drain_until_s = time.monotonic() + self._options.drain_s + DRAIN_MORE_S
            elif time.monotonic() - node.heard_s > SILENT_S:
                node.lose()

    def _failed(self, name: str, node: _Node) -> None:
        """An actor that Ray has given up: it could not be started, or somebody has ended it."""
        ray = self._cluster.ray
        try:
            ray.get(node.actor.look.remote(), timeout=ANSWER_WITHIN_S)
        except ray.exceptions.RayError as error:
            self._fault = _last_line(error)
        log.warning("%s is gone for good: %s", name, self._fault or "ended from outside")
        self._starts.failed(time.monotonic())

    def _start(self, num: int) -> None:
        actor = self._cluster.ray.remote(Member)
        for _ in range(num):
            number = 1
            while (name := f"{self._fleet}/{number}") in self._nodes:
                number += 1
            log.info("%s is started", name)
            found = actor.options(name=name, namespace=NAMESPACE, lifetime="detached", max_restarts=-1,
                                  resources={RESOURCE: 1}, num_cpus=0, max_concurrency=CALLS,
                                  get_if_exists=True).remote(self._options)  # fmt: skip
            self._nodes[name] = _Node(found)

    def _drain(self, now_s: float) -> None:
        """Tell those that are to go, and end those that are done, or have taken too long."""
        for name, node in list(self._nodes.items()):
            if node.drain_until_s is None:
                continue
            if now_s > node.drain_until_s or (node.told is not None and node.told["ended"]):
                log.info("%s is ended: %s", name, node.told["ended"] if node.told is not None else "it did not answer")
                self._cluster.ray.kill(node.actor, no_restart=True)
            elif node.told is not None and not node.told["draining"]:  # also one that was started anew meanwhile
                node.actor.drain.remote()


def _last_line(error: BaseException) -> str:
    """Ray tells a story; what was said is its end."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix("headwater.errors.")[:500] if lines else type(error).__name__

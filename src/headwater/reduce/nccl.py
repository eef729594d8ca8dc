"""On NVIDIA fabrics the switch adds up already: which of NCCL's settings ask for it. Owns `choose`; pure.

NVLink switches (NVLS) add up within a node, InfiniBand switches with SHARP (CollNet) between nodes. Whether the fabric
has them, NCCL finds out by itself; these settings only say that it may. The names and values are those of NCCL's
documentation of its environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NVLS, COLLNET, ALGO = "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_ALGO"
_IN_SWITCH = ("nvls", "nvlstree", "collnetdirect", "collnetchain")


@dataclass(frozen=True)
class Choice:
    """Settings to make, and what to tell the user."""

    settings: dict[str, str]
    said: str


def choose(env: Mapping[str, str], num_workers: int, workers_per_node: int) -> Choice:
    """What to set for so many workers on as many nodes as that takes. What the user has set stays."""
    num_nodes = -(-num_workers // workers_per_node)
    settings, notes = {}, []
    wanted = {}
    if workers_per_node > 1:
        wanted[NVLS] = "within a node, on NVLink switches"
    if num_nodes > 1:
        wanted[COLLNET] = "between nodes, on InfiniBand switches with SHARP"
    for name, where in wanted.items():
        if name not in env:
            settings[name] = "1"
            notes.append(f"{name}=1 was set: NCCL adds up {where}, if there are any")
        elif env[name] == "0":
            notes.append(f"{name}=0 is set, and stays: no sums {where}")
        else:
            notes.append(f"{name}={env[name]} is set, and stays")
    if not wanted:
        notes.append("there is one worker, and nothing to add up")
    algorithms = [each.strip().lower() for each in env.get(ALGO, "").replace(":", ",").split(",") if each.strip()]
    if algorithms and not any(each.lstrip("^") in _IN_SWITCH for each in algorithms):
        notes.append(f"{ALGO}={env[ALGO]} is set, stays, and names no algorithm that adds up in a switch; unset it to "
                     "let NCCL choose")  # fmt: skip
    return Choice(settings, "; ".join(notes))

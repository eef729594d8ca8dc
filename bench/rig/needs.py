"""What this machine must have for a rig. Owns `missing`, the one sentence that tests skip with and RigUp raises."""

from __future__ import annotations

import os
import shutil
import sys

from bench.rig import cgroups

_PROGRAMS = {
    "ip": "iproute2; makes the hosts and links",
    "tc": "iproute2; shapes the links",
    "nsenter": "util-linux; starts processes in a host",
    "taskset": "util-linux; keeps a host on its cores",
}


def missing() -> str | None:
    """Why no rig can come up here, or None if one can."""
    if sys.platform != "linux":
        return "the rig needs Linux: its hosts are network namespaces and control groups"
    if os.geteuid() != 0:
        return "the rig needs root: it makes network namespaces, shapes links and limits CPU and memory (try sudo)"
    lacking = [f"{name} ({why})" for name, why in _PROGRAMS.items() if shutil.which(name) is None]
    if lacking:
        return f"the rig needs {', '.join(lacking)}"
    if absent := cgroups.absent():
        return (
            f"the rig needs the version-1 control groups {', '.join(absent)} below {cgroups.MOUNT}, to hold a host to "
            "its CPU share and memory (on systemd machines: boot with systemd.unified_cgroup_hierarchy=0)"
        )
    return None

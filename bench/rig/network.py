"""The hosts' network: a namespace each, joined by shaped veth pairs to a bridge in a namespace of its own.

Owns names, addresses and shaping. All of it lives inside the namespaces: the machine's own network sees no new
interface, address or route, and two rigs can use the same addresses.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.rig.description import Link, RigError
from bench.rig.tool import tool

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them
_DEVICE = "eth0"  # a host's end of its link
_FRAME_BYTES = 1514
_handles = itertools.count()

# The same in every host, so that results don't depend on what the machine around them is set to.
_SETTINGS = {
    # Every kernel has reno and lets a namespace choose it; with queues this short it fills a link as cubic does.
    "net/ipv4/tcp_congestion_control": "reno",
    # A connection must not start with what an earlier one learnt at another rate.
    "net/ipv4/tcp_no_metrics_save": "1",
    # No neighbour discovery: an idle host sends nothing.
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


@dataclass(frozen=True)
class Network:
    """The network of the rig `name`; `hosts` in the order of their addresses."""

    name: str
    hosts: tuple[str, ...]

    def namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def make(self) -> None:
        """All hosts joined, unshaped."""
        switch = self.namespace("switch")
        tool("ip", "netns", "add", switch)
        _set(switch)
        tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        tool("ip", "-n", switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            inside, port = self.namespace(host), self._port(host)
            tool("ip", "netns", "add", inside)
            _set(inside)
            tool("ip", "-n", inside, "link", "set", "lo", "up")
            # Both ends are born in their namespaces, so the machine's own never holds one, not even for a moment.
            tool("ip", "link", "add", _DEVICE, "netns", inside, "type", "veth", "peer", "name", port, "netns", switch)
            tool("ip", "-n", inside, "address", "add", f"{self.address(host)}/24", "dev", _DEVICE)
            tool("ip", "-n", inside, "link", "set", _DEVICE, "up")
            tool("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")

    def shape(self, host: str, link: Link) -> None:
        """Hold the host's link to its rates, also while traffic flows. Queues act on what leaves a device: up is
        shaped at the host's end, down at the switch's."""
        _shape(self.namespace(host), _DEVICE, link.up)
        _shape(self.namespace("switch"), self._port(host), link.down_mbit_per_s)

    def set_up(self, host: str, *, up: bool) -> None:
        """Plug the host's cable in or pull it, at the switch."""
        tool("ip", "-n", self.namespace("switch"), "link", "set", self._port(host), "up" if up else "down")

    def num_bytes(self, host: str) -> tuple[int, int]:
        """Received and sent over the host's link, counted behind the shaping."""
        said = tool("ip", "-n", self.namespace(host), "-statistics", "-json", "link", "show", "dev", _DEVICE)
        counters = json.loads(said)[0]["stats64"]
        return counters["rx"]["bytes"], counters["tx"]["bytes"]

    def _port(self, host: str) -> str:
        return f"port{self.hosts.index(host)}"


def found() -> list[str]:
    """The namespaces of this machine."""
    return sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []


def remove(namespace: str) -> None:
    """Take a namespace away, and with it the ends of links in it. Who else is at it, or was, is no error."""
    try:
        tool("ip", "netns", "delete", namespace)
    except RigError:
        if (NAMESPACES / namespace).exists():
            raise


def token_bucket(mbit_per_s: float) -> tuple[int, int]:
    """Burst and queue of a link, in bytes.

    The burst is what may pass at once after silence: 4 ms' worth. Much more, and short messages would fly free at low
    rates; with 1 ms, 1 Gbit/s fell to 0.87 now and then beside busy loops on all cores, since timers come late there.
    But at least two frames: a frame larger than the bucket never passes.

    The queue is what waits before frames are dropped: 50 ms' worth. With 100 ms, a start at 100 Mbit/s lost twice the
    frames, which TCP is long in sending again. But at least 64 kB (a quarter of a second at 2 Mbit/s), since TCP gets
    over a loss at once only with more than a few frames under way.
    """
    bytes_per_s = mbit_per_s * 1e6 / 8
    burst = max(2 * _FRAME_BYTES, int(bytes_per_s * 0.004))
    return burst, burst + max(64_000, int(bytes_per_s * 0.05))


def _shape(namespace: str, device: str, mbit_per_s: float) -> None:
    burst, limit = token_bucket(mbit_per_s)
    # A new handle makes a new queue. Changed in place, the old one might hold packets larger than the new burst (the
    # kernel merges frames up to the burst), and stand still for ever. What was queued is lost; TCP sends it again.
    handle = f"{next(_handles) % 0xFFF0 + 1:x}:"
    tool(
        "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "handle", handle, "tbf",
        "rate", f"{round(mbit_per_s * 1e6)}bit", "burst", str(burst), "limit", str(limit),
    )  # fmt: skip


def _set(namespace: str) -> None:
    script = "\n".join(
        # A kernel without IPv6 has no such files.
        f"if [ -e /proc/sys/{key} ]; then echo {value} > /proc/sys/{key} || exit 1; fi"
        for key, value in _SETTINGS.items()
    )
    done = subprocess.run(
        ["nsenter", f"--net={NAMESPACES / namespace}", "sh", "-c", script], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RigError(f"the network settings of {namespace} were refused: {done.stderr.strip()}")

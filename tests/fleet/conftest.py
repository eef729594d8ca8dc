"""A real Ray cluster on loopback, of processes of its own, and fleets on it that are gone after their test."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

SLOTS = 4  # nodes that fit
UP_WITHIN_S = 60.0


@pytest.fixture
def eventually():
    """eventually(holds): wait for an event, with a deadline that is far away."""

    def wait(holds, within_s=60.0):
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, "it never came to hold"
            time.sleep(0.05)

    return wait


def _ended(process):
    """A Ray node's own processes end with the one that started them; all are waited for."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def ray_address():
    """Of a cluster of one machine, on which four nodes fit. It asks for a token, as Ray's clusters do."""
    if find_spec("ray") is None:
        pytest.skip("needs ray (pip install '.[ray]')")
    program = shutil.which("ray", path=str(Path(sys.executable).parent)) or shutil.which("ray")
    folder = Path(tempfile.mkdtemp(prefix="hw-ray-"))  # Ray has sockets in it, whose paths must be short
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
             "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
             "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # fmt: skip  # or Ray takes another address than loopback
    command = [
        program, "start", "--block", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2",
        f'--resources={{"storage": {SLOTS}}}', "--include-dashboard=false", "--include-log-monitor=false",
        f"--temp-dir={folder}", f"--object-store-memory={80 << 20}",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, (folder / "log").open("wb") as log:
        for name, value in given.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + UP_WITHIN_S
            while b"block forever" not in (folder / "log").read_bytes():
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"Ray did not start:\n{(folder / 'log').read_text(errors='replace')[-2000:]}")
                time.sleep(0.1)
            patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            yield f"127.0.0.1:{port}"
        finally:
            _ended(process)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(ray_address):
    """A connection; whatever a test has left on the cluster is taken away."""
    from headwater.data.cluster import Cluster
    from headwater.fleet.up import down

    found = Cluster(ray_address)
    yield found
    for name in sorted({each.partition("/")[0] for each in found.names()}):
        down(found, name)
    found.close()


@pytest.fixture
def fleet(cluster, tmp_path):
    """fleet(root, least, most): a fleet called photos whose nodes keep no rows; one that hurries soon."""
    from headwater.core.fleet import Scaling
    from headwater.fleet.member import NodeOptions
    from headwater.fleet.up import up

    def start(root, least=1, most=None, name="photos", **options):
        options = {"threads": 1, "state": str(tmp_path / "state"), "cache_bytes": 0, "drain_s": 5.0, **options}
        scaling = Scaling(least, most or least, up_after_s=1.0, queue=1.0, busy=0.05)
        return up(cluster, name, NodeOptions((Path(root).as_uri(),), **options), scaling)

    return start


@pytest.fixture
def pid_of(cluster):
    """pid_of(name): the process of an actor."""

    def ask(name):
        actor = cluster.find(name)
        return cluster.ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)

    return ask


@pytest.fixture
def pid_or_none(cluster, pid_of):
    """The same, and None while there is none."""

    def ask(name):
        try:
            return pid_of(name)
        except cluster.ray.exceptions.RayError:
            return None

    return ask


@pytest.fixture
def alive():
    """alive(pid): is there such a process, other than as a zombie?"""

    def look(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    return look

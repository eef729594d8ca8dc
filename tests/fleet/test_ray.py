"""Fleets on a real Ray cluster: actors are killed and added under a run, and the run is that of one quiet node."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.fleet import Scaling
from headwater.core.plan import near_plan
from headwater.data.transforms import Normalize, Resize, ToFloat, Transforms
from headwater.errors import ConfigError, UnreachableError
from headwater.fleet.keeper import member_names
from headwater.fleet.member import NodeOptions
from headwater.fleet.up import down, up
from headwater.model.capture import capture
from headwater.model.cuts import cuts

TRANSFORMS = Transforms([Resize((32, 32)), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])
# Enough for a node to do that a queue builds up in front of it.
HEAVY = Transforms([Resize((1200, 1200)), Resize((32, 32)), ToFloat(), Normalize((0.5,) * 3, (0.5,) * 3)])


def network():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return hw.freeze(nn.Sequential(body, nn.Linear(16, 3)).eval(), until="1")


@pytest.fixture(scope="module")
def plan():
    """Small chunks, so that there are many; one engine, so that losses can be compared."""
    cut = [each for each in cuts(capture(network(), (torch.zeros(2, 3, 32, 32),))) if each.legal][-1]
    return near_plan(cut, chunk_rows=2, node_batch=2, prefetch=2, engine="onnxruntime")


@pytest.fixture
def near(plan, pictures):
    """near(nodes): a job on the pictures; closed after the test."""
    jobs = []

    def start(nodes, transforms=TRANSFORMS, **options):
        options = {"batch_size": 2, "seed": 3, "plan": plan, "patience_s": 60, **options}
        jobs.append(hw.near(network(), pictures, nodes=nodes, transforms=transforms, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


class Run:
    """What a loop saw."""

    def __init__(self, job, epochs=1, at_step=None, do=lambda: None, until=lambda: True):
        """At a step of the first epoch something is done; epochs go on until that holds."""
        self.samples, self.losses, self.job = [], [], job
        with torch.no_grad():
            while len(self.samples) < epochs or not until():
                self.samples.append([])
                self.losses.append([])
                for step, (x, y) in enumerate(job.loader):
                    if step == at_step and len(self.samples) == 1:
                        do()
                    self.samples[-1] += x.samples.tolist()
                    self.losses[-1].append(cross_entropy(job.model(x), y).item())

    def __iadd__(self, other):
        self.samples += other.samples
        self.losses += other.losses
        return self

    def check(self, quiet):
        """Each sample once, in the order and with the losses of the undisturbed run."""
        for mine, others in zip(self.samples, quiet.samples, strict=True):
            assert sorted(mine) == list(range(50))
            assert mine == others
        for mine, others in zip(self.losses, quiet.losses, strict=True):
            assert mine == pytest.approx(others, rel=1e-5)


def told(cluster):
    """What the keeper says of its nodes."""
    return cluster.ask(cluster.find("photos").state.remote())["nodes"]


def addresses(cluster):
    """Of all nodes that the keeper has; "" for one that is being started."""
    return sorted(each["address"] for each in told(cluster).values())


def names(job):
    return sorted(client.name for client in job._source.clients)


def test_each_actor_may_be_killed_in_the_middle_of_an_epoch(
    cluster, fleet, near, pictures, pid_of, pid_or_none, alive, eventually, start_node
):
    quiet = Run(near([start_node(pictures).address]), epochs=3)
    before = fleet(pictures, least=2)
    actors = ["photos", *member_names(cluster, "photos")]
    assert actors == ["photos", "photos/1", "photos/2"]
    pids = {name: pid_of(name) for name in actors}
    job = near("ray://photos")
    run = Run(job)
    for victims in (["photos/1"], ["photos", "photos/2"]):
        run += Run(job, at_step=3, do=lambda victims=victims: [os.kill(pids[name], signal.SIGKILL) for name in victims])
        for name in victims:
            eventually(lambda name=name: not alive(pids[name]))
            eventually(lambda name=name: pid_or_none(name) not in (None, pids[name]))
            pids[name] = pid_or_none(name)
        eventually(lambda: len(addresses(cluster)) == 2 and names(job) == addresses(cluster))
    run.check(quiet)
    assert not set(names(job)) & set(before), "every node has been started anew"
    received = {client.name: client.received_bytes for client in job._source.clients}
    Run(job)
    assert all(client.received_bytes > received[client.name] for client in job._source.clients), "and is used again"
    job.close()
    assert down(cluster, "photos") == 2
    assert cluster.names() == []
    for pid in pids.values():
        eventually(lambda pid=pid: not alive(pid))
    eventually(lambda: cluster.ray.available_resources().get("storage") == 4)
    assert not [each.name for each in threading.enumerate() if each.name.startswith(("fetch-", "follow", "join-"))]


@pytest.mark.slow
def test_an_epoch_waits_for_its_only_node_to_be_started_anew(cluster, fleet, near, pictures, pid_of, start_node):
    quiet = Run(near([start_node(pictures).address]))
    fleet(pictures)
    pid = pid_of("photos/1")
    run = Run(near("ray://photos"), at_step=3, do=lambda: os.kill(pid, signal.SIGKILL))
    run.check(quiet)
    assert pid_of("photos/1") != pid


def test_a_fleet_grows_from_one_node_to_four_under_load_while_steps_go_on(
    cluster, fleet, near, pictures, start_node, eventually
):
    fleet(pictures, least=1, most=4)
    job = near("ray://photos", transforms=HEAVY)
    steps, seen = [0], []
    step_clock = job._source.step_clock

    def counted():
        clock = step_clock()

        def got(num_rows):
            steps[0] += 1
            if not seen or seen[-1][1] != len(names(job)):
                seen.append((steps[0], len(names(job))))
            clock(num_rows)

        return got

    job._source.step_clock = counted
    states = []

    def is_grown():
        states.append((steps[0], len(told(cluster))))
        return len(names(job)) == 4

    run = Run(job, until=is_grown)
    last = Run(job)
    first_asked = next(step for step, num in states if num > 1)
    all_there = next(step for step, num in seen if num == 4)
    assert all_there > first_asked, "steps went on while nodes were being started"
    assert seen[0][1] == 1
    assert job._source.version == 0, "nothing that was under way was dropped"
    run += last
    run.check(Run(near([start_node(pictures).address], transforms=HEAVY), epochs=len(run.samples)))
    assert all(client.received_bytes > 0 for client in job._source.clients)


@pytest.mark.slow
def test_another_up_changes_the_bounds_also_in_the_middle_of_an_epoch(
    cluster, fleet, near, pictures, pid_of, start_node, eventually
):
    quiet = Run(near([start_node(pictures).address]))
    first = fleet(pictures, least=1)
    pid = pid_of("photos/1")
    assert set(first) < set(fleet(pictures, least=2))
    assert pid_of("photos/1") == pid, "the node that was there stays"
    job = near("ray://photos")
    Run(job, at_step=3, do=lambda: fleet(pictures, least=1, most=1)).check(quiet)
    eventually(lambda: len(member_names(cluster, "photos")) == 1 and names(job) == addresses(cluster))
    with pytest.raises(ConfigError, match="runs already, with other threads; take it away first"):
        fleet(pictures, threads=2)


def test_what_keeps_nodes_from_starting_is_said_and_nothing_stays(cluster, fleet, tmp_path):
    with pytest.raises(ConfigError, match=r"no node of photos could be started: .*gone"):
        fleet(tmp_path / "gone")
    assert cluster.names() == []


@pytest.mark.slow
def test_why_a_node_can_not_be_started_is_said_although_another_one_answers(cluster, pictures, tmp_path):
    """Both on one machine, and on one port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = NodeOptions((Path(pictures).as_uri(),), port=port, threads=1, state=str(tmp_path / "state"),
                          cache_bytes=0, drain_s=1.0)  # fmt: skip
    with pytest.raises(UnreachableError, match=r"1 of 2 nodes of photos are up(?s:.*)can't listen on grpc://127"):
        up(cluster, "photos", options, Scaling(2, 2), within_s=15.0)


def test_a_connection_leaves_what_a_signal_does_to_a_script_as_it_was(cluster):
    assert "ray" not in (getattr(signal.getsignal(signal.SIGTERM), "__module__", None) or "")


def test_there_is_no_such_fleet(cluster, near):
    with pytest.raises(ConfigError, match="no fleet called other on this Ray cluster; start it with `headwater up s3:"):
        near("ray://other")
    with pytest.raises(ConfigError, match="no fleet called other"):
        down(cluster, "other")


def run(*arguments, **env):
    return subprocess.run([sys.executable, "-m", "headwater.cli", *arguments], capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": "200", **env}, timeout=120, check=False)  # fmt: skip


def test_up_and_down_from_the_shell(ray_address, cluster, pictures, tmp_path):
    done = run("up", str(pictures), "--ray", ray_address, "--name", "shell", "--state", str(tmp_path / "state"),
               "--threads", "1", "--cache-size", "0")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"shell serves {Path(pictures).as_uri()} with 1 node; 1 answers:\n  grpc://127.0.0.1:" in done.stdout
    shown = run("nodes", "ray://shell", "--seconds", "0.1")
    assert shown.returncode == 0, shown.stderr
    assert "grpc://127.0.0.1:" in shown.stdout
    done = run("down", "--ray", "auto", "--name", "shell")
    assert (done.returncode, done.stdout) == (0, "shell is gone, with its 1 node\n"), done.stderr
    assert cluster.names() == []


@pytest.mark.parametrize("given", [("127.0.0.1:1", ""), ("nowhere", ""), ("auto", "127.0.0.1:1")])
def test_a_cluster_that_is_not_there_is_a_plain_error(ray_address, given):
    address, environment = given
    done = run("up", "s3://photos", "--ray", address, RAY_ADDRESS=environment)
    assert done.returncode == 1
    assert f"UnreachableError: no Ray cluster at {environment or address} (" in done.stderr
    assert "Traceback" not in done.stderr

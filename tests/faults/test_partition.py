"""Nodes that die while the first layers train on them: a step happens on all of them or on none, and the run goes
on."""

import copy
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.core.access import entry_text, token_digest
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.errors import ConfigError, DamagedError, HeadwaterError, UnreachableError

PIXELS = Transforms([Resize((16, 16)), ToFloat()])
STEPS = 14


@pytest.fixture
def norm_model():
    """With a batch-norm on the nodes, and one behind the cut."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(100, 3),
    ).double()  # fmt: skip


def train(model, pictures, nodes, at=lambda step, job: None, loss_at=lambda step: None, **options):
    """Losses of some steps. `at` is called before each; `loss_at` in the middle of it, when rows have come."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []

    def loss_fn(output, labels):
        loss_at(len(losses))
        return cross_entropy(output, labels)

    with hw.partition(model, pictures, transforms=PIXELS, nodes=nodes, batch_size=8, seed=1,
                      **{"cut": "2", "patience_s": 60, "check_every": 5, **options}) as job:  # fmt: skip
        while len(losses) < STEPS:
            for batch in job.steps():
                at(len(losses), job)
                optimizer.zero_grad()
                losses.append(batch.backward(loss_fn).item())
                optimizer.step()
                if len(losses) == STEPS:
                    break
        job.check()
        return losses, job


@pytest.fixture
def alone(norm_model, pictures):
    """(losses, model) of the same training with nothing moved."""
    reference = copy.deepcopy(norm_model)
    return train(reference, pictures, None, cut="none")[0], reference


def assert_same(found, wanted, model, reference):
    assert found == pytest.approx(wanted, rel=1e-9)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_a_node_killed_in_the_middle_of_a_step_leaves_no_trace_and_takes_part_again_once_it_is_back(
    norm_model, alone, pictures, start_node, eventually
):
    """Neither in weights nor in running statistics, nor in what dropout draws; the other makes its rows meanwhile."""
    nodes = [start_node(pictures) for _ in range(2)]
    struck = []

    def strike(step):
        if step == 3 and not struck:
            struck.append(step)
            nodes[1].kill()

    def at(step, job):
        if step == 8:
            start_node(pictures, listen=nodes[1].listen)
            eventually(lambda: len(job._replicas.present()) == 2)

    found, job = train(norm_model, pictures, [node.address for node in nodes], at, strike)
    assert job.num_rolled_back == job._replicas.rejoined == 1
    assert_same(found, alone[0], norm_model, alone[1])


def test_a_run_goes_on_on_a_node_that_was_killed_and_started_again(norm_model, alone, pictures, start_node):
    nodes = [start_node(pictures)]
    threads = []

    def restart():
        nodes.append(start_node(pictures, listen=nodes[0].listen))

    def strike(step):
        if step == 6 and not threads:
            nodes[0].kill()
            threads.append(threading.Thread(target=restart))
            threads[0].start()

    found, job = train(norm_model, pictures, [nodes[0].address], loss_at=strike)
    threads[0].join()
    assert job.num_rolled_back == 1
    assert_same(found, alone[0], norm_model, alone[1])


def test_a_node_that_stays_away_ends_the_job_with_the_reason(norm_model, pictures, start_node):
    node = start_node(pictures)
    with pytest.raises(UnreachableError, match=r"does not answer|has ended"):
        train(norm_model, pictures, [node.address], lambda step, job: node.kill() if step == 2 else None, patience_s=2)


def test_a_node_that_is_told_to_stop_hands_its_part_to_the_others(norm_model, alone, pictures, start_node):
    nodes = [start_node(pictures, options=("--drain-s", "30")) for _ in range(2)]

    def at(step, job):
        if step == 4:
            os.kill(nodes[1].process.pid, signal.SIGTERM)

    found, _ = train(norm_model, pictures, [node.address for node in nodes], at)
    assert nodes[1].process.wait(timeout=30) == 0
    assert_same(found, alone[0], norm_model, alone[1])


def test_a_cut_link_is_not_the_end_of_a_tenant_with_a_single_stream(norm_model, alone, pictures, start_node, tmp_path):
    """The trainer is back before the node has noticed."""
    token, file = f"hw_{'a' * 43}", tmp_path / "tokens.toml"
    file.write_text(entry_text("a", token_digest(token), {"max_chunks": 1}))
    node = start_node(pictures, options=("--tokens", str(file), "--state", str(tmp_path / "state")))

    def at(step, job):
        if step == 4:
            job._replicas.peers[0]._reader.cancel()

    found, job = train(norm_model, pictures, [node.address], at, token=token)
    assert job._replicas.rejoined == 1
    assert_same(found, alone[0], norm_model, alone[1])


@pytest.fixture(scope="module")
def node(pictures, start_node_once):
    """One that several tests share, and nobody kills."""
    return start_node_once(pictures)


def test_a_copy_that_differs_from_the_model_is_found(norm_model, pictures, node):
    """A weight changed behind PyTorch's back is what a flipped bit on a node would be."""

    def at(step, job):
        if step == 7:
            job.check()  # the node has everything that PyTorch tells of
            norm_model[0].weight.data[0, 0, 0, 0] += 1  # of this it does not
            job.check()

    with pytest.raises(DamagedError, match=r"copy of the prefix on .* is not the model's"):
        train(norm_model, pictures, [node.address], at)


def test_an_error_in_the_loss_drops_the_step_and_the_job_goes_on(norm_model, alone, pictures, node):
    def fail(step):
        if step == 3 and not failed:
            failed.append(step)
            raise ZeroDivisionError

    failed, losses = [], []
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(norm_model.parameters(), lr=0.05, momentum=0.9)
    with hw.partition(
        norm_model, pictures, transforms=PIXELS, nodes=[node.address], batch_size=8, cut="2", seed=1
    ) as job:
        for batch in job.steps():
            optimizer.zero_grad()
            try:
                losses.append(batch.backward(lambda out, y: fail(len(losses)) or cross_entropy(out, y)).item())
            except ZeroDivisionError:
                losses.append(batch.backward(cross_entropy).item())
            optimizer.step()
    assert failed
    assert losses == pytest.approx(alone[0][: len(losses)], rel=1e-9)


def test_a_bad_picture_stops_the_run_with_its_name(norm_model, tmp_path, start_node):
    from PIL import Image

    for number in range(6):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.new("RGB", (20, 20)).save(tmp_path / "ab"[number % 2] / f"{number}.jpg")
    (tmp_path / "a" / "bad.jpg").write_bytes(b"no picture")
    node = start_node(tmp_path)
    with pytest.raises(HeadwaterError, match=r"a/bad\.jpg"):
        train(norm_model, tmp_path, [node.address])


@pytest.mark.parametrize("content", [b"torn", b"", [1, 2], {"model": {}, "job": 5, "random": 5}], ids=repr)
def test_a_file_that_is_no_run_is_a_plain_error(content, norm_model, pictures, node, tmp_path):
    path = tmp_path / "run.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    options = {"transforms": PIXELS, "nodes": [node.address], "batch_size": 8, "cut": "2", "seed": 1}
    with hw.partition(norm_model, pictures, **options) as job, pytest.raises(ConfigError, match=r"run\.pt|format"):
        job.load(path)


def test_a_run_goes_on_from_a_file_at_another_cut(norm_model, alone, pictures, node, tmp_path):
    """With its optimizer, in the middle of an epoch."""
    nodes = [node.address]
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(norm_model.parameters(), lr=0.05, momentum=0.9), []
    with hw.partition(norm_model, pictures, transforms=PIXELS, nodes=nodes, batch_size=8, cut="2", seed=1) as job:
        for batch in job.steps():
            optimizer.zero_grad()
            losses.append(batch.backward(cross_entropy).item())
            optimizer.step()
            if len(losses) == 4:
                job.save(tmp_path / "run.pt", optimizer)
                break
    other = copy.deepcopy(norm_model)
    with torch.no_grad():
        for each in other.parameters():
            each.zero_()
    torch.manual_seed(99)
    fresh = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    with hw.partition(other, pictures, transforms=PIXELS, nodes=nodes, batch_size=8, cut="5", seed=1) as job:
        job.load(tmp_path / "run.pt", fresh)
        while len(losses) < STEPS:
            for batch in job.steps():
                fresh.zero_grad()
                losses.append(batch.backward(cross_entropy).item())
                fresh.step()
                if len(losses) == STEPS:
                    break
    assert_same(losses, alone[0], other, alone[1])

"""Nodes that add their gradients up on an aggregator: the numbers are those of one process, and bit by bit those of a
trainer that adds up; an aggregator or a node that dies in the middle changes nothing of that."""

import copy
import signal
import threading

import pytest
import torch
from tests.reduce.processes import KEY, Running
from torch import nn
from torch.nn.functional import cross_entropy

import headwater as hw
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.errors import ConfigError, PlanError

PIXELS = Transforms([Resize((16, 16)), ToFloat()])
STEPS = 14


@pytest.fixture
def model():
    """With a batch-norm on the nodes, a layer there that is frozen, and dropout behind the cut."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(100, 3),
    ).double()  # fmt: skip
    made[3].bias.requires_grad_(False)
    return made


@pytest.fixture
def aggregator(tmp_path):
    """Starts `headwater reduce`, again at the same place if it is asked to."""
    started = []

    def start(listen="127.0.0.1:0"):
        started.append(Running(tmp_path, listen=listen))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.process.stderr.close()


@pytest.fixture
def nodes_at(pictures, start_node, tmp_path):
    """Starts nodes whose operator has named an aggregator."""
    key = tmp_path / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_text(f"{KEY}\n")

    def start(where, count=2, *options):
        given = ("--reduce", where, "--reduce-key-file", str(key), *options)
        return [start_node(pictures, options=given) for _ in range(count)]

    return start


def train(model, pictures, nodes, at=lambda step, job: None, loss_at=lambda step: None, steps=STEPS, **options):
    """Losses of some steps. `at` is called before each; `loss_at` in the middle of it, when rows have come."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []

    def loss_fn(output, labels):
        loss_at(len(losses))
        return cross_entropy(output, labels)

    given = {"cut": "5", "patience_s": 60, "check_every": 5, "batch_size": 10, "sums": "network", **options}
    with hw.partition(model, pictures, transforms=PIXELS, nodes=nodes, seed=1, **given) as job:
        while len(losses) < steps:
            for batch in job.steps():
                at(len(losses), job)
                optimizer.zero_grad()
                losses.append(batch.backward(loss_fn).item())
                optimizer.step()
                if len(losses) == steps:
                    break
        job.check()
        return losses, job


def addresses(nodes):
    return [node.address for node in nodes]


@pytest.fixture
def alone(model, pictures):
    """(losses, model) of the same training with nothing moved."""
    reference = copy.deepcopy(model)
    return train(reference, pictures, None, cut="none", sums="trainer")[0], reference


def assert_same(found, wanted, model, reference):
    assert found == pytest.approx(wanted, rel=1e-9)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def assert_same_bits(found, wanted, model, reference):
    assert found == wanted
    for name, tensor in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def meet(job, eventually):
    """Steps here are small, and meeting takes a moment: what nodes say of it is heard in a step, or in a check."""
    eventually(lambda: job._meetings.look(job._replicas.present()) or job.check() or job._meetings.members)


def meets_at(eventually, *steps):
    return lambda step, job: meet(job, eventually) if step in steps else None


def test_nodes_that_add_up_give_the_bits_of_a_trainer_that_does_and_the_numbers_of_one_process(
    model, alone, pictures, aggregator, nodes_at, eventually
):
    nodes = addresses(nodes_at(aggregator().address, 3))
    by_trainer, shares = copy.deepcopy(model), (1, 0.5, 2)
    wanted, _ = train(by_trainer, pictures, nodes, sums="trainer", shares=shares)
    found, job = train(model, pictures, nodes, meets_at(eventually, 2), shares=shares)
    assert job.num_added >= STEPS - 2
    assert "added up among nodes" in job.describe()
    assert_same_bits(found, wanted, model, by_trainer)
    assert_same(found, alone[0], model, alone[1])


def test_a_batch_that_not_all_nodes_make_takes_the_ordinary_way(model, pictures, aggregator, nodes_at, eventually):
    """Of 50 pictures the fourth batch of 16 has two, for three nodes."""
    nodes, reference = addresses(nodes_at(aggregator().address, 3)), copy.deepcopy(model)
    wanted, _ = train(reference, pictures, nodes, sums="trainer", batch_size=16, steps=8)
    counts = []

    def at(step, job):
        counts.append(job.num_added)
        if step == 2:
            meet(job, eventually)

    found, job = train(model, pictures, nodes, at, batch_size=16, steps=8)
    assert [after - before for before, after in zip(counts[2:], [*counts[3:], job.num_added], strict=True)] == [
        1, 0, 1, 1, 1, 0]  # fmt: skip
    assert_same_bits(found, wanted, model, reference)


def test_the_trainers_link_carries_one_sum(pictures, aggregator, nodes_at, eventually):
    """Of layers whose weights are what there is to carry: with three nodes a third of the bytes."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Flatten(), nn.Linear(768, 700), nn.ReLU(), nn.Linear(700, 4), nn.ReLU(), nn.Linear(4, 3))
    nodes = addresses(nodes_at(aggregator().address, 3))
    came = {}
    for sums in ("trainer", "network"):
        received = []

        def at(step, job, received=received, sums=sums):
            if step == 2 and sums == "network":
                meet(job, eventually)
            received.append(sum(peer.received_bytes for peer in job._replicas.peers.values()))

        train(copy.deepcopy(wide), pictures, nodes, at, cut="4", sums=sums)
        came[sums] = received[12] - received[5]
    assert came["trainer"] == pytest.approx(7 * 3 * 4 * 700 * 772, rel=0.02)
    assert came["network"] == pytest.approx(came["trainer"] / 3, rel=0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_aggregator_that_ends_in_the_middle_of_a_run_changes_no_bit_and_is_used_again(
    how, model, pictures, aggregator, nodes_at, eventually
):
    first = aggregator()
    nodes = addresses(nodes_at(first.address))
    reference, added = copy.deepcopy(model), []
    wanted, _ = train(reference, pictures, nodes, sums="trainer")

    def at(step, job):
        if step == 7:
            added.append(job.num_added)
            aggregator(first.address)
        if step in (2, 7):
            meet(job, eventually)

    def strike(step):
        if step == 5 and first.process.poll() is None:
            first.process.send_signal(how)
            first.process.wait()

    found, job = train(model, pictures, nodes, at, strike)
    assert added[0] >= 3
    assert added[0] <= 5
    assert job.num_added == added[0] + STEPS - 7
    assert job.num_rolled_back == 0, "a step is ended the ordinary way"
    assert_same_bits(found, wanted, model, reference)


def test_an_aggregator_that_dies_at_any_moment_of_a_sum_changes_no_bit(pictures, aggregator, nodes_at, eventually):
    """Killed by a clock, beside steps that are mostly sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 1500), nn.ReLU(), nn.Linear(1500, 4), nn.ReLU(), nn.Linear(4, 3))
    running = [aggregator()]
    nodes = addresses(nodes_at(running[0].address))
    reference = copy.deepcopy(model)
    wanted, _ = train(reference, pictures, nodes, cut="4", sums="trainer")
    timers = []

    def at(step, job):
        if step in (3, 6, 9, 12):
            if running[-1].process.poll() is not None:
                running.append(aggregator(running[0].address))
            meet(job, eventually)
            timers.append(threading.Timer(0.004 * step, running[-1].kill))
            timers[-1].start()

    found, job = train(model, pictures, nodes, at, cut="4")
    for timer in timers:
        timer.join()
    assert job.num_rolled_back == 0
    assert_same_bits(found, wanted, model, reference)


def test_a_node_that_is_killed_leaves_no_trace_and_the_others_meet_anew(
    model, alone, pictures, aggregator, nodes_at, start_node, tmp_path, eventually
):
    where = aggregator().address
    nodes = nodes_at(where, 3)
    struck, numbers = [], []

    def strike(step):
        if step == 5 and not struck:
            struck.append(step)
            nodes[1].kill()

    def at(step, job):
        if step == 8:
            start_node(pictures, listen=nodes[1].listen,
                       options=("--reduce", where, "--reduce-key-file", str(tmp_path / "key")))  # fmt: skip
            eventually(lambda: len(job._replicas.present()) == 3)
        if step in (2, 7, 9):
            meet(job, eventually)
        numbers.append((job._meetings.number, job._meetings.members))

    found, job = train(model, pictures, addresses(nodes), at, strike)
    assert job.num_rolled_back == job._replicas.rejoined == 1
    assert numbers[5][1] == numbers[9][1] == {0, 1, 2}
    assert numbers[7][1] == {0, 2}
    assert numbers[5][0] < numbers[7][0] < numbers[9][0]
    assert job.num_added >= 8
    assert_same(found, alone[0], model, alone[1])


def test_a_node_that_does_not_reach_the_aggregator_keeps_nobody_from_training(
    model, alone, pictures, aggregator, nodes_at, caplog
):
    """Nobody is together with it, which is said once; the gradients come one by one."""
    there = nodes_at(aggregator().address, 1)
    lost = nodes_at("127.0.0.1:1", 1)
    found, job = train(model, pictures, addresses(there + lost))
    assert job.num_added == job.num_rolled_back == 0
    said = [each for each in caplog.messages if "don't add up among themselves" in each]
    assert len(said) == 1
    assert "no aggregator answers at 127.0.0.1:1" in said[0]
    assert_same(found, alone[0], model, alone[1])


def test_nodes_with_another_key_are_told_so(model, pictures, aggregator, start_node, tmp_path, caplog):
    running = aggregator()
    other = tmp_path / "other"
    other.touch(0o600)
    other.write_text(f"not-{KEY}\n")
    options = ("--reduce", running.address, "--reduce-key-file", str(other))
    nodes = [start_node(pictures, options=options) for _ in range(2)]
    _, job = train(model, pictures, addresses(nodes), steps=6)
    assert job.num_added == 0
    assert "the key is not one of this aggregator's" in caplog.text


@pytest.mark.parametrize(("options", "error", "says"), [
    ({"cut": "none"}, PlanError, "no node trains anything"),
    ({"cut": "input"}, PlanError, "no node trains anything"),
    ({"cut": "5", "nodes": 1}, PlanError, "nobody to add up with"),
    ({"cut": "5", "sums": "moon"}, ConfigError, "one of trainer, network"),
])  # fmt: skip
def test_what_can_not_be_added_up_among_nodes_is_said_before_the_first_step(
    options, error, says, model, pictures, aggregator, nodes_at
):
    nodes = addresses(nodes_at("127.0.0.1:1", 2))[: options.pop("nodes", 2)]
    with pytest.raises(error, match=says):
        train(model, pictures, nodes, **options)


def test_nodes_without_an_aggregator_are_named(model, pictures, nodes_at, start_node):
    nodes = [*nodes_at("127.0.0.1:1", 1), start_node(pictures)]
    with pytest.raises(ConfigError, match=rf"{nodes[1].listen} has no aggregator; .*--reduce HOST:PORT"):
        train(model, pictures, addresses(nodes))

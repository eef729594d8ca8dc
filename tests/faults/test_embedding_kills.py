"""A table's steps are done once each, whatever is killed in the middle of them."""

import os
import queue
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import headwater as hw

NUM, DIM, LR = 500, 4, 0.1


def batch(number):
    generator = np.random.default_rng(number)
    return torch.from_numpy(np.minimum(generator.zipf(1.3, (8, 5)) - 1, NUM - 1))


def steps(bag, numbers, after=lambda number: None):
    for number in numbers:
        bag(batch(number)).square().sum().backward()
        after(number)


def open_bag(nodes, name, **more):
    return hw.EmbeddingBag(NUM, DIM, mode="sum", name=name, nodes=nodes, lr=LR, scale=0.1, dtype=torch.float64,
                           travels="pooled", **more)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed():
    """The vectors after so many steps, on a node of its own."""
    with hw.EmbeddingBag(NUM, DIM, mode="sum", lr=LR, scale=0.1, dtype=torch.float64, travels="pooled") as bag:
        found = {0: bag.export()}
        for number in range(60):
            steps(bag, [number])
            found[number + 1] = bag.export()
    return found


def test_a_node_killed_in_the_middle_of_steps_has_done_each_once(start_node, tmp_path, undisturbed):
    options = ("--tables", str(tmp_path / "tables"), "--state", str(tmp_path / "state"))
    node = start_node(tmp_path, options=options)
    chance, listen, reached = random.Random(0), node.listen, queue.Queue()
    with open_bag([node.address], "killed") as bag:
        training = threading.Thread(target=steps, args=(bag, range(60), reached.put))
        training.start()
        for stop in (8, 23, 40, 55):
            while reached.get(timeout=60) < stop:
                pass
            doomed = threading.Timer(chance.uniform(0.0, 0.004), node.kill)  # a step takes about that long
            doomed.start()
            doomed.join()
            node = start_node(tmp_path, options=options, listen=listen)
        training.join()
        assert bag.version == 60
        assert torch.equal(bag.export(), undisturbed[60])


TRAINER = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_embedding_kills as kills
bag = kills.open_bag({nodes!r}, "orphan")
kills.steps(bag, range(60), lambda number: print(number, flush=True))
"""


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_trainer_killed_in_the_middle_of_a_step_leaves_parts_that_meet(start_node, tmp_path, undisturbed, seed):
    """Whatever part had not got the step, all go back to what all have; the next trainer finds a whole version."""
    nodes = []
    for each in range(3):
        (tmp_path / str(each)).mkdir()
        nodes.append(start_node(tmp_path / str(each), options=("--tables", str(tmp_path / str(each) / "t"))).address)
    code = TRAINER.format(here=str(Path(__file__).parent), nodes=nodes)
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    stop = random.Random(seed).randrange(5, 40)
    for line in trainer.stdout:
        if int(line) == stop:
            os.kill(trainer.pid, signal.SIGKILL)
            break
    trainer.wait()
    trainer.stdout.close()
    with open_bag(nodes, "orphan") as bag:
        assert stop <= bag.version <= 60
        torch.testing.assert_close(bag.export(), undisturbed[bag.version], rtol=1e-12, atol=1e-15)


def test_a_second_trainer_takes_over_and_the_first_is_refused(start_node, tmp_path):
    node = start_node(tmp_path, options=("--tables", str(tmp_path / "t")))
    first = open_bag([node.address], "two")
    steps(first, [0])
    first.sync()
    with open_bag([node.address], "two") as second:
        assert second.version == 1
        with pytest.raises(hw.HeadwaterError, match="another trainer has taken over"):
            steps(first, [1])
        steps(second, [1])
        assert second.version == 2
    first.close()

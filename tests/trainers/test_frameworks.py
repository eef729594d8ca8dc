"""Every loop goes on where its own checkpoint was made, in the middle of an epoch, as if nothing had happened.

The loops are those of examples/. Each of them saves every three steps; runs are cut short after four and after seven of
ten.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Frameworks warn of their own and of each other's changes; ours are errors everywhere else.
pytestmark = pytest.mark.filterwarnings("ignore")
SAVED, STOPPED, STEPS = (0, 3, 6), (4, 7, 10), 10


@pytest.fixture(scope="module")
def node(start_node_once, pictures, tmp_path_factory):
    return start_node_once(pictures, options=("--state", str(tmp_path_factory.mktemp("state"))))


@pytest.mark.parametrize("example", ["plain", "accelerate_loop", "lightning_fit", "hf_trainer"])
def test_a_run_that_is_resumed_twice_has_the_batches_and_losses_of_an_undisturbed_one(
    example, node, pictures, tmp_path, batches
):
    train = importlib.import_module(example).train
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    expected = train(pictures, tmp_path / "whole", [node.address])
    undisturbed = list(batches)
    assert len(expected) == len(undisturbed) == STEPS
    for start, stop in zip(SAVED, STOPPED, strict=True):
        batches.clear()
        losses = train(pictures, tmp_path / "cut", [node.address], stop_after=stop)
        assert batches == undisturbed[start:stop]
        assert losses == pytest.approx(expected[start:stop], rel=1e-5)


def test_the_trainer_resumes_where_gradients_of_several_batches_add_up(node, pictures, tmp_path, batches):
    import hf_trainer

    def losses(folder, stop):
        monkey = pytest.MonkeyPatch()
        arguments = hf_trainer.TrainingArguments
        with monkey.context() as patch:
            patch.setattr(hf_trainer, "TrainingArguments", lambda *args, **options: arguments(
                *args, **{**options, "save_steps": 1, "gradient_accumulation_steps": 2}))  # fmt: skip
            return hf_trainer.train(pictures, tmp_path / folder, [node.address], stop_after=stop)

    expected = losses("whole", None)
    undisturbed = list(batches)
    batches.clear()
    found = losses("cut", 4) + losses("cut", None)  # an epoch of five batches is three steps; the fourth is the next's
    assert batches == undisturbed
    assert found == pytest.approx(expected, rel=1e-5)


def test_two_trainers_resume_together_under_torchrun(node, pictures, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", "--max-restarts", "0"]  # fmt: skip
    script = Path(__file__).with_name("ddp_thrice.py")
    done = subprocess.run([*command, str(script), str(pictures), node.address, str(tmp_path), "7"],
                          capture_output=True, text=True, timeout=240,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        said = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(said["whole"]) == STEPS
        assert said["before"] == pytest.approx(said["whole"][:7], rel=1e-5)
        assert said["after"] == pytest.approx(said["whole"][6:], rel=1e-5)


def test_digits_are_written_and_trained_on(tmp_path):
    from pictures import write_digits
    from plain import train

    losses = train(write_digits(tmp_path / "digits", 40), tmp_path)
    assert len(losses) == 8


@pytest.mark.parametrize("option", [{"ignore_data_skip": True}, {"restore_callback_states_from_checkpoint": False}])
def test_the_trainer_is_told_which_arguments_the_loaders_place_needs(option):
    from transformers import TrainingArguments

    from headwater.errors import ConfigError
    from headwater.train.hf import LoaderState, dataloader_of

    arguments = TrainingArguments("x", use_cpu=True, **({"restore_callback_states_from_checkpoint": True} | option))
    with pytest.raises(ConfigError, match=r"restore_callback_states_from_checkpoint=True.*ignore_data_skip"):
        LoaderState().on_train_begin(arguments, None, None, train_dataloader=dataloader_of([]))


def test_another_dataloader_than_the_loaders_is_named():
    from headwater.errors import ConfigError
    from headwater.train.hf import LoaderState

    with pytest.raises(ConfigError, match=r"dataloader_of.*returns list"):
        LoaderState().on_step_end(None, None, None, train_dataloader=[])

"""`headwater train`: from a job file to a trained model, also when it is stopped on the way."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import headwater as hw
from headwater.cli.ctrlc import CtrlC
from headwater.cli.jobfile import read_job
from headwater.cli.train import run
from headwater.errors import ConfigError

EPOCHS = 4
LONG = {"epochs": EPOCHS, "batch_size": 2, "checkpoint_every": 1, "lr": 0.01}
PIXEL_BYTES = 3 * 32 * 32


def children_of(pid):
    """The processes whose parent is `pid`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture(scope="module")
def undisturbed(command, pictures):
    """A whole run, and the folder with what it wrote."""
    done = command("train", command.job("whole", pictures, **LONG))
    assert done.returncode == 0, done.err
    return command.folder / "whole"


def test_a_run_leaves_a_model_a_checkpoint_and_its_metrics(undisturbed):
    names = sorted(path.name for path in undisturbed.iterdir())
    assert names == ["checkpoint.pt", "metrics.jsonl", "model.pt", "plans.json", "run.json"]
    lines = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == list(range(EPOCHS))
    told = {"epoch", "loss", "pictures_per_s", "bytes_per_picture", "skipped", "prongs", "tiers", "checkpoint"}
    assert set(lines[0]) == told
    assert lines[0]["tiers"]["trainer"]["cpu_s"] > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert 0 < lines[0]["bytes_per_picture"] < 2 * PIXEL_BYTES, "of rows, pixels or files: the plan is the machine's"


def test_an_earlier_run_is_not_overwritten(command, undisturbed):
    before = (undisturbed / "model.pt").read_bytes()
    with pytest.raises(ConfigError, match="go on with --resume, or name another output"):
        run(read_job(command.folder / "whole.toml"), resume=False)
    assert (undisturbed / "model.pt").read_bytes() == before


def test_ctrl_c_leaves_a_checkpoint_and_nothing_else_and_resume_ends_the_same(command, pictures, undisturbed):
    job, output = command.job("stopped", pictures, command.planned, **LONG), command.folder / "stopped"
    with command.start("train", job) as process:
        deadline = time.monotonic() + 100
        while not (output / "checkpoint.pt").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGSTOP)  # or a fast machine may be done before the next lines are
        nodes = children_of(process.pid)
        assert len(nodes) == 1
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "go on with --resume" in out
    assert "Traceback" not in out + err
    assert not any(Path(f"/proc/{pid}").exists() for pid in nodes)
    assert sorted(path.name for path in output.iterdir() if path.name != "metrics.jsonl") == [
        "checkpoint.pt",
        "run.json",
    ]

    done = command("train", job, "--resume")
    assert done.returncode == 0, done.err
    expected, found = (torch.load(folder / "model.pt", weights_only=True) for folder in (undisturbed, output))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_resume_without_a_checkpoint_says_so(command, pictures):
    with pytest.raises(ConfigError, match="start without --resume"):
        run(read_job(command.job("nothing", pictures)), resume=True)


def test_a_damaged_checkpoint_is_a_plain_error(command, pictures, monkeypatch):
    monkeypatch.syspath_prepend(str(command.folder))
    (command.folder / "torn").mkdir()
    (command.folder / "torn" / "checkpoint.pt").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"checkpoint\.pt can't be used with this job"):
        run(read_job(command.job("torn", pictures, command.planned)), resume=True)


def test_validation_is_measured_after_each_epoch(command, pictures, monkeypatch):
    monkeypatch.syspath_prepend(str(command.folder))
    job = command.job("validated", pictures, f'validation = "{pictures}"\n{command.planned}')
    run(read_job(job), resume=False)
    line = json.loads((command.folder / "validated" / "metrics.jsonl").read_text())
    assert 0 <= line["accuracy"] <= 1
    assert len(line["tiers"]) == 2
    assert set(line["tiers"]) < set(line["validation"]), "which has a node of its own here, and is no part of the epoch"


def test_validation_with_other_classes_is_refused_before_the_first_step(command, pictures, tmp_path, monkeypatch):
    """Class b would be label 0 there and 1 in training."""
    monkeypatch.syspath_prepend(str(command.folder))
    shutil.copytree(pictures / "b", tmp_path / "b")
    job = command.job("other", pictures, f'validation = "{tmp_path}"\n{command.planned}')
    with pytest.raises(ConfigError, match="its class 0 is 'b', and 'a' in the training data"):
        run(read_job(job), resume=False)
    assert not (command.folder / "other").exists()


def test_steps_that_are_not_full_can_be_left_out_of_training(command, pictures, monkeypatch):
    monkeypatch.syspath_prepend(str(command.folder))
    asked = []
    near = hw.near
    monkeypatch.setattr(hw, "near", lambda *args, **options: asked.append(options) or near(*args, **options))
    job = command.job("dropped", pictures, f'validation = "{pictures}"\n{command.planned}', drop_last="true")
    run(read_job(job), resume=False)
    assert [options.get("drop_last") for options in asked] == [True, None], "every picture counts in validation"


def test_views_and_the_size_of_the_cache_reach_the_job(command, pictures):
    from headwater.cli.meaning import near_options

    file = read_job(command.job("viewed", pictures, extra='views = 3\n[nodes]\ncache = "5MB"'))
    options = near_options(file)
    assert (options["views"], options["node_cache"]) == (3, "5MB")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_ctrl_c_that_a_finaliser_swallows_still_ends_the_run():
    class Finaliser:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)  # the handler runs here

    with CtrlC() as ctrl_c:
        Finaliser()
        with pytest.raises(KeyboardInterrupt), ctrl_c.step():
            pass

"""`headwater pack`: from pictures to shards that a job trains on, also when it is killed on the way."""

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from headwater.cli import typer_app
from headwater.data.layouts import list_samples
from headwater.data.shards.verify import verify_set
from headwater.errors import BadSampleError, ConfigError, DataError


def run(*args):
    """In this process; raises what the command raises."""
    return CliRunner().invoke(typer_app, ["pack", *map(str, args)], catch_exceptions=False, env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Pictures that take a while."""
    root = tmp_path_factory.mktemp("large")
    (root / "a").mkdir()
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (900, 1200, 3), np.uint8)
    for number in range(60):
        Image.fromarray(np.roll(pixels, number, 1)).save(root / "a" / f"{number:03d}.jpg", quality=90)
        os.link(root / "a" / f"{number:03d}.jpg", root / "a" / f"{number:03d}-again.jpg")
    return root


def test_pack_again_and_verify(pictures, tmp_path):
    target = tmp_path / "packed"
    done = run(pictures, target, "--resize", 32, "--crop", 24, "--shard-size", 0.02)
    assert done.exit_code == 0
    assert "packed: 50 pictures in 5 shards" in done.output.replace("\n", " ")
    assert "done in them: Decode, Resize, CenterCrop; a job's transforms must begin with these" in done.output
    done = run(pictures, target, "--resize", 32, "--crop", 24, "--shard-size", 0.02)
    assert "is finished: 50 pictures in 5 shards" in done.output
    assert "is whole" in run("--verify", target).output
    shard = target / "shards" / "00000001.hws"
    shard.write_bytes(shard.read_bytes()[:-10] + b"0123456789")
    with pytest.raises(DataError, match=r"1 damaged shards:\n  - shards/00000001\.hws has"):
        run("--verify", target)
    done = run(pictures, target, "--resize", 32, "--crop", 24, "--shard-size", 0.02, "--verify")
    assert "was damaged: shards/00000001.hws" in done.output
    assert "4 shards kept" in done.output
    assert "is whole" in run("--verify", target).output


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("SRC",), "pack takes SRC and DST, not 1 URLs"),
        (("SRC", "DST", "x"), "pack takes SRC and DST, not 3 URLs"),
        (("SRC", "DST"), "--job job.toml, or --resize 256 --crop 224"),
        (("SRC", "DST", "--resize", "-1"), "--resize -1 and --crop 0 must be above 0"),
        (("SRC", "DST", "--resize", "8", "--shard-size", "0"), "--shard-size is 0 MB"),
        (("SRC", "DST", "--resize", "8", "--threads", "-1"), "--threads is -1"),
        (("SRC", "DST", "--resize", "8", "--on-bad-sample", "ignore"), 'must be "raise" or "skip"'),
        (("--verify", "SRC"), "is not a packed set: it has no manifest.json"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(pictures, tmp_path, args, text):
    places = {"SRC": pictures, "DST": tmp_path / "packed"}
    with pytest.raises((ConfigError, DataError), match=text):
        run(*(places.get(each, each) for each in args))
    assert not (tmp_path / "packed").exists()


def test_a_bad_picture_stops_it_or_is_left_out(pictures, tmp_path):
    source = shutil.copytree(pictures, tmp_path / "source")
    (source / "b" / "004.jpg").write_bytes(b"broken")
    with pytest.raises(BadSampleError, match=r"b/004\.jpg.*--on-bad-sample skip"):
        run(source, tmp_path / "packed", "--resize", 32)
    done = run(source, tmp_path / "packed", "--resize", 32, "--on-bad-sample", "skip")
    assert "left out: 1 pictures" in done.output
    assert "b/004.jpg: not a picture" in done.output


def test_a_job_trains_on_its_packed_set_as_on_its_pictures(command, pictures, tmp_path):
    target = tmp_path / "packed"
    job = command.job("plain", pictures, command.planned, epochs=2)
    done = command("pack", "--job", job, target)
    assert done.returncode == 0, done.err
    found = []
    for name, data in (("plain", pictures), ("packed", target)):
        done = command.here("train", command.job(name, data, command.planned, epochs=2))
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in (command.folder / name / "metrics.jsonl").read_text().splitlines()]
        found.append(([line["loss"] for line in lines], torch.load(command.folder / name / "model.pt")))
    (losses, model), (ours, trained) = found
    assert ours == pytest.approx(losses, rel=1e-4)
    for name, tensor in model.items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def _wait_for_shards(process, target, count):
    deadline = time.monotonic() + 100
    while len(list((target / "parts").glob("*"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


SETTINGS = ("--resize", 256, "--crop", 224, "--shard-size", 0.5, "--threads", 1)


@pytest.fixture(scope="module")
def whole(large, tmp_path_factory):
    """The set that a pack makes which nobody disturbs."""
    target = tmp_path_factory.mktemp("whole") / "packed"
    assert run(large, target, *SETTINGS).exit_code == 0
    return target


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pack_that_is_killed_goes_on_where_it_stood(command, large, whole, tmp_path, number):
    target = tmp_path / "packed"
    with command.start("pack", large, target, *SETTINGS) as process:
        _wait_for_shards(process, target, 3)
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    if number == signal.SIGINT:
        assert "the same command goes on from there" in err
    assert "Traceback" not in out + err
    assert not (target / "manifest.json").exists()
    with pytest.raises(DataError, match="not finished"):
        list_samples(str(target))
    before = {path.name: path.stat().st_mtime_ns for path in (target / "shards").glob("*.hws")}
    done = run(large, target, *SETTINGS)
    assert done.exit_code == 0, done.output
    assert "shards kept" in done.output
    after = {path.name: path.stat().st_mtime_ns for path in (target / "shards").iterdir()}
    assert sum(after[name] == at for name, at in before.items()) >= 3
    assert sorted(path.name for path in target.iterdir() if path.is_file()) == ["index.parquet", "manifest.json"]
    assert verify_set(str(target)) == []
    for path in (whole / "shards").iterdir():
        assert path.read_bytes() == (target / "shards" / path.name).read_bytes()

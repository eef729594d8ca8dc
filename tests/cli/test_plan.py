"""`headwater plan`: a ranking in words and numbers, a plan that a run can use, a picture."""

import json

import pytest

from headwater.core.plan import Plan
from headwater.errors import ConfigError

pytestmark = pytest.mark.usefixtures("moments")


def test_a_plan_is_shown_written_and_drawn(command, pictures, tmp_path):
    job = command.job("planned", pictures, "[power]\nnode_idle_w = 2\nnode_busy_w = 6", epochs=1)
    done = command("plan", job, "-o", tmp_path / "plan.json", "--picture", tmp_path / "plan.png")
    assert done.returncode == 0, done.err
    assert "move nothing" in done.out
    assert "limits" in done.out
    assert "modelled J a picture" in done.out
    assert Plan.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_can_not_be_written_is_said_before_anything_is_measured(command, pictures, tmp_path):
    job = command.job("nowhere", pictures)
    for verb, option in (("plan", "-o"), ("plan", "--picture"), ("profile", "-o")):
        done = command(verb, job, option, tmp_path / "missing" / "file")
        assert done.returncode == 1
        assert "there is no folder" in done.err
        assert "Traceback" not in done.err


def test_power_is_given_whole_or_not_at_all(command, pictures):
    done = command("plan", command.job("half", pictures, "[power]\nnode_idle_w = 2"))
    assert done.returncode == 1
    assert "give both node_idle_w and node_busy_w" in done.err


def test_as_json_it_has_the_plan_and_every_estimate(command, pictures):
    done = command.here("plan", command.job("as-json", pictures, epochs=1), "--json")
    found = json.loads(done.stdout.splitlines()[-1])
    assert Plan.from_json(found["plan"])
    assert len(found["estimates"]) >= 2
    assert all(each["estimated"]["samples_per_s"] > 0 for each in found["estimates"])


def test_a_pinned_cut_is_marked_written_and_told_of(command, pictures, tmp_path):
    job = command.job("pinned", pictures, '[plan]\ncut = "0.1"', epochs=1)
    done = command.here("plan", job, "-o", tmp_path / "plan.json", "--picture", tmp_path / "plan.png")
    assert "pinned" in done.stdout
    assert "The job file pins a plan (run the prefix near the data, up to 0.1)" in done.stdout
    assert Plan.loads((tmp_path / "plan.json").read_text()).cut_name == "0.1"
    other = command.job("given", pictures, f'[plan]\nfile = "{tmp_path / "plan.json"}"', epochs=1)
    found = json.loads(command.here("plan", other, "--json").stdout.splitlines()[-1])
    assert (found["pinned"], found["plan"]["cut"]["name"]) == (True, "0.1")


@pytest.mark.parametrize("more", ['prongs = "mte"', 'profile = "kept.json"'])
def test_what_training_refuses_is_refused_before_anything_is_measured(command, pictures, more, monkeypatch):
    from headwater.train import job as job_module

    monkeypatch.setattr(job_module, "measure", lambda *args, **options: pytest.fail("measured"))
    with pytest.raises(ConfigError, match=r"planned for|for planning"):
        command.here("plan", command.job("refused", pictures, f'[plan]\ncut = "0"\n{more}'))

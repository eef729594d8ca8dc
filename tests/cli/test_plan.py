"""`headwater plan`: a ranking in words and numbers, a plan that a run can use, a picture."""

import json

import pytest

from headwater.core.plan import Plan

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

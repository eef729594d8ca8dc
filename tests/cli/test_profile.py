"""`headwater profile`: costs in a table, kept in a file that a plan is made from, and refused for another job."""

import json

import pytest

from headwater.core.profile import Profile
from headwater.errors import ConfigError

pytestmark = pytest.mark.usefixtures("moments")


def test_a_profile_is_shown_written_and_planned_from(command, pictures, tmp_path):
    job = command.job("profiled", pictures, epochs=1)
    done = command("profile", job, "-o", tmp_path / "profile.json")
    assert done.returncode == 0, done.err
    assert "decode and transform" in done.out
    assert "every cut to choose from" in done.out
    kept = Profile.loads((tmp_path / "profile.json").read_text())
    with job.open("a") as file:
        file.write(f"\n[plan]\nprofile = '{tmp_path / 'profile.json'}'\n")
    assert command.here("plan", job).exit_code == 0

    other = kept.to_json()
    other["key"]["model"], other["measured_at"] = "another", 0.0
    (tmp_path / "profile.json").write_text(json.dumps(other))
    with pytest.raises(ConfigError) as refused:
        command.here("plan", job)
    for part in ("measured for the model 'another'", "days old", "headwater profile"):
        assert part in str(refused.value)


def test_how_both_sides_shall_share_an_epoch_is_nothing_that_is_measured(command, pictures):
    """With one machine there are no two sides, which planning would refuse."""
    from headwater.cli.jobfile import read_job
    from headwater.cli.meaning import near_options

    job = command.job("sides", pictures, '[nodes]\nshare = false\n[plan]\nprongs = "mte"')
    assert near_options(read_job(job))["prongs"] == "mte"
    assert command.here("profile", job).exit_code == 0

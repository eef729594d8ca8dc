"""`headwater profile`: costs in a table, kept in a file that a plan is made from, and refused for another job."""

import json

from headwater.core.profile import Profile


def test_a_profile_is_shown_written_and_planned_from(command, pictures, tmp_path):
    job = command.job("profiled", pictures, epochs=1)
    done = command("profile", job, "-o", tmp_path / "profile.json")
    assert done.returncode == 0, done.err
    assert "decode and transform" in done.out
    assert "every cut to choose from" in done.out
    kept = Profile.loads((tmp_path / "profile.json").read_text())
    with job.open("a") as file:
        file.write(f"\n[plan]\nprofile = '{tmp_path / 'profile.json'}'\n")
    assert command("plan", job).returncode == 0

    other = kept.to_json()
    other["key"]["model"], other["measured_at"] = "another", 0.0
    (tmp_path / "profile.json").write_text(json.dumps(other))
    refused = command("plan", job)
    assert refused.returncode == 1
    assert "measured for the model 'another'" in refused.err
    assert "days old" in refused.err
    assert "headwater profile" in refused.err

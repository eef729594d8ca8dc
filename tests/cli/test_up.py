"""What `headwater up` and `down` say before any cluster is asked."""

import pytest
from typer.testing import CliRunner

from headwater.cli import typer_app
from headwater.data import cluster
from headwater.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["up", "s3://photos"], "--ray auto"),
        (["down"], "--ray auto"),
        (["up", "s3://photos", "--ray", "auto", "--min", "3", "--max", "2"], "--max is 2, and --min is 3"),
        (["up", "s3://photos", "--ray", "auto", "--tls-cert", "/a.pem"], "--tls-cert and --tls-key together"),
        (["up", "s3://photos", "--ray", "auto", "--tokens", "tokens.toml"], "must be absolute"),
    ],
)
def test_what_makes_no_sense_is_said_first(given, said):
    done = CliRunner().invoke(typer_app, given)
    assert isinstance(done.exception, ConfigError)
    assert said in str(done.exception)


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    done = CliRunner().invoke(typer_app, ["up", "s3://photos", "--ray", "auto"])
    assert isinstance(done.exception, ConfigError)
    assert "pip install '.[ray]'" in str(done.exception)

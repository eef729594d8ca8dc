"""What `headwater up` and `down` say before any cluster is asked."""

import pytest
from typer.testing import CliRunner

from headwater.cli import needs, typer_app
from headwater.data import cluster
from headwater.errors import ConfigError, UnreachableError


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


@pytest.mark.parametrize("verb", [["nodes"], ["top", "--once"]])
def test_a_fleet_none_of_whose_nodes_answers_now_is_a_plain_error(verb, monkeypatch):
    """Its keeper is being started anew, say."""

    class Fleet:
        def __init__(self, name):
            self.addresses, self.close = list, lambda: None

    monkeypatch.setattr(needs, "RayFleet", Fleet)
    done = CliRunner().invoke(typer_app, [*verb, "ray://photos"])
    assert isinstance(done.exception, UnreachableError)
    assert "ray://photos has no node that answers at this moment" in str(done.exception)

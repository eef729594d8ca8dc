"""`headwater token`: the token once, and an entry that a node takes."""

import tomllib

import pytest
from typer.testing import CliRunner

from headwater.cli import typer_app
from headwater.core.access import identify, read_grants, token_digest
from headwater.errors import RefusedError


def run(*args):
    done = CliRunner().invoke(typer_app, ["token", *map(str, args)])
    assert done.exit_code == 0, done.output
    return done


def test_the_entry_goes_to_a_file_and_only_the_token_is_shown(tmp_path):
    file = tmp_path / "tokens.toml"
    first = run("team", "--root", "s3://photos/train", "--max-chunks", 4, "--to", file).stdout.strip()
    second = run("other", "--root", tmp_path, "--days", 1, "--max-upload", "5MB", "--rows-per-second", 9,
                 "--weight", 0.5, "--to", file)  # fmt: skip
    grants = read_grants(tomllib.loads(file.read_text()), "tokens.toml")
    assert [grant.tenant for grant in grants] == ["team", "other"]
    assert grants[0].roots == ("s3://photos/train",)
    assert grants[1].roots == (str(tmp_path),)
    assert (grants[0].quota.max_chunks, grants[1].quota.rows_per_s) == (4, 9)
    assert (grants[0].quota.weight, grants[1].quota.weight) == (1.0, 0.5)
    assert identify(grants, [f"Bearer {first}"], 1e12) is grants[0]
    with pytest.raises(RefusedError, match="expired"):
        identify(grants, [f"Bearer {second.stdout.strip()}"], 1e12)
    assert first not in file.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.toml"]


def test_without_a_file_entry_and_token_go_different_ways():
    done = run("team")
    token = done.stderr.splitlines()[-1]
    assert tomllib.loads(done.stdout) == {"token": [{"tenant": "team", "sha256": token_digest(token)}]}
    assert run("team").stderr.splitlines()[-1] != token

"""What goes wrong on the command line: one message, no traceback, exit code 1, and every fault of a file at once."""

import json

import pytest
from typer.testing import CliRunner

from headwater.cli import app, typer_app
from headwater.cli.jobfile import read_job
from headwater.errors import ConfigError
from headwater.version import VERSION


def run(*args):
    return CliRunner().invoke(typer_app, [*map(str, args)], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})


@pytest.mark.parametrize("verb", [(), ("serve",), ("token",), ("train",), ("cuts",), ("pack",), ("reduce",)])
def test_help_is_there_for_every_verb(verb):
    done = run(*verb, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.output


def test_the_version_is_printed():
    assert run("--version").output.strip() == VERSION


def test_every_fault_of_a_job_file_is_in_one_error(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("""
        colour = 1
        [model]
        nane = "x:y"
        [data]
        url = 5
        transforms = []
        on_bad_sample = "ignore"
        [train]
        epochs = 0
        batchsize = 3
        shuffle = "yes"
        lr = true
        [nodes]
        addresses = "grpc://x:1"
        [plan]
        cut = 1.5
    """)
    with pytest.raises(ConfigError) as caught:
        read_job(path)
    for fault in (
        "job.toml has 11 faults",
        "colour is not a part; there are model, data, train, nodes, plan",
        "nane is not a field of [model]; did you mean name?",
        "[model] name is missing",
        "[data] url is 5; it must be str",
        "[data] on_bad_sample is 'ignore'; it must be one of raise, skip",
        "[train] epochs is 0; it must be at least 1",
        "batchsize is not a field of [train]; did you mean batch_size?",
        "[train] shuffle is 'yes'; it must be bool",
        "[train] lr is True; it must be float",
        "[nodes] addresses is 'grpc://x:1'; it must be list",
        "[plan] cut is 1.5; it must be str or int",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize("text", ["[model", "\xff", "[model]\nname = 1\nname = 2"])
def test_what_is_not_toml_is_refused(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="is not TOML"):
        read_job(path)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("train", "absent.toml"), "absent.toml can't be read"),
        (("train", "."), "can't be read"),
        (("cuts", "tiny"), "a model is named"),
        (("cuts", "absent_module:tiny"), "can't import absent_module"),
        (("cuts", "users_models:tinny"), "close: tiny"),
        (("cuts", "users_models:not_a_model"), "gave int, not a torch module"),
        (("cuts", "users_models:explodes"), "ValueError: no weights here"),
        (("cuts", "breaks_as_it_is_imported:model"), "RuntimeError: no such operator; does its build fit the torch"),
        (("cuts", "users_models:tiny", "--until", "9"), "no such module"),
        (("serve", ".", "--listen", "0.0.0.0:0"), "no tokens file and no TLS to keep them out; give --tokens FILE"),
        (("serve", ".", "--listen", "0.0.0.0:0", "--tokens", "absent.toml"), "it has no TLS to keep them out"),
        (("serve", ".", "--listen", "127.0.0.1:0", "--tokens", "absent.toml"), "absent.toml can't be read"),
        (("serve", ".", "--listen", "127.0.0.1:0", "--tls-cert", "x.pem"), "--tls-cert and --tls-key together"),
        (("serve", ".", "--listen", "127.0.0.1:0", "--tls-cert", "x.pem", "--tls-key", "x.key"), "x.key can't be used"),
        (("token", "two words"), "no token can be made so: tenant must be a name"),
        (("token", "a", "--max-upload", "much"), "max_upload is 'much'; it must be a number of bytes"),
        (("token", "a", "--to", "absent/tokens.toml"), "absent/tokens.toml can't be written"),
        (("serve", ".", "--listen", "127.0.0.1:0", "--state", "/proc/none"), "choose another with --state"),
        (("serve", ".", "--listen", "here"), "it must look like 127.0.0.1:8815"),
        (("serve", "absent-folder", "--listen", "127.0.0.1:0"), "absent-folder does not exist"),
        (("serve", "http://x", "--listen", "127.0.0.1:0"), "not a store that can be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_error_is_a_message_without_a_traceback(command, args, text, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(command.folder))
    monkeypatch.chdir(command.folder)
    with pytest.raises(SystemExit) as caught:
        app([*args])
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert text in said
    assert said.split(":")[0].endswith("Error")


def test_a_process_that_fails_says_one_line_and_exits_with_1(command):
    done = command("train", "absent.toml")
    assert done.returncode == 1
    assert done.err.count("\n") == 1
    assert done.err.startswith("ConfigError: the job file absent.toml can't be read")


def test_a_taken_port_is_named_with_the_way_out(command, start_node, tmp_path):
    node = start_node(tmp_path)
    done = command("serve", tmp_path, "--listen", node.listen)
    assert done.returncode == 1
    assert f"can't listen on {node.address}" in done.err
    assert "--listen" in done.err
    assert "Traceback" not in done.err


def test_a_state_folder_with_something_in_its_place_is_not_called_a_port(command, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "prefixes").write_text("a file")
    done = command("serve", tmp_path, "--listen", "127.0.0.1:0", "--state", tmp_path / "state")
    assert done.returncode == 1
    assert "prefixes can't be used" in done.err
    assert "--state" in done.err
    assert "Traceback" not in done.err


def test_cuts_are_shown_as_a_table_and_as_json(command, monkeypatch):
    monkeypatch.syspath_prepend(str(command.folder))
    done = run("cuts", "users_models:tiny", "--size", 32)
    assert done.exit_code == 0, done.output
    assert "★" in done.output
    assert "bytes a row" in done.output
    done = run("cuts", "users_models:tiny", "--size", 32, "--json", "--until", "1")
    found = json.loads(done.stdout)
    assert found[0]["name"] == "input"
    assert found[0]["row_bytes"] == 3 * 32 * 32 * 4
    assert any(cut["legal"] and cut["row_bytes"] == 64 for cut in found)
    assert any(not cut["legal"] and cut["why_not"] for cut in found)

"""`headwater ui` and `headwater top` without a browser: who may look, what is shown of files, what a terminal gets."""

import http.client
import io
import json

import pytest
from rich.console import Console

from headwater.cli.runfiles import RunFiles
from headwater.cli.top import screen
from headwater.cli.ui import Door
from headwater.cli.watching import Watched
from headwater.core.plan import Plan
from headwater.errors import ConfigError, PlanError
from headwater.train.access import Access
from headwater.train.client import NodeClient


@pytest.fixture
def door():
    door = Door("127.0.0.1:0", [], RunFiles([]), Access())
    yield door
    door.close()


def ask(door, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", door.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_whoever_has_the_key_may_look_and_nobody_else(door):
    assert ask(door, "/status.json")[0] == 401
    assert ask(door, "/status.json", Authorization=f"Bearer {door.key}x")[0] == 401
    assert ask(door, "/run.json")[0] == 401
    assert ask(door, "/status.json", Authorization=f"Bearer {door.key}", Host="evil.example:80")[0] == 421
    status, said = ask(door, "/status.json", Authorization=f"Bearer {door.key}")
    assert (status, json.loads(said)["nodes"]) == (200, [])
    assert ask(door, "/")[0] == 200
    assert ask(door, "/../page.js")[0] == 404


def test_the_page_is_for_this_machine(command):
    done = command("ui", "grpc://127.0.0.1:1", "--listen", "0.0.0.0:0")
    assert done.returncode == 1
    assert "ssh -L" in done.err


def test_the_key_is_new_each_time(door):
    other = Door("127.0.0.1:0", [], RunFiles([]), Access())
    other.close()
    assert len(door.key) >= 32
    assert door.key != other.key


def test_a_file_is_known_by_what_is_in_it_and_read_again_when_it_changes(tmp_path):
    path = tmp_path / "anything.json"
    path.write_text(Plan().dumps())
    files = RunFiles([path])
    version = files.version()
    assert files.read()["plan"]["cut"]["name"] == "input"
    path.write_text(Plan(cut=3, cut_name="layer3").dumps())
    assert files.version() != version
    assert files.read()["plan"]["cut"]["name"] == "layer3"
    path.write_text("{")  # somebody is writing it by hand
    assert files.read()["plan"]["cut"]["name"] == "layer3"


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "is not JSON"), ("[]", "is no object"), ("{}", "none of what can be shown"), (None, "is not there")],
)
def test_what_can_not_be_shown_is_explained(tmp_path, text, said):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        RunFiles([path])


def test_a_folder_without_a_run_and_a_plan_that_is_none_are_explained(tmp_path):
    with pytest.raises(ConfigError, match=r"neither run.json nor plans.json"):
        RunFiles([tmp_path])
    (tmp_path / "plans.json").write_text('{"plan": {}, "estimates": []}')
    with pytest.raises(PlanError):
        RunFiles([tmp_path])


@pytest.mark.usefixtures("moments")
def test_a_run_leaves_what_the_page_shows_of_it(command, pictures, tmp_path):
    job = command.job("shown", pictures, epochs=1)
    command.here("train", job, "--trace", tmp_path / "trace.json")
    found = RunFiles([command.folder / "shown", tmp_path / "trace.json"]).read()
    assert found["report"]["ended"]
    assert found["report"]["num_rows"] == 50
    assert found["planned"]["cuts"][0]["plan"]["cut"]["index"] == 0
    assert all(each["estimated"]["loads"] for each in found["planned"]["cuts"])
    assert {"step", "wait"} <= {each["name"] for each in found["timeline"]["strips"]}


def test_top_shows_nodes_once_as_a_table_and_as_what_the_page_gets(command, start_node, pictures):
    node = start_node(pictures)
    shown = command.here("top", node.address, "--once")
    assert shown.exit_code == 0
    assert "idle" in shown.stdout
    said = json.loads(command.here("top", node.address, "--once", "--json").stdout)
    assert said["nodes"][0]["per_s"]["rows_sent"] == 0.0
    node.kill()
    gone = command.here("top", node.address, "--once")
    assert gone.exit_code == 1
    assert "does not answer" in " ".join(gone.stdout.split())


def test_what_a_node_says_steers_no_terminal(start_node, pictures, monkeypatch):
    node, status = start_node(pictures), NodeClient.status

    def hostile(client):
        said = status(client)
        fault = {"at_s": 0.0, "times": 1, "kind": "DataError", "tenant": "a\x1b[2J", "said": "b\x1b]0;c\x07"}
        return {**said, "about": {**said["about"], "faults": [fault]}}

    monkeypatch.setattr(NodeClient, "status", hostile)
    watched = Watched([node.address], Access())
    try:
        said = watched.to_json(within_s=20)
    finally:
        watched.close()
    console = Console(record=True, file=io.StringIO(), width=200)
    console.print(screen(said))
    assert "DataError a\\x1b[2J: b\\x1b]0;c\\x07" in console.export_text()


def test_top_writes_lines_where_there_is_no_terminal(command, start_node, pictures):
    node = start_node(pictures)
    with command.start("top", node.address, "--every", "0.5") as process:
        lines = [process.stdout.readline() for _ in range(2)]
        process.kill()
    assert all(node.address in line and "rows/s" in line for line in lines)

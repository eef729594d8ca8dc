"""`headwater doctor`: what it finds, what it says to do, and the exit code."""

import json
import socket
import subprocess
import sys

import pytest

from headwater.cli.checks import NOTE, OK, WRONG, machine, network, packages, store
from headwater.train.access import Access


def by_name(findings):
    return {each.what: each for each in findings}


def test_here_nothing_is_wrong_and_every_fault_has_a_way_out():
    found = [*packages.check(), *machine.check()]
    assert [each for each in found if each.verdict == WRONG] == []
    assert {"Python", "headwater", "pyarrow", "torch", "engines", "cores", "memory", "disk"} <= set(by_name(found))


def test_without_torch_it_is_a_storage_nodes_installation(monkeypatch):
    monkeypatch.setattr(packages, "_version", lambda name: None if name == "torch" else "99.0")
    found = by_name(packages.check())["torch"]
    assert (found.verdict, "storage node" in found.said, "[train]" in found.do) == (NOTE, True, True)


def test_a_package_that_is_missing_or_too_old_is_wrong(monkeypatch):
    monkeypatch.setattr(packages, "_version", lambda name: {"numpy": None, "pyarrow": "1.0"}.get(name, "99.0"))
    monkeypatch.setattr(packages, "_least", lambda: {"pyarrow": "20"})
    found = by_name(packages.check())
    assert (found["numpy"].verdict, found["numpy"].said) == (WRONG, "not installed")
    assert (found["pyarrow"].verdict, found["pyarrow"].do) == (WRONG, "pip install 'pyarrow>=20'")


def test_a_node_that_answers_is_measured(start_node, pictures):
    node = start_node(pictures)
    found = by_name(network.check(node.address, Access(), 0.05))
    assert all(each.verdict == OK for each in found.values() if each.what != "cache")
    assert {"reach", "token", "version", "clock", "latency", "link", "node"} <= set(found)
    assert "MB/s from the node" in found["link"].said


def test_a_clock_that_is_off_and_another_version_are_told(start_node, pictures, monkeypatch):
    node = start_node(pictures)
    hello = network.NodeClient.hello

    def off(client):
        said = hello(client)
        return {**said, "at_s": said["at_s"] + 3600.0, "headwater": "0.0.9"}

    monkeypatch.setattr(network.NodeClient, "hello", off)
    found = by_name(network.check(node.address, Access(), 0.05))
    assert (found["clock"].verdict, "NTP" in found["clock"].do) == (WRONG, True)
    assert found["version"].verdict == NOTE


def test_who_does_not_answer_is_told_by_the_layer_that_fails():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = list(network.check(f"grpc://127.0.0.1:{port}", Access(), 0.05))
    assert [(each.what, each.verdict) for each in found] == [("reach", WRONG)]
    assert "start headwater serve" in found[0].do
    for wrong in ("store-1:8815", "grpc://store-1:port", "grpc://store-1:99999", "grpc://[store-1:8815"):
        assert [each.what for each in network.check(wrong, Access(), 0.05)] == ["address"]


def test_a_certificate_of_ours_that_can_not_be_read_is_told(start_node, pictures, tmp_path):
    node, junk = start_node(pictures), tmp_path / "junk.pem"
    junk.write_text("no certificate")
    for file in (junk, tmp_path / "missing.pem"):
        found = by_name(network.check(node.address.replace("grpc://", "grpc+tls://"), Access(tls_ca=file), 0.05))
        assert (found["TLS"].verdict, "HEADWATER_TLS_CA" in found["TLS"].do) == (WRONG, True)


def test_a_node_without_tls_that_is_asked_for_it_says_so(start_node, pictures):
    node = start_node(pictures)
    found = by_name(network.check(node.address.replace("grpc://", "grpc+tls://"), Access(), 0.05))
    assert found["TLS"].verdict == WRONG
    assert "grpc://" in found["TLS"].do


def test_a_wrong_token_is_told_as_that(start_node, pictures, tmp_path):
    file = str(tmp_path / "tokens.toml")
    made = subprocess.run([sys.executable, "-m", "headwater.cli", "token", "team", "--to", file],
                          capture_output=True, text=True, check=True)  # fmt: skip
    node = start_node(pictures, options=("--tokens", file))
    assert by_name(network.check(node.address, Access(made.stdout.strip()), 0.05))["token"].verdict == OK
    refused = by_name(network.check(node.address, Access("hw_" + "x" * 43), 0.05))
    assert [each.verdict for each in refused.values()] == [OK, WRONG]


def test_a_store_is_listed_and_one_object_read(pictures, tmp_path):
    found = by_name(store.check(str(pictures)))
    assert (found["list"].verdict, found["read"].verdict) == (OK, OK)
    assert "50 entries" in found["list"].said
    assert [each.verdict for each in store.check(str(tmp_path))] == [WRONG]
    assert [each.verdict for each in store.check("s3://")][-1] == WRONG


@pytest.mark.parametrize("url", ["/no/such/folder"])
def test_what_is_wrong_is_the_exit_code_in_json_too(command, url):
    done = command("doctor", "--store", url, "--json")
    said = json.loads(done.out)
    assert (done.returncode, said["wrong"]) == (1, 1)
    assert {"part", "what", "verdict", "said", "do"} == set(said["findings"][0])
    shown = command("doctor")
    assert shown.returncode == 0
    assert "everything that is needed is there" in shown.out

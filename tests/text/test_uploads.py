"""What strangers may send a node about tokenizers: it is refused with the reason, not kept, and the node goes on."""

import hashlib
import json
import os
import threading

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.text.conftest import wordpiece

from headwater.core.access import Grant, Quota
from headwater.core.spec import TensorSpec
from headwater.data import tokenizerfile, wire
from headwater.data.layouts import list_samples
from headwater.data.transforms import Tokenize, Transforms
from headwater.node import quotas
from headwater.node.quotas import Quotas
from headwater.node.service import Node

DATA = wordpiece(["only", "here"])
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(scope="module")
def node(start_node_once, jsonl, tmp_path_factory):
    found = start_node_once(jsonl.parent, options=("--state", str(tmp_path_factory.mktemp("state"))))
    return flight.connect(found.address)


def put(node, command, data):
    schema = pa.schema([("piece", pa.binary())])
    writer, _ = node.do_put(flight.FlightDescriptor.for_command(command), schema)
    writer.write_batch(pa.record_batch([pa.array([data], pa.binary())], schema=schema))
    writer.close()


def has(node, digest):
    return json.loads(next(iter(node.do_action(flight.Action("has-tokenizer", digest.encode())))).body.to_pybytes())


def ask(node, digest, path, length=8):
    chain = Transforms([Tokenize(digest, length)])
    samples = list_samples(str(path), "text")
    want = wire.Extraction(samples.url, chain, None, (TensorSpec("tokens", (2, length), "int32"),))
    ticket = wire.Chunk(want, "job", 0, 0, 0, tuple(samples.take([0, 1]))).dumps()
    return node.do_get(flight.Ticket(ticket)).read_all()


BAD = {
    "unreadable": (b"tokenizer " + hashlib.sha256(b"{").hexdigest().encode(), b"{", "not JSON"),
    "another digest": (b"tokenizer " + b"0" * 64, DATA, "arrived with sha256"),
    "no digest": (b"tokenizer ../../x", DATA, "not a sha256"),
    "too large": (b"tokenizer " + b"0" * 64, bytes(tokenizerfile.MAX_BYTES + 1), "more than"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_upload_is_refused_and_not_kept(node, name):
    command, data, said = BAD[name]
    with pytest.raises(flight.FlightError, match=said):
        put(node, command, data)
    assert not has(node, command.decode().split()[1]) if name != "no digest" else True


def test_a_question_about_no_digest_is_refused(node):
    with pytest.raises(flight.FlightError, match="not a sha256"):
        has(node, "../../etc/passwd")


def test_rows_need_the_tokenizer_and_come_once_it_is_there(node, jsonl):
    with pytest.raises(flight.FlightError, match=f"unknown tokenizer {DIGEST}"):
        ask(node, DIGEST, jsonl)
    put(node, b"tokenizer " + DIGEST.encode(), DATA)
    assert has(node, DIGEST)
    assert ask(node, DIGEST, jsonl).num_rows == 2
    with pytest.raises(flight.FlightError, match="at least 3"):
        ask(node, DIGEST, jsonl, length=2)


def test_a_tokenizer_is_loaded_once_there_is_memory_for_it(jsonl, tmp_path):
    data = wordpiece(["patient"])
    digest = tokenizerfile.keep(data, tmp_path / "state" / "tokenizers")
    node = Node("grpc://127.0.0.1:0", (str(jsonl.parent),), state=tmp_path / "state", num_threads=1)
    try:
        rooms, found = node._tenants.rooms, []
        with flight.connect(f"grpc://127.0.0.1:{node.port}") as client:
            with node._tenants.errand("something large", rooms.budget_bytes - tokenizerfile.LOADING_TIMES * len(data)):
                asking = threading.Thread(target=lambda: found.append(ask(client, digest, jsonl)))
                asking.start()
                while not rooms.to_json()["num_waiting"]:
                    asking.join(0.01)
                    assert asking.is_alive()
                assert tokenizerfile.KEPT.get(digest) is None
            asking.join(60)
        assert found[0].num_rows == 2
    finally:
        node.stop(5)


def test_tokenizers_count_among_a_tenants_prefixes_and_not_against_others(tmp_path, monkeypatch):
    prefixes, tokenizers = tmp_path / "prefixes", tmp_path / "tokenizers"
    prefixes.mkdir()
    monkeypatch.setattr(quotas, "FILES_KEPT", 2)
    held = Quotas(prefixes, tokenizers)
    own = {name: Grant(name, "0" * 64, quota=Quota(max_prefix_bytes=10_000)) for name in "ab"}
    kept = {name: [] for name in "ab"}
    for number, name in enumerate("abaaab"):
        digest = tokenizerfile.keep(wordpiece([f"word{number}"]), tokenizers, all_of_them=True)
        os.utime(tokenizers / f"{digest}.json", ns=(number, number))
        held.uploaded(own[name], digest, is_tokenizer=True)
        kept[name].append(digest)
    assert {path.stem for path in tokenizers.glob("*.json")} == {*kept["a"][-2:], *kept["b"]}
    (prefixes / "x.onnx").write_bytes(bytes(9000))
    held.uploaded(own["a"], "x")
    assert {path.stem for path in tokenizers.glob("*.json")} == {*kept["b"]}


def test_texts_outside_of_the_nodes_roots_are_not_read(node, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "secret", "label": 1}\n' * 2)
    with pytest.raises(flight.FlightError, match=r"refused|below|serves"):
        ask(node, DIGEST, tmp_path / "a.jsonl")

"""Whatever a stranger sends: a plain refusal, and the node goes on."""

import contextlib
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater import errors
from headwater.core.plan import LIMITS
from headwater.core.unpacked import most_values
from headwater.data import wire
from headwater.data.wire import Listing
from headwater.errors import ConfigError, HeadwaterError, RefusedError, TransformError
from headwater.node.service import Node
from headwater.train.client import NodeClient

OK = {"kind": "listing", "protocol": wire.PROTOCOL, "url": "file:///", "layout": "auto"}
BROKEN = {
    "not JSON": b"\x00\xff",
    "empty": b"",
    "a list": b"[]",
    "a number": b"1e999",
    "deep": b"[" * 200_000,
    "many values": b"[" + b"[]," * 5_000_000 + b"[]]",
    "long number": b"9" * 100_000,
    "unknown kind": json.dumps({**OK, "kind": "shell"}).encode(),
    "other protocol": json.dumps({**OK, "protocol": 99}).encode(),
    "wrong type": json.dumps({**OK, "url": ["a"]}).encode(),
    "no url": json.dumps({**OK, "url": ""}).encode(),
    "other scheme": json.dumps({**OK, "url": "http://127.0.0.1/"}).encode(),
    "layout": json.dumps({**OK, "layout": "x"}).encode(),
    "surrogate": json.dumps({**OK, "url": "\ud800"}).encode(),
    "NUL": json.dumps({**OK, "url": "file:///\x00"}).encode(),
}


def error_of(raw, ticket):
    """The class of ours that the node answers with."""
    with pytest.raises(flight.FlightServerError) as caught:
        raw.do_get(flight.Ticket(ticket)).read_all()
    return wire.error_from_wire(caught.value.extra_info)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_ticket_is_refused_and_the_node_stays_up(name, raw, client):
    error = error_of(raw, BROKEN[name])
    assert isinstance(error, ConfigError | RefusedError), repr(error)
    assert "unexpected" not in str(error)
    assert client.hello()["protocol"] == wire.PROTOCOL


def rows_request(chunk):
    return json.loads(chunk.dumps())


@pytest.mark.parametrize("key", ["../a.jpg", "/etc/passwd", "a/../../b.jpg", "", "a\0b", 5, None, "x" * 5000])
def test_a_key_that_leaves_its_root_is_refused(key, raw, chunk_of):
    request = rows_request(chunk_of())
    request["samples"] = [[0, key, 0, -1, 1, ""]]
    assert isinstance(error_of(raw, json.dumps(request).encode()), ConfigError)


@pytest.mark.parametrize(
    "change",
    [
        {"boundary": []},
        {"boundary": [{"name": "x", "shape": [1e999], "dtype": "float32"}]},
        {"boundary": [{"name": "x", "shape": [2**40, 2**40], "dtype": "float32"}]},
        {"boundary": [{"name": "x", "shape": [0], "dtype": "float32"}]},
        {"boundary": [{"name": "x", "shape": [1], "dtype": "object"}]},
        {"boundary": [{"name": "x", "shape": "12", "dtype": "float32"}]},
        {"boundary": [5]},
        {"transforms": [{"op": "__import__"}]},
        {"transforms": [{"op": "Resize", "size": 10**9}]},
        {"codec": "zip"},
        {"compression": "rar"},
        {"node_batch": 10**9},
        {"prefix": "../../etc/passwd"},
        {"prefix": "A" * 64},
    ],
    ids=str,
)
def test_an_extraction_out_of_bounds_is_refused(change, raw, chunk_of):
    request = rows_request(chunk_of())
    request["extraction"].update(change)
    error = error_of(raw, json.dumps(request).encode())
    assert isinstance(error, ConfigError | TransformError), repr(error)
    assert "unexpected" not in str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# Hypothesis reads its table of characters in the first draw; two busy cores take their time for it.
calmly = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
fields = ["kind", "protocol", "url", "layout", "job", "seed", "epoch", "index", "reuse", "samples", "path_column"]
inner_fields = ["url", "transforms", "boundary", "precision", "codec", "compression", "node_batch", "prefix"]


@calmly
@given(changes=st.dictionaries(st.sampled_from(fields), json_values, max_size=3),
       inner=st.dictionaries(st.sampled_from(inner_fields), json_values, max_size=3))  # fmt: skip
def test_any_ticket_parses_or_is_a_config_error(changes, inner):
    extraction = {"url": "/x", "transforms": [{"op": "Resize", "size": [8, 8]}], "prefix": None, "precision": "fp32",
                  "boundary": [{"name": "a", "shape": [2], "dtype": "float32"}], "codec": "raw", "compression": "none",
                  "node_batch": 8, **inner}  # fmt: skip
    request = {"kind": "rows", "protocol": wire.PROTOCOL, "job": "j", "seed": 0, "epoch": 0, "index": 0,
               "extraction": extraction, "samples": [[0, "a.jpg", 0, -1, 5, ""]], **changes}  # fmt: skip
    with contextlib.suppress(ConfigError, TransformError):
        wire.loads(json.dumps(request).encode())


@calmly
@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_a_config_error(ticket):
    with pytest.raises(ConfigError):
        wire.loads(ticket)


@pytest.mark.parametrize(
    "escape",
    ["file://{secret}", "file://{root}-secret", "file://{root}/../secret", "file://{root}/%2e%2e/secret",
     "file://{root}/.\t./secret", "file://{root}/link", "file://{root}/link/sub", "file:///", "/", "file://{root}/..",
     "{secret}", "{root}/../secret", "{root}/link"],
)  # fmt: skip
def test_a_url_outside_of_the_roots_is_refused(escape, tmp_path):
    root = tmp_path / "data"
    for folder in (root, tmp_path / "secret" / "sub", tmp_path / "data-secret"):
        folder.mkdir(parents=True)
        (folder / "a.jpg").write_bytes(b"x")
    (root / "link").symlink_to(tmp_path / "secret")
    node = Node("grpc://127.0.0.1:0", (str(root),), state=tmp_path / "state", num_threads=1)
    client = NodeClient(f"grpc://127.0.0.1:{node.port}")
    try:
        with pytest.raises(HeadwaterError) as caught:
            client.list_samples(Listing(escape.format(root=root, secret=tmp_path / "secret")))
        assert isinstance(caught.value, RefusedError | ConfigError), caught.value
    finally:
        client.close()
        node.stop(5)


def test_a_root_that_is_itself_a_link_is_served(tmp_path, pictures):
    (tmp_path / "link").symlink_to(pictures)
    node = Node("grpc://127.0.0.1:0", (str(tmp_path / "link"),), state=tmp_path / "state", num_threads=1)
    client = NodeClient(f"grpc://127.0.0.1:{node.port}")
    try:
        assert len(client.list_samples(Listing(str(tmp_path / "link")))) == 50
        with pytest.raises(errors.RefusedError, match="is not below what this node serves"):
            client.list_samples(Listing(str(pictures)))
    finally:
        client.close()
        node.stop(5)


@pytest.mark.parametrize(("kind", "body"), [("shell", b""), ("has-prefix", b"../../x"), ("has-prefix", b"\xff\xfe")])
def test_an_unknown_action_or_digest_is_refused(kind, body, raw):
    with pytest.raises(flight.FlightServerError) as caught:
        list(raw.do_action(flight.Action(kind, body)))
    assert isinstance(wire.error_from_wire(caught.value.extra_info), ConfigError)


def test_an_upload_of_another_type_is_refused(raw, build):
    schema = pa.schema([("piece", pa.int64())])
    writer, _ = raw.do_put(flight.FlightDescriptor.for_command(b"0" * 64), schema)
    with contextlib.suppress(flight.FlightServerError):  # the refusal may come now or at the end
        writer.write_batch(pa.record_batch([pa.array([1])], schema=schema))
    with pytest.raises(flight.FlightServerError) as caught:
        writer.close()
    assert isinstance(wire.error_from_wire(caught.value.extra_info), ConfigError)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadwaterError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_arrives_as_the_class_it_was(kind):
    arguments = {errors.PlanError: (["a", "b"],), errors.BadSampleError: ("key", "why")}
    sent = kind(*arguments.get(kind, ("text",)))
    found = wire.error_from_wire(wire.error_to_wire(sent))
    assert type(found) is kind
    assert str(sent) in str(found)


@pytest.mark.parametrize("extra", [None, b"", b"x", b"[]", b"{}", b'{"error":"Iterable","text":"x"}', b"[" * 99_999])
def test_what_is_no_error_of_ours_is_at_most_a_refusal(extra):
    assert wire.error_from_wire(extra) is None or type(wire.error_from_wire(extra)) is RefusedError


def test_an_error_with_a_very_long_text_still_arrives(client, pictures):
    """gRPC drops a status that is larger than 8 KB."""
    name = "ä" * 20_000
    with pytest.raises(RefusedError, match=r"(?s)ä … .*headwater serve"):
        client.list_samples(Listing(f"s3://{name}"))


def test_a_request_for_the_largest_chunk_has_no_more_values_than_may_be_and_others_are_not_read(monkeypatch, chunk_of):
    chunk = chunk_of()
    more = replace(chunk, samples=(*chunk.samples, replace(chunk.samples[0], id=len(chunk.samples))))
    a_sample = most_values(more.dumps()) - most_values(chunk.dumps())
    assert LIMITS["chunk_rows"][1] * a_sample + 100_000 < wire.MAX_REQUEST_VALUES
    monkeypatch.setattr(wire.json, "loads", lambda text: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match="lower chunk_rows"):
        wire.loads(b"[]," * wire.MAX_REQUEST_VALUES)

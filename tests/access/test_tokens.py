"""A real node with a tokens file, over TLS: who gets in, to what, and what the others are told."""

import os
import signal
import threading
from datetime import date

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from headwater.data.layouts import list_samples
from headwater.data.transforms import Resize, ToFloat, Transforms
from headwater.data.wire import Chunk, Extraction, Listing
from headwater.errors import RefusedError
from headwater.train.access import Access
from headwater.train.client import NodeClient

PIXELS = Transforms([Resize((8, 8)), ToFloat()])


@pytest.fixture(scope="module")
def node(start_node_once, tmp_path_factory, pictures, certificates, entry_of):
    """Serves pictures in three classes: "all" may read everything, "train" the folder `a`; "later" sees what others do;
    "old" has expired."""
    folder = tmp_path_factory.mktemp("node")
    file = folder / "tokens.toml"
    file.write_text(
        entry_of("all")
        + entry_of("train", roots=[str(pictures / "a")], max_upload="1KB", max_chunks=1)
        + entry_of("later", operator=True)
        + entry_of("old", expires=date(2020, 1, 1))
    )
    tls = ("--tls-cert", str(certificates.node_pem), "--tls-key", str(certificates.node_key))
    return start_node_once(pictures, options=("--tokens", str(file), "--state", str(folder / "state"), *tls))


@pytest.fixture
def enter(node, tokens, certificates):
    """enter(name): the node as the tenant of that name sees it."""
    clients = []

    def connect(name):
        clients.append(NodeClient(node.address, Access(tokens.get(name), certificates.ca_pem)))
        return clients[-1]

    yield connect
    for each in clients:
        each.close()


def put(raw):
    writer, _ = raw.do_put(flight.FlightDescriptor.for_command(b"0" * 64), pa.schema([("piece", pa.binary())]))
    writer.close()


CALLS = {
    "hello": lambda raw: list(raw.do_action(flight.Action("hello", b""))),
    "status": lambda raw: list(raw.do_action(flight.Action("status", b""))),
    "has-prefix": lambda raw: list(raw.do_action(flight.Action("has-prefix", b"0" * 64))),
    "unknown action": lambda raw: list(raw.do_action(flight.Action("shell", b""))),
    "listing": lambda raw: raw.do_get(flight.Ticket(Listing("file:///").dumps())).read_all(),
    "blob": lambda raw: raw.do_get(flight.Ticket(b'{"kind":"blob","protocol":3,"num_bytes":9}')).read_all(),
    "garbage": lambda raw: raw.do_get(flight.Ticket(b"\xff")).read_all(),
    "put": put,
    "list_actions": lambda raw: raw.list_actions(),
    "list_flights": lambda raw: list(raw.list_flights()),
    "get_flight_info": lambda raw: raw.get_flight_info(flight.FlightDescriptor.for_command(b"x")),
    "do_exchange": lambda raw: raw.do_exchange(flight.FlightDescriptor.for_command(b"x"))[1].read_chunk(),
}


@pytest.mark.parametrize(("name", "said"), [("nobody", "none was sent"), ("foreign", "not one of this node's"),
                                            ("old", "expired at 2020-01-02 00:00 UTC")])  # fmt: skip
def test_every_kind_of_call_is_refused_without_a_good_token(name, said, node, tokens, certificates):
    headers = [(b"authorization", f"Bearer {tokens[name]}".encode())] if name in tokens else []
    with flight.connect(node.address, tls_root_certs=certificates.ca_pem.read_bytes()) as raw:
        for call in CALLS.values():
            refused = pytest.raises(flight.FlightUnauthenticatedError, match=said)
            with refused as caught, flight_options(raw, headers) as armed:
                call(armed)
            assert tokens["foreign"] not in str(caught.value)


class flight_options:  # noqa: N801  a client whose every call has these headers
    def __init__(self, raw, headers):
        self._raw, self._options = raw, flight.FlightCallOptions(headers=headers)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return None

    def __getattr__(self, name):
        return lambda *args: getattr(self._raw, name)(*args, options=self._options)


def test_a_client_is_told_plainly_what_to_do(enter, node):
    with pytest.raises(
        RefusedError, match=rf"{node.address.replace('+', '.')} lets nobody in .* none was sent; ask whoever"
    ):
        enter("nobody").hello()
    with pytest.raises(RefusedError, match="expired at 2020-01-02 00:00 UTC; ask whoever runs the node"):
        enter("old").list_samples(Listing("/"))


def test_a_token_opens_what_it_is_for_and_nothing_else(enter, pictures):
    everything, some = enter("all"), enter("train")
    assert len(everything.list_samples(Listing(str(pictures)))) == 50
    assert some.hello()["roots"] == [(pictures / "a").as_uri()]
    assert everything.hello()["roots"] == [pictures.as_uri()]
    for url in (str(pictures), str(pictures / "b"), f"{pictures}/a/../b", f"{pictures.as_uri()}/a/%2e%2e/b", "/etc"):
        with pytest.raises(RefusedError, match=rf"is not below what tenant train may read \(file://{pictures}/a\)"):
            some.list_samples(Listing(url))


def test_rows_too_come_only_from_below_the_tokens_roots(enter, pictures):
    samples = list_samples(str(pictures))
    want = Extraction(samples.url, PIXELS, None, (PIXELS.pixel_spec,), node_batch=8)
    chunk = Chunk(want, "job", 0, 0, 0, tuple(samples.take(range(20))))
    assert enter("all").rows(chunk, threading.Event()).good.all()
    for ask in (lambda client: client.rows(chunk, threading.Event()), lambda client: client.probe(chunk)):
        with pytest.raises(RefusedError, match="is not below what tenant train may read"):
            ask(enter("train"))


def test_an_upload_above_the_tenants_limit_is_refused(enter, tmp_path):
    client = enter("train")
    assert client.hello()["max_upload_bytes"] == 1000
    (tmp_path / "x.onnx").write_bytes(bytes(5000))
    with pytest.raises(RefusedError, match=r"more than 0\.001 MB, the limit of tenant train; cut earlier, or ask"):
        client.upload("0" * 64, tmp_path / "x.onnx")


def test_a_whole_job_runs_with_a_token_over_tls(node, tokens, certificates, pictures, monkeypatch):
    import torch

    import headwater as hw

    monkeypatch.setenv("HEADWATER_TOKEN", tokens["all"])
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    with hw.near(model, pictures, transforms=PIXELS, nodes=[node.address], batch_size=16, cut="input",
                 tls_ca=certificates.ca_pem) as job:  # fmt: skip
        assert sum(len(y) for _, y in job.loader) == 50


def test_a_changed_file_counts_from_the_next_call_and_a_broken_one_does_not(start_node, tmp_path, tokens, entry_of):
    file, said = tmp_path / "tokens.toml", tmp_path / "said"
    file.write_text(entry_of("all"))
    node = start_node(tmp_path, options=("--tokens", str(file), "--state", str(tmp_path / "state")),
                      wrap=("sh", "-c", f'exec "$@" 2>{said}', "sh"))  # fmt: skip
    old, new = (NodeClient(node.address, Access(tokens[name])) for name in ("all", "later"))

    def replace(text):
        (tmp_path / "new").write_text(text)
        os.replace(tmp_path / "new", file)

    old.hello()
    with pytest.raises(RefusedError, match="not one of this node's"):
        new.hello()
    replace(entry_of("all") + entry_of("later"))
    new.hello()
    for broken in ("[[token", "", entry_of("all", roots=["/elsewhere"]), '[[token]]\ntenant = "x"\n'):
        replace(broken)
        new.hello()
    file.unlink()
    new.hello()
    replace(entry_of("later"))
    new.hello()
    with pytest.raises(RefusedError, match="not one of this node's"):
        old.hello()
    node.process.send_signal(signal.SIGTERM)
    node.process.wait()
    log = said.read_text()
    assert log.count("the new one is not used; the one before stays in force") == 5
    for reason in ("is not TOML", "has no [[token]]", "the root file:///elsewhere of all is not below", "sha256 must",
                   "can't be read: No such file"):  # fmt: skip
        assert reason in log
    assert not any(token in log for token in tokens.values())


def test_a_job_whose_token_is_taken_back_stops_with_the_reason(start_node, tmp_path, pictures, tokens, entry_of):
    import torch

    import headwater as hw

    file = tmp_path / "tokens.toml"
    file.write_text(entry_of("all"))
    node = start_node(pictures, options=("--tokens", str(file), "--state", str(tmp_path / "state")))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))
    with hw.near(model, pictures, transforms=PIXELS, nodes=[node.address], cut="input", token=tokens["all"]) as job:
        assert sum(len(y) for _, y in job.loader) == 50
        file.write_text(entry_of("later"))
        with pytest.raises(RefusedError, match="the token that was sent is not one of this node's; ask whoever"):
            sum(len(y) for _, y in job.loader)


def test_a_tenant_sees_its_own_numbers_and_faults_and_an_operator_all(enter, pictures):
    for name in ("all", "train"):
        with pytest.raises(RefusedError):
            enter(name).list_samples(Listing("/etc"))

    def seen(name):
        said = enter(name).status()
        tenants = {labels[0] for metric, labels, _ in said["numbers"] if metric == "headwater_errors_total"}
        return tenants, {each["tenant"] for each in said["about"]["faults"]}

    assert seen("train") == ({"train"}, {"train"})
    assert all({"all", "train"} <= each for each in seen("later"))

"""TLS and mutual TLS with real nodes; and what a trainer does not do with a token."""

import pytest

from headwater.errors import ConfigError, UnreachableError
from headwater.train.access import Access
from headwater.train.client import NodeClient

TOKEN = "hw_" + "t" * 43


@pytest.fixture(scope="module")
def node(start_node_once, tmp_path_factory, certificates):
    """Wants a certificate of its clients."""
    folder = tmp_path_factory.mktemp("node")
    files = {"cert": certificates.node_pem, "key": certificates.node_key, "client-ca": certificates.ca_pem}
    tls = [each for name, path in files.items() for each in (f"--tls-{name}", str(path))]
    return start_node_once(folder, options=("--state", str(folder), *tls))


def hello(address, access):
    client = NodeClient(address, access)
    try:
        return client.hello()
    finally:
        client.close()


def test_both_sides_show_their_certificates(node, certificates):
    assert node.address.startswith("grpc+tls://")
    found = hello(node.address, Access(None, certificates.ca_pem, certificates.client_pem, certificates.client_key))
    assert found["protocol"]


@pytest.mark.parametrize("what", ["no certificate", "a foreign authority", "no authority", "no TLS"])
def test_who_has_the_wrong_ones_is_not_let_in_and_told_where_to_look(what, node, certificates):
    ours = (certificates.client_pem, certificates.client_key)
    access = {
        "no certificate": Access(None, certificates.ca_pem),
        "a foreign authority": Access(None, certificates.other_pem, *ours),
        "no authority": Access(None, None, *ours),
        "no TLS": Access(),
    }[what]
    address = node.address.replace("+tls", "") if what == "no TLS" else node.address
    hint = "does it want TLS" if what == "no TLS" else "do certificates fit: is its one signed by tls_ca"
    with pytest.raises(UnreachableError, match=hint):
        hello(address, access)


@pytest.mark.parametrize("address", ["grpc://store-1:8815", "grpc+tcp://10.0.0.5:8815", "grpc://127.0.0.1.evil.org:1"])
def test_a_token_is_not_sent_where_others_can_read_it(address):
    with pytest.raises(ConfigError, match=r"is not sent to .* in the open; use grpc\+tls://") as caught:
        NodeClient(address, Access(TOKEN))
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["grpc://127.0.0.1:1", "grpc://localhost:1", "grpc://[::1]:1", "grpc+tls://store-1:1"]
)
def test_a_token_is_sent_over_tls_and_within_the_machine(address):
    NodeClient(address, Access(TOKEN)).close()


def test_arguments_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("HEADWATER_TOKEN", TOKEN)
    monkeypatch.setenv("HEADWATER_TLS_CA", "env.pem")
    assert Access.of() == Access(TOKEN, "env.pem")
    assert Access.of(tls_ca="mine.pem", token=None).tls_ca == "mine.pem"
    assert TOKEN not in repr(Access.of())


@pytest.mark.parametrize("given", [{"token": "password"}, {"tls_cert": "x.pem"}, {"tls_key": "x.pem"}])
def test_what_can_not_be_meant_is_refused_without_telling_it(given):
    with pytest.raises(ConfigError) as caught:
        Access(**given)
    assert "password" not in str(caught.value)


def test_files_that_do_not_fit_are_named_with_the_way_out(certificates, tmp_path):
    (tmp_path / "x.pem").write_text("no certificate")
    address = "grpc+tls://127.0.0.1:1"
    for file in (tmp_path / "x.pem", tmp_path / "absent.pem"):
        with pytest.raises(ConfigError, match=rf"tls_ca {file} can't be used: .*; give the certificate"):
            NodeClient(address, Access(tls_ca=file))
    with pytest.raises(ConfigError, match=r"tls_cert .* can't be used: KEY_VALUES_MISMATCH"):
        NodeClient(address, Access(tls_cert=certificates.client_pem, tls_key=certificates.node_key))


def test_a_token_for_no_node_is_refused(pictures):
    import torch

    import headwater as hw

    with pytest.raises(ConfigError, match="token, tls_ca is for nodes of your own"):
        hw.near(torch.nn.Flatten(), pictures, transforms=[], token=TOKEN, tls_ca="x.pem")


def test_an_address_that_others_may_reach_needs_tokens_and_tls_or_a_loud_word(start_node, tmp_path):
    """LOCALHOST is this machine, in a spelling that is not taken for it: nobody outside can reach the test."""
    said = tmp_path / "said"
    node = start_node(tmp_path, listen="LOCALHOST:0", options=("--insecure", "--state", str(tmp_path)),
                      wrap=("sh", "-c", f'exec "$@" 2>{said}', "sh"))  # fmt: skip
    assert "INSECURE: LOCALHOST has no tokens file and no TLS; everyone who can reach it may read" in said.read_text()
    assert hello(node.address, Access())["protocol"]

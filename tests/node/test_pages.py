"""The pages over HTTP: what they say, to whom, and what a client that means harm can't do."""

import http.client
import json
import re
import socket
import threading

import pytest

from headwater import page
from headwater.core.access import Grant, token_digest
from headwater.core.exposition import Sample
from headwater.core.redact import TOKEN_START
from headwater.errors import ConfigError
from headwater.node import pages as module
from headwater.node import web
from headwater.node.metrics import Shown
from headwater.node.pages import Pages
from headwater.node.web import listen_http

TOKEN = TOKEN_START + "a" * 40


class Asking:
    """Pages of a node that is not there."""

    def __init__(self, *grants):
        self.fault = ""
        self.free = threading.Event()
        self.free.set()
        self.samples = [Sample("headwater_rows_sent_total", 5.0, (tenant,)) for tenant in ("mine", "others")]
        tokens = (lambda: grants) if grants else None
        self.pages = Pages(listen_http("127.0.0.1:0"), self.look, lambda: self.fault, tokens)

    def look(self, num_turned_away):
        self.free.wait(30)
        counted = [*self.samples, Sample("headwater_http_turned_away_total", num_turned_away)]
        return Shown(tuple(counted), lambda grant: {"prefixes": [], "faults": [], "roots": [str(grant)]})

    def ask(self, path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.pages.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read().decode()
        finally:
            connection.close()

    def get(self, path, method="GET", **headers):
        answer, text = self.ask(path, method, **headers)
        numbers = re.findall(r"^headwater_http\S+ \d+$", text, re.MULTILINE)
        return answer.status, "\n".join(numbers) if path == "/metrics" and numbers else text

    def status(self, **headers):
        answer, text = self.ask("/status.json", **headers)
        return answer.status, json.loads(text)

    def connect(self, data=b""):
        connection = socket.create_connection(("127.0.0.1", self.pages.port), timeout=30)
        connection.sendall(data)
        return connection


@pytest.fixture
def asking():
    asking = Asking()
    yield asking
    asking.free.set()
    asking.pages.close()


def test_every_page_says_what_it_is_for(asking):
    assert asking.get("/healthz") == (200, "ok\n")
    assert asking.get("/readyz?verbose") == (200, "ready\n")
    assert asking.get("/metrics") == (200, "headwater_http_turned_away_total 0")
    assert asking.get("/metrics", "HEAD") == (200, "")
    asking.fault = "draining"
    assert asking.get("/readyz") == (503, "draining\n")
    assert asking.get("/healthz") == (200, "ok\n")


def test_what_is_no_page_is_an_error_with_the_way_out(asking):
    assert asking.get("/x") == (404, "there are / to look at, /metrics, /healthz and /readyz\n")
    assert asking.get("/metrics", "POST") == (405, "pages are read with GET\n")
    assert asking.get("/metrics", Cookie="x" * 10_000) == (431, "a request has at most 8192 bytes\n")
    with asking.connect(b"what?\r\n\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_half_a_request_is_hung_up_on(asking, monkeypatch):
    monkeypatch.setattr(web, "WITHIN_S", 0.05)
    with asking.connect(b"GET /metrics HTT") as connection:
        assert connection.recv(100) == b""
    assert asking.pages.num_turned_away == 1


def test_the_oldest_of_too_many_connections_goes_and_a_new_one_is_answered(asking, monkeypatch):
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 4)
    idle = [asking.connect() for _ in range(5)]
    assert asking.get("/healthz") == (200, "ok\n")
    assert idle[0].recv(100) == b""
    for connection in idle:
        connection.close()


def test_numbers_that_take_long_hold_up_themselves_alone(asking):
    asking.free.clear()
    waiting = [asking.connect(b"GET /metrics HTTP/1.1\r\n\r\n") for _ in range(3)]
    assert asking.get("/healthz") == (200, "ok\n")
    asking.free.set()
    for connection in waiting:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.close()


def test_numbers_that_can_not_be_made_are_an_error_and_later_ones_are_made_again(asking, monkeypatch, caplog):
    monkeypatch.setattr(module, "FRESH_S", -1.0)
    monkeypatch.setattr(asking.pages, "_look", lambda num: 1 / 0)
    assert asking.get("/metrics")[0] == 500
    assert "unexpected error while metrics were made" in caplog.text
    assert asking.get("/status.json")[0] == 500
    monkeypatch.setattr(asking.pages, "_look", asking.look)
    assert asking.get("/metrics") == (200, "headwater_http_turned_away_total 0")


def test_closed_pages_leave_no_thread_and_no_port():
    asking = Asking()
    asking.get("/metrics")
    with asking.connect(b"GET"):
        asking.pages.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pages"]
    listen_http(f"127.0.0.1:{asking.pages.port}").close()


def test_the_page_comes_whole_from_the_node_under_rules_that_allow_nothing_else(asking):
    for path, (_, kind) in page.FILES.items():
        answer, text = asking.ask(path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, kind)
        rules = answer.headers["Content-Security-Policy"]
        assert rules.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in rules
        assert not re.search(r"https?://(?!www\.w3\.org/)|innerHTML|eval\(| style=| onclick=", text), path


def test_the_page_gets_the_numbers_of_metrics_made_in_the_same_moment(asking, monkeypatch):
    monkeypatch.setattr(module, "FRESH_S", 1e9)
    said = asking.status()[1]["nodes"][0]["numbers"]
    told = asking.ask("/metrics")[1]
    assert len(said) == 3
    for name, labels, value in said:
        shown = f'{name}{{tenant="{labels[0]}"}}' if labels else name
        assert f"{shown} {value:g}" in told


def test_however_many_look_the_node_is_looked_at_a_few_times_a_second_at_most(asking, monkeypatch):
    looks = []
    monkeypatch.setattr(module, "FRESH_S", 1e9)
    monkeypatch.setattr(asking.pages, "_look", lambda num: looks.append(num) or asking.look(num))
    for _ in range(10):
        assert asking.status()[0] == asking.get("/metrics")[0] == 200
    assert len(looks) == 1


def test_a_token_shows_its_tenants_numbers_alone_and_metrics_need_none():
    asking = Asking(Grant("mine", token_digest(TOKEN)))
    try:
        status, said = asking.status()
        assert (status, "a token is needed" in said["fault"]) == (401, True)
        assert asking.status(Authorization=f"Bearer {TOKEN}x")[0] == 401
        status, said = asking.status(Authorization=f"Bearer {TOKEN}")
        assert status == 200
        assert [labels for name, labels, _ in said["nodes"][0]["numbers"] if labels] == [["mine"]]
        assert "others" not in json.dumps(said)
        assert asking.get("/metrics")[0] == 200
    finally:
        asking.pages.close()


def test_an_operators_token_shows_what_all_tenants_do():
    asking = Asking(Grant("mine", token_digest(TOKEN), is_operator=True))
    try:
        said = asking.status(Authorization=f"Bearer {TOKEN}")[1]
        assert [each["name"] for each in said["nodes"][0]["tenants"]] == ["mine", "others"]
    finally:
        asking.pages.close()


def test_no_token_is_taken_from_another_machine(monkeypatch):
    monkeypatch.setattr(web, "is_loopback", lambda host: False)  # as a connection from elsewhere looks
    asking = Asking(Grant("mine", token_digest(TOKEN)))
    try:
        status, said = asking.status(Authorization=f"Bearer {TOKEN}")
        assert (status, "headwater ui grpc+tls://" in said["fault"]) == (403, True)
    finally:
        asking.pages.close()


def test_a_name_that_was_turned_into_our_address_gets_no_numbers(asking):
    assert asking.status(Host="evil.example")[0] == 421
    assert asking.status(Host="localhost:1")[0] == 200


@pytest.mark.parametrize("address", ["9815", ":9815", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_explained(address):
    with pytest.raises(ConfigError, match="must look like"):
        listen_http(address)


def test_a_port_that_is_taken_is_a_plain_error():
    with listen_http("127.0.0.1:0") as taken, pytest.raises(ConfigError, match="is something else running there"):
        listen_http(f"127.0.0.1:{taken.getsockname()[1]}")

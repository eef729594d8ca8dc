"""The pages over HTTP: what they say, and what a client that means harm can't do."""

import http.client
import socket
import threading

import pytest

from headwater.errors import ConfigError
from headwater.node import pages as module
from headwater.node.pages import Pages, listen_http


class Asking:
    """Pages of a node that is not there."""

    def __init__(self):
        self.is_ready = True
        self.free = threading.Event()
        self.free.set()
        self.pages = Pages(listen_http("127.0.0.1:0"), self.metrics, lambda: self.is_ready)

    def metrics(self, num_turned_away):
        self.free.wait(30)
        return f"turned_away {num_turned_away}\n"

    def get(self, path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.pages.port, timeout=30)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

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
    assert asking.get("/metrics") == (200, "turned_away 0\n")
    assert asking.get("/metrics", "HEAD") == (200, "")
    asking.is_ready = False
    assert asking.get("/readyz") == (503, "draining\n")
    assert asking.get("/healthz") == (200, "ok\n")


def test_what_is_no_page_is_an_error_with_the_way_out(asking):
    assert asking.get("/") == (404, "there are /metrics, /healthz and /readyz\n")
    assert asking.get("/metrics", "POST") == (405, "pages are read with GET\n")
    assert asking.get("/metrics", Cookie="x" * 10_000) == (431, "a request has at most 8192 bytes\n")
    with asking.connect(b"what?\r\n\r\n") as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_half_a_request_is_hung_up_on(asking, monkeypatch):
    monkeypatch.setattr(module, "WITHIN_S", 0.05)
    with asking.connect(b"GET /metrics HTT") as connection:
        assert connection.recv(100) == b""
    assert asking.pages.num_turned_away == 1


def test_the_oldest_of_too_many_connections_goes_and_a_new_one_is_answered(asking, monkeypatch):
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 4)
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
    monkeypatch.setattr(asking.pages, "_metrics", lambda num: 1 / 0)
    assert asking.get("/metrics")[0] == 500
    assert "unexpected error while metrics were made" in caplog.text
    monkeypatch.setattr(asking.pages, "_metrics", lambda num: "well\n")
    assert asking.get("/metrics") == (200, "well\n")


def test_closed_pages_leave_no_thread_and_no_port():
    asking = Asking()
    asking.get("/metrics")
    with asking.connect(b"GET"):
        asking.pages.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "pages"]
    listen_http(f"127.0.0.1:{asking.pages.port}").close()


@pytest.mark.parametrize("address", ["9815", ":9815", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_explained(address):
    with pytest.raises(ConfigError, match="must look like"):
        listen_http(address)


def test_a_port_that_is_taken_is_a_plain_error():
    with listen_http("127.0.0.1:0") as taken, pytest.raises(ConfigError, match="is something else running there"):
        listen_http(f"127.0.0.1:{taken.getsockname()[1]}")

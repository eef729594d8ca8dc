"""The store that fails when told, in front of a plain web server."""

import http.client
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest
from bench.badstore import ERRORS, BadStore

DATA = bytes(range(256)) * 16


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(DATA), DATA))
        else:
            self.send_header("Content-Length", str(len(DATA)))
            self.send_header("X-Host", self.headers["Host"])
            self.end_headers()
            self.wfile.write(DATA)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[tuple[BadStore, http.client.HTTPConnection]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = ("127.0.0.1", free.getsockname()[1])
    bad = BadStore(listen, ("127.0.0.1", server.server_address[1]), seed=0)
    connection = http.client.HTTPConnection(*listen, timeout=30)
    yield bad, connection
    connection.close()
    bad.close()
    server.shutdown()
    server.server_close()
    thread.join()


def get(connection: http.client.HTTPConnection, path: str = "/", method: str = "GET") -> tuple[int, bytes]:
    connection.request(method, path)
    answer = connection.getresponse()
    return answer.status, answer.read()


@pytest.mark.parametrize("path", ["/", "/chunked"])
def test_a_good_store_is_passed_through(store, path):
    _, connection = store
    assert [get(connection, path) for _ in range(3)] == [(200, DATA)] * 3
    assert get(connection, method="HEAD") == (200, b"")


def test_the_host_header_goes_through_since_the_signature_covers_it(store):
    _, connection = store
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    assert answer.headers["X-Host"] == f"{connection.host}:{connection.port}"


@pytest.mark.parametrize("mode", list(ERRORS))
def test_errors_are_those_of_s3_and_end_when_told(store, mode):
    bad, connection = store
    bad(mode)
    status, body = get(connection)
    assert status == int(ERRORS[mode][0][:3])
    assert f"<Code>{ERRORS[mode][1]}</Code>".encode() in body
    assert bad("good") == 1
    assert get(connection) == (200, DATA)


def test_half_a_body_comes_under_the_whole_length(store):
    bad, connection = store
    bad("half")
    with pytest.raises(http.client.IncompleteRead) as caught:
        get(connection)
    assert caught.value.partial == DATA[: len(DATA) // 2]


def test_a_flipped_bit_is_one_bit(store):
    bad, connection = store
    bad("flip")
    _, body = get(connection)
    assert sum((one ^ other).bit_count() for one, other in zip(body, DATA, strict=True)) == 1

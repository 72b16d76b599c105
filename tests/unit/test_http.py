"""The client against a real socket: what each kind of trouble is called."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvfleet.core.http import HttpClient, HttpFailure


class Server(BaseHTTPRequestHandler):
    seen: list[dict] = []  # noqa: RUF012 - one server a module

    def _respond(self, body):
        self.seen.append({"path": self.path, "key": self.headers.get("Authorization")})
        status, text, end = {
            "/ok": (200, '{"a": 1}', True),
            "/empty": (200, "", True),
            "/text": (200, "not json", True),
            "/busy": (503, "loading", True),
            "/denied": (401, '{"error": "no key"}', True),
            "/long": (500, "x" * 5000, True),
            "/cut": (200, '{"a":', False),
            "/stream": (200, 'data: {"n": 1}\n\n: comment\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n', True),
            "/stream-cut": (200, 'data: {"n": 1}\n\n', True),
            "/stream-error": (200, 'data: {"error": {"message": "engine died"}}\n\n', True),
        }[self.path]
        self.send_response(status)
        self.send_header("Content-Length", str(len(text) + (0 if end else 100)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self._respond(None)

    def do_POST(self):
        self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(url):
    return HttpClient(url, "secret")


def test_answers_and_streams(client):
    assert client.get_json("/ok") == {"a": 1}
    assert client.post_json("/empty", {}) is None
    events = list(client.stream("/stream", {}))
    assert [event for _, event in events] == [{"n": 1}, {"n": 2}]
    assert 0 <= events[0][0] <= events[1][0]


def test_the_key_goes_out_as_a_bearer_token_and_never_into_a_message(client):
    client.get_json("/ok")
    assert Server.seen[-1]["key"] == "Bearer secret"
    with pytest.raises(HttpFailure) as failure:
        client.get_json("/denied")
    assert "secret" not in str(failure.value)
    assert failure.value.status == 401


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [("/busy", "status", 503), ("/text", "broken", None), ("/cut", "broken", None)],
)
def test_kinds_of_trouble(client, path, kind, status):
    with pytest.raises(HttpFailure) as failure:
        client.get_json(path)
    assert (failure.value.kind, failure.value.status) == (kind, status)


def test_a_stream_that_ends_early_or_carries_an_error_is_broken(client):
    for path in ("/stream-cut", "/stream-error"):
        with pytest.raises(HttpFailure) as failure:
            list(client.stream(path, {}))
        assert failure.value.kind == "broken"
    assert "engine died" in str(failure.value)


def test_a_long_error_is_cut(client):
    with pytest.raises(HttpFailure) as failure:
        client.get_text("/long")
    assert len(str(failure.value)) < 600


def test_nobody_listening_is_refused():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(HttpFailure) as failure:
        HttpClient(f"http://127.0.0.1:{port}").get_text("/")
    assert failure.value.kind == "refused"


def test_a_server_that_says_nothing_is_a_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(HttpFailure) as failure:
            client.get_text("/", timeout_s=0.2)
        assert failure.value.kind == "timeout"
        with pytest.raises(HttpFailure) as failure:
            list(client.stream("/", {}, timeout_s=0.2))
        assert failure.value.kind == "timeout"


def test_a_proxy_of_the_environment_sees_nothing(url, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert HttpClient(url).get_json("/ok") == {"a": 1}

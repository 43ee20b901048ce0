"""The server of play.py over HTTP: who gets an answer, how a text comes, and what ends it."""

import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import threading
import time
import urllib.request

import pytest

from scripts.playground import models
from scripts.playground import server as server_module
from scripts.playground.runs import RunFolder
from scripts.playground.server import MOST_CONNECTIONS
from tests.scripts.playground.pages import (
    HOSTILE,
    ask,
    asked,
    connect,
    own_headers,
    played_model,
    records_of,
    serving,
    wait_until,
    written,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving([played_model("one"), played_model("two <b>", seed=1)], tmp_path_factory.mktemp("out")) as server:
        yield server


def test_a_port_that_is_taken_is_not_shared(server, tmp_path):
    """On Windows the option that HTTPServer sets would let both listen."""
    with pytest.raises(OSError):
        server_module.Server("127.0.0.1", server.server_port, [], RunFolder(tmp_path))
    assert server_module.Server.allow_reuse_address == (os.name == "posix")


def test_the_page_may_run_its_own_script_and_nothing_else(server):
    """Reference: the digests of what stands in the page, and the rules that no directive may loosen."""
    status, headers, content = ask(server, "GET", "/", headers={"Origin": None})
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert "unsafe" not in headers["Content-Security-Policy"] and "http" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_the_page_makes_no_markup_of_texts_and_names_no_host():
    page = server_module.PAGE.read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "DOMParser",
        " onclick=",
        " style=",
    ):
        assert word not in page, word
    assert set(re.findall(r"https?://[^\"' ]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=(?!\"data:,\")", page)


def test_the_models_are_told(server):
    status, headers, content = ask(server, "GET", "/api/models")
    told = json.loads(content)
    assert status == 200 and headers["Content-Type"].startswith("application/json")
    assert [model["name"] for model in told["models"]] == ["one", "two <b>"]
    parameters = sum(parameter.numel() for parameter in server.models[0].model.parameters())
    assert told["models"][0]["parameters"] == parameters and told["models"][0]["can_chat"]


def test_a_text_comes_piece_by_piece(server):
    """Reference: the same request to the model itself."""
    records = written(server, max_new_tokens=20)
    found = []
    _, request = server_module.parse_request(json.dumps(asked(max_new_tokens=20)).encode(), 1)
    server.models[0].write(request, found.extend, lambda ahead: None)
    assert [record["text"] for record in records[:-1]] == [piece.text for piece in found]
    labels, probability, likeliest = records[0]["tokens"][0]
    assert (labels, probability) == (found[0].tokens[0].label, pytest.approx(found[0].tokens[0].probability, rel=1e-3))
    assert len(likeliest) == 6 and likeliest[0][1] >= likeliest[-1][1]
    assert records[-1]["reason"] == "length" and records[-1]["tokens"] == 20
    assert written(server, max_new_tokens=20)[:-1] == records[:-1], "the seed decides the text"
    assert written(server, max_new_tokens=20, model=1)[:-1] != records[:-1]


def test_the_first_piece_is_there_before_the_last_one_is_made(server, monkeypatch):
    """The model is held after its first token until that was read."""
    was_read = threading.Event()
    write = server_module.PlayedModel.write

    def held(model, request, tell, wait):
        def tell_and_wait(pieces):
            tell(pieces)
            assert was_read.wait(60)

        return write(model, request, tell_and_wait, wait)

    monkeypatch.setattr(server_module.PlayedModel, "write", held)
    connection = connect(server)
    connection.request("POST", "/api/generate", json.dumps(asked(text="a b")), own_headers(server))
    answer = connection.getresponse()
    assert answer.getheader("Transfer-Encoding") == "chunked"
    first = answer.readline()
    was_read.set()
    assert "text" in json.loads(first) and records_of(answer.read())[-1]["tokens"] == 8
    connection.close()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_stay_texts(server, text):
    """A line of JSON each, in ASCII, whatever is in the text; what a browser would obey has a visible form beside it."""
    status, headers, content = ask(server, "POST", "/api/generate", asked(text=text, max_new_tokens=2))
    assert status == 200 and content.isascii()
    assert (
        headers["Content-Type"] == "application/x-ndjson; charset=utf-8"
        and headers["X-Content-Type-Options"] == "nosniff"
    )
    assert records_of(content)[-1]["tokens"] == 2


def test_what_a_model_says_is_shown_and_not_obeyed():
    """Controls and marks of direction of a text that a model might write. Reference: the visible forms of a terminal."""
    token = server_module.Piece("\x1b[1m\u202ex", [])
    assert server_module.piece_record(token)["shown"] == "␛[1m<U+202E>x"
    assert "shown" not in server_module.piece_record(server_module.Piece("<b>\n你好", []))
    assert server_module.rounded(float("nan")) is None


def test_a_conversation_is_answered(server):
    messages = [{"role": "user", "content": "<script>"}]
    assert written(server, text=None, messages=messages)[-1]["tokens"] > 0


OWN = "http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "example.com"},
        {"Host": "example.com:{port}", "Origin": "http://example.com:{port}"},
        {"Host": None},
        {"Origin": "http://example.com"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1:{port}.example.com"},
        {"Origin": "http://127.0.0.1:{port}/x"},
        {"Origin": "http://[x"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method, path", [("GET", "/api/models"), ("GET", "/api/runs"), ("POST", "/api/generate")])
def test_other_hosts_and_origins_are_refused(server, method, path, headers):
    headers = {name: value and value.format(port=server.server_port) for name, value in headers.items()}
    status, _, content = ask(server, method, path, asked() if method == "POST" else None, headers)
    assert status == 403 and b"tokens" not in content


def test_a_page_of_another_host_is_not_given(server):
    assert ask(server, "GET", "/", headers={"Host": "example.com"})[0] == 403
    assert ask(server, "GET", "/", headers={"Host": "localhost:1234", "Origin": None})[0] == 200


def fetched(site, mode, dest):
    """The headers that a browser sends without an Origin (https://www.w3.org/TR/fetch-metadata/)."""
    return {"Origin": None, "Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}


def test_the_page_is_given_to_visitors_and_to_no_other_page(server):
    """Reference: what browsers send for an address that is typed, a link, a reload; for a frame, a script and a fetch."""
    for site in ("none", "same-origin", "same-site", "cross-site"):
        assert ask(server, "GET", "/", headers=fetched(site, "navigate", "document"))[0] == 200
    for site in ("same-site", "cross-site"):
        assert ask(server, "GET", "/", headers=fetched(site, "navigate", "iframe"))[0] == 403
        assert ask(server, "GET", "/", headers=fetched(site, "no-cors", "script"))[0] == 403
        assert ask(server, "GET", "/", headers=fetched(site, "cors", "empty"))[0] == 403
        assert ask(server, "GET", "/api/runs", headers=fetched(site, "navigate", "document"))[0] == 403
    for origin in ("http://example.com", "null", f"https://127.0.0.1:{server.server_port}"):
        assert ask(server, "GET", "/", headers={"Origin": origin})[0] == 403
    assert ask(server, "GET", "/")[0] == 200


def test_a_request_without_an_origin(server):
    """A browser leaves it out where it reads from the same page, and nowhere else."""
    assert ask(server, "GET", "/api/models", headers={"Origin": None})[0] == 200
    assert ask(server, "GET", "/api/models", headers={"Origin": None, "Sec-Fetch-Site": "same-origin"})[0] == 200
    assert ask(server, "GET", "/api/models", headers={"Origin": None, "Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(server, "GET", "/api/models", headers={"Origin": None, "Sec-Fetch-Site": "same-site"})[0] == 403
    assert ask(server, "POST", "/api/generate", asked(), {"Origin": None})[0] == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None])
def test_what_a_form_can_send_is_refused(server, kind):
    assert ask(server, "POST", "/api/generate", asked(), {"Content-Type": kind})[0] == 415


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"{", 400),
        ({}, json.dumps(asked(temperature=-1)).encode(), 400),
        ({}, json.dumps(asked(max_new_tokens=1e99)).encode(), 400),
        ({"Content-Length": None}, b"{}", 411),
        ({"Content-Length": "-1"}, b"{}", 411),
        ({"Content-Length": "1_0"}, b"{}", 411),
        ({"Content-Length": "9" * 30}, b"{}", 411),
        ({"Content-Length": None, "Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 411),
        ({}, b" " * (1 << 20) + b"{}", 413),
    ],
    ids=range(9),
)
def test_a_request_of_the_wrong_form_gets_a_line(server, headers, body, status):
    found, answered, content = ask(server, "POST", "/api/generate", body, headers)
    assert found == status and answered["Content-Type"] == "text/plain; charset=utf-8"
    assert b"\n" not in content and b"Traceback" not in content


@pytest.mark.parametrize("path", ["/x", "/../etc/passwd", "/api", "/api/runs/../../etc/passwd", "/index.html", "*"])
def test_there_are_no_other_pages(server, path):
    assert ask(server, "GET", path)[0] == 404
    assert ask(server, "POST", path, asked())[0] == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "<script>"])
def test_there_are_no_other_methods(server, method):
    status, headers, content = ask(server, method, "/")
    assert status == 501 and headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    "line",
    [b"\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\xff\xfe\x00\r\n\r\n", b"GET " + b"a" * 70_000 + b"\r\n\r\n",
     b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: example.com\r\n\r\n"],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_request_does_no_harm(server, line):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while block := connection.recv(1 << 16):
                answer += block
        except ConnectionResetError:
            pass
    assert b"200 OK" not in answer and b"<html" not in answer
    assert ask(server, "GET", "/api/models")[0] == 200


def begin(server, **fields):
    """A connection on which a text has begun to come."""
    connection = connect(server)
    connection.request("POST", "/api/generate", json.dumps(asked(**fields)), own_headers(server))
    answer = connection.getresponse()
    answer.readline()
    return connection, answer


def leave(connection, answer):
    # The response has the socket as a file of its own.
    answer.close()
    connection.close()


def test_a_text_ends_when_the_browser_leaves(server, monkeypatch):
    """Reference: the tokens that were made. A text of 1,024 would take seconds."""
    counted = []
    hand_on = server_module.PlayedModel._write

    def counting(model, request, tell):
        def told(pieces):
            counted.append(len(pieces))
            tell(pieces)

        return hand_on(model, request, told)

    monkeypatch.setattr(server_module.PlayedModel, "_write", counting)
    connection, answer = begin(server, max_new_tokens=1024)
    leave(connection, answer)
    line = server.models[0].line
    wait_until(lambda: not line._waiting)
    assert 0 < len(counted) < 1000
    assert written(server)[-1]["tokens"] == 8


def test_who_comes_second_waits_and_is_told(server, monkeypatch):
    monkeypatch.setattr(models, "SECONDS_BETWEEN_NEWS", 0.01)
    first = begin(server, max_new_tokens=1024)
    second = connect(server)
    second.request("POST", "/api/generate", json.dumps(asked()), own_headers(server))
    answer = second.getresponse()
    assert json.loads(answer.readline()) == {"waiting": 1}
    # The other model is free.
    assert written(server, model=1)[-1]["tokens"] == 8
    leave(*first)
    assert records_of(answer.read())[-1]["tokens"] == 8
    second.close()


def test_who_waits_and_leaves_gives_the_place_up(server, monkeypatch):
    monkeypatch.setattr(models, "SECONDS_BETWEEN_NEWS", 0.01)
    first = begin(server, max_new_tokens=1024)
    leave(*begin(server))
    line = server.models[0].line
    wait_until(lambda: len(line._waiting) <= 1)
    leave(*first)
    wait_until(lambda: not line._waiting)


def test_too_many_are_turned_away(server, monkeypatch):
    monkeypatch.setattr(models, "MOST_WAITING", 0)
    first = begin(server, max_new_tokens=1024)
    (record,) = written(server)
    assert record["busy"] and "too many" in record["error"]
    leave(*first)


def test_a_prompt_that_is_too_long_gets_a_line(server):
    (record,) = written(server, text="word " * 6000)
    assert "4,096 fit" in record["error"] and not record["busy"]


def test_a_model_that_fails_tells_the_page_no_secrets(server, monkeypatch, capsys):
    def fail(*arguments):
        raise RuntimeError("/somewhere/secret: inf or nan")

    monkeypatch.setattr(server_module.PlayedModel, "_write", fail)
    (record,) = written(server)
    assert "secret" not in record["error"]
    monkeypatch.undo()
    assert "secret" in capsys.readouterr().err
    assert written(server)[-1]["tokens"] == 8


def test_any_other_fault_of_a_model_is_told_as_well(server, monkeypatch, capsys):
    def fail(*arguments):
        raise ValueError("secret")

    monkeypatch.setattr(server_module.PlayedModel, "_write", fail)
    (record,) = written(server)
    assert "the model has failed" in record["error"] and "secret" in capsys.readouterr().err


def test_a_connection_without_a_thread_gives_its_place_back(tmp_path, monkeypatch):
    def no_thread(*arguments):
        raise RuntimeError("can't start new thread")

    with serving([], tmp_path) as server:
        with monkeypatch.context() as patched:
            patched.setattr(server_module.socketserver.ThreadingMixIn, "process_request", no_thread)
            patched.setattr(server, "handle_error", lambda *arguments: None)
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as refused:
                assert refused.recv(1) == b""
        assert server._free._value == MOST_CONNECTIONS
        assert ask(server, "GET", "/api/models")[0] == 200


def test_connections_beyond_the_bound_find_the_door_shut(tmp_path):
    """Idle ones of somebody hold no more than so many threads; when they end, others are served."""
    with serving([], tmp_path) as server:
        idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(MOST_CONNECTIONS)]
        wait_until(lambda: not server._free._value)
        late = socket.create_connection(("127.0.0.1", server.server_port), timeout=30)
        with late, contextlib.suppress(ConnectionResetError):
            assert late.recv(1) == b""
        for connection in idle:
            connection.close()
        wait_until(lambda: server._free._value == MOST_CONNECTIONS)
        assert ask(server, "GET", "/api/models")[0] == 200


@contextlib.contextmanager
def slow_connection(server, receive_buffer=None):
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    with connection:
        connection.settimeout(30)
        connection.connect(("127.0.0.1", server.server_port))
        yield connection


def test_who_sends_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "SECONDS_TO_ASK", 0.1)
    with serving([], tmp_path) as server, slow_connection(server) as idle:
        idle.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        assert idle.recv(1) == b""


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nx: ", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"]
)
def test_who_sends_a_byte_now_and_then_is_left(tmp_path, monkeypatch, head):
    """Each byte comes long before the time is over, and all of them would take for ever."""
    monkeypatch.setattr(server_module, "SECONDS_TO_ASK", 0.3)
    with serving([], tmp_path) as server, slow_connection(server) as slow:
        slow.sendall(head)
        give_up = time.monotonic() + 30
        # The server has closed the connection: at first the answer 403 may come.
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < give_up:
                slow.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() < give_up
        wait_until(lambda: server._free._value == MOST_CONNECTIONS)


def test_who_takes_a_text_too_slowly_is_left(server, monkeypatch):
    """A few bytes now and then, so that no single write takes long. The model is free for others then."""
    monkeypatch.setattr(server_module, "SECONDS_TO_TAKE", 0.3)
    large = {"text": "x" * 200_000}
    monkeypatch.setattr(server_module, "piece_record", lambda piece: large)
    request = json.dumps(asked(max_new_tokens=1024)).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in own_headers(server).items())
    with slow_connection(server, receive_buffer=4096) as slow:
        slow.sendall(f"POST /api/generate HTTP/1.1\r\n{head}Content-Length: {len(request)}\r\n\r\n".encode() + request)
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
        line = server.models[0].line
        wait_until(lambda: line._waiting)
        give_up = time.monotonic() + 30
        while line._waiting and time.monotonic() < give_up:
            slow.recv(100)
            time.sleep(0.02)
        assert not line._waiting


def test_a_server_that_ends_stops_the_texts(tmp_path):
    with serving([played_model()], tmp_path) as server:
        connection, answer = begin(server, max_new_tokens=1024)
        start = time.monotonic()
    # A text of 1,024 tokens was given up, not waited for; the bound is that of `end`.
    assert not server.models[0].line._waiting
    assert time.monotonic() - start < 60
    leave(connection, answer)


def test_without_a_model_nothing_is_written(tmp_path):
    with serving([], tmp_path) as server:
        assert ask(server, "POST", "/api/generate", asked())[0] == 404


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.param("::1", "http://[::1]:", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine"))


@pytest.mark.parametrize(("host", "address"), [("0.0.0.0", "http://127.0.0.1:"), IPV6])
def test_the_address_that_is_printed_leads_to_the_page(tmp_path, host, address):
    with serving([], tmp_path, host) as server:
        assert server.address.startswith(address)
        with urllib.request.urlopen(server.address + "api/models", timeout=60) as answer:
            assert json.load(answer)["models"] == []


def test_the_second_server_on_a_port_is_refused(server, tmp_path):
    with pytest.raises(OSError):
        server_module.Server("127.0.0.1", server.server_port, [], server.runs)

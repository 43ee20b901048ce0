"""The page and what it asks for, over HTTP, by Python's own http.server: a thread for each request.

A text is computed in one long call, which a thread of its own suits; nothing has to be installed. That server is not made
for the internet, and neither is this page: by default nobody but this machine reaches it.

| request | answer |
|---|---|
| GET / | the page |
| GET /api/models | names of the models, and the bounds of a request |
| GET /api/runs | the runs of the folder, the latest first |
| GET /api/runs/ID | the curves and samples of one |
| POST /api/generate | a line of JSON for each piece of text as it comes; the text ends when the browser leaves |
"""

import base64
import hashlib
import io
import json
import os
import re
import select
import socket
import socketserver
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.errors import DataError, UserError
from common.wording import one_line, printable
from scripts.playground.connection import PatientReader, PatientWriter
from scripts.playground.models import MOST_NEW_TOKENS, Outcome, PlayedModel, Request
from scripts.playground.pieces import Piece
from scripts.playground.requests import MOST_BODY_BYTES, MOST_CHARACTERS, is_own_host, parse_request
from scripts.playground.runs import RunFolder
from scripts.playground.turns import TooManyError
from trainer.machine.limits import is_out_of_memory

PAGE = Path(__file__).with_name("page.html")
# At once: of one browser, some side by side and those that wait. One more finds the door shut.
MOST_CONNECTIONS = 40
# That a browser may keep us waiting for its request, and for taking the answer, each in all.
SECONDS_TO_ASK = 20.0
SECONDS_TO_TAKE = 60.0
# What is read at once of what nobody wants to know
BLOCK_BYTES = 1 << 16
# For texts that are being written when the server ends.
SECONDS_TO_END = 5.0
# Sec-Fetch-Mode and Sec-Fetch-Dest of a page that comes into the address line
VISIT = ("navigate", "document")


class Refused(Exception):
    """Ends a request with a status and a line that says why."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class GoneError(ConnectionError):
    """Nobody reads the answer any more."""


class Server(ThreadingHTTPServer):
    """Listens at once. Errors: OSError where the address cannot be had."""

    # Elsewhere this lets a port be had again at once. On Windows it lets two processes listen on one.
    allow_reuse_address = os.name == "posix"
    daemon_threads = True
    # Those that were begun are waited for in `end`.
    block_on_close = False
    # Those that come at once: beyond the usual five a system lets a browser try again seconds later.
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, models: Sequence[PlayedModel], runs: RunFolder) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.host = host
        self.models = models
        self.runs = runs
        self.page = PAGE.read_bytes()
        self.policy = content_security_policy(self.page.decode("utf-8"))
        self.is_ending = threading.Event()
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name that HTTPServer does, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = self.host
        self.server_port = self.server_address[1]

    @property
    def address(self) -> str:
        """For the address line of a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread could be started, so none gives the place back.
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves is no fault; anything else is a defect of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()

    def end(self) -> None:
        """Close the door, and wait until the texts that are being written have stopped."""
        self.is_ending.set()
        self.server_close()
        for model in self.models:
            place = model.line.join()
            model.line.ahead_of(place, SECONDS_TO_END)
            model.line.leave(place)


def content_security_policy(page: str) -> str:
    """What a browser may do on the page: run its own script and style, by their digests, and ask this server."""
    digests = {}
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        # Text cannot even by mistake be made markup by a script.
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


class Handler(BaseHTTPRequestHandler):
    """One request. Each has a connection of its own, so nothing of one can be taken for the beginning of the next."""

    server: Server
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """The files that http.server reads from and writes to, with an end to its patience."""
        self.connection = self.request
        self.rfile = io.BufferedReader(PatientReader(self.connection, SECONDS_TO_ASK))
        self.wfile = PatientWriter(self.connection, SECONDS_TO_TAKE)

    def do_GET(self) -> None:
        self._answer_safely(self._get)

    def do_POST(self) -> None:
        self._answer_safely(self._post)

    def version_string(self) -> str:
        return "minimind"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the page asks every two seconds, and nobody wants to read it."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses: in plain text, and in the same way."""
        self._answer(HTTPStatus(code), "text/plain", (message or HTTPStatus(code).phrase).encode(errors="replace"))

    # ------------------------------------------------------------------------------------------ requests

    def _answer_safely(self, answer: Callable[[], None]) -> None:
        self.close_connection = True
        try:
            self._check_host()
            answer()
        except Refused as refused:
            self._answer(refused.status, "text/plain", one_line(refused.reason).encode(errors="replace"))
            self._read_the_rest()

    def _read_the_rest(self) -> None:
        """Of a request that was refused before its body was read: a system that drops it drops our answer, too."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,9}", length):
            return
        left = min(int(length), MOST_BODY_BYTES)
        while left > 0 and (content := self.rfile.read1(min(left, BLOCK_BYTES))):
            left -= len(content)

    def _get(self) -> None:
        path = self.path
        self._check_origin()
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.page)
        elif path == "/api/models":
            self._answer_json(self._models())
        elif path == "/api/runs":
            self._answer_json(self.server.runs.summaries())
        elif path.startswith("/api/runs/"):
            content = self.server.runs.content(path.removeprefix("/api/runs/"))
            if content is None:
                raise Refused(HTTPStatus.NOT_FOUND, "no such run")
            self._answer_json(content)
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "no such page")

    def _post(self) -> None:
        self._check_origin()
        if self.path != "/api/generate" or not self.server.models:
            raise Refused(HTTPStatus.NOT_FOUND, "no such page, or no model to write")
        # A form of another page can send text, but not this type.
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "JSON is wanted (Content-Type: application/json)")
        try:
            number, request = parse_request(self._body(), len(self.server.models))
        except UserError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
        self._write_text(self.server.models[number], request)

    def _check_host(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not is_own_host(hosts[0], self.server.host):
            raise Refused(HTTPStatus.FORBIDDEN, "this server is addressed as localhost, or by what --host says")

    def _check_origin(self) -> None:
        """A browser says which page a request comes from; a page of another address gets nothing."""
        origin = self.headers.get("Origin")
        if origin is not None:
            is_own = host_of_origin(origin) == self.headers["Host"].lower()
        else:
            # A browser leaves it out where it only reads: of its own accord, or for the same page. It always sends it along
            # with a POST.
            site = self.headers.get("Sec-Fetch-Site", "none")
            is_own = self.command == "GET" and (site in ("none", "same-origin") or self._is_visit())
        if not is_own:
            raise Refused(HTTPStatus.FORBIDDEN, "this server answers its own page alone")

    def _is_visit(self) -> bool:
        """Whether a person follows a link of any page to ours, which that page cannot look into."""
        headers = self.headers
        return self.path == "/" and (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest")) == VISIT

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not re.fullmatch(r"[0-9]{1,9}", length):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "the length of the request is wanted (Content-Length)")
        if int(length) > MOST_BODY_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MOST_BODY_BYTES:,} bytes are taken")
        body = self.rfile.read(int(length))
        # So that nothing of it is waited for again where the request is refused.
        del self.headers["Content-Length"]
        return body

    def _models(self) -> dict[str, object]:
        models = []
        for model in self.server.models:
            models.append({"name": model.name, "parameters": model.parameters, "can_chat": model.can_chat})
        bounds = {"characters": MOST_CHARACTERS, "new_tokens": MOST_NEW_TOKENS}
        return {"models": models, "bounds": bounds, "folder": printable(str(self.server.runs.folder))}

    # ------------------------------------------------------------------------------------------- answers

    def _write_text(self, model: PlayedModel, request: Request) -> None:
        """The text of a model as a stream of JSON lines."""
        self._begin(HTTPStatus.OK, "application/x-ndjson", {"Transfer-Encoding": "chunked"})

        def tell(pieces: list[Piece]) -> None:
            self._check_reader()
            if pieces:
                self._send_lines([piece_record(piece) for piece in pieces])

        def wait(ahead: int) -> None:
            self._check_reader()
            self._send_lines([{"waiting": ahead}])

        try:
            last = outcome_record(model.write(request, tell, wait))
        except (UserError, DataError) as error:
            last = {"error": one_line(error), "busy": isinstance(error, TooManyError)}
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                last = {"error": "no memory is left for this text; try a shorter one"}
            else:
                traceback.print_exc()
                last = {"error": "the model has failed; the terminal of play.py tells more"}
        self._send_lines([last])
        self.wfile.write(b"0\r\n\r\n")

    def _check_reader(self) -> None:
        """Raises GoneError if the browser has left or the server is to end."""
        if self.server.is_ending.is_set():
            raise GoneError
        readable, _, _ = select.select([self.connection], [], [], 0)
        # A browser sends nothing more after its request, so what there is to read is the end.
        if readable and not self.connection.recv(1, socket.MSG_PEEK):
            raise GoneError

    def _send_lines(self, records: list[dict[str, object]]) -> None:
        """A chunk of the answer."""
        lines = b"".join(json_bytes(record) + b"\n" for record in records)
        self.wfile.write(b"%x\r\n%s\r\n" % (len(lines), lines))

    def _answer_json(self, value: object) -> None:
        self._answer(HTTPStatus.OK, "application/json", json_bytes(value))

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self._begin(status, kind, {"Content-Length": str(len(content))})
        self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, headers: dict[str, str]) -> None:
        self.close_connection = True
        self.send_response(status)
        headers |= {
            "Content-Type": f"{kind}; charset=utf-8",
            "Connection": "close",
            "Cache-Control": "no-store",
            "Content-Security-Policy": self.server.policy,
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def host_of_origin(origin: str) -> str | None:
    """The host and port of an origin such as http://localhost:8000; None for anything else, such as "null"."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return None
    return parts.netloc.lower() if parts.scheme == "http" and not parts.path else None


def piece_record(piece: Piece) -> dict[str, object]:
    """A piece of text as the page takes it. `shown` is there where a browser would obey the text instead of showing it."""
    tokens = []
    for token in piece.tokens:
        likeliest = [[printable(label), rounded(probability)] for label, probability in token.likeliest]
        tokens.append([printable(token.label), rounded(token.probability), likeliest])
    record: dict[str, object] = {"text": piece.text, "tokens": tokens}
    if printable(piece.text) != piece.text:
        record["shown"] = printable(piece.text)
    return record


def rounded(probability: float) -> float | None:
    """None: of a model whose numbers are no numbers."""
    return float(f"{probability:.4g}") if 0 <= probability <= 1.001 else None


def outcome_record(outcome: Outcome) -> dict[str, object]:
    return {
        "reason": outcome.reason,
        "prompt_tokens": outcome.prompt_tokens,
        "tokens": outcome.tokens,
        "seconds": round(outcome.seconds, 4),
    }


def json_bytes(value: object) -> bytes:
    """As JSON in ASCII, in which even half a character of UTF-16 from a file name can be written."""
    return json.dumps(value, allow_nan=False).encode("ascii")

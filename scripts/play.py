"""A page in your browser: continue texts and chat with a model, and watch the runs of out/ as they train.

    python scripts/play.py --weight out/pretrain_512.pth

It prints the address to open. Only this machine can reach it. Ctrl-C ends it.
"""

if __name__ == "__main__" and not __package__:
    import by_path  # noqa: F401 - puts the repository in the place of this folder, and answers wrong flags

import argparse
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import numpy as np
import torch

from common.errors import UserError, utf8
from common.flags import not_negative, positive, seed, share
from common.wording import announce, one_line, printable
from dataset.reading.conversations import checked_message
from dataset.tokenizing.encoder import DocumentEncoder
from model.decoding import Sampling
from model.model_minimind import MiniMindLM
from scripts.arguments import play_parser, repetition_penalty, temperature, weight_of
from scripts.chat_template import default_template
from scripts.common import end_ids, load, trained_length
from scripts.generate import TextStream, chat_ids, check_prompt, generate, prompt_limit, turns_encoder
from scripts.openai_api import ROUTES, Enough, Reply
from trainer.machine.command_line import run_cli
from trainer.reporting.records import CHARTS, METRICS_SUFFIX, RunRecords, downsample, smooth

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_NEW_TOKENS = 1024
# Likeliest tokens shown beside the sampled one
ALTERNATIVES = 6
MAX_RUNS = 100
# Bounds of a run on the page: points of a curve, samples, characters of a text
BUCKETS = 150
MAX_SAMPLES = 8
MAX_CHARACTERS = 4_000

# How numbers of a request are checked, as flags are
CHECKS = {"seed": seed, "max_new_tokens": positive(int, MAX_NEW_TOKENS), "temperature": temperature, "top_p": share}
CHECKS |= {"top_k": not_negative(int), "repetition_penalty": repetition_penalty}
# Values of those that may be missing
OFF = {"top_k": 0, "repetition_penalty": 1.0}
# What a request has beside numbers, for messages
EXPECTED = {"the request": "a JSON object", "text": "a text", "messages": "texts of user and assistant, user last"}

# This machine, on any port: a tunnel may use another one.
OWN_HOST = re.compile(r"(localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)
NOT_OWN = "this server answers its own page alone and, with --api, programs that send Content-Type: application/json"


def main(argv: Sequence[str] | None = None) -> int:
    args = play_parser().parse_args(argv)
    weight = weight_of(args.weight)
    model = None
    try:
        loaded = load(weight, args.tokenizer_path, args.device, args.dtype, with_interface=False)
        model = PlayedModel(for_page(weight), *loaded)
    except UserError as error:
        if args.weight or args.api:
            raise
        announce(f"only runs are shown: {error}")
    try:
        server = Server(args.port, model, RunFolder(Path(args.out_dir).resolve()), args.api)
    except OSError as error:
        raise UserError(f"--port {args.port}: {error}") from error
    announce(f"open {server.address} in your browser; Ctrl-C ends")
    if args.api:
        announce(f"for programs: OpenAI's API at {server.address}v1, with any key")
    # Ctrl-C is the usual end.
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    server.is_ending.set()
    server.server_close()
    return 0


def for_page(text: str) -> str:
    """A text of a file, safe to show: bounded, without control characters and lone surrogates."""
    return printable(text[:MAX_CHARACTERS]).encode(errors="backslashreplace").decode()


# ---------------------------------------------------------------------------------------------------- the model


# Receives the pieces of a text as they come; an exception from it ends the text. Enough is no error.
Send = Callable[[dict[str, Any]], None]


class PlayedModel:
    """A model that generates for the page."""

    def __init__(
        self, name: str, model: MiniMindLM, tokenizer: "PreTrainedTokenizerBase", encoder: DocumentEncoder
    ) -> None:
        self.name = name
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.chat = turns_encoder(tokenizer) if default_template(tokenizer) else None
        # torch has one global random generator: one text at a time.
        self.lock = threading.Lock()
        self.new_tokens = min(200, trained_length(model.config))

    def write(self, request: dict[str, Any], send: Send, check: Callable[[], object] = bool) -> dict[str, Any]:
        """Generate for a checked request; returns how it ended. Errors: UserError for a prompt that does not fit."""
        with self.lock:
            # The client may have waited for long. An exception ends the text.
            check()
            sampling: Sampling = request["sampling"]
            if "text" in request:
                ids = self.encoder.prompt_ids(request["text"])
            elif self.chat is None:
                raise UserError("this model has no chat template: it only continues texts")
            else:
                ids = chat_ids(self.chat, request["messages"], prompt_limit(self.model, sampling))
            check_prompt(self.model, ids, sampling)
            if request.get("fills_context"):
                room = self.model.config.max_position_embeddings - len(ids)
                sampling = dataclasses.replace(sampling, max_new_tokens=min(room, MAX_NEW_TOKENS))
            stream = PieceStream(self.tokenizer, send, check)
            start = time.perf_counter()
            torch.manual_seed(request["seed"])
            # An answer that has enough has ended too.
            is_end = True
            with contextlib.suppress(Enough):
                (new,) = generate(self.model, self.tokenizer, [ids], sampling, stream.receive)
                stream.end()
                is_end = new[-1] in end_ids(self.model, self.tokenizer.eos_token_id)
        seconds = round(time.perf_counter() - start, 4)
        beyond = len(ids) + stream.count > trained_length(self.model.config)
        counts = {"prompt_tokens": len(ids), "tokens": stream.count}
        return {"reason": "end" if is_end else "length", **counts, "seconds": seconds, "beyond": beyond}


class PieceStream(TextStream):
    """Sends {"text", "tokens"} for each stretch of whole characters: half a Chinese character is never shown.

    A token is [label, probability, [[label, probability] of the likeliest in its place]]; the label is the text it
    adds, or its vocabulary entry. Probabilities are the model's own, before temperature and top_p. `shown` is added for a
    text with control characters. `check` is called with each token; an exception from it ends the text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", send: Send, check: Callable[[], object] = bool) -> None:
        super().__init__(tokenizer, self._keep)
        self.send = send
        self.check = check
        self.special = {int(i): str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        # Tokens whose text is incomplete
        self._tokens: list[list[Any]] = []

    def receive(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Called with each new token [1] and its logits [1, V]."""
        self.check()
        token = int(tokens)
        probabilities = logits[0].float().softmax(-1)
        best = probabilities.topk(min(ALTERNATIVES, len(probabilities)))
        others = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        likeliest = [[self._label(other), rounded(probability)] for other, probability in others]
        # Before `add` holds it back with the others: its label is what it adds to these.
        self._tokens.append([self._label(token), rounded(float(probabilities[token])), likeliest])
        self.add(token)
        # Special tokens have no text, so the stream would hold them back until the next word.
        if token in self.special and len(self._tokens) == 1:
            self._keep("")

    def _label(self, token: int) -> str:
        if token in self.special:
            return printable(self.special[token])
        text = self._text_added([*self.held_back, token])
        # A model may have more embeddings than its tokenizer has entries.
        entry = str(self.tokenizer.convert_ids_to_tokens(token) or f"[{token}]")
        # Partial characters are shown as the entry.
        return printable(entry if text.endswith("\ufffd") else text or entry)

    def _keep(self, text: str) -> None:
        """Called by the stream with whole characters."""
        if self._tokens:
            piece: dict[str, Any] = {"text": text, "tokens": self._tokens}
            if printable(text) != text:
                piece["shown"] = printable(text)
            self._tokens = []
            self.send(piece)


def rounded(probability: float) -> float | None:
    """Four digits; None for NaN."""
    return float(f"{probability:.4g}") if 0 <= probability <= 1.001 else None


# ----------------------------------------------------------------------------------------------------- the runs


class LiveRun(RunRecords):
    """A growing metrics file; each read continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        self.changed_at = 0.0

    def summary(self) -> dict[str, Any]:
        """A line of the list of runs."""
        minutes = self.last("eta")
        return {
            "id": self.id,
            "name": for_page(self.name),
            "version": self.position,
            "changed_at": self.changed_at,
            "seconds_left": None if minutes is None else max(minutes, 0.0) * 60,
            "figures": self.figures(),
        }

    def content(self) -> dict[str, Any]:
        """The curves and samples."""
        charts = []
        for chart in CHARTS:
            curves = []
            for curve in self.curves(chart):
                drawn: dict[str, Any] = {
                    "label": for_page(curve.label),
                    "points": points(*downsample(curve.x, curve.y, BUCKETS)),
                }
                if curve.is_noisy:
                    drawn["means"] = points(*smooth(curve.x, curve.y))
                curves.append(drawn)
            if curves:
                charts.append({"title": chart.title, "logarithmic": chart.logarithmic, "curves": curves})
        samples = [[update, for_page(prompt), for_page(text)] for update, prompt, text in reversed(self.samples)]
        return {**self.summary(), "charts": charts, "samples": samples}


def points(x: np.ndarray, y: np.ndarray) -> list[list[float]]:
    """[[tokens, value], ...]"""
    return [[float(f"{tokens:.7g}"), float(f"{value:.5g}")] for tokens, value in zip(x, y, strict=True)]


class RunFolder:
    """The runs in a folder and its direct subfolders. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._runs: dict[tuple[Path, int], LiveRun] = {}

    def summaries(self) -> list[dict[str, Any]]:
        """A line for each run, the latest first: finds metrics files, and reads what was added to them."""
        with self._lock:
            files = []
            for depth in ("*", "*/*"):
                for path in self.folder.glob(depth + METRICS_SUFFIX):
                    # Regular files only: no links, and no pipes, which would block.
                    if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                        files.append((path, path.stat()))
            files.sort(key=lambda item: item[1].st_mtime, reverse=True)
            runs: dict[tuple[Path, int], LiveRun] = {}
            for path, status in files[:MAX_RUNS]:
                # A resume rewrites the file.
                key = (path, status.st_ino)
                run = self._runs.get(key)
                if run is None or status.st_size < run.position:
                    run = LiveRun(path)
                    run.name = str(path.relative_to(self.folder)).removesuffix(METRICS_SUFFIX)
                with contextlib.suppress(OSError):
                    run.read_new_lines()
                del run.samples[:-MAX_SAMPLES]
                run.changed_at = status.st_mtime
                runs[key] = run
            self._runs = runs
            return [run.summary() for run in runs.values() if run.columns]

    def content(self, run_id: str) -> dict[str, Any] | None:
        """The curves of a run listed by `summaries`; None for any other."""
        with self._lock:
            return next((run.content() for run in self._runs.values() if run.id == run_id), None)


# --------------------------------------------------------------------------------------------------- the server


def parse_request(body: bytes, read: Callable[[Any], dict[str, Any]] = dict) -> dict[str, Any]:
    """{"text" or "messages", "sampling", "seed", "fills_context"}. read: gives fields the page's names. Errors: UserError."""
    name = "the request"
    try:
        fields = {**OFF, **read(json.loads(body))}
        numbers: dict[str, Any] = {}
        for name, check in CHECKS.items():
            numbers[name] = check(str(fields[name]))
        request: dict[str, Any] = {"seed": numbers.pop("seed"), "sampling": Sampling(**numbers)}
        request["fills_context"] = fields.get("fills_context")
        if fields.get("text") is not None:
            name = "text"
            request["text"] = utf8(fields["text"])
        else:
            name = "messages"
            turns = [checked_message(dict(turn), number) for number, turn in enumerate(fields["messages"], 1)]
            utf8(json.dumps(turns, ensure_ascii=False))
            if turns[-1]["role"] != "user" or "tool" in {turn["role"] for turn in turns}:
                raise ValueError
            request["messages"] = turns
        return request
    except UserError:
        raise
    # A malformed request can fail in any way.
    except Exception as error:
        is_clear = isinstance(error, argparse.ArgumentTypeError)
        reason = one_line(error)[:200] if is_clear else f"expected {EXPECTED.get(name, 'a number')}"
        raise UserError(f"{name}: {reason}") from None


class Server(ThreadingHTTPServer):
    """Listens at once, to this machine only. Errors: OSError for an unavailable port."""

    # On POSIX it frees a port at once for the next start. On Windows it lets two processes share one.
    allow_reuse_address = os.name == "posix"
    daemon_threads = True

    def __init__(self, port: int, model: PlayedModel | None, runs: RunFolder, has_api: bool) -> None:
        """port: 0 for any free one. model: None if only runs are shown. has_api: for programs too."""
        self.model = model
        self.has_api = has_api
        self.runs = runs
        self.is_ending = threading.Event()
        # Browsers hash line feeds alone, and git on Windows may write CRLF.
        self.page = Path(__file__).with_name("play.html").read_bytes().replace(b"\r\n", b"\n")
        # The browser runs only the page's own script and style, by their digests, and connects only to this server. The
        # script cannot turn text into markup, even by mistake.
        digests = {}
        for tag in ("script", "style"):
            (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", self.page.decode(), re.DOTALL)
            digests[tag] = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy = (
            f"default-src 'none'; script-src 'sha256-{digests['script']}'; style-src 'sha256-{digests['style']}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        )
        # Other sites may neither embed nor read the answers.
        self.headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        super().__init__(("127.0.0.1", port), Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that disconnects is no error; anything else is a bug of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()


class Handler(BaseHTTPRequestHandler):
    """One request on its own connection."""

    server: Server
    has_begun = False

    def log_message(self, format: str, *args: object) -> None:
        """No log: the page polls every two seconds."""

    def do_GET(self) -> None:
        runs, model = self.server.runs, self.server.model
        if not self._is_own():
            self._refuse(HTTPStatus.FORBIDDEN, NOT_OWN)
        elif self.path == "/":
            self._begin("text/html", self.server.page)
        elif self.path == "/api/model":
            about: dict[str, Any] = {"most_new_tokens": MAX_NEW_TOKENS, "folder": for_page(str(runs.folder))}
            if model is not None:
                parameters = sum(parameter.numel() for parameter in model.model.parameters())
                about.update(name=model.name, parameters=parameters, can_chat=model.chat is not None)
                about["new_tokens"] = model.new_tokens
            self._answer(about)
        elif self._is_api() and model and unquote(self.path) in ("/v1/models", f"/v1/models/{model.name}"):
            listed = {"id": model.name, "object": "model", "created": 0, "owned_by": "play.py"}
            self._answer({"object": "list", "data": [listed]} if self.path == "/v1/models" else listed)
        elif self.path == "/api/runs":
            self._answer(runs.summaries())
        elif self.path.startswith("/api/runs/") and (content := runs.content(self.path.removeprefix("/api/runs/"))):
            self._answer(content)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "no such page, or no such model")

    def do_POST(self) -> None:
        model = self.server.model
        if not self._is_own() or model is None or not (self.path == "/api/generate" or self._is_api()):
            self._refuse(HTTPStatus.FORBIDDEN, NOT_OWN)
            return
        length = self.headers.get("Content-Length", "0")
        if not re.fullmatch("[0-9]{1,8}", length):
            self._refuse(HTTPStatus.BAD_REQUEST, "Content-Length: expected a number of bytes below 10^8")
            return
        body = self.rfile.read(int(length))
        try:
            if not self._is_api():
                request = parse_request(body)
                # One line of JSON for each piece of text
                self._begin("application/x-ndjson")
                self._send(model.write(request, self._send, self._check_client))
            elif self.path not in ROUTES:
                self._refuse(HTTPStatus.NOT_FOUND, f"expected /v1/models, {' or '.join(ROUTES)}")
            else:
                reply = Reply(model.name, self.path, self._send)
                request = parse_request(body, partial(reply.read, tokens=model.new_tokens, most=MAX_NEW_TOKENS))
                if whole := reply.end(model.write(request, reply.receive, self._check_client)):
                    self._answer(whole)
                else:
                    self.wfile.write(b"data: [DONE]\n\n")
        except UserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, one_line(error).replace("--max_new_tokens", "max_tokens"))
        except ConnectionError:
            raise
        except Exception:
            traceback.print_exc()
            failed = "the model has failed; the reason is in the terminal of play.py"
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, failed)

    def _is_api(self) -> bool:
        """True for a route of OpenAI's API, with --api."""
        return self.server.has_api and self.path.startswith("/v1/")

    def _is_own(self) -> bool:
        """True for a request to this machine from its own page: a browser names the asking page as the Origin.

        Any site can point its name at 127.0.0.1 (DNS rebinding), and then its scripts could talk to us. But the browser
        sends that name as the Host.
        """
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not OWN_HOST.fullmatch(hosts[0]):
            return False
        origin = self.headers.get("Origin")
        if origin is not None:
            return origin.lower() == f"http://{hosts[0].lower()}"
        # Browsers may omit it in a GET, whose answer other pages cannot read. With a POST they send it, and for JSON they first
        # ask whether another page may post it: a POST of JSON without an Origin is a program's.
        return self.command == "GET" or self._is_api() and self.headers.get_content_type() == "application/json"

    def _check_client(self) -> None:
        """Errors: ConnectionError if the client has left or the server ends; that ends the text."""
        came, _, _ = select.select([self.connection], [], [], 0)
        # From a client that waits nothing comes, from one that has left an end.
        if self.server.is_ending.is_set() or came and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionError

    def _send(self, fields: dict[str, Any]) -> None:
        """Send a part of the answer. Errors: ConnectionError if the client has left."""
        if not self.has_begun:
            self._begin("text/event-stream")
        frame = b"data: %s\n\n" if self._is_api() else b"%s\n"
        self.wfile.write(frame % json.dumps(fields, allow_nan=False).encode())

    def _answer(self, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin("application/json", json.dumps(value, allow_nan=False).encode(), status)

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """Tell of an error, in place of the answer or in it."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": reason, "type": kind, "param": None, "code": None} if self._is_api() else reason
        if self.has_begun:
            self._send({"error": error})
        elif self._is_api():
            self._answer({"error": error}, status)
        else:
            self._begin("text/plain", reason.encode(errors="replace"), status)

    def _begin(self, kind: str, content: bytes = b"", status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send the headers, and all of the content or its start."""
        self.has_begun = True
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    run_cli(main)

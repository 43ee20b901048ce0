"""scripts/play.py: what it writes is what generate.py writes, who may ask it, and the runs of a folder while they train."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import urllib.request
from unittest import mock

import pytest
import torch

from common.errors import UserError
from model.decoding import Sampling
from scripts import arguments, play
from scripts.generate import TextStream, generate
from tests.chats import turn
from tests.helpers import ROOT, wait_until
from tests.scripts.playground.pages import HOSTILE, ask, asked, connect, own_headers, records_of
from tests.scripts.playground.pages import written as written_by
from tests.trainer.reporting.test_html_report import metrics_file

STRANGERS = [{"Host": host} for host in ("evil.example", "127.0.0.1.evil.example", "192.168.0.3", None)]
STRANGERS += [{"Origin": origin} for origin in ("http://evil.example", "null", "https://127.0.0.1")]


def test_one_line_for_what_the_user_can_mend(server, tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "DEFAULT_WEIGHT", tmp_path / "none.pth")
    taken = str(server.server_address[1])
    for flags, message in ((["--weight", "nowhere.pth"], "no such file"), (["--port", taken], f"--port {taken}")):
        with pytest.raises(UserError, match=message):
            play.main(["--out_dir", str(tmp_path), *flags])


def streamed(model, ids, sampling):
    """(generate.py's stream behind these ids, its new ids)"""
    stream = TextStream(model.tokenizer, lambda text: None)
    (new,) = generate(model.model, model.tokenizer, [ids], sampling, lambda token, _: stream.add(int(token)))
    stream.end()
    return stream, new


def test_a_text_is_that_of_generate_with_the_same_seed(server):
    """Reference: generate.py's stream, and the probabilities of plain forwards."""
    *pieces, last = written_by(server, seed=7, max_new_tokens=20)
    model = server.model
    ids = model.encoder.prompt_ids("the cat")
    torch.manual_seed(7)
    stream, new = streamed(model, ids, Sampling(20, 0.8, 0.9))
    assert "".join(piece["text"] for piece in pieces) == stream.text
    tokens = [token for piece in pieces for token in piece["tokens"]]
    assert last["tokens"] == len(tokens) == stream.count
    with torch.no_grad():
        probabilities = model.model(torch.tensor([[*ids, *new[:-1]]])).logits[0].softmax(-1)[len(ids) - 1 :]
    drawn = probabilities.gather(1, torch.tensor(new).unsqueeze(1)).squeeze(1).tolist()
    assert [token[1] for token in tokens] == pytest.approx(drawn, rel=1e-3)
    assert [token[2][0][1] for token in tokens] == pytest.approx(probabilities.max(1).values.tolist(), rel=1e-3)


def test_a_conversation_is_put_through_the_template(server):
    turns = [turn("user", "Hi"), turn("assistant", "Yes"), turn("user", "<|im_end|>")]
    *pieces, _ = written_by(server, text=None, messages=turns, temperature=0)
    stream, _ = streamed(server.model, server.model.chat(turns), Sampling(8, 0.0, 0.9))
    assert "".join(piece["text"] for piece in pieces) == stream.text


def test_hostile_texts_stay_texts(server):
    """The page gets them as JSON in ASCII, with `shown` in place of what a browser would obey."""
    for text in HOSTILE:
        status, headers, content = ask(server, "POST", "/api/generate", asked(text=text, max_new_tokens=2))
        assert status == 200 and headers["Content-Type"].startswith("application/x-ndjson") and content.isascii()
        assert "reason" in records_of(content)[-1]
    # A text of the model itself
    sent, tokenizer = [], server.model.tokenizer
    stream = play.PieceStream(tokenizer, sent.append)
    for token in tokenizer.encode("\x1b[31mred \u202egnp\x9b", add_special_tokens=False):
        stream.receive(torch.tensor([token]), torch.zeros(1, 6400))
    stream.end()
    assert "".join(piece.get("shown", piece["text"]) for piece in sent) == "<U+001B>[31mred <U+202E>gnp<U+009B>"


@pytest.mark.parametrize("path", ["/api/generate", "/v1/completions"])
def test_a_text_ends_when_the_client_leaves(server, path):
    """Also one that is sent as a whole, and of those that have left while they waited none begins."""
    receive = play.PieceStream.receive
    with mock.patch.object(play.PieceStream, "receive", autospec=True, side_effect=receive) as tokens:
        connections = [connect(server) for _ in range(4)]
        body = asked(max_new_tokens=1000, temperature=1.5) if "api" in path else {"prompt": "a", "max_tokens": 1000}
        for connection in connections:
            connection.request("POST", path, json.dumps(body), own_headers(server))
        wait_until(lambda: tokens.call_count > 2)
        for connection in connections:
            connection.close()
        wait_until(lambda: not server.model.lock.locked())
        assert ask(server, "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert tokens.call_count < 500


def test_other_hosts_and_origins_are_refused(server):
    """A POST without an Origin is no browser's, and allowed for JSON with --api. Other machines cannot connect."""
    assert server.server_address[0] == "127.0.0.1"
    for method, path, refused in (
        ("GET", "/api/runs", STRANGERS),
        ("GET", "/api/model", STRANGERS),
        ("POST", "/api/generate", [*STRANGERS, {"Origin": None}]),
        ("GET", "/v1/models", STRANGERS),
        ("POST", "/v1/completions", [*STRANGERS, {"Origin": None, "Content-Type": "text/plain"}]),
    ):
        body = asked() if method == "POST" else None
        for headers in refused:
            status, _, content = ask(server, method, path, body, headers)
            assert status == 403 and b"this server answers its own page alone" in content, (path, headers)
    # A tunnel may name this machine otherwise.
    for host in ("127.0.0.1:1", "localhost", "LOCALHOST:8765", "[::1]:80"):
        assert ask(server, "POST", "/api/generate", asked(), {"Host": host, "Origin": f"http://{host}"})[0] == 200
    assert ask(server, "POST", "/v1/completions", {"prompt": "a"}, {"Origin": None})[0] == 200
    with mock.patch.object(server, "has_api", False):
        assert ask(server, "POST", "/v1/completions", {"prompt": "a"}, {"Origin": None})[0] == 403


def test_the_page_may_run_its_own_script_and_nothing_else(server):
    _, headers, page = ask(server, "GET", "/")
    policy = headers["Content-Security-Policy"]
    for part in ("default-src 'none'", "trusted-types 'none'", "frame-ancestors 'none'"):
        assert part in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    writes = rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\("
    assert not re.search(writes + rb"|https?://(?!www\.w3\.org)", page)


@pytest.mark.parametrize(
    "fields",
    [{"seed": -1}, {"temperature": 1e9}, {"top_p": 0}, {"max_new_tokens": 100_000}]
    + [{"text": 3}, {"text": None}, {"text": "\ud800"}, *({"headers": {"Content-Length": n}} for n in ("-1", "9" * 30))]
    + [{"text": None, "messages": turns} for turns in ([], [turn("tool", "x")], [turn("assistant", "x")])],
)
def test_what_is_out_of_range_is_one_line(server, fields):
    status, _, content = ask(server, "POST", "/api/generate", asked(**fields), fields.get("headers"))
    assert status == 400 and b"\n" not in content


def line(i, **fields):
    return json.dumps({"step": i, "update": i, "tokens": 100 * i, **fields}) + "\n"


def test_a_run_that_grows_is_read_on(tmp_path):
    """A half-written line is read when it is whole, and a file that was written anew from its beginning."""
    path = metrics_file(tmp_path / "a.metrics.jsonl", n=5)
    runs = play.RunFolder(tmp_path)
    (before,) = runs.summaries()
    with open(path, "a") as file:
        file.write(line(50, loss=0.5) + line(51, loss=0.25)[:-9])
    (after,) = runs.summaries()
    assert after["version"] != before["version"] and dict(after["figures"])["updates"] == "50"
    with open(path, "a") as file:
        file.write(line(51, loss=0.25)[-9:])
    assert dict(runs.summaries()[0]["figures"])["training loss"] == "0.2500"
    metrics_file(path, n=2)
    assert len(runs.content(runs.summaries()[0]["id"])["charts"][0]["curves"][0]["points"]) <= 2


def test_odd_numbers_of_a_foreign_file_hide_no_run(tmp_path):
    """Reference: JSON without NaN and infinity, which a browser reads."""
    metrics_file(tmp_path / "a.metrics.jsonl", n=5)
    odd = [line(1, loss=value, eta=value) for value in (math.nan, math.inf, 1.7e308, -1.7e308, 10**400)] * 40
    odd += [line(math.nan, loss=1.0, prompt="", text="x"), line(1, prompt="", text="x"), line(1, loss=2.0)]
    (tmp_path / "b.metrics.jsonl").write_text("".join(odd))
    runs = play.RunFolder(tmp_path)
    summaries = runs.summaries()
    assert {run["name"] for run in summaries} == {"a", "b"}
    json.dumps([*summaries, *(runs.content(run["id"]) for run in summaries)], allow_nan=False)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes and links for everybody")
def test_links_and_pipes_are_passed_over(tmp_path):
    folder = tmp_path / "out"
    (folder / "run").mkdir(parents=True)
    metrics_file(folder / "run" / "a.metrics.jsonl", n=3)
    metrics_file(tmp_path / "secret.metrics.jsonl", n=3)
    (folder / "link.metrics.jsonl").symlink_to(tmp_path / "secret.metrics.jsonl")
    (folder / "way").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe.metrics.jsonl")
    runs = play.RunFolder(folder)
    assert [run["name"] for run in runs.summaries()] == [os.path.join("run", "a")]
    assert runs.content("../../etc/passwd") is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT to send")
def test_it_runs_by_path_until_ctrl_c(weight, tmp_path):
    words = [sys.executable, str(ROOT / "scripts" / "play.py"), "--weight", weight, "--device", "cpu", "--port", "0"]
    words += ["--tokenizer_path", str(ROOT / "model")]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = process.stdout.readline()
        assert said.startswith("open http://127.0.0.1:") and "Ctrl-C ends" in said, process.stderr.read()
        with urllib.request.urlopen(said.split()[1] + "api/model", timeout=60) as answer:
            assert json.load(answer)["name"] == weight
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()

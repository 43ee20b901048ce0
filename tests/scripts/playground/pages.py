"""What the tests of play.py share: a tiny model, a server in this process, hostile texts, and questions over HTTP."""

import contextlib
import http.client
import json
import threading

from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from scripts.play import PlayedModel, RunFolder, Server
from tests.helpers import ROOT, tiny_model

# What a browser or a template could take for something else than text
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<iframe srcdoc=\"<script>parent.document.title='owned'</script>\"></iframe>",
    "<a href=\"javascript:document.title='owned'\">x</a>",
    '"><script>alert(1)</script>',
    "</pre></span></div></body></html><h1>gone</h1>",
    "</script><script>alert(1)</script>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &#60;b&#62;",
    "{{ 7 * 7 }} {% raise %} ${7 * 7} `${alert(1)}`",
    "<base href='http://example.invalid/'><link rel=stylesheet href='//example.invalid/a.css'>",
    "\u202egnp.exe\u202c \u2066x\u2069",
    "\x1b[31mred\x1b[0m \x07 \x08 \x9b2J",
    "\x00\ufeff\ufffe\u2028\u2029",
    '\\"}\n{"reason": "end"}\n',
    "<x" + " a" * 500 + ">" + "Z\u0351\u036b" * 50,
)


def played_model(name="tiny", folder=ROOT / "model", **fields):
    """A PlayedModel of random weights with the tokenizer of a folder, of the repository's size."""
    tokenizer = load_tokenizer(folder)
    model = tiny_model(**{"vocab_size": 6400, **fields}).eval()
    return PlayedModel(name, model, tokenizer, DocumentEncoder(tokenizer))


@contextlib.contextmanager
def serving(model, folder):
    server = Server(0, model, RunFolder(folder), has_api=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.is_ending.set()
        server.server_close()
        thread.join(10)


def asked(**fields):
    sampling = {"max_new_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 1}
    body = {"text": "the cat", **sampling, **fields}
    return {name: value for name, value in body.items() if value is not None}


def own_headers(server):
    host = f"127.0.0.1:{server.server_address[1]}"
    return {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/json"}


def connect(server):
    return http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)


def ask(server, method, path, body=None, headers=None):
    """(status, headers, content) of a request; headers: in place of those of our own page, None drops one."""
    connection = connect(server)
    given = {**own_headers(server), **(headers or {})}
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if content is not None:
        given = {"Content-Length": str(len(content)), **given}
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    try:
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def records_of(content):
    return [json.loads(line) for line in content.splitlines()]


def written(server, **fields):
    """The records of a text that the server has written."""
    status, _, content = ask(server, "POST", "/api/generate", asked(**fields))
    assert status == 200, content
    return records_of(content)

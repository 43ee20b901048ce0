"""Files behind addresses. References: the same bytes on the disk, and the readers of local files."""

import contextlib
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from common.errors import DataError
from dataset.chat.chat_corpus import holds_conversations
from dataset.quality.evaluation_texts import evaluation_of
from dataset.reading import remote
from dataset.reading.disk_cache import DiskCache
from dataset.reading.documents import read_documents, split_into_blocks
from dataset.reading.file_kinds import choose_files, find_files
from dataset.reading.remote import remote_files
from dataset.store.token_store import build_shard, open_or_build
from tests.helpers import ROOT, train

TEXTS = [f"the cat {i} sat on " + "a mat, " * (i % 7) for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    # Small pieces, so that small files have many.
    monkeypatch.setattr(remote, "PIECE_BYTES", 4096)
    monkeypatch.setattr(remote, "WAITS_S", (0.0, 0.0))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_kinds(folder):
    """The texts as files of several kinds."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": TEXTS})
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    parquet.write_table(table, folder / "c.parquet", row_group_size=50)
    with arrow.OSFile(str(folder / "d.arrow"), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    with arrow.OSFile(str(folder / "e.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    (folder / "f.txt").write_text("\n".join(TEXTS))
    return sorted(folder.iterdir())


def test_every_kind_of_file_gives_the_same_documents_as_on_the_disk(tmp_path, s3, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    (tmp_path / "data").mkdir()
    for file in write_kinds(tmp_path / "data"):
        address = s3.put(f"kinds/{file.name}", file.read_bytes())
        for there in (address, f"file://{file}", f"{s3.url}/kinds/{file.name}"):
            (found,) = find_files(there)
            assert list(read_documents(found)) == list(read_documents(file)), there


def test_a_folder_and_a_pattern_give_the_same_choice_as_on_the_disk(tmp_path, s3):
    for name in (
        "x/one.jsonl",
        "x/deep/two.jsonl",
        "x/README.md",
        "x/notes.txt",
        "x/one-1.jsonl",
        "x/.hidden/three.jsonl",
        "x/table.csv",
        "x/four#1.jsonl",
        "x/p_16.metrics.jsonl",
        "x/p_16_resume/x.jsonl",
        "x/hr_resume/y.jsonl",
        "x/hr_resume/p_8_resume/z.jsonl",
        "x/model/config.json",
        "x/model/model.safetensors",
        "x/model/vocab.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(LINES)
        s3.put(f"choice/{name}", LINES)
    for pattern in ("x", "x/*.jsonl", "x/**/*.jsonl", "x/one*", "x/o*.jsonl", "x/.hid*/*", "x/hr_resume", "x/model/v*"):
        local = choose_files(str(tmp_path / pattern))
        for begin in ("s3://choice", f"file://{tmp_path}"):
            there = choose_files(f"{begin}/{pattern}")
            for mine, theirs in zip(local, there, strict=True):
                wanted = [f"{begin}/{file.relative_to(tmp_path).as_posix()}" for file in mine]
                assert [str(file) for file in theirs] == wanted


def test_the_name_of_an_object_is_all_of_its_key_and_that_of_a_web_address_its_path(tmp_path):
    names = {
        "s3://bucket/a/b?c#d.jsonl": "b?c#d.jsonl",
        "file:///data/b#d.jsonl": "b#d.jsonl",
        "https://host/a/b.jsonl?token=c/d.txt#e": "b.jsonl",
    }
    cache = DiskCache(tmp_path, 1)
    assert {address: remote.RemoteFile(address, 1, "1", cache).name for address in names} == names


def test_what_is_looked_at_beside_the_data_lies_in_the_cache_that_was_named(tmp_path, s3, encoder):
    """Reference: where its pieces lie."""
    chat = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    address = s3.put("beside/chat.jsonl", chat)
    cache = remote.cache_in(tmp_path / "named")
    (file,) = find_files(address, cache=cache)
    assert file.cache is cache
    assert holds_conversations(address, "text", cache=cache)
    assert evaluation_of(s3.put("beside/a.jsonl", LINES), encoder, "text", cache=cache).is_whole
    assert len([path for path in cache.folder.iterdir() if path.is_file() and path.stat().st_size]) > 1
    assert not (tmp_path / "xdg").exists()


def test_blocks_of_a_large_file_read_little_more_than_their_own_range(tmp_path, s3, monkeypatch):
    monkeypatch.setattr(remote, "_prefetch_piece", lambda *_: None)
    content = LINES * 12
    (found,) = find_files(s3.put("ranges/a.jsonl", content))
    blocks = list(split_into_blocks(found, "text", 40_000))
    s3.requests.clear()
    documents = list(blocks[3].documents("text"))
    assert len(documents) > 100
    first, last = 3 * 40_000 // 4096, 4 * 40_000 // 4096
    asked = [span for _, span in s3.contents_asked_for()]
    assert asked == [f"bytes={i * 4096}-{i * 4096 + 4095}" for i in range(first, last + 1)]


def test_a_piece_is_fetched_beside_the_one_before_and_only_once(tmp_path, s3):
    (found,) = find_files(s3.put("once/a.jsonl", LINES))
    s3.requests.clear()
    for _ in range(3):
        with found.open() as stream:
            assert stream.read() == LINES
    wanted = -(-len(LINES) // 4096)
    assert len(s3.contents_asked_for()) == len(set(s3.contents_asked_for())) == wanted


def bytes_under(folder):
    """Of all files. One that is removed while they are counted counts no more: a thread fetches ahead and makes room."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def test_the_disk_holds_no_more_than_the_limit(tmp_path, s3):
    (found,) = find_files(s3.put("limit/a.jsonl", LINES * 4))
    cache = DiskCache(tmp_path / "small", 5 * 4096)
    found = replace(found, cache=cache)
    largest = 0
    read = b""
    with found.open(buffering=1024) as stream:
        while part := stream.read(3000):
            read += part
            largest = max(largest, bytes_under(cache.folder))
    assert read == LINES * 4
    assert 2 * 4096 <= largest <= cache.limit_bytes


@pytest.mark.slow
def test_a_connection_that_is_cut_gives_no_shorter_file(tmp_path, s3):
    (found,) = find_files(s3.put("cut/a.jsonl", LINES[:4000]))
    s3.go_on.set()
    s3.cuts.set()
    s3.stalls.set()
    try:
        with pytest.raises(DataError, match=r"^s3://cut/a\.jsonl: cannot be read \("), found.open() as stream:
            stream.read()
        assert not [path for path in found.cache.folder.iterdir() if path.is_file() and path.stat().st_size]
    finally:
        s3.stalls.clear()
        s3.cuts.clear()
        s3.go_on.clear()
    with found.open() as stream:
        assert stream.read() == LINES[:4000]


READ = """
import sys
from dataset.reading import remote
from dataset.reading.file_kinds import find_files

remote.PIECE_BYTES = 100_000
(file,) = find_files(sys.argv[1])
with file.open() as stream:
    sys.stdout.buffer.write(stream.read())
"""


@pytest.mark.slow
def test_a_download_that_is_killed_half_way_starts_again(tmp_path, s3):
    address = s3.put("killed/a.jsonl", LINES)
    command = [sys.executable, "-c", READ, address]
    s3.go_on.clear()
    s3.stalled.clear()
    s3.stalls.set()
    try:
        killed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert s3.stalled.wait(60)
        killed.send_signal(signal.SIGKILL)
        assert killed.wait() == -signal.SIGKILL
    finally:
        s3.stalls.clear()
        s3.go_on.set()
    left = list((tmp_path / "xdg" / "minimind" / "downloads").glob(".tmp-*"))
    assert left, "the test killed no download"
    again = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert again.stdout == LINES and not any(path.exists() for path in left)


def test_a_file_that_changes_while_it_is_read_is_told(s3):
    (found,) = find_files(s3.put("changing/a.jsonl", LINES))
    s3.put("changing/a.jsonl", LINES[::-1])
    with pytest.raises(DataError, match="changed since this run began"), found.open() as stream:
        stream.read()


@pytest.mark.parametrize("address", ["s3://nobody/a.jsonl", "s3://there/none.jsonl", "s3://there/none/*.jsonl"])
def test_what_is_not_there_is_told_in_a_line(s3, address):
    s3.put("there/a.jsonl", LINES)
    with pytest.raises(DataError) as caught:
        find_files(address)
    assert str(caught.value) == f"{address}: no such file or folder"


def test_a_web_server_that_gives_whole_files_alone_is_refused(tmp_path, s3):
    (tmp_path / "a.jsonl").write_bytes(LINES)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/a.jsonl"
    with pytest.raises(DataError, match="download it first"):
        find_files(address)
    server.shutdown()


@pytest.fixture
def slow_server():
    """Its address. It sends 10 bytes in half a second; of `stops.bin` the first one, and then nothing for long."""
    done = threading.Event()

    class Slow(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            for _ in range(10):
                self.wfile.write(b"x")
                if done.wait(5 if "stops" in self.path else 0.05):
                    return

        def log_message(self, *_):
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    done.set()
    server.shutdown()
    server.server_close()


def test_a_large_file_may_take_longer_than_any_limit_and_a_silent_server_may_not(tmp_path, monkeypatch, slow_server):
    """A file of half a second, where aiohttp would give 0.2 s, as it gives five minutes of its own accord."""
    aiohttp = pytest.importorskip("aiohttp")
    http = pytest.importorskip("fsspec.implementations.http")
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    monkeypatch.setattr(remote, "SILENCE_S", 0.3)
    # Those of other tests have their own limits.
    http.HTTPFileSystem.clear_instance_cache()
    path = tmp_path / "tokens.bin"
    remote.fetch_file(f"{slow_server}/tokens.bin", path, 10, lambda path: True)
    assert path.read_bytes() == b"x" * 10
    with pytest.raises(DataError, match="cannot be read"):
        remote.fetch_file(f"{slow_server}/stops.bin", path, 10, lambda path: True)


@pytest.mark.parametrize("scheme, package", [("s3", "s3fs"), ("http", "aiohttp"), ("https", "aiohttp")])
def test_a_package_that_is_missing_is_named(monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError) as caught:
        find_files(f"{scheme}://bucket/a.jsonl")
    assert str(caught.value).endswith(f"to read {scheme}:// addresses: pip install {package}")


def test_only_the_scheme_that_is_named_is_followed(tmp_path, s3):
    """fsspec takes `a://b::c://d` for a chain of file systems."""
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(DataError, match="^s3://none::file:"):
        find_files(f"s3://none::file://{tmp_path}/a.jsonl")


@pytest.mark.slow
def test_a_store_of_a_corpus_elsewhere_has_the_tokens_of_the_local_one(tmp_path, s3, encoder, monkeypatch):
    (tmp_path / "data").mkdir()
    files = write_kinds(tmp_path / "data")
    for file in files:
        s3.put(f"store/{file.name}", file.read_bytes())
    local = open_or_build(str(tmp_path / "data"), encoder, progress=False)
    store = open_or_build("s3://store", encoder, progress=False)
    assert store.tokens.tolist() == local.tokens.tolist() and store.offsets.tolist() == local.offsets.tolist()
    # In parts, by processes with caches of their own.
    together = None
    for k in (1, 2, 3):
        together = build_shard("s3://store", encoder, (k, 3), cache_dir=str(tmp_path / "parts"), progress=False)
    assert together is not None and together.tokens.tolist() == local.tokens.tolist()
    # The next start reads no content.
    s3.requests.clear()
    assert open_or_build("s3://store", encoder, progress=False).folder == store.folder
    assert s3.contents_asked_for() == []


@pytest.mark.slow
def test_a_corpus_on_s3_trains_to_the_same_weights_as_on_the_disk(tmp_path, s3, data):
    address = s3.put("corpus/data.jsonl", data.read_bytes())
    outs = []
    for name, path in (("disk", data), ("s3", address)):
        train(data_path=path, out_dir=tmp_path / name, val_fraction=0.2, eval_interval=3)
        outs.append(digest(tmp_path / name / "pretrain_16.pth"))
    assert outs[0] == outs[1]


def test_the_version_of_a_file_is_part_of_its_digest(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    _, (first,) = remote_files(f"file://{path}")
    os.utime(path, (1, 1))
    _, (second,) = remote_files(f"file://{path}")
    assert first.digest != second.digest and first.size == second.size == len(LINES)

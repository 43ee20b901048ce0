"""Files behind addresses. References: the same bytes on the disk, and the readers of local files."""

import contextlib
import gzip
import json
import re
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from common.errors import DataError
from common.wording import one_line
from dataset.reading import remote
from dataset.reading.file_kinds import find_files
from dataset.store.build import open_or_build
from dataset.store.token_store import FILES

TEXTS = [f"the cat {i} sat on " + "a mat, " * (i % 7) for i in range(300)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def put(key, content):
    """Store an object under `bucket/name`, which everybody may read; its address."""
    system = pytest.importorskip("fsspec").filesystem("s3")
    if not system.exists(key.partition("/")[0]):
        system.mkdir(key.partition("/")[0])
    system.pipe_file(key, content, ACL="public-read")
    return f"s3://{key}"


@pytest.fixture(scope="module")
def s3():
    """The address of a server in this process."""
    moto = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        # A client remembers the server that it was made for.
        s3fs.S3FileSystem.clear_instance_cache()
        yield url
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_file_is_fetched_once_and_another_version_of_it_anew(s3):
    address = put("once/a.jsonl", LINES)
    (found,) = find_files(address)
    assert found.read_bytes() == LINES
    fetched_at = found.stat().st_mtime_ns
    assert find_files(address) == [found] and found.stat().st_mtime_ns == fetched_at
    put("once/a.jsonl", LINES[::-1])
    (found,) = find_files(address)
    assert found.read_bytes() == LINES[::-1]


def test_a_file_that_changes_while_it_is_fetched_is_not_kept(tmp_path, s3, monkeypatch):
    address = put("during/a.jsonl", LINES)
    system = remote._file_system("s3")
    get_file = system.get_file

    def changing(*paths, **options):
        get_file(*paths, **options)
        put("during/a.jsonl", LINES[::-1])

    monkeypatch.setattr(system, "get_file", changing)
    with pytest.raises(DataError, match="changed while it was fetched; start again"):
        find_files(address)
    assert not list((tmp_path / "xdg").rglob("a.jsonl"))


@pytest.mark.parametrize("place", ["nobody/a.jsonl", "there/none.jsonl", "there/*.jsonl", "there"])
def test_what_is_not_there_is_told_in_a_line(s3, place):
    put("there/a.jsonl", LINES)
    address = f"s3://{place}"
    with pytest.raises(DataError, match=f"{re.escape(address)}: .*download a folder or a pattern first"):
        find_files(address)


@pytest.fixture
def web():
    """The address of a server that would have `packed.jsonl.gz` unpacked on the way, cuts `cut.jsonl` off, sends `more.jsonl`
    and `endless.jsonl` for ever, answers `403.jsonl` with 403, and of other files sends one byte and then nothing."""
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answered() or self.begin(10 if "endless" not in self.path else None)

        def answered(self):
            """A status by the name; a redirect leads back to itself."""
            name = self.path.strip("/").partition(".")[0]
            if name.isdigit():
                self.send_response(int(name))
                self.send_header("Location", self.path)
                self.end_headers()
            return name.isdigit()

        def do_GET(self):
            if self.answered():
                return
            if "more" in self.path or "endless" in self.path:
                self.begin(None)
                with contextlib.suppress(OSError):
                    while not done.is_set():
                        self.wfile.write(b"x" * 100_000)
                return
            if "packed" in self.path:
                packed = gzip.compress(LINES, mtime=0)
                self.begin(len(packed), "gzip" if "gzip" in self.headers["Accept-Encoding"] else None)
                self.wfile.write(packed)
                return
            self.begin(10)
            self.wfile.write(b"x")
            if "cut" not in self.path:
                done.wait(5)

        def begin(self, length, encoding=None):
            self.send_response(200)
            for name, value in (("Content-Length", length), ("Content-Encoding", encoding)):
                if value is not None:
                    self.send_header(name, str(value))
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    done.set()
    server.shutdown()
    server.server_close()


def test_a_compressed_file_comes_as_it_is_and_what_is_cut_or_silent_is_told(tmp_path, web, monkeypatch):
    """A server may name the compression of the file as that of the way, and then a client unpacks it."""
    http = pytest.importorskip("fsspec.implementations.http")
    monkeypatch.setattr(remote, "READ_TIMEOUT_S", 0.3)
    http.HTTPFileSystem.clear_instance_cache()
    remote._file_system("http").get_file(f"{web}/packed.jsonl.gz", str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == gzip.compress(LINES, mtime=0)
    for name in ("cut.jsonl", "silent.jsonl"):
        with pytest.raises(DataError, match=f"^{web}/{name}: cannot be read"):
            find_files(f"{web}/{name}")
        assert not list((tmp_path / "xdg").rglob(name))


@pytest.mark.parametrize(
    "name, reason",
    [
        ("403", "the server answers 403 Forbidden"),
        ("500", "the server answers 500 Internal Server Error"),
        ("302", "it redirects without end"),
        ("404", "no such file or server; download a folder or a pattern first"),
        ("more", "stopped: the server sends more than 10 bytes"),
        ("endless", "stopped: the server sends more than 1,000,000 bytes"),
    ],
)
def test_what_a_server_does_is_told_without_the_password(web, name, reason, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    address = f"{web}/{name}.jsonl".replace("://", "://me:secret@") + "?token=secret"
    with pytest.raises(DataError) as caught:
        find_files(address)
    shown = f"{web}/{name}.jsonl?token=***".replace("://", "://***@")
    assert one_line(caught.value) == f"{shown}: cannot be read ({reason})"


@pytest.mark.parametrize("scheme, package", [("s3", "s3fs"), ("http", "aiohttp"), ("https", "aiohttp")])
def test_a_package_that_is_missing_is_named(monkeypatch, scheme, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError) as caught:
        find_files(f"{scheme}://bucket/a.jsonl")
    assert str(caught.value).endswith(f"to read {scheme}:// addresses: pip install {package}")


def test_a_file_gives_the_store_of_the_same_file_on_the_disk(tmp_path, s3, encoder):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(LINES))
    here = open_or_build(str(file), encoder, progress=False).folder
    assert here.parent == tmp_path / ".token_store"
    for address in (put("corpus/a.jsonl.gz", file.read_bytes()), f"{s3}/corpus/a.jsonl.gz"):
        there = open_or_build(address, encoder, progress=False).folder
        assert there.parent == tmp_path / "xdg" / "minimind" / "token_store" and there.name == here.name
        assert all((there / name).read_bytes() == (here / name).read_bytes() for name in [*FILES, "meta.json"])

"""export_hf.py --push_to_hub: the hubs' own clients against a server that speaks their protocols. Reference: the exported files."""

import json
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants

from common.errors import UserError
from scripts import export_hf

TOKEN = "hf_test"


class Hub(BaseHTTPRequestHandler):
    """The repository me/tiny of both hubs: its visibility, and its files by a commit. Large ones come before it, by their digest."""

    def log_message(self, format, *args):
        pass

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, value = self.answer(self.path.partition("?")[0], body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    do_GET = do_POST = do_PUT = handle_request

    def answer(self, path, body):
        """(status, JSON)"""
        hub, (*_, place, last) = self.server, path.split("/")
        if place == "blobs":
            hub.blobs[last] = body
            return 200, {}
        if TOKEN not in self.headers.get("Authorization", "") + self.headers.get("Cookie", ""):
            return 401, {}
        lines = [json.loads(line) for line in body.splitlines()]
        if path in ("/api/repos/create", "/api/v1/models"):
            is_new = hub.is_private is None
            if is_new:
                hub.is_private = lines[0].get("visibility") == "private" or lines[0].get("Visibility") == 1
            return 200 if is_new else 409, {"url": f"{hub.address}/me/tiny", "Message": "already exists", "Data": {}}
        if last == "batch":
            for one in lines[0]["objects"]:
                one["actions"] = {"upload": {"href": f"{hub.address}/blobs/{one['oid']}"}}
            return 200, {**lines[0], "Data": lines[0]}
        if place == "preupload":
            modes = {file["path"]: "lfs" if file["size"] > 50_000 else "regular" for file in lines[0]["files"]}
            return 200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}
        if place == "commit":
            # A line a file, or one line with all of them
            for file in lines[0].get("actions") or [line["value"] for line in lines[1:]]:
                digest = file.get("oid") or file.get("sha256")
                hub.files[file["path"]] = hub.blobs[digest] if digest else b64decode(file["content"])
            return 200, {"Success": True, "commitUrl": f"{hub.address}/me/tiny/commit/1", "commitOid": "1" * 40}
        found = {"id": "me/tiny", "private": hub.is_private, "visibility": 1 if hub.is_private else 5}
        return 200, {**found, "data": found, "success": True, "errors": [], "warnings": []}


@pytest.fixture(params=["huggingface", "modelscope"])
def hub(request, monkeypatch, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.name, server.is_private, server.blobs, server.files = request.param, None, {}, {}
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # As HF_ENDPOINT does, before the package is imported. Xet, another protocol for the large files, is left out.
    for name, value in {"ENDPOINT": server.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    if request.param == "modelscope":
        config = pytest.importorskip("modelscope_hub.config")
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)
        config.set_default_config(config.HubConfig(endpoint=server.address, config_dir=tmp_path / "modelscope"))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def push(hub, weight, folder, *flags):
    words = ["--weight", weight, "--out_dir", str(folder), "--overwrite", "--push_to_hub", "me/tiny", "--hub", hub.name]
    assert export_hf.main([*words, *flags]) == 0


def test_what_arrives_is_what_was_exported(hub, weight, tmp_path, capsys):
    """All of it, the large files too, byte for byte, for its owner alone; a second time in the same repository."""
    for dtype in ("auto", "float32"):
        push(hub, weight, tmp_path / "hf", "--dtype", dtype)
        exported = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        assert hub.files == exported and {"README.md", "tokenizer.json"} <= exported.keys()
        assert exported["model.safetensors"] in hub.blobs.values() and exported["README.md"] not in hub.blobs.values()
    assert hub.is_private and f"uploaded: {hub.address}/" in capsys.readouterr().out


def test_a_public_repository_gets_a_model_only_if_asked(hub, weight, tmp_path):
    push(hub, weight, tmp_path / "hf", "--public")
    assert hub.is_private is False and hub.files
    hub.files.clear()
    with pytest.raises(UserError, match=f"{hub.name} shows this repository to everybody: .* add --public"):
        push(hub, weight, tmp_path / "hf2")
    assert not hub.files and not (tmp_path / "hf2").exists()


def test_without_a_token_nothing_is_exported(hub, weight, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.scripts.test_hubs.TOKEN", "another")
    with pytest.raises(UserError, match="it wants your token: .*401") as error:
        push(hub, weight, tmp_path / "hf")
    assert "\n" not in str(error.value) and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("flags", ["--out_dir a --public", "--to_pth a --hub modelscope", "--to_pth a --push_to_hub b"])
def test_flags_of_an_upload_that_is_none(flags):
    with pytest.raises(UserError, match="--hub and --public want --push_to_hub, and that wants --out_dir"):
        export_hf.main(flags.split())

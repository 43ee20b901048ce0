"""The token store. Reference: read_documents and DocumentEncoder, one document after the other, in this process."""

import errno
import gzip
import hashlib
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from common.errors import DataError
from dataset.reading.settings import TextSettings
from dataset.store import build
from dataset.store.build import open_or_build
from dataset.store.token_store import FILES
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT, before_calls, wait_until, write_texts

SKIPPING = TextSettings(skip_bad_lines=True)
TEXTS = [f"the cat {i} sat on " + "a mat, " * (i % 7) + "二三" * (i % 3) for i in range(300)]
SCRIPT = """
import pickle, sys
sys.path.insert(0, {root!r})
from dataset.store import build
build.BLOCK_BYTES = 5000
encoder = pickle.load(open({encoder!r}, "rb"))  # without the slow import of transformers
store = build.open_or_build({path!r}, encoder, num_procs={procs})
print(store.folder, len(store))
"""


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(build, "BLOCK_BYTES", 1000)


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def check(store, texts, encoder):
    assert len(store) == len(texts)
    expected = [encoder.encode([text])[0] for text in texts]
    assert [store.document(i).tolist() for i in range(len(store))] == expected
    assert store.text_bytes.tolist() == [len(text.encode()) for text in texts]
    hashes = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts]
    assert store.doc_hash.tolist() == hashes
    assert store.tokens.dtype == np.uint16 and store.offsets.dtype == np.int64


def test_any_number_of_processes_gives_the_same_bytes(tmp_path, encoder, small_blocks):
    plain = write_texts(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(TEXTS[:20]):
        (tmp_path / "txt" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    for path in (plain, str(tmp_path / "b.jsonl.gz")):
        store = open_or_build(path, encoder, num_procs=1)
        check(store, TEXTS, encoder)
        other = open_or_build(path, encoder, TextSettings(cache_dir=str(tmp_path / "other")), num_procs=3)
        assert content(other.folder) == content(store.folder)
    paths = [plain, str(tmp_path / "txt" / "0*.txt")]
    check(open_or_build(paths, encoder, num_procs=1), TEXTS + TEXTS[:10], encoder)


def test_remembered_digests_are_used_and_only_for_the_same_file(tmp_path, encoder, monkeypatch):
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(build.time, "time", lambda: time.time_ns() / 1e9 + 60)  # the file is no longer fresh
    open_or_build(path, encoder)
    read, hashed = build.file_digest, []
    monkeypatch.setattr(build, "file_digest", lambda file: hashed.append(file) or read(file))
    store = open_or_build(path, encoder)
    assert hashed == []
    for broken in ("[1]", '{"files": ["00"], "sha256": "0"}'):
        (store.folder.parent / "hashes.json").write_text(broken)
        assert open_or_build(path, encoder).folder == store.folder
    hashed.clear()
    new = write_texts(tmp_path / "b.jsonl", TEXTS)
    open_or_build([path, new], encoder)
    assert hashed == [Path(new)], "of a folder that gets a file the new one alone is read"
    hashed.clear()
    stat = os.stat(path)
    changed = (tmp_path / "a.jsonl").read_bytes().replace(b"the cat 7 ", b"the dog 7 ")
    (tmp_path / "a.jsonl").write_bytes(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time: only the ctime tells
    assert "dog" in small_tokenizer().decode(open_or_build(path, encoder).document(7))
    assert len(hashed) == 1


def test_edits_tokenizers_and_options_have_stores_of_their_own(tmp_path, encoder):
    """Nothing stale is ever reused; the same content in another place is."""
    path, here = write_texts(tmp_path / "a.jsonl", TEXTS), TextSettings(cache_dir=str(tmp_path / "cache"))
    first = open_or_build(path, encoder, here)
    others = [
        open_or_build(path, DocumentEncoder(small_tokenizer(pad="<pad>")), here),
        open_or_build(path, DocumentEncoder(small_tokenizer(), parse_special_tokens=True), here),
        open_or_build(path, encoder, replace(here, skip_bad_lines=True)),
        open_or_build([path, path], encoder, here),
    ]
    write_texts(tmp_path / "a.jsonl", [*TEXTS, "more"])
    others.append(open_or_build(path, encoder, here))
    assert len({store.fingerprint for store in [first, *others]}) == 6
    (tmp_path / "other").mkdir()
    again = open_or_build(write_texts(tmp_path / "other" / "a.jsonl", TEXTS), encoder, here)
    assert again.folder == first.folder


@pytest.mark.parametrize("num_procs", [1, 3])
def test_faulty_line_is_named_rightly(tmp_path, encoder, small_blocks, num_procs):
    """The first fault of the file is raised, with its line in the file, whichever process met it."""
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[211] = '{"text": null}'
    lines[260] = "nonsense"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError) as caught:
        open_or_build(str(path), encoder, num_procs=num_procs)
    assert str(caught.value).startswith(f"{path}:212: 'text' is a null") and "\n" not in str(caught.value)
    assert not list((tmp_path / ".token_store").glob("*/")), "no store and no temporary folder is left"
    store = open_or_build(str(path), encoder, SKIPPING, num_procs=num_procs)
    check(store, [text for i, text in enumerate(TEXTS) if i not in (211, 260)], encoder)
    assert store.bad_lines.counts == {"text is null": 1, "not JSON": 1}
    assert any(f"{path}:261: " in line for line in store.bad_lines.report())


def test_nothing_to_train_on(tmp_path, encoder):
    for name, data in {"empty.jsonl": "", "blank.jsonl": "\n\n", "void.jsonl": '{"text": ""}'}.items():
        (tmp_path / name).write_text(data)
        with pytest.raises(DataError, match=f"{name}: no document in there; the files have no text"):
            open_or_build(str(tmp_path / name), encoder)
    (tmp_path / "bad.jsonl").write_text("a\nb\n")
    with pytest.raises(DataError, match="no document in there; all 2 lines are bad"):
        open_or_build(str(tmp_path / "bad.jsonl"), encoder, SKIPPING)


def test_a_flipped_bit_or_another_size_anywhere_in_a_store_is_noticed(tmp_path, encoder, capsys):
    """Reference: the store as it was built. 25 random bits; each either changes nothing that is read or is noticed."""
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    folder = open_or_build(path, encoder, progress=False).folder
    built = content(folder)
    generator = np.random.default_rng(0)
    noticed = 0
    for _ in range(25):
        name = sorted(built)[generator.integers(len(built))]
        damaged = bytearray(built[name])
        bit = int(generator.integers(8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(damaged)
        check(open_or_build(path, encoder, progress=False), TEXTS, encoder)
        noticed += capsys.readouterr().out.count("it is rebuilt")
        assert json.loads((folder / "meta.json").read_text()) == json.loads(built["meta.json"])
    assert noticed >= 20, "white space in meta.json may change without harm"
    for name in FILES:
        for other_size in (built[name][:-8], b"", built[name] + built[name][:8]):
            (folder / name).write_bytes(other_size)
            check(open_or_build(path, encoder, progress=False), TEXTS, encoder)
            assert (folder / name).read_bytes() == built[name] and "it is rebuilt" in capsys.readouterr().out
    # A worker process does not read again what was checked.
    store = open_or_build(path, encoder, progress=False)
    (folder / "tokens.bin").write_bytes(built["tokens.bin"][::-1])
    assert pickle.loads(pickle.dumps(store)).tokens.tobytes() == built["tokens.bin"][::-1]


@pytest.mark.parametrize("is_file", [True, False])
def test_read_only_data_folder(tmp_path, encoder, capsys, monkeypatch, is_file):
    """False: of a bucket that renames no folders."""
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    rename = os.replace

    def refuse(source, target):
        if ".token_store" in str(source) and list(source.glob("*")):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    if is_file:
        # In the way: root may write anywhere, so permissions would prove nothing.
        (tmp_path / ".token_store").touch()
    store = open_or_build(path, encoder)
    assert store.folder.parent == tmp_path / "xdg" / "minimind" / "token_store"
    assert not [*store.folder.parent.glob(".probe*"), *tmp_path.glob(".token_store/*")]
    assert f"using {store.folder.parent}" in capsys.readouterr().out
    assert open_or_build(path, encoder).folder == store.folder
    with pytest.raises(DataError, match="--cache_dir"):
        reading = TextSettings(cache_dir=str(tmp_path / ".token_store"))
        open_or_build(write_texts(tmp_path / "b.jsonl", ["b"]), encoder, reading)


def test_data_that_changes_meanwhile_is_refused(tmp_path, encoder):
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    edit_first = before_calls(build, "encode_blocks", lambda *_: write_texts(tmp_path / "a.jsonl", ["other"]))
    with edit_first, pytest.raises(DataError, match="changed while"):
        open_or_build(path, encoder)
    assert not list((tmp_path / ".token_store").glob("*/"))


def start(path, encoder, procs=1, before=""):
    pickled = Path(f"{path}.encoder")
    # A process that was started before may be reading it.
    if not pickled.exists():
        pickled.write_bytes(pickle.dumps(encoder))
    code = before + SCRIPT.format(root=str(ROOT), encoder=str(pickled), path=str(path), procs=procs)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_start_together_build_once(tmp_path, encoder):
    path = write_texts(tmp_path / "a.jsonl", TEXTS * 100)
    runs = [start(path, encoder) for _ in range(3)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert sum("tokenised a:" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


# The build takes what its workers made of the first block, and waits there for the signal.
HANGS = f"""
import signal, sys, time
# What is started in the background of a shell would not hear Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT)!r})
from dataset.store import build
encode_blocks = build.encode_blocks
def hanging(*arguments):
    blocks = encode_blocks(*arguments)
    yield next(blocks)
    time.sleep(300)
build.encode_blocks = hanging
"""


@pytest.mark.parametrize("name", ["KILL", *(pytest.param(name, marks=pytest.mark.slow) for name in ("INT", "TERM"))])
def test_interrupted_build_leaves_no_store_and_no_process(tmp_path, encoder, name):
    """No half store is readable, the next start clears up, the workers end with their parent."""
    path = write_texts(tmp_path / "a.jsonl", TEXTS * 40)
    run = start(path, encoder, procs=2, before=HANGS)
    store = tmp_path / ".token_store"
    wait_until(lambda: list(store.glob(".*/tokens.bin")) and len(psutil.Process(run.pid).children()) == 2)
    children = psutil.Process(run.pid).children()
    run.send_signal(signal.Signals[f"SIG{name}"])
    run.communicate(timeout=20)
    assert run.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(store.glob("a-*/"))
    # It may be one of other data in the same place.
    open_or_build(write_texts(tmp_path / "b.jsonl", TEXTS), encoder)
    assert not list(store.glob("*under-way"))


def test_full_disk_is_named_and_leaves_nothing(tmp_path, encoder):
    """A limit on the size of files stands for the full disk."""
    path = write_texts(tmp_path / "a.jsonl", TEXTS * 20)
    run = start(path, encoder, before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))")
    _, errors = run.communicate(timeout=60)
    assert "DataError" in errors and "--cache_dir names another folder" in errors
    assert not list((tmp_path / ".token_store").glob("*/"))


@pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="another process has the real function")
def test_dead_worker_is_reported(tmp_path, encoder, small_blocks, monkeypatch):
    monkeypatch.setattr(build, "encode_block", lambda *_: os._exit(9))
    with pytest.raises(DataError, match=r"process \d+ ended with code 9;"):
        open_or_build(write_texts(tmp_path / "a.jsonl", TEXTS), encoder, num_procs=2)


def test_a_split_is_part_of_the_name_of_a_store_only_where_it_splits(tmp_path, encoder):
    (tmp_path / "a.txt").write_text("the cat\nsat on\n\na mat\n")
    plain, jsonl = open_or_build(str(tmp_path / "a.txt"), encoder), write_texts(tmp_path / "b.jsonl", TEXTS[:3])
    by_line = TextSettings(split_text="lines")
    split = open_or_build(str(tmp_path / "a.txt"), encoder, by_line)
    check(split, ["the cat", "sat on", "a mat"], encoder)
    assert len(plain) == 1 and plain.folder != split.folder
    assert open_or_build(jsonl, encoder).folder == open_or_build(jsonl, encoder, by_line).folder

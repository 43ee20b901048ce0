"""The token store. Reference: read_documents and DocumentEncoder, one document after the other, in this process."""

import errno
import gzip
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from common import files
from common.errors import UserError
from dataset import tokenize_corpus
from dataset.reading.documents import DataError, read_documents
from dataset.store import builder, file_digests, token_store
from dataset.store import check as store_check
from dataset.store import format as store_format
from dataset.store.check import DigestCheck
from dataset.store.format import TokenStore
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import LetterTokenizer, small_tokenizer
from tests.helpers import ROOT

TEXTS = [f"the cat {i} sat on " + "a mat, " * (i % 7) + "二三" * (i % 3) for i in range(300)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(builder, "BLOCK_BYTES", 1000)


def write(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def content(store):
    return {file.name: file.read_bytes() for file in store.folder.iterdir()}


def check(store, texts, encoder):
    assert len(store) == len(texts)
    expected = [encoder.encode([text])[0] for text in texts]
    assert [store.document(i).tolist() for i in range(len(store))] == expected
    assert store.lengths().tolist() == [len(ids) for ids in expected]
    assert store.text_bytes.tolist() == [len(text.encode()) for text in texts]
    hashes = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") for text in texts]
    assert store.doc_hash.tolist() == hashes
    assert store.max_token_id == max(max(ids) for ids in expected) == store.tokens.max()
    assert store.tokens.dtype == np.uint16 and store.offsets.dtype == np.int64


@pytest.mark.parametrize("num_procs", [1, 3])
def test_every_format_gives_the_same_documents(tmp_path, encoder, small_blocks, num_procs):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zstandard = pytest.importorskip("zstandard")

    plain = write(tmp_path / "a.jsonl")
    raw = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(raw))
    parquet.write_table(arrow.table({"text": TEXTS}), tmp_path / "d.parquet")
    (tmp_path / "txt").mkdir()
    for i, text in enumerate(TEXTS[:20]):
        (tmp_path / "txt" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    for path in (plain, *(str(tmp_path / name) for name in ("b.jsonl.gz", "c.jsonl.zst", "d.parquet"))):
        check(open_or_build(path, encoder, num_procs=num_procs), TEXTS, encoder)
    check(open_or_build(str(tmp_path / "txt"), encoder, num_procs=num_procs), TEXTS[:20], encoder)
    check(
        open_or_build([plain, str(tmp_path / "txt" / "0*.txt")], encoder, num_procs=num_procs),
        TEXTS + TEXTS[:10],
        encoder,
    )


def test_bytes_do_not_depend_on_the_number_of_processes(tmp_path, encoder, small_blocks):
    path = write(tmp_path / "a.jsonl", [*TEXTS, "x" * 5000, "end"])
    stores = [open_or_build(path, encoder, cache_dir=str(tmp_path / str(n)), num_procs=n) for n in (1, 2, 4)]
    assert content(stores[0]) == content(stores[1]) == content(stores[2])


def test_carried_bos_and_eos_count_as_no_text(tmp_path, encoder):
    store = open_or_build(write(tmp_path / "a.jsonl", ["<s>the cat</s>", "the cat"]), encoder)
    assert store.document(0).tolist() == store.document(1).tolist()
    assert store.text_bytes.tolist() == [7, 7] and store.doc_hash[0] == store.doc_hash[1]


def test_second_start_reads_nothing_anew(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    old = time.time() - 60
    os.utime(path, (old, old))
    first = open_or_build(path, encoder)
    monkeypatch.setattr(builder, "encode_blocks", None)
    second = open_or_build(path, encoder)
    assert second.folder == first.folder and second.folder.parent == tmp_path / ".token_store"
    copy = pickle.loads(pickle.dumps(second))  # as a loader's worker gets it
    assert copy.document(5).tolist() == first.document(5).tolist()


def test_remembered_digests_are_used_and_only_for_the_same_file(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    monkeypatch.setattr(file_digests.time, "time", lambda: time.time_ns() / 1e9 + 60)  # the file is no longer fresh
    open_or_build(path, encoder)
    read, hashed = file_digests.sha256_of_file, []
    monkeypatch.setattr(file_digests, "sha256_of_file", lambda file: hashed.append(file) or read(file))
    open_or_build(path, encoder)
    assert hashed == []
    stat = os.stat(path)
    changed = (tmp_path / "a.jsonl").read_bytes().replace(b"the cat 7 ", b"the dog 7 ")
    (tmp_path / "a.jsonl").write_bytes(changed)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time: only the ctime tells
    assert "dog" in small_tokenizer().decode(open_or_build(path, encoder).document(7))
    assert len(hashed) == 1


@pytest.mark.slow
def test_a_large_file_that_was_just_written_is_not_read_again_at_the_next_start(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(file_digests, "WAIT_FROM_BYTES", 1, raising=False)
    path = write(tmp_path / "a.jsonl")
    open_or_build(path, encoder)
    monkeypatch.setattr(file_digests, "sha256_of_file", None)
    open_or_build(path, encoder)


def test_a_time_in_the_future_does_not_cost_a_reading_at_each_start(tmp_path, encoder, monkeypatch):
    """As archives leave it; on POSIX the change time tells all the same."""
    path = write(tmp_path / "a.jsonl")
    os.utime(path, (2**32, 2**32))
    monkeypatch.setattr(file_digests.time, "time", lambda: time.time_ns() / 1e9 + 60)
    open_or_build(path, encoder)
    monkeypatch.setattr(file_digests, "sha256_of_file", None)
    open_or_build(path, encoder)


BROKEN_HASHES = ["", "{}", "[1]", "[[]]", '[["a"]]', "null", "[" * 5000, '[[{}, 1, 2, 3, 4, "x"]]', '{"a": [1, 2]}']


@pytest.mark.parametrize("broken", [*BROKEN_HASHES, '[["PATH", NaN, NaN, NaN, NaN, "00"]]', "\udcff"])
def test_broken_remembered_digests_are_ignored(tmp_path, encoder, broken):
    path = write(tmp_path / "a.jsonl")
    (tmp_path / ".token_store").mkdir()
    (tmp_path / ".token_store" / "hashes.json").write_bytes(broken.encode("utf-8", "surrogateescape"))
    check(open_or_build(path, encoder), TEXTS, encoder)
    check(open_or_build(path, encoder), TEXTS, encoder)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_whoever_may_read_the_store_may_read_the_remembered_digests(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(file_digests.time, "time", lambda: time.time_ns() / 1e9 + 60)
    store = open_or_build(write(tmp_path / "a.jsonl", TEXTS[:5]), encoder, progress=False)
    remembered = store.folder.parent / "hashes.json"
    assert remembered.stat().st_mode == (store.folder / "meta.json").stat().st_mode


def test_a_flipped_bit_in_remembered_digests_changes_nothing(tmp_path, encoder, monkeypatch):
    """A wrong digest would give the data another identity: a resume would be refused, and the store made again."""
    path = write(tmp_path / "a.jsonl", TEXTS[:5])
    monkeypatch.setattr(file_digests.time, "time", lambda: time.time_ns() / 1e9 + 60)
    store = open_or_build(path, encoder, progress=False)
    remembered = tmp_path / ".token_store" / "hashes.json"
    sound = remembered.read_bytes()
    assert len(sound) > 100
    monkeypatch.setattr(builder, "encode_blocks", None)
    for bit in np.random.default_rng(0).choice(8 * len(sound), 100, replace=False).tolist():
        flipped = bytearray(sound)
        flipped[bit // 8] ^= 1 << bit % 8
        remembered.write_bytes(flipped)
        assert open_or_build(path, encoder, progress=False).fingerprint == store.fingerprint


def test_an_edit_within_one_tick_of_the_file_system_is_found(tmp_path, encoder, monkeypatch):
    """Times of files in whole ticks of two seconds, as on FAT: the edit leaves size and all times as they were."""

    def coarse(files):
        tick = 2 * 10**9
        stats = []
        for path, size, modified, changed, inode in real(files):
            stats.append((path, size, modified // tick * tick, changed // tick * tick, inode))
        return stats

    real = file_digests.stats_of
    monkeypatch.setattr(file_digests, "stats_of", coarse)
    monkeypatch.setattr(builder, "stats_of", coarse)
    path = write(tmp_path / "a.jsonl", ["the cat sat"])
    while True:
        write(tmp_path / "a.jsonl", ["the cat sat"])
        before = coarse([tmp_path / "a.jsonl"])
        open_or_build(path, encoder, progress=False)
        write(tmp_path / "a.jsonl", ["the dog sat"])
        if coarse([tmp_path / "a.jsonl"]) == before:
            break
    assert "dog" in small_tokenizer().decode(open_or_build(path, encoder, progress=False).document(0))


def test_edits_tokenizers_and_options_have_stores_of_their_own(tmp_path, encoder):
    """Nothing stale is ever reused; the same content in another place is."""
    path, cache = write(tmp_path / "a.jsonl"), str(tmp_path / "cache")
    first = open_or_build(path, encoder, cache_dir=cache)
    others = [
        open_or_build(path, DocumentEncoder(small_tokenizer(pad="<pad>")), cache_dir=cache),
        open_or_build(path, DocumentEncoder(small_tokenizer(), parse_special_tokens=True), cache_dir=cache),
        open_or_build(path, encoder, cache_dir=cache, skip_bad_lines=True),
        open_or_build([path, path], encoder, cache_dir=cache),
    ]
    write(tmp_path / "a.jsonl", [*TEXTS, "more"])
    others.append(open_or_build(path, encoder, cache_dir=cache))
    assert len({store.fingerprint for store in [first, *others]}) == 6
    (tmp_path / "other").mkdir()
    again = open_or_build(write(tmp_path / "other" / "a.jsonl"), encoder, cache_dir=cache)
    assert again.folder == first.folder


def test_large_vocabulary_takes_uint32(tmp_path):
    letters = "".join(chr(i) for i in range(0x20, 0x11000) if not 0xD800 <= i < 0xE000)
    tokenizer = LetterTokenizer(letters, bos_token="<s>", eos_token="</s>")
    big = DocumentEncoder(tokenizer)
    store = open_or_build(write(tmp_path / "a.jsonl", ["a\U00010ff0b"]), big)
    assert store.tokens.dtype == np.uint32 and store.document(0).tolist() == big.encode(["a\U00010ff0b"])[0]
    assert store.max_token_id > 65535


def test_document_without_tokens_is_not_stored(tmp_path):
    bare = DocumentEncoder(LetterTokenizer("ab"))
    bare._slow._tokenize = lambda text, **kwargs: [letter for letter in text if letter in "ab"]
    store = open_or_build(write(tmp_path / "a.jsonl", ["ab", "??", "b"]), bare)
    assert [store.document(i).tolist() for i in range(len(store))] == [[0, 1], [1]]


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
    assert not list((tmp_path / ".token_store").glob("*a-*/")), "no store and no temporary folder is left"
    store = open_or_build(str(path), encoder, num_procs=num_procs, skip_bad_lines=True)
    check(store, [text for i, text in enumerate(TEXTS) if i not in (211, 260)], encoder)
    assert store.bad_lines.counts == {"text is null": 1, "not JSON": 1}
    assert any(f"{path}:261: " in line for line in store.bad_lines.report())


def test_all_16_kinds_are_skipped_and_counted(tmp_path, encoder, small_blocks):
    """The exact count by kind, after any number of processes and on a second start."""
    from tests.dataset.reading.test_documents import FAULTS, HARMLESS
    from tests.dataset.reading.test_documents import TEXTS as GOOD_TEXTS

    path, kinds = tmp_path / "a.jsonl", {}
    path.write_bytes(b"\n".join([b"\n".join(HARMLESS.values()), *(line for line, _ in FAULTS.values())]))
    for _, kind in FAULTS.values():
        kinds[kind] = kinds.get(kind, 0) + 1
    for num_procs in (1, 2, 1):
        store = open_or_build(str(path), encoder, skip_bad_lines=True, num_procs=num_procs)
        check(store, GOOD_TEXTS * len(HARMLESS), encoder)
        assert store.bad_lines.counts == kinds
    documents = list(read_documents(path, bad_lines=store.bad_lines))
    assert len(documents) == len(store)


def test_nothing_to_train_on(tmp_path, encoder):
    for name, data in {"empty.jsonl": "", "blank.jsonl": "\n\n", "void.jsonl": '{"text": ""}'}.items():
        (tmp_path / name).write_text(data)
        with pytest.raises(DataError, match=f"{name}: no document in there; the files are empty"):
            open_or_build(str(tmp_path / name), encoder)
    (tmp_path / "bad.jsonl").write_text("a\nb\n")
    with pytest.raises(DataError, match="no document in there; all 2 lines are bad"):
        open_or_build(str(tmp_path / "bad.jsonl"), encoder, skip_bad_lines=True)


@pytest.mark.parametrize("file", ["tokens.bin", "offsets.bin", "text_bytes.bin", "doc_hash.bin", "meta.json"])
def test_truncated_store_is_made_anew(tmp_path, encoder, capsys, file):
    path = write(tmp_path / "a.jsonl")
    folder = open_or_build(path, encoder).folder
    os.truncate(folder / file, (folder / file).stat().st_size // 2)
    with pytest.raises(ValueError):
        TokenStore(folder)
    check(open_or_build(path, encoder), TEXTS, encoder)
    assert capsys.readouterr().out.count("is damaged") == 1


def test_a_flipped_bit_anywhere_in_a_store_is_noticed(tmp_path, encoder, capsys):
    """Reference: the store as it was built. 25 random bits; each either changes nothing that is read or is noticed."""
    path = write(tmp_path / "a.jsonl")
    folder = open_or_build(path, encoder, progress=False).folder
    built = {file.name: file.read_bytes() for file in folder.iterdir()}
    generator = np.random.default_rng(0)
    noticed = 0
    for _ in range(25):
        name = sorted(built)[generator.integers(len(built))]
        damaged = bytearray(built[name])
        bit = int(generator.integers(8 * len(damaged)))
        damaged[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(damaged)
        check(open_or_build(path, encoder, progress=False), TEXTS, encoder)
        noticed += capsys.readouterr().out.count("it is made anew")
        assert json.loads((folder / "meta.json").read_text()) == json.loads(built["meta.json"])
    assert noticed >= 20, "white space in meta.json may change without harm"


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", '{"sha256": 1}', '{"sha256": {}, "meta_sha256": []}', "[" * 9999]
)
def test_a_broken_description_of_a_store_is_noticed(tmp_path, encoder, capsys, content):
    path = write(tmp_path / "a.jsonl")
    folder = open_or_build(path, encoder, progress=False).folder
    (folder / "meta.json").write_text(content)
    check(open_or_build(path, encoder, progress=False), TEXTS, encoder)
    assert capsys.readouterr().out.count("it is made anew") == 1


FORGED = {
    "key": [None, 3, []],
    "source_name": [None, 3],
    "dtype": [None, "O", "float64", ["uint16"], "uint32"],
    "documents": [None, -1, 1.5, "300", True, 10**19, 301, 0],
    "tokens": [None, -1, 10**19, 5],
    "max_token_id": [None, "9", [], float("nan")],
    "bad_lines": [
        None,
        [],
        {"counts": {"a": 1}},
        {"counts": {"a": "1"}, "places": {"a": []}},
        {"counts": {"a": 1}, "places": {"a": [{}]}},
    ],
    "sha256": [None, [], {}, {"tokens.bin": None}],
}


def test_damaged_tokens_of_a_large_store_are_noticed_beside_the_training(tmp_path, encoder, monkeypatch):
    monkeypatch.setattr(store_format, "CHECKED_AT_ONCE", 0)
    monkeypatch.setattr(store_check, "CHECKED_AT_ONCE", 0)
    path = write(tmp_path / "a.jsonl")
    folder = open_or_build(path, encoder, progress=False).folder
    DigestCheck([TokenStore(folder)]).raise_if_damaged(wait_s=60)
    tokens = bytearray((folder / "tokens.bin").read_bytes())
    tokens[100] ^= 1
    (folder / "tokens.bin").write_bytes(tokens)
    with pytest.raises(DataError, match=r"tokens.bin is damaged.*tokenises the data again"):
        DigestCheck([TokenStore(folder)]).raise_if_damaged(wait_s=60)
    check(open_or_build(path, encoder, progress=False), TEXTS, encoder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_of_a_store_is_open_or_mapped_when_it_is_renamed_or_removed(
    tmp_path, encoder, small_blocks, monkeypatch
):
    """Windows refuses both. Cases: a first build, a damaged store made anew."""
    touched = []

    def nothing_open(folder):
        touched.append(folder)
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
        opened = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd)]
        assert not mapped and not [name for name in opened if str(folder) in name]

    def fd_is_there(fd):
        return os.path.islink(f"/proc/self/fd/{fd}")

    rename, rmtree = os.rename, files.shutil.rmtree
    monkeypatch.setattr(os, "rename", lambda a, b: nothing_open(a) or rename(a, b))
    monkeypatch.setattr(files.shutil, "rmtree", lambda folder: nothing_open(folder) or rmtree(folder))
    path = write(tmp_path / "a.jsonl")
    folder = open_or_build(path, encoder, num_procs=1, progress=False).folder
    os.truncate(folder / "doc_hash.bin", 8)
    check(open_or_build(path, encoder, num_procs=1, progress=False), TEXTS, encoder)
    flipped = bytearray((folder / "doc_hash.bin").read_bytes())
    flipped[0] ^= 1
    (folder / "doc_hash.bin").write_bytes(flipped)
    check(open_or_build(path, encoder, num_procs=1, progress=False), TEXTS, encoder)
    assert len(touched) >= 5


def test_pickle_payload_is_never_run(tmp_path, encoder):
    """Whatever file of a store is replaced by a pickle, opening it runs nothing."""

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    path = write(tmp_path / "a.jsonl")
    for file in open_or_build(path, encoder).folder.iterdir():
        file.write_bytes(pickle.dumps(Payload()))
        check(open_or_build(path, encoder), TEXTS, encoder)
    assert not (tmp_path / "owned").exists()


def test_read_only_data_folder(tmp_path, encoder, capsys, monkeypatch):
    """The fall-back is named; a store that lies beside read-only data is found."""
    path = write(tmp_path / "a.jsonl")
    (
        tmp_path / ".token_store"
    ).touch()  # a file in the way: root may write anywhere, so permissions would prove nothing
    store = open_or_build(path, encoder)
    assert store.folder.parent == tmp_path / "xdg" / "minimind" / "token_store"
    assert f"goes to {store.folder.parent}" in capsys.readouterr().out
    assert open_or_build(path, encoder).folder == store.folder
    with pytest.raises(DataError, match="--cache_dir"):
        open_or_build(write(tmp_path / "b.jsonl", ["b"]), encoder, cache_dir=str(tmp_path / ".token_store"))


def test_data_that_changes_meanwhile_is_refused(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    real = builder.encode_blocks

    def edit_first(*args):
        write(tmp_path / "a.jsonl", ["other"])
        return real(*args)

    monkeypatch.setattr(builder, "encode_blocks", edit_first)
    with pytest.raises(DataError, match="changed while"):
        open_or_build(path, encoder)
    assert not list((tmp_path / ".token_store").glob("*a-*/"))


SCRIPT = """
import pickle, sys
sys.path.insert(0, {root!r})
from dataset.store import builder, token_store
builder.BLOCK_BYTES = 5000
encoder = pickle.load(open({encoder!r}, "rb"))  # without the slow import of transformers
store = token_store.open_or_build({path!r}, encoder, num_procs={procs})
print(store.folder, len(store))
"""


def start(path, encoder, procs=1, before=""):
    pickled = Path(f"{path}.encoder")
    # A process that was started before may be reading it.
    if not pickled.exists():
        pickled.write_bytes(pickle.dumps(encoder))
    code = before + SCRIPT.format(root=str(ROOT), encoder=str(pickled), path=str(path), procs=procs)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_start_together_build_once(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", TEXTS * 100)
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
from dataset.store import builder
encode_blocks = builder.encode_blocks
def hanging(*arguments):
    blocks = encode_blocks(*arguments)
    yield next(blocks)
    time.sleep(300)
builder.encode_blocks = hanging
"""


@pytest.mark.parametrize(
    "sig", [signal.SIGKILL, *(pytest.param(sig, marks=pytest.mark.slow) for sig in (signal.SIGINT, signal.SIGTERM))]
)
def test_interrupted_build_leaves_no_store_and_no_process(tmp_path, encoder, sig):
    """No half store is readable, the next start clears up, the workers end with their parent."""
    psutil = pytest.importorskip("psutil")
    path = write(tmp_path / "a.jsonl", TEXTS * 40)
    run = start(path, encoder, procs=2, before=HANGS)
    store = tmp_path / ".token_store"
    deadline = time.time() + 60
    while not (list(store.glob(".tmp-*/tokens.bin")) and len(psutil.Process(run.pid).children()) == 2):
        assert time.time() < deadline and run.poll() is None
        time.sleep(0.01)
    children = psutil.Process(run.pid).children()
    run.send_signal(sig)
    run.communicate(timeout=20)
    assert run.returncode != 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not list(store.glob("a-*/"))
    other = write(tmp_path / "b.jsonl")  # another store's build clears up as well
    open_or_build(other, encoder)
    assert not list(store.glob(".tmp-*"))


def test_full_disk_is_named_and_leaves_nothing(tmp_path, encoder):
    """A limit on the size of files stands for the full disk."""
    path = write(tmp_path / "a.jsonl", TEXTS * 20)
    run = start(path, encoder, before="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))")
    _, errors = run.communicate(timeout=60)
    assert "DataError" in errors and "--cache_dir names another folder" in errors
    assert not list((tmp_path / ".token_store").glob("*a-*/"))


def test_a_file_name_of_many_bytes_is_no_obstacle(tmp_path, encoder):
    path = write(tmp_path / ("数据" * 40 + ".jsonl"), ["the cat"])
    assert len(open_or_build(path, encoder, num_procs=1, progress=False)) == 1


def test_dead_worker_is_reported(tmp_path, encoder, small_blocks, monkeypatch):
    from dataset.store import encode_worker

    real = encode_worker._Worker.__call__

    def call(self, block):
        self.process.kill()
        self.process.wait()
        return real(self, block)

    monkeypatch.setattr(encode_worker._Worker, "__call__", call)
    with pytest.raises(DataError, match="ended with code -9"):
        open_or_build(write(tmp_path / "a.jsonl"), encoder, num_procs=2)


def test_files_that_cannot_be_read_are_one_line(tmp_path, encoder, monkeypatch):
    """As of a disk that is gone since the folder was listed."""
    gone = tmp_path / "gone.jsonl"
    monkeypatch.setattr(token_store, "files_of", lambda *_: [gone])
    with pytest.raises(DataError) as caught:
        open_or_build(str(gone), encoder, progress=False)
    assert str(caught.value) == f"{gone}: {os.strerror(errno.ENOENT)}"


def test_tokenize_corpus_tells_a_missing_tokenizer_and_keeps_the_traceback_of_a_defect(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", TEXTS[:5])
    with pytest.raises(UserError, match="no such tokenizer folder"):
        tokenize_corpus.main(["--data_path", path, "--tokenizer_path", str(tmp_path / "none")])

    def defect(*_, **__):
        raise ValueError("of ours")

    monkeypatch.setattr(tokenize_corpus, "open_or_build", defect)
    with pytest.raises(ValueError, match="of ours") as caught:
        tokenize_corpus.main(["--data_path", path])
    assert not isinstance(caught.value, UserError | DataError)


@pytest.mark.slow
def test_command_line(tmp_path, capsys):
    """`tokenize_corpus.py` from another folder, then user errors with one line and exit code 2."""
    path = write(tmp_path / "a.jsonl")

    def run(*flags):
        script = [sys.executable, str(ROOT / "dataset" / "tokenize_corpus.py"), "--data_path", *flags]
        return subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    first = run("a.jsonl")
    assert first.returncode == 0 and "300 documents" in first.stdout, first.stderr
    assert tokenize_corpus.main(["--data_path", path]) == 0
    assert "300 documents" in capsys.readouterr().out
    missing = run("missing.jsonl")
    assert (
        missing.returncode == 2
        and missing.stderr.startswith("error: missing.jsonl")
        and missing.stderr.count("\n") == 1
    )


def test_a_store_that_an_earlier_version_made_in_shards_is_made_anew_with_a_line(tmp_path, encoder, capsys):
    path = write(tmp_path / "a.jsonl")
    folder = open_or_build(path, encoder, progress=False).folder
    (folder / "meta.json").rename(folder / "manifest.json")
    check(open_or_build(path, encoder, progress=False), TEXTS, encoder)
    assert "an earlier version made it, in shards); it is made anew" in capsys.readouterr().out
    assert not (folder / "manifest.json").exists()

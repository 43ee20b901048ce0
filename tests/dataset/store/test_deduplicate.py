"""Stores without copies. Reference: the store of a file from which the copies were taken out by hand."""

import hashlib
import json
import random
import sys

import numpy as np
import pytest

from common.errors import DataError
from dataset import tokenize_corpus
from dataset.corpus import Corpus
from dataset.store import deduplicate
from dataset.store.deduplicate import notice_of, open_sources
from dataset.store.texts import stored_texts
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import LineEncoder
from dataset.tokenizing.wordpiece import load_wordpiece
from tests.dataset.electra.test_electra_dataset import write_vocab
from tests.dataset.quality.planted import changed, chinese, english

ARRAYS = ("tokens", "offsets", "text_bytes", "doc_hash")


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def texts_with_copies():
    """(texts, without copies to the letter, without near ones either)"""
    generator = random.Random(0)
    unlike = [english(generator) for _ in range(30)] + [chinese(generator) for _ in range(30)]
    exact = generator.sample(unlike, 20)
    near = [changed(text, generator, 0.85, 0.95) for text in generator.sample(unlike, 10)]
    return [*unlike, *exact, *near], [*unlike, *near], unlike


def is_store_of(store, texts, tmp_path, encoder):
    reference = open_or_build(write(tmp_path / "reference.jsonl", texts), encoder, num_procs=1, progress=False)
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(store, name), getattr(reference, name), err_msg=name)
    assert store.max_token_id >= reference.max_token_id
    return True


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_copies_are_left_out_and_counted(tmp_path, encoder, monkeypatch):
    # Several blocks.
    monkeypatch.setattr(deduplicate, "BLOCK_TOKENS", 500)
    texts, no_exact, no_near = texts_with_copies()
    path = write(tmp_path / "a.jsonl", texts)
    (exact,) = open_sources([[path]], encoder, "exact", num_procs=1, progress=False)
    (near,) = open_sources([[path]], encoder, "near", num_procs=1, progress=False)
    assert is_store_of(exact, no_exact, tmp_path, encoder)
    assert is_store_of(near, no_near, tmp_path, encoder)
    assert exact.meta["left_out"] == {"documents": 90, "exact": 20}
    assert near.meta["left_out"] == {"documents": 90, "exact": 20, "near": 10}
    assert (
        notice_of(exact)
        == "a: 20 of 90 documents (22.2%) are copies of earlier ones (20 to the letter) and are left out"
    )
    assert "(20 to the letter, 10 nearly)" in notice_of(near)


def test_without_the_flag_the_store_is_what_it_was(tmp_path, encoder):
    """Reference: the key by its formula, written down here once more, and the bytes of the folder."""
    path = write(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    (whole,) = open_sources([[path]], encoder, num_procs=1, progress=False)
    data = [(".jsonl", hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest())]
    options = [1, data, encoder.fingerprint, "text", False]
    assert whole.fingerprint == hashlib.sha256(json.dumps(options).encode()).hexdigest()
    assert whole.folder.name == f"a-{whole.fingerprint[:16]}"
    assert len(whole) == 3 and notice_of(whole) is None and "left_out" not in whole.meta
    before = bytes_of(whole.folder)
    (without,) = open_sources([[path]], encoder, "exact", progress=False)
    assert bytes_of(whole.folder) == before
    assert without.folder != whole.folder and without.fingerprint != whole.fingerprint


def test_every_start_and_every_machine_makes_the_same_bytes(tmp_path, encoder):
    texts, _, _ = texts_with_copies()
    folders = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        path = write(tmp_path / str(number) / "a.jsonl", texts)
        (store,) = open_sources([[path]], encoder, "near", num_procs=number, progress=False)
        folders.append(store.folder)
    assert bytes_of(folders[0]) == bytes_of(folders[1])
    assert folders[0].name == folders[1].name


def test_a_later_source_loses_what_an_earlier_one_has(tmp_path, encoder):
    first = write(tmp_path / "a.jsonl", ["one text", "shared text"])
    second = write(tmp_path / "b.jsonl", ["shared text", "other text", "other text"])
    stores = open_sources([[first], [second]], encoder, "exact", num_procs=1, progress=False)
    assert [len(store) for store in stores] == [2, 1]
    # By itself it keeps the shared text, so it is another store.
    (alone,) = open_sources([[second]], encoder, "exact", num_procs=1, progress=False)
    assert len(alone) == 2 and alone.fingerprint != stores[1].fingerprint
    turned = open_sources([[second], [first]], encoder, "exact", num_procs=1, progress=False)
    assert [len(store) for store in turned] == [2, 1]


def test_a_source_of_copies_alone_is_refused(tmp_path, encoder):
    first = write(tmp_path / "a.jsonl", ["one text", "two"])
    second = write(tmp_path / "b.jsonl", ["two"])
    with pytest.raises(DataError, match=r"b.jsonl: all 1 document are copies .* sources before it"):
        open_sources([[first], [second]], encoder, "exact", num_procs=1, progress=False)


def test_a_damaged_one_is_made_anew(tmp_path, encoder, capsys):
    path = write(tmp_path / "a.jsonl", ["one text", "one text", "another"])
    (store,) = open_sources([[path]], encoder, "exact", num_procs=1, progress=False)
    expected = bytes_of(store.folder)
    (store.folder / "tokens.bin").write_bytes(b"\1" * store.tokens.nbytes)
    (again,) = open_sources([[path]], encoder, "exact", num_procs=1, progress=False)
    assert bytes_of(again.folder) == expected
    assert "is damaged" in capsys.readouterr().out


def test_the_corpus_says_it_and_has_an_identity_of_its_own(tmp_path, encoder):
    texts, no_exact, _ = texts_with_copies()
    path = write(tmp_path / "a.jsonl", texts)
    plain = Corpus([path], encoder, max_seq_len=16, seed=0, progress=False)
    corpus = Corpus([path], encoder, max_seq_len=16, seed=0, deduplicate="exact", progress=False)
    assert corpus.fingerprint != plain.fingerprint
    assert len(corpus.store) == len(no_exact)
    assert not plain.notices and len(corpus.notices) == 1 and "20 of 90 documents" in corpus.notices[0]
    shares = [f"{path}:0.5", f"{write(tmp_path / 'b.jsonl', [*texts[:5], 'a new text'])}:0.5"]
    mixed = Corpus(shares, encoder, max_seq_len=16, seed=0, deduplicate="exact", progress=False)
    assert [len(store) for store in mixed.stores] == [len(no_exact), 1] and len(mixed.notices) == 2


def test_validation_documents_of_their_own_keep_their_copies(tmp_path, encoder):
    path = write(tmp_path / "a.jsonl", ["one text", "one text"])
    val_path = write(tmp_path / "b.jsonl", ["other", "other"])
    options = {"max_seq_len": 16, "seed": 0, "val_path": val_path, "progress": False}
    assert len(Corpus([path], encoder, deduplicate="exact", **options).val_store) == 2


def test_tokenize_corpus_makes_it_ahead(tmp_path, capsys):
    texts, no_exact, _ = texts_with_copies()
    path = write(tmp_path / "a.jsonl", texts)
    assert tokenize_corpus.main(["--data_path", path, "--deduplicate", "exact", "--num_procs", "1"]) == 0
    (folder,) = tmp_path.glob(".token_store/a-exact-*")
    lines = capsys.readouterr().out.splitlines()
    assert "20 of 90 documents" in lines[-2] and lines[-1].startswith(f"{folder}: {len(no_exact)} documents")


def test_texts_come_back_in_the_order_of_the_store(tmp_path, encoder):
    """Bad lines, empty texts and blank lines have no document."""
    lines = ['{"text": "one"}', "", "no json", '{"text": ""}', '{"text": "two"}', '{"text": "one"}']
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    store = open_or_build(str(path), encoder, skip_bad_lines=True, num_procs=1, progress=False)
    found = list(stored_texts(store, [path], encoder, "text"))
    assert found == [(0, 0, 1, "one"), (1, 0, 5, "two"), (2, 0, 6, "one")]
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(DataError, match="has changed since"):
        list(stored_texts(store, [path], encoder, "text"))


def test_near_without_the_library_is_told_before_anything_is_looked_at(tmp_path, encoder, monkeypatch):
    path = write(tmp_path / "a.jsonl", ["one text"])
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(DataError, match="pip install rensa"):
        open_sources([[path]], encoder, "near", num_procs=1, progress=False)
    with pytest.raises(DataError, match="pip install rensa"):
        tokenize_corpus.main(["--data_path", path, "--deduplicate", "near"])
    assert not (tmp_path / ".token_store").exists()
    assert len(open_sources([[path]], encoder, "exact", num_procs=1, progress=False)[0]) == 1


@pytest.mark.parametrize("method", ["exact", "near"])
def test_copies_between_blank_lines_of_a_text_file_are_left_out(tmp_path, method):
    """As ELECTRA reads it: what stands between blank lines is a document. Reference: the same without the copies."""
    generator = random.Random(3)
    unlike = [english(generator) for _ in range(10)]
    copies = [unlike[2], changed(unlike[5], generator, 0.9, 0.95)] if method == "near" else [unlike[2], unlike[5]]
    encoder = LineEncoder(load_wordpiece(write_vocab(tmp_path / "vocab.txt")))
    for name, texts in (("a.txt", [*unlike, *copies]), ("b.txt", unlike)):
        (tmp_path / name).write_text("\n\n".join(texts) + "\n")
    (store,) = open_sources([[str(tmp_path / "a.txt")]], encoder, method, progress=False)
    reference = open_or_build(str(tmp_path / "b.txt"), encoder, progress=False)
    assert store.meta["left_out"]["documents"] == 12
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(store, name), getattr(reference, name), err_msg=name)

"""Which token stores the paths of --data_path make, and what is held out. Reference: the documents of the files."""

import json
from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from common.errors import DataError
from dataset.corpus import Corpus
from dataset.store.build import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT, write_texts


def test_files_of_a_pattern_that_the_shell_spelt_out_make_one_store_and_one_line(tmp_path, encoder, capsys):
    paths = [write_texts(tmp_path / f"part{i:03}.jsonl", [f"document {i}"]) for i in range(30)]
    corpus = Corpus(paths, encoder, max_seq_len=16, seed=0)
    lines = capsys.readouterr().out.splitlines()
    assert len([path for path in (tmp_path / ".token_store").iterdir() if path.is_dir()]) == 1
    assert [line.split(":")[0] for line in lines] == ["tokenising part000 (30 files)", "tokenised part000 (30 files)"]
    one_by_one = [open_or_build(path, encoder, progress=False).tokens.tolist() for path in paths]
    assert corpus.store.tokens[:].tolist() == [token for tokens in one_by_one for token in tokens]


def test_a_run_can_note_what_each_source_gives(tmp_path, encoder):
    """Reference: the lengths of the documents that the epoch's plan has, counted one by one."""
    first, second = (write_texts(tmp_path / f"{i}.jsonl", [f"document {i}"]) for i in range(2))
    mixed = Corpus([f"{first}:0.25", f"{second}:0.75"], encoder, max_seq_len=16, seed=0, progress=False)
    sources = mixed.sources_of_epoch(0)
    assert [source["paths"] for source in sources] == [[first], [second]]
    drawn = np.array(mixed.plan(0).documents_of(0, mixed.plan(0).n_rows))
    lengths = np.diff(mixed.store.offsets[:])[drawn] - 1
    in_first = drawn < len(mixed.stores[0])
    assert [source["tokens"] for source in sources] == [lengths[in_first].sum(), lengths[~in_first].sum()]
    assert [source["documents"] for source in sources] == [1, 1]
    assert sources[0]["share"] == pytest.approx(lengths[in_first].sum() / lengths.sum())
    json.dumps(sources)


def test_validation_documents_that_are_trained_too_are_counted(tmp_path, encoder):
    """Reference: the texts as sets. The count is said at each start, with the store already there as well."""
    training = [f"document {i}" for i in range(500)]
    validation = [f"document {i}" for i in range(490, 530)] + ["document 495"]
    paths = write_texts(tmp_path / "a.jsonl", training), write_texts(tmp_path / "b.jsonl", validation)
    shared = sum(text in set(training) for text in validation)
    for _ in range(2):
        corpus = Corpus([paths[0]], encoder, max_seq_len=16, seed=0, val_path=paths[1], progress=False)
        assert corpus.notices[0].startswith(f"warning: {shared / 41:.1%} of the validation documents ({shared} of 41)")
    with_shares = [f"{paths[0]}:0.5", f"{write_texts(tmp_path / 'c.jsonl', ['document 529', 'other'])}:0.5"]
    corpus = Corpus(with_shares, encoder, max_seq_len=16, seed=0, val_path=paths[1], progress=False)
    assert corpus.notices[0].startswith(f"warning: {(shared + 1) / 41:.1%} of the ")


def test_a_validation_set_that_is_wholly_trained_is_refused_unless_asked_for(tmp_path, encoder):
    path = write_texts(tmp_path / "a.jsonl", [f"document {i}" for i in range(20)])
    part = write_texts(tmp_path / "b.jsonl", ["document 3", "document 4"])
    for val_path in (path, part):
        options = {"max_seq_len": 16, "seed": 0, "val_path": val_path, "progress": False}
        with pytest.raises(DataError, match="in the training data too.*--allow_val_overlap"):
            Corpus([path], encoder, **options)
        assert Corpus([path], encoder, allow_val_overlap=True, **options).notices


def test_a_share_that_does_not_hold_is_said(tmp_path, encoder):
    """One document of four tokens is to be nine tenths of an epoch of whole documents, of which the other source has long ones."""
    tiny = write_texts(tmp_path / "tiny.jsonl", ["abcd"])
    long = write_texts(tmp_path / "long.jsonl", ["the cat sat on a mat " * 20] * 3)
    report = Corpus([f"{tiny}:0.9", f"{long}:0.1"], encoder, max_seq_len=16, seed=0).mixture_report(0)
    assert any("does not get its share" in line for line in report)


@pytest.mark.parametrize("split", [{"val_path": "valid.jsonl"}, {"val_fraction": 0.2}])
def test_validation_without_anything_to_predict_is_refused(tmp_path, encoder, monkeypatch, split):
    """Without BOS and EOS a document of one token has no pair, so its loss would be 0."""
    monkeypatch.chdir(tmp_path)
    encoder.bos_id = encoder.eos_id = None
    training = write_texts(tmp_path / "a.jsonl", ["the cat sat", "a"] if "val_path" in split else ["a", "b", "c", "d"])
    write_texts(tmp_path / "valid.jsonl", ["a", "b"])
    with pytest.raises(DataError, match="valid.jsonl: no document of two|0.2 holds out: no document of two") as caught:
        Corpus([training], encoder, max_seq_len=16, seed=0, progress=False, **split)
    assert "so there is no loss to measure" in str(caught.value)
    write_texts(tmp_path / "valid.jsonl", ["a", "b c"])
    if "val_path" in split:
        validation = Corpus([training], encoder, max_seq_len=16, seed=0, progress=False, **split).validation()
        assert len(validation) == len(list(validation)) == 1


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("paths", [["b.txt"], ["a.txt", "b.txt", "c.txt"], ["a.txt:0.5", "b.txt:0.3", "c.txt:0.2"]])
def test_of_few_long_texts_the_end_of_the_longest_is_held_out_from_a_line_on(tmp_path, monkeypatch, paths, fraction):
    """Reference: the books themselves. Their hashes would hold out nothing, or whole books."""
    monkeypatch.chdir(tmp_path)
    sizes = {"a": 200, "b": 400, "c": 150}
    lines = {name: [f"{name} says {i}, 第{i}行.\n" for i in range(n)] for name, n in sizes.items()}
    books = {name: "".join(lines[name]) for name in lines if any(path.startswith(name) for path in paths)}
    for name, text in books.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    corpus = Corpus(paths, encoder, max_seq_len=32, seed=0, val_fraction=fraction, deduplicate="exact", progress=False)
    parts = [encoder.decode(corpus.store.tokens[slice(*bounds)].tolist()) for bounds in pairwise(corpus.store.offsets)]
    longest = list(books).index("b")
    (last,) = corpus.val_documents.tolist()
    assert last == longest + 1 and corpus.documents.tolist() == [i for i in range(len(parts)) if i != last]
    assert parts[longest] in accumulate(lines["b"])
    assert corpus.store.text_bytes.tolist() == [len(part.encode()) for part in parts]
    parts[longest : last + 1] = ["".join(parts[longest : last + 1])]
    assert parts == list(books.values())
    tokens = len(corpus.store.tokens)
    held_out = int(np.diff(corpus.store.offsets)[last])
    assert held_out == pytest.approx(fraction * tokens, abs=20)
    assert f"the end of the longest, {held_out:,} tokens ({held_out / tokens:.1%})" in " ".join(corpus.notices)
    # A run on whole texts, or an earlier one on a single text, has no such entry.
    assert corpus.layout().get("held-out part") == (longest if len(paths) > 1 else None)


def test_a_part_is_not_half_of_what_is_asked_for_where_a_line_is_long(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} " + "a cat sat " * 500 + "\n" + "on a mat " * 20)
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    corpus = Corpus([str(tmp_path)], encoder, max_seq_len=32, seed=0, val_fraction=0.1, progress=False)
    held_out = int(np.diff(corpus.store.offsets)[corpus.val_documents].sum())
    assert held_out == pytest.approx(0.1 * len(corpus.store.tokens), abs=1)


def test_a_split_near_the_share_stays_as_the_hashes_have_it(tmp_path, encoder):
    for n in (40, 300):
        path = write_texts(tmp_path / f"{n}.jsonl", [f"the cat sat {i} " * 5 for i in range(n)])
        corpus = Corpus([path], encoder, max_seq_len=16, seed=0, val_fraction=0.1, progress=False)
        hashes = corpus.store.doc_hash / 2.0**64
        assert corpus.val_documents.tolist() == np.flatnonzero(hashes < 0.1).tolist()
        assert corpus.layout()["held-out part"] is None


@pytest.mark.parametrize("n_giants", [1, 2, 3, 20])
@pytest.mark.parametrize("share", ["", ":0.5"])
def test_any_split_is_near_the_share_of_the_text_and_leaves_no_source_out(tmp_path, encoder, n_giants, share):
    """Reference: counted tokens. Hashes hold out none of the giants, some or all."""
    giants = write_texts(tmp_path / "giants.jsonl", [f"the cat {i} " * 1000 for i in range(n_giants)])
    for fraction, first in product((0.01, 0.1), range(3)):
        notes = write_texts(tmp_path / f"{first}.jsonl", [f"the cat {first} {i}" for i in range(300)])
        paths = [giants + share, notes + share]
        corpus = Corpus(paths, encoder, max_seq_len=16, seed=0, val_fraction=fraction, progress=False)
        lengths = np.diff(corpus.store.offsets)
        held_out, trained = lengths[corpus.val_documents].sum(), lengths[corpus.documents].sum()
        assert held_out + trained == len(corpus.store.tokens)
        assert fraction / 2 <= held_out / len(corpus.store.tokens) <= 2 * fraction
        assert (lengths[corpus.documents] > 1000).sum() >= n_giants * (1 - 2 * fraction)
        assert f", {held_out:,} tokens ({held_out / (held_out + trained):.1%})" in corpus.notices[-1]

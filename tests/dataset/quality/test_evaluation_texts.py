"""Texts of evaluation files. References: the objects that were written, and files of each kind with the same texts."""

import bz2
import gzip
import json
import lzma

import numpy as np
import pytest

from common.errors import DataError
from dataset.quality import evaluation_texts as module
from dataset.quality.evaluation_texts import Item, Sample, evaluation_items, evaluation_of, sampled, thinned
from dataset.quality.leaks import RUN, Search, TrainingText, read_through
from dataset.store.token_store import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.dataset.test_corpus_sources import write_texts
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.helpers import ROOT

OBJECTS = [
    {"context": "a", "choices": ["b", {"c": "d"}], "answer": 1},
    {"text": "only this", "other": "x"},
    {"answer": 2},
    {"question": "half \ud800"},
]
TEXTS = [(1, ["a", "b", "d"]), (2, ["only this"]), (4, ["half ?"])]


def zstd(data):
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize(
    "name, pack",
    [
        ("a.jsonl", bytes),
        ("a.ndjson", bytes),
        ("a.json", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.bz2", bz2.compress),
        ("a.json.xz", lzma.compress),
        ("a.jsonl.zst", zstd),
    ],
)
def test_objects_of_any_kind_give_their_texts(tmp_path, name, pack):
    """Half a surrogate pair, which an escape can spell, is no text that a tokenizer takes."""
    path = tmp_path / name
    path.write_bytes(pack("".join(json.dumps(line) + "\n" for line in OBJECTS).encode()))
    assert list(evaluation_items(str(path), "text")) == [Item(str(path), line, texts) for line, texts in TEXTS]


def test_tables_text_files_and_folders_are_read_as_data_is(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    parquet.write_table(arrow.table({"text": ["one", "two"], "label": [0, 1]}), folder / "a.parquet")
    (folder / "b.txt").write_text("three")
    assert [item.texts for item in evaluation_items(str(folder), "text")] == [["one"], ["two"], ["three"]]
    (tmp_path / "c.csv").write_text("question,label\nfour,1\n")
    assert [item.texts for item in evaluation_items(str(tmp_path / "c.csv"), "question")] == [["four"]]


def test_a_faulty_line_is_named_or_passed_over(tmp_path):
    encoder = DocumentEncoder(small_tokenizer())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "the cat"}\n[1]\n{"text"\n'))
    with pytest.raises(DataError, match="a.jsonl.gz:2: "):
        evaluation_of(str(path), encoder, "text")
    assert evaluation_of(str(path), encoder, "text", skip_bad_lines=True).places == [f"{path}:1"]
    path.write_bytes(gzip.compress(b'{"answer": 1}\n'))
    with pytest.raises(DataError, match="--against .*no text in there"):
        evaluation_of(str(path), encoder, "text")


def test_a_text_that_cannot_be_encoded_is_named_or_passed_over(tmp_path):
    """Letters without a gap, between which the tokenizer allows no cut."""
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    texts = ["the cat sat", "a" * 3_000_000, "on a mat"]
    path = write_texts(tmp_path / "a.jsonl", texts)
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*allows no cut.*; mend the line, or pass --skip_bad_lines"):
        evaluation_of(path, encoder, "text")
    evaluation = evaluation_of(path, encoder, "text", skip_bad_lines=True)
    assert evaluation.places == [f"{path}:1", f"{path}:3"] and evaluation.runs.documents == 2


def test_long_texts_are_encoded_alone_and_give_the_same_runs(tmp_path, monkeypatch):
    """Reference: all texts in one batch."""
    encoder = DocumentEncoder(load_tokenizer(ROOT / "model"))
    texts = ["short", "the cat sat on a mat and " * 40, "rain fell over far hills while " * 30, "end"]
    path = write_texts(tmp_path / "a.jsonl", texts)
    together = evaluation_of(path, encoder, "text")
    monkeypatch.setattr(module, "BATCH_CHARACTERS", 20)
    sizes = []
    runs_of_texts = module._runs_of_texts

    def noted(texts, *rest):
        sizes.append(len(texts))
        return runs_of_texts(texts, *rest)

    monkeypatch.setattr(module, "_runs_of_texts", noted)
    apart = evaluation_of(path, encoder, "text")
    assert sizes == [1, 1, 1, 1] and apart.places == together.places
    for there, here in zip(together.runs, apart.runs, strict=True):
        assert np.array_equal(there, here)


def test_a_sample_is_evenly_spread_and_bounded():
    items = [Item("a", number, ["x" * 10, "y" * 10]) for number in range(1000)]
    read = []

    def reading():
        for item in items:
            read.append(item)
            yield item

    kept, is_whole = sampled(reading(), Sample(items=60, characters=10**6, text_characters=12, runs=4))
    numbers = [item.line for item in kept]
    assert 30 < len(kept) <= 60 and len(set(np.diff(numbers).tolist())) == 1 and max(numbers) > 900 and not is_whole
    assert all(item.texts == ["x" * 10, "y" * 2] for item in kept)
    read.clear()
    kept, is_whole = sampled(reading(), Sample(items=60, characters=500, text_characters=99, runs=4))
    assert len(read) == len(kept) == 26 and not is_whole
    assert sampled(iter(items[:20]), Sample(items=60, characters=500, text_characters=20, runs=4)) == (items[:20], True)


def test_thinning_keeps_the_smallest_hashes_of_each_document_and_one_at_least():
    """Reference: a loop over the documents. The order of the runs decides nothing."""
    generator = np.random.default_rng(0)
    document = np.repeat(np.arange(50), generator.integers(0, 9, 50))
    hashes = generator.permutation(10**6)[: len(document)].astype(np.uint64)
    stays = thinned(hashes, document)
    expected = set()
    for number in range(50):
        mine = sorted(hashes[document == number].tolist())
        expected |= set(mine[: -(-len(mine) // 2)])
    assert set(hashes[stays].tolist()) == expected
    order = generator.permutation(len(document))
    again = thinned(hashes[order], document[order])
    assert set(hashes[order][again].tolist()) == expected


@pytest.mark.parametrize("many", [1 << 23, 40])
def test_short_texts_of_a_very_large_file_are_found_too(tmp_path, monkeypatch, many):
    """Each text has one run or a few. However much they are thinned, every leaked one is found and no other one."""
    monkeypatch.setattr(module, "MANY_RUNS", many)
    monkeypatch.setattr(module, "BATCH", 16)
    encoder = DocumentEncoder(small_tokenizer())
    texts = []
    for i in range(200):
        # This tokenizer makes a token of each of these letters.
        letters = np.random.default_rng(i).integers(0, 16, RUN + i % 4).tolist()
        texts.append("".join("dfgijklpqruvwxyz"[letter] for letter in letters))
    training = write_texts(tmp_path / "a.jsonl", [f"zz {text} zz" for text in texts[::2]])
    store = open_or_build(training, encoder, progress=False)
    evaluation = evaluation_of(write_texts(tmp_path / "b.jsonl", texts), encoder, "text")
    search = Search(evaluation.runs)
    read_through([search], [TrainingText(store)])
    shares = search.shares()
    assert not np.isnan(shares).any(), "each text has a run"
    assert (shares[1::2] == 0).all() and (shares[::2] > 0).all()

"""Which token stores the paths of --data_path make. Reference: the documents of the files, one after the other."""

import json

import pytest

from dataset.corpus import Corpus
from dataset.encoder import DocumentEncoder
from dataset.faults import DataError
from dataset.token_store import open_or_build
from dataset.tokenize_corpus import main
from tests.test_encoder import small_tokenizer


def write_files(folder, count):
    paths = []
    for i in range(count):
        path = folder / f"part{i:03}.jsonl"
        path.write_text(json.dumps({"text": f"document {i}"}) + "\n")
        paths.append(str(path))
    return paths


def stores_in(folder):
    return sorted(path.name for path in (folder / ".token_store").iterdir() if path.is_dir())


@pytest.fixture
def encoder():
    return DocumentEncoder(small_tokenizer())


def test_files_of_a_pattern_that_the_shell_spelt_out_make_one_store_and_one_line(tmp_path, encoder, capsys):
    paths = write_files(tmp_path, 30)
    corpus = Corpus(paths, encoder, max_seq_len=16, seed=0)
    lines = capsys.readouterr().out.splitlines()
    assert len(stores_in(tmp_path)) == 1
    assert [line.split(":")[0] for line in lines] == ["tokenising part000 (30 files)", "tokenised part000 (30 files)"]
    one_by_one = [open_or_build(path, encoder, progress=False).tokens.tolist() for path in paths]
    assert corpus.store.tokens[:].tolist() == [token for tokens in one_by_one for token in tokens]


def test_with_shares_each_source_keeps_its_store(tmp_path, encoder):
    first, second = write_files(tmp_path, 2)
    corpus = Corpus([f"{first}:0.5", f"{second}:0.5"], encoder, max_seq_len=16, seed=0, progress=False)
    assert len(stores_in(tmp_path)) == 2
    assert [line.split(":")[0] for line in corpus.mixture_report(0)] == [first, second]


def test_a_share_for_some_sources_is_refused_before_anything_is_tokenised(tmp_path, encoder):
    first, second = write_files(tmp_path, 2)
    with pytest.raises(DataError, match=f"give every source a share, or none; {second} has none"):
        Corpus([f"{first}:0.5", second], encoder, max_seq_len=16, seed=0, progress=False)
    assert not (tmp_path / ".token_store").exists()


def test_tokenize_corpus_makes_the_store_that_the_trainer_opens(tmp_path, capsys):
    paths = write_files(tmp_path, 5)
    assert main(["--data_path", *paths, "--num_procs", "1"]) == 0
    assert len(stores_in(tmp_path)) == 1
    assert main(["--data_path", f"{paths[0]}:1", f"{paths[1]}:2", "--num_procs", "1"]) == 0
    assert len(stores_in(tmp_path)) == 3

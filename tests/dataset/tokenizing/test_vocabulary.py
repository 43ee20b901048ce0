"""A tokenizer that knows no word of a text, or belongs to another model, ends every trainer with one line."""

import json
import shutil

import numpy as np
import pytest
from transformers import BertTokenizer, RobertaConfig

from common.errors import DataError
from dataset.tokenizing import tokenizer_files
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.tokenizer_files import check_known, check_size
from tests.trainer.glue.glue_helpers import complaint, fine_tune, make_place, write_task

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    top = make_place(tmp_path_factory.mktemp("vocabulary"))
    write_task(top / "glue", "RTE", {"train.tsv": 40, "dev.tsv": 9})
    return top


def without_tokenizer(place, target):
    shutil.copytree(place / "tiny", target)
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
    return target


# ------------------------------------------------------------------------------------------- files of a folder


def test_a_vocabulary_without_its_merges_is_refused(tmp_path):
    """RoBERTa's vocab.json alone, or with an empty file of merges, would make single characters of a text, or nothing."""
    RobertaConfig().save_pretrained(tmp_path)
    words = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4, "a": 5}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    with pytest.raises(ValueError, match="neither tokenizer.json nor merges.txt|no tokenizer can be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(ValueError, match="neither tokenizer.json nor merges.txt"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kept", ["vocab.txt", "tokenizer.json"])
def test_one_file_of_a_vocabulary_is_enough(place, tmp_path, kept):
    """Reference: the ids of the whole folder's tokenizer."""
    whole = load_tokenizer(place / "tiny")
    folder = without_tokenizer(place, tmp_path / "model")
    if kept == "vocab.txt":
        words = sorted(whole.get_vocab(), key=whole.get_vocab().get)
        (folder / kept).write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
    else:
        shutil.copy(place / "tiny" / kept, folder)
    assert load_tokenizer(folder)("a b j zebra").input_ids == whole("a b j zebra").input_ids


# ------------------------------------------------------------------------------------ a tokenizer of another text


def foreign(folder):
    """A tokenizer that knows one letter of the made-up tasks' texts."""
    BertTokenizer(vocab={word: i for i, word in enumerate([*WORDS[:6], *"klmnopqrst"])}).save_pretrained(folder)
    return folder


def test_what_counts_as_unknown():
    """By hand: most of the first tokens, separators left out; a few tokens tell nothing; no unknown token, no fault."""
    half = np.array([1, 7] * 50)
    check_known(half, 1, "x")
    check_known(half, 1, "x", others=(None, 1))
    check_known(np.full(tokenizer_files.FEWEST - 1, 1), 1, "x")
    check_known(np.full(1000, 1), None, "x")
    late = np.concatenate([np.full(tokenizer_files.SAMPLE, 7), np.full(tokenizer_files.SAMPLE, 1)])
    check_known(late, 1, "x")
    with pytest.raises(DataError, match="^x: the tokenizer does not know 51% of the first 100 tokens"):
        check_known(np.array([1] * 51 + [7] * 49), 1, "x")
    with pytest.raises(DataError, match="does not know 100% of the first 50 tokens"):
        check_known(half, 1, "x", others=(7,))


# ------------------------------------------------------------------------------------------ one of another model


def test_a_tokenizer_with_far_fewer_entries_than_the_embeddings_is_of_another_model(place, tmp_path, capsys):
    """Some models have a few more embeddings than entries; half as many more is another model's."""
    check_size(95, 100, "x")
    with pytest.raises(ValueError, match="^x: the tokenizer has 89 entries and the model embeddings for 100"):
        check_size(89, 100, "x")
    folder = without_tokenizer(place, tmp_path / "model")
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    error = complaint(capsys, place, tmp_path / "out", model_path=folder)
    assert "the tokenizer has 15 entries and the model embeddings for 19: it is the tokenizer of another model" in error
    assert fine_tune(place, tmp_path / "scratch", model_path=folder, from_scratch=1)

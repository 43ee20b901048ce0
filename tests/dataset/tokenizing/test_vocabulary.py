"""A tokenizer that knows no word of a text, or belongs to another model, ends every trainer with one line."""

import json
import shutil

import numpy as np
import pytest
from transformers import BertTokenizer, ElectraConfig, RobertaConfig

from common.errors import DataError, UserError
from dataset.tokenizing import vocabulary
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.vocabulary import check_ids_fit, check_known, check_size
from tests.helpers import ROOT, train, write_corpus
from tests.trainer.glue.glue_helpers import complaint, fine_tune, make_place, write_task
from tests.trainer.test_train_electra import train as train_electra

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


def test_glue_refuses_a_model_folder_without_tokenizer_files(place, tmp_path, capsys):
    """transformers makes a tokenizer of five entries of the config alone, and every word becomes [UNK]."""
    bare = without_tokenizer(place, tmp_path / "bare")
    error = complaint(capsys, place, tmp_path / "out", model_path=bare)
    assert f"{bare}: no vocabulary is in there (neither tokenizer.json nor vocab.txt)" in error


def test_the_main_trainer_refuses_a_tokenizer_folder_without_a_vocabulary(tmp_path):
    """A config and the special tokens' file are not enough."""
    folder = tmp_path / "bare"
    ElectraConfig(vocab_size=20).save_pretrained(folder)
    shutil.copy(ROOT / "model" / "tokenizer_config.json", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "BertTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    data = write_corpus(tmp_path / "data.jsonl")
    with pytest.raises(UserError, match="no vocabulary is in there"):
        train(data_path=data, out_dir=tmp_path / "out", tokenizer_path=folder)


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


def test_electra_refuses_a_vocabulary_folder_without_one(tmp_path):
    folder = tmp_path / "bare"
    ElectraConfig(vocab_size=20).save_pretrained(folder)
    data = write_corpus(tmp_path / "data.jsonl")
    with pytest.raises(UserError, match="--vocab_path .*no vocabulary is in there"):
        train_electra(data_path=data, vocab_path=folder, out_dir=tmp_path / "out")


# ------------------------------------------------------------------------------------ a tokenizer of another text


def foreign(folder):
    """A tokenizer that knows one letter of the made-up tasks' texts."""
    BertTokenizer(vocab={word: i for i, word in enumerate([*WORDS[:6], *"klmnopqrst"])}).save_pretrained(folder)
    return folder


def test_glue_refuses_sentences_that_are_mostly_unknown(place, tmp_path, capsys):
    folder = foreign(without_tokenizer(place, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 16}))
    error = complaint(capsys, place, tmp_path / "out", model_path=folder, from_scratch=1, task="rte")
    assert "train.tsv, --model_path" in error and "the tokenizer does not know 8" in error or "does not know 9" in error
    assert not (tmp_path / "out").exists()


def test_electra_refuses_data_that_is_mostly_unknown(tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    data = write_corpus(tmp_path / "data.jsonl")
    with pytest.raises((UserError, DataError), match="--vocab_path .*the tokenizer does not know"):
        train_electra(data_path=data, vocab_path=vocab, out_dir=tmp_path / "out")


def test_the_main_trainer_refuses_data_that_is_mostly_unknown(tmp_path):
    folder = foreign(tmp_path / "tokenizer")
    data = write_corpus(tmp_path / "data.jsonl")
    with pytest.raises((UserError, DataError), match="--tokenizer_path .*the tokenizer does not know"):
        train(data_path=data, out_dir=tmp_path / "out", tokenizer_path=folder)


def test_what_counts_as_unknown():
    """By hand: most of the first tokens, separators left out; a few tokens tell nothing; no unknown token, no fault."""
    half = np.array([1, 7] * 50)
    check_known(half, 1, "x")
    check_known(half, 1, "x", others=(None, 1))
    check_known(np.full(vocabulary.FEWEST - 1, 1), 1, "x")
    check_known(np.full(1000, 1), None, "x")
    late = np.concatenate([np.full(vocabulary.SAMPLE, 7), np.full(vocabulary.SAMPLE, 1)])
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


def test_electra_goes_on_with_the_vocabulary_of_its_networks(tmp_path, capsys):
    """Without --vocab_path a new vocabulary would be trained, whose ids mean other words. Without one in the folder, or
    with a far smaller one, it is refused."""
    data = write_corpus(tmp_path / "data.jsonl", 80)
    small = {"data_path": data, "max_steps": 2}
    train_electra(**small, out_dir=tmp_path / "a")
    networks = tmp_path / "a" / "electra_small"
    before = (networks / "discriminator" / "vocab.txt").read_text(encoding="utf-8")
    other = write_corpus(tmp_path / "other.jsonl", 80, seed=5)
    capsys.readouterr()
    sizes = dict.fromkeys(
        (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "embedding_size",
            "generator_divisor",
        )
    )
    again = {**small, **sizes, "data_path": other, "model_path": networks}
    train_electra(**again, out_dir=tmp_path / "b")
    assert "training a WordPiece vocabulary" not in capsys.readouterr().out
    assert (tmp_path / "b" / "electra_small" / "discriminator" / "vocab.txt").read_text(encoding="utf-8") == before
    for name in TOKENIZER_FILES:
        (networks / "discriminator" / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="needs its vocabulary: name it by --vocab_path"):
        train_electra(**again, out_dir=tmp_path / "c")
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("".join(before.splitlines(keepends=True)[: len(before.splitlines()) // 2]), encoding="utf-8")
    with pytest.raises(UserError, match="it is the tokenizer of another model"):
        train_electra(**again, out_dir=tmp_path / "d", vocab_path=vocab)


def test_ids_beyond_the_embeddings_are_refused():
    check_ids_fit(100, 100, "x")
    with pytest.raises(ValueError, match="^x: the tokenizer has 6,400 entries and the model embeddings for 97: name "):
        check_ids_fit(6400, 97, "x")

"""What a tokenizer's files say, here and in exports; one that knows no word of a text, or belongs to another model, ends every
trainer with one line. References: the data path, recorded digests."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerFast, RobertaConfig

from common.errors import DataError
from dataset.tokenizing import tokenizer_files
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.tokenizer_files import check_unknown_share, check_vocabulary_size
from scripts import export_hf
from tests.helpers import ROOT
from tests.scripts.test_export import write
from tests.trainer.glue.glue_helpers import complaint, fine_tune, make_place, write_task

MODEL = ROOT / "model"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)


# ---------------------------------------------------------------------------------------------- BOS


@pytest.mark.parametrize("text", ["hi", "", " 你好\n", "a<|im_end|>b"])
def test_a_plain_call_gives_what_a_document_begins_with(tokenizer, text):
    """Reference: the encoder of the trainers, without the EOS that the model is to say."""
    assert tokenizer(text, split_special_tokens=True).input_ids == DocumentEncoder(tokenizer).prompt_ids(text)
    assert tokenizer(text).input_ids == [1, *tokenizer(text, add_special_tokens=False).input_ids]
    assert tokenizer.encode(text) == tokenizer(text).input_ids


def test_an_export_adds_the_bos_that_training_put_where_the_tokenizer_adds_none(tmp_path):
    """A tokenizer of MiniMind's, which has no post-processor; the export's is the same one to the trainers."""
    fields = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    own = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps({**fields, "post_processor": None})),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    assert own("hi").input_ids[0] != 1
    own.save_pretrained(tmp_path / "own")
    export_hf.export(write(tmp_path), tmp_path / "hf", tokenizer_path=tmp_path / "own")
    exported = load_tokenizer(tmp_path / "hf")
    assert exported("hi").input_ids == [1, *own("hi").input_ids]
    assert DocumentEncoder(exported).fingerprint == DocumentEncoder(load_tokenizer(tmp_path / "own")).fingerprint


# ------------------------------------------------------------------------------------------- the model card


def test_the_card_tells_of_the_run_and_nothing_in_an_export_of_places_or_people(tmp_path, monkeypatch):
    """Neither the folders of the run and of the export nor the name of the user; the data's names stay."""
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    settings = {
        "data_path": [str(home / "texts" / "wiki.jsonl") + ":0.7", "C:\\Users\\alice\\code.jsonl", "~/more.jsonl", str(home), "/mnt/Alice:0.1"],
        "val_path": str(home / "valid.jsonl"),
        "tokenizer_path": str(ROOT / "model"),
        "from_weight": str(home / "earlier.pth"),
        "wandb_project": "alice-secret",
        "a_flag_to_come": str(home / "x" / "thing"),
        "learning_rate": 0.0005,
    }  # fmt: skip
    start = {
        "settings": settings,
        "command": f"python {home}/trainer/train_pretrain.py",
        "started": "2026-01-01 00:00:00",
    }
    lines = [
        {"update": 1, "tokens": 9, **start, "model": {}, "data": {}, "machine": {}, "versions": {}},
        {"update": 10, "tokens": 1234567, "loss": 3.25},
        {"update": 20, "tokens": 1234567, "val_loss": 3.5, "bits_per_byte": 1.5},
    ]
    weight = write(home)
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"update": 30, "lo'
    weight.with_name("pretrain_32.metrics.jsonl").write_text(text)
    load_tokenizer(MODEL).save_pretrained(home / "tokenizer")
    export_hf.export(weight, home / "hf", tokenizer_path=home / "tokenizer")
    for file in (home / "hf").iterdir():
        content = file.read_bytes()
        for private in ("alice", "Alice", str(tmp_path), str(ROOT), "Users", "/home", "is_local"):
            assert private.encode() not in content, (file.name, private)
    card = (home / "hf" / "README.md").read_text()
    for told in ("library_name: transformers", "| updates | 20 |", "| tokens | 1,234,567 |", "3.5000", "bitwise"):
        assert told in card
    assert "| `--learning_rate` | `0.0005` |" in card


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


def test_what_counts_as_unknown():
    """By hand: most of the first tokens, separators left out; a few tokens tell nothing; no unknown token, no fault."""
    half = np.array([1, 7] * 50)
    check_unknown_share(half, 1, "x")
    check_unknown_share(half, 1, "x", ignored=(None, 1))
    check_unknown_share(np.full(tokenizer_files.MIN_SAMPLE - 1, 1), 1, "x")
    check_unknown_share(np.full(1000, 1), None, "x")
    late = np.concatenate([np.full(tokenizer_files.SAMPLE, 7), np.full(tokenizer_files.SAMPLE, 1)])
    check_unknown_share(late, 1, "x")
    with pytest.raises(DataError, match="^x: the tokenizer does not know 51% of the first 100 tokens"):
        check_unknown_share(np.array([1] * 51 + [7] * 49), 1, "x")
    with pytest.raises(DataError, match="does not know 100% of the first 50 tokens"):
        check_unknown_share(half, 1, "x", ignored=(7,))


# ------------------------------------------------------------------------------------------ one of another model


def test_a_tokenizer_with_far_fewer_entries_than_the_embeddings_is_of_another_model(place, tmp_path, capsys):
    """Some models have a few more embeddings than entries; half as many more is another model's."""
    check_vocabulary_size(95, 100, "x")
    with pytest.raises(ValueError, match="^x: the tokenizer has 89 entries and the model embeddings for 100"):
        check_vocabulary_size(89, 100, "x")
    folder = without_tokenizer(place, tmp_path / "model")
    BertTokenizer(vocab={word: i for i, word in enumerate(WORDS)}).save_pretrained(folder)
    error = complaint(capsys, place, tmp_path / "out", model_path=folder)
    assert "the tokenizer has 15 entries and the model embeddings for 19: it is the tokenizer of another model" in error
    assert fine_tune(place, tmp_path / "scratch", model_path=folder, from_scratch=1)

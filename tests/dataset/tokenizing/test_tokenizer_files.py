"""What a tokenizer's files say, here and in exports; one that knows no word of a text, or belongs to another model, ends every
trainer with one line. References: the data path, recorded digests."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, RobertaConfig

from common.errors import DataError, UserError
from dataset.reading.settings import TextSettings
from dataset.store import build
from dataset.store.build import open_or_build
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from dataset.tokenizing.plain_tokenizer import STANDARD_TOKENS, PlainTokenizer
from dataset.tokenizing.tokenizer_files import PROBE, check_vocabulary_size, load_by_transformers, lost_text
from dataset.tokenizing.wordpiece import wordpiece
from scripts import evaluate, export_hf, inspect_data
from tests import helpers
from tests.encoders.electra import test_command as test_train_electra
from tests.encoders.glue.glue_helpers import complaint, fine_tune, make_place, write_task
from tests.helpers import ROOT, SHARED, change_json, copy_tokenizer, write_records, write_texts
from tests.scripts.test_export import write
from trainer import train_electra, train_pretrain, train_tokenizer

MODEL = ROOT / "model"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")
BPE_FILES = {"vocab.json": '{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}', "merges.txt": "#version: 0.2\na b\n"}
OLD_NAMES = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
QWEN = {"model_type": "qwen2"}
# As libraries in Rust raise it
PANIC = type("PanicException", (BaseException,), {})("odd")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL, trust_remote_code=False)


@pytest.mark.parametrize("text", ["hi", "", " 你好\n", "a<|im_end|>b"])
def test_a_plain_call_gives_what_a_document_begins_with(tokenizer, text):
    """Reference: the encoder of the trainers, without the EOS that the model is to say."""
    assert tokenizer(text, split_special_tokens=True).input_ids == DocumentEncoder(tokenizer).prompt_ids(text)
    assert tokenizer(text).input_ids == [1, *tokenizer(text, add_special_tokens=False).input_ids]
    assert tokenizer.encode(text) == tokenizer(text).input_ids


@pytest.mark.parametrize("folder", [MODEL, *sorted((SHARED / "tokenizers").glob("minimind?"))], ids=lambda f: f.name)
def test_without_transformers_a_tokenizer_is_the_same(folder):
    """Reference: that of transformers. The fingerprint covers the whole tokenizer.json."""
    ours, theirs = load_tokenizer(folder), load_by_transformers(folder)
    assert type(ours) is PlainTokenizer and DocumentEncoder(ours).fingerprint == DocumentEncoder(theirs).fingerprint
    names = [*STANDARD_TOKENS, *(f"{name}_id" for name in STANDARD_TOKENS)]
    for name in (*names, "all_special_tokens", "all_special_ids", "chat_template", "name_or_path"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.get_vocab(), len(ours)) == (theirs.get_vocab(), len(theirs))
    for skips, ids in itertools.product((False, True), (range(len(ours)), theirs(PROBE).input_ids)):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(list(ids), skip_special_tokens=skips)


@pytest.mark.parametrize("change", [{"eos_token": "new"}, {"split_special_tokens": True}, {"tokenizer_class": "GPT2"}])
def test_a_tokenizer_that_transformers_would_change_is_theirs(change, tmp_path):
    assert isinstance(load_tokenizer(copy_tokenizer(tmp_path, **change)), PreTrainedTokenizerBase)


def test_an_export_adds_the_bos_that_training_put_where_the_tokenizer_adds_none(tmp_path):
    """A tokenizer of MiniMind's, which has no post-processor; the export's is the same one to the trainers."""
    fields = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    backend = Tokenizer.from_str(json.dumps({**fields, "post_processor": None}))
    special_tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    own = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
    assert own("hi").input_ids[0] != 1
    own.save_pretrained(tmp_path / "own")
    export_hf.export(write(tmp_path), tmp_path / "hf", tokenizer_path=tmp_path / "own")
    exported = load_tokenizer(tmp_path / "hf")
    assert exported("hi").input_ids == [1, *own("hi").input_ids]
    assert DocumentEncoder(exported).fingerprint == DocumentEncoder(load_tokenizer(tmp_path / "own")).fingerprint


def test_the_card_tells_of_the_run_and_nothing_in_an_export_of_places_or_people(tmp_path, monkeypatch):
    """Neither the folders of the run and of the export nor the name of the user; the data's names stay."""
    home = tmp_path / "home" / "alice"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    texts = [f"{home}/a.jsonl:0.7", "C:\\Users\\alice\\code.jsonl", "~/more.jsonl", str(home), "/mnt/Alice:0.1"]
    paths = {"val_path": "valid.jsonl", "from_weight": "earlier.pth", "a_flag_to_come": "x/thing"}
    settings = {"data_path": texts, **{name: str(home / path) for name, path in paths.items()}, "learning_rate": 0.0005}
    settings |= {"tokenizer_path": str(ROOT / "model"), "wandb_project": "alice-secret"}
    command = f"python {home}/trainer/train_pretrain.py"
    start = {"settings": settings, "command": command, "started": "2026-01-01 00:00:00"}
    lines = [
        {"update": 1, "tokens": 9, **start, "model": {}, "data": {}, "machine": {}, "versions": {}},
        {"update": 10, "tokens": 1234567, "loss": 3.25},
        {"update": 20, "tokens": 1234567, "val_loss": 3.5, "bits_per_byte": 1.5},
        {"update": 20, "tokens": 1234567, "prompt": 'say "\u4f60\n', "text": "x"},
        {"update": 20, "tokens": 1234567, "trained": [{"source": "/home/alice/a", "passes": 2.5}, {"passes": 0.5}]},
    ]
    weight = write(home)
    metrics = weight.with_name("pretrain_32.metrics.jsonl")
    write_records(metrics, lines)
    metrics.write_text(metrics.read_text() + '{"update": 30, "lo')
    load_tokenizer(MODEL).save_pretrained(home / "tokenizer")
    export_hf.export(weight, home / "hf", tokenizer_path=home / "tokenizer")
    for file in (home / "hf").iterdir():
        content = file.read_bytes()
        for private in ("alice", "Alice", str(tmp_path), str(ROOT), "Users", "/home", "is_local"):
            assert private.encode() not in content, (file.name, private)
    card = (home / "hf" / "README.md").read_text()
    for told in ("library_name: transformers", "| updates | 20 |", "| tokens | 1,234,567 |", "3.5000", "bitwise"):
        assert told in card
    assert "| passes over the text | 2.50, 0.50 |" in card
    assert """tokenizer("say \\"\u4f60\\n", return_tensors="pt")""" in card
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


@pytest.mark.parametrize(
    ("files", "to_do"),
    [
        ({"tokenizer.model": "\n\x0e\n"}, "pip install sentencepiece"),
        ({"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n"}, '"tokenizer_class": "BertTokenizer"'),
        (BPE_FILES, '"tokenizer_class": "GPT2Tokenizer"'),
        ({old: BPE_FILES[new] for old, new in OLD_NAMES.items()}, "rename them to vocab.json and merges.txt"),
    ],
)
def test_bare_files_are_refused_with_what_to_do(tmp_path, monkeypatch, capfd, files, to_do):
    """What the line says to write makes a tokenizer of them."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(to_do)) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value) and not capfd.readouterr().err
    if "write a" in str(caught.value):
        for theirs, ours in OLD_NAMES.items():
            if theirs in files:
                (tmp_path / theirs).rename(tmp_path / ours)
        (tmp_path / "tokenizer_config.json").write_text(re.search(r"\{.*\}", str(caught.value))[0])
        assert load_tokenizer(tmp_path).tokenize("a")


@pytest.mark.parametrize("config, name", [(QWEN, None), (QWEN, "Qwen2TokenizerFast"), ({}, "GPT2TokenizerFast")])
def test_a_folder_is_read_by_the_rule_in_its_tokenizer_json(tmp_path, config, name):
    """Reference: the library's own reading of the file. Its rule takes three digits together and has no normalizer."""
    copy_tokenizer(tmp_path, tokenizer_class=name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    of_file = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    for backend in (load_tokenizer(tmp_path).backend_tokenizer, DocumentEncoder(load_tokenizer(tmp_path))._backend):
        for text in ("x20 1234567", "e\u0301 I'LL\n\n  go", "<|im_end|>你好，<think>"):
            ids = backend.encode(text, add_special_tokens=False).ids
            # Special tokens in a text are text to the second.
            if "<" not in text or not backend.encode_special_tokens:
                assert ids == of_file.encode(text, add_special_tokens=False).ids
            assert backend.decode(ids, skip_special_tokens=False) == text
        for part in ("model", "normalizer", "pre_tokenizer", "decoder"):
            assert json.loads(backend.to_str())[part] == json.loads(of_file.to_str())[part]


def test_an_option_of_the_config_stays(place, tmp_path):
    """Lower case as the config says: what transformers offers to set beside a tokenizer.json."""
    folder = shutil.copytree(place / "tiny", tmp_path / "model")
    for lower_case in (True, False):
        change_json(folder / "tokenizer_config.json", do_lower_case=lower_case)
        assert (load_tokenizer(folder).tokenize("A") == ["a"]) == lower_case


@pytest.mark.parametrize("ids", [(257, 258), (300, 310), (257, 310)])
def test_added_tokens_keep_their_ids_or_are_refused(tmp_path, ids):
    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    content = json.loads(Tokenizer(models.BPE({**alphabet, "ab": 256}, [("a", "b")])).to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["special"] = True
    content["added_tokens"] = [{"id": i, "content": f"<{name}>", **flags} for name, i in zip("xy", ids, strict=True)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<y>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    if ids == (257, 258):
        assert load_tokenizer(tmp_path).eos_token_id == 258
        return
    refused = ids[0] if ids[0] > 257 else 310
    with pytest.raises(DataError, match=rf"tokenizer.json: <.> has the id {refused}, and is"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("error", [Exception("odd"), PANIC])
def test_what_a_library_raises_ends_in_one_line(tmp_path, tokenizer, monkeypatch, error):
    def fail(*_, **__):
        raise error

    encoder = DocumentEncoder(tokenizer)
    monkeypatch.setattr(encoder, "_backend", SimpleNamespace(encode=fail, decode=fail))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    for call in (lambda: load_by_transformers(MODEL), lambda: encoder.encode(["text"])):
        with pytest.raises(UserError, match=f"{type(error).__name__}: odd") as caught:
            call()
        assert str(MODEL) in str(caught.value) and "\n" not in str(caught.value)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: sys.exit(3))
    with pytest.raises(SystemExit):
        load_by_transformers(MODEL)


def words(model, trainer):
    """A tokenizer that cuts at white space, trained on English."""
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator(["the cat sat on a mat, so there"] * 9, trainer)
    return backend


def whole_words(special_tokens, **options):
    trainer = trainers.WordLevelTrainer(special_tokens=special_tokens, show_progress=False)
    return words(models.WordLevel(**options), trainer)


def nfkc():
    backend = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    backend.normalizer = normalizers.NFKC()
    return backend


LETTERS = "thecasonm,"
KINDS = {
    "vanishes": lambda: words(models.BPE(), trainers.BpeTrainer(show_progress=False)),
    "unknown": lambda: whole_words(["[UNK]"], unk_token="[UNK]"),
    "raises": lambda: whole_words([]),
    "bert": lambda: wordpiece([*WORDS[:5], *LETTERS, *(f"##{x}" for x in LETTERS)], True).backend_tokenizer,
    "bytes": lambda: Tokenizer.from_file(str(MODEL / "tokenizer.json")),
    "nfkc": nfkc,
}
ENGLISH = "the cat sat on a mat\n" * 5
CHINESE = "这座小城建在河的两岸"


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        ("vanishes", CHINESE * 6, "does not know 100% of the first 60 characters, such as 这 座 小 城 建;"),
        ("unknown", "the cat\n" + "dogs ran over " * 9, "94% of the first 105 characters, such as o r e a d;"),
        ("bert", "这座小城 the cat" * 9, ": spaces, 4 characters (这 座 小 城); bits per byte"),
        ("bert", "The  Cat\nsat" * 9, ": case, spaces, line breaks; bits per byte"),
        ("vanishes", ENGLISH + "河", ": line breaks, 1 character (河); bits"),
        ("nfkc", "Ａ，e\u0301 cat", ": 4 characters ("),
        ("vanishes", "the cat sat", ""),
        ("raises", "the cat sat", ""),
        ("raises", "the dog", "cannot encode 'the dog' (Exception: WordLevel error: Missing [UNK]"),
        ("vanishes", "河" * 49, ": 1 character (河)"),
        ("bytes", "\tThe  河\r\n\u3000e\u0301 <|im_end|>", ""),
    ],
)
def test_what_a_tokenizer_loses_of_a_text_is_told(kind, text, lost):
    """By hand: characters that the vocabulary lacks vanish or are unknown, most of them is an error; other losses are named."""
    encoder = DocumentEncoder(PreTrainedTokenizerFast(tokenizer_object=KINDS[kind]()))
    try:
        told = "".join(lost_text([text], encoder.round_trip, "x: it"))
    except UserError as error:
        told = str(error)
    assert lost in told and bool(told) == bool(lost), told
    assert told.startswith("note: x: it ") == (": " in lost and "Exc" not in lost and "first" not in lost), told


def test_each_command_compares_a_text_with_what_the_tokenizer_keeps(tmp_path, capsys):
    """Before anything is written; ELECTRA has no bits per byte, so it tells only what is refused."""
    folder, vocabulary = str(tmp_path / "tokenizer"), str(tmp_path / "vocab.txt")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS["vanishes"](), bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    Path(vocabulary).write_text("\n".join(wordpiece([*WORDS[:5], *LETTERS], True).get_vocab()))
    english = write_texts(tmp_path / "en.jsonl", [f"{ENGLISH} the cat sat on {'a ' * i}" for i in range(40)])
    chinese = write_texts(tmp_path / "zh.jsonl", [CHINESE] * 40)
    run = {"tokenizer_path": folder, "out_dir": tmp_path}
    helpers.train(data_path=english, **run)
    told = f"note: {english}: the tokenizer {folder} loses some of the text: spaces, line breaks"
    assert told in capsys.readouterr().out
    arguments = ["perplexity", "--weight", str(tmp_path / "pretrain_16.pth"), "--tokenizer_path", folder, "--data_path"]
    assert evaluate.main([*arguments, english]) == 0 and f"note: {english}: the" in capsys.readouterr().err
    electra = {"data_path": chinese, "vocab_path": vocabulary}
    for main, flags in (
        (train_pretrain.main, helpers.flags(data_path=chinese, **run)),
        (inspect_data.main, ["--data_path", chinese, "--tokenizer_path", folder]),
        (evaluate.main, [*arguments, chinese]),
        (train_electra.main, test_train_electra.flags(**electra, out_dir=tmp_path)),
    ):
        assert "zh.jsonl: the tokenizer" in helpers.complaint(capsys, main, flags)
    assert not list(tmp_path.glob("**/zh-*"))
    words = ["--type", "wordpiece", "--vocab_size", "30", "--out_dir", str(tmp_path / "new"), "--data_path", english]
    assert train_tokenizer.main(words) == 0 and f"note: {english}: the new tokenizer loses" in capsys.readouterr().out


def test_a_store_tells_at_each_start_what_was_lost_when_it_was_built(tmp_path, monkeypatch):
    """A faulty line is named before the rest is read."""
    encoder = DocumentEncoder(PreTrainedTokenizerFast(tokenizer_object=KINDS["vanishes"]()))
    path = write_texts(tmp_path / "en.jsonl", [ENGLISH] * 9)
    (told,) = open_or_build(path, encoder, progress=False).notices
    assert told.startswith(f"note: {path}: the tokenizer loses some of the text: ")
    monkeypatch.setattr(build, "_tokenise", None)
    with pytest.raises(DataError, match=r"en\.jsonl:1: no 'content'"):
        open_or_build(path, encoder, TextSettings(text_field="content"))
    monkeypatch.setattr(build, "plain_texts", None)
    assert open_or_build(path, encoder).notices == [told]


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

"""The tokenizer and the script that trains it. References: the ids of the public tokenizers, plain UTF-8, and the texts themselves."""

import contextlib
import json
import random
import re
from base64 import b64encode
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from dataset.tokenizing import byte_level_bpe
from dataset.tokenizing.byte_level_bpe import SPECIAL_TOKENS, piece_rule, train_bpe
from dataset.tokenizing.encoder import load_tokenizer
from dataset.tokenizing.sample import draw_sample
from tests.helpers import ROOT, SHARED, complaint, needs_shared, records, run_program, write_texts, write_weights
from trainer.train_tokenizer import TokenizerSettings, main

MODEL = ROOT / "model"
UPDATE = "--hidden_size 16 --num_hidden_layers 1 --max_updates 1 --use_compile 0 --report 0 --cpu_processes 1 --sample_prompts hi"
SLOW = {"transformers", "torch._dynamo", "torch.distributed.tensor", "sympy", "scipy", "matplotlib", "jinja2", "pandas"}


@pytest.mark.parametrize(
    "module, flags, absent",
    [
        ("scripts.inspect_data", "--data_path {corpus}", {"torch", *SLOW}),
        ("trainer.train_pretrain", f"--data_path {{corpus}} --out_dir {{corpus}}.out {UPDATE}", SLOW),
        ("scripts.generate", "--weight {weight} --max_new_tokens 2 hi", SLOW),
    ],
)
def test_what_takes_seconds_to_import_a_command_does_without(module, flags, absent, corpus, tmp_path):
    """Up to its end: looking at data, an update, tokens."""
    weight = write_weights(tmp_path / "tiny", vocab_size=6400)
    program = f"import sys, {module} as m\ntry: m.main()\nfinally: print(sorted({absent} & sys.modules.keys()))"
    ended = run_program(program, *flags.format(corpus=corpus, weight=weight).split())
    assert ended.stdout.endswith("\n[]\n"), ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A jsonl of made-up words, Chinese, code and the literal text of special tokens."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(300)]
    words += ["".join(draw.choices("天地玄黄宇宙洪荒日月", k=2)) for _ in range(100)]
    words += [":\n    ", "2025", "，", "<|im_end|>", "<think>"]
    texts = [" ".join(draw.choices(words, k=40)) for _ in range(200)]
    return write_texts(tmp_path_factory.mktemp("corpus") / "made_up.jsonl", texts)


def test_a_vocabulary_over_an_earlier_one_appears_whole_or_not_at_all(corpus, tmp_path):
    """Stopped when a part of its files is written, the earlier ones stay; what lies beside them stays anyway."""
    (tmp_path / "notes.txt").write_text("mine")
    stopped = mock.patch.object(Path, "write_bytes", mock.Mock(side_effect=KeyboardInterrupt))
    found = []
    for patch in (contextlib.nullcontext(), stopped, contextlib.nullcontext()):
        flags = ["--type", "wordpiece", "--vocab_size", str(100 + 20 * len(found)), "--data_path", corpus]
        with patch, contextlib.suppress(KeyboardInterrupt):
            assert main([*flags, "--out_dir", str(tmp_path)]) == 0
        found.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert found[0] == found[1] and found[0].keys() == found[2].keys()
    assert [files["vocab.txt"].count(b"\n") for files in found] == [100, 100, 140]


def test_committed_entries_and_special_ids(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 6400
    special = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (0, 0, 1, 2)
    assert tokenizer.convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == SPECIAL_TOKENS


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8"))
        | st.text(" \t\r\n\u00a0\u3000\u200d\u0301\x00'’，。.:_(\n", max_size=8)
        | st.sampled_from(SPECIAL_TOKENS + ["def", "'s", "你好", "1234567", "👩🏽‍🚀"]),
        max_size=12,
    ).map("".join)
)
def test_any_text_round_trips_and_gives_no_special_token(tokenizer, text):
    ids = tokenizer(text, split_special_tokens=True, add_special_tokens=False).input_ids
    assert all(i >= len(SPECIAL_TOKENS) for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_training_is_deterministic_to_the_byte(corpus, tmp_path, monkeypatch):
    """Reference: a second run, without threads."""
    for run, parallel in (("a", "true"), ("b", "false")):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        assert main(["--data_path", corpus, "--vocab_size", "600", "--out_dir", str(tmp_path / run)]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    trained = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(trained) == 600 and trained.convert_ids_to_tokens([0, 1, 2]) == SPECIAL_TOKENS[:3]


def test_special_tokens_in_the_training_text_make_no_entry(corpus):
    """No second entry may spell a special token: its literal text must stay several tokens."""
    texts = [record["text"] for record in records(corpus, None)]
    tokenizer = train_bpe(["<|im_end|> <think>"] * 50 + texts, 500)
    tokenizer.encode_special_tokens = True
    assert all(tokenizer.token_to_id(token) == i for i, token in enumerate(SPECIAL_TOKENS))
    for token in SPECIAL_TOKENS:
        assert min(tokenizer.encode(token, add_special_tokens=False).ids) >= len(SPECIAL_TOKENS)


def test_user_errors_are_one_line_and_exit_code_2(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n{"text": bad}\n')
    for arguments, message in (
        (["--data_path", "nowhere.jsonl", "--out_dir", "o"], "nowhere.jsonl"),
        (["--data_path", "CORPUS"], "--out_dir"),
        (["--data_path", "CORPUS", "--out_dir", "o", "--vocab_size", "100"], "--vocab_size is 100"),
        (["--data_path", "CORPUS", "--out_dir", "o", "--vocab_size", "90000"], "at most, not 90000: pass --vocab_size"),
        (["--data_path", "CORPUS", "--out_dir", "o", "--weights", "1", "2"], "--weights has 2 values for 1 sources"),
        (["--data_path", "CORPUS", "--out_dir", "o", "--lower_case", "0"], "--lower_case has no effect: --type is bpe"),
        (["--data_path", "BROKEN", "--out_dir", "o"], "broken.jsonl:2"),
    ):
        words = [{"CORPUS": corpus, "BROKEN": str(broken)}.get(word, word) for word in arguments]
        assert message in complaint(capsys, main, words)
        assert not (tmp_path / "o").exists()


ENGLISH, HINDI = "It is a small town of 3,000 people. ", "यह लगभग तीन हज़ार लोगों का एक छोटा सा शहर है। "
NUMBERS, CODE = "2024-05-17,13.25,1017\n", "for i in range(10):\n    print(f'{i}')\n"


@pytest.mark.parametrize("texts, rule", [
    *((texts, "llama-bpe") for texts in (ENGLISH, NUMBERS, CODE, "我们在这里，你好！", ENGLISH * 99 + HINDI)),
    *((texts, "qwen35") for texts in (HINDI, "ประเทศไทยเป็นเมืองเล็ก ", "cafe\u0301 ", ENGLISH + HINDI)),
])  # fmt: skip
def test_the_text_chooses_the_rule_that_cuts_it(texts, rule, tmp_path, capsys):
    """Words with combining marks are single pieces."""
    path = write_texts(tmp_path / "a.jsonl", [texts] * 50)
    assert main(["--data_path", path, "--vocab_size", "270", "--out_dir", str(tmp_path)]) == 0
    assert f"--pieces {rule}\n" in capsys.readouterr().out
    backend = load_tokenizer(tmp_path).backend_tokenizer
    assert piece_rule(json.loads(backend.to_str())) == rule
    n_pieces = len(backend.pre_tokenizer.pre_tokenize_str("यह लगभग तीन हज़ार"))
    assert n_pieces == 4 if rule == "qwen35" else n_pieces > 4


def long_words():
    """{name: a word of 10,000 letters}: DNA of repeated genes, Base64 of English, Chinese without marks."""
    draw = random.Random(0)
    genes = ["".join(draw.choices("ACGT", k=200)) for _ in range(30)]
    base64 = b64encode(" ".join(draw.choices(ENGLISH.split(), k=2000)).encode()).decode()
    chinese = "".join(draw.choices("我们在这里北京东行你好世界一个小城", weights=range(1, 18), k=10_000))
    found = {"dna": "".join(draw.choices(genes, weights=range(1, 31), k=60)), "base64": base64, "chinese": chinese}
    return {name: re.sub(r"\W", "", word)[:10_000] for name, word in found.items()}


@pytest.mark.parametrize("name", long_words())
def test_a_long_word_gives_the_vocabulary_of_its_parts(name, monkeypatch):
    """Its time grows with the square of a part. Reference: training on the whole word."""
    word = long_words()[name]
    ours = train_bpe([word], 330)
    monkeypatch.setattr(byte_level_bpe, "LONGEST_PIECE", 1 << 20)
    assert ours.get_vocab().keys() == train_bpe([word], 330).get_vocab().keys()


@pytest.mark.parametrize("letters", ["ประเทศไทยเปนเมองเลกๆ", "ACGT"])
def test_wordpiece_cuts_words_that_are_too_long_for_it(letters, tmp_path):
    """Text without spaces is known, in our loader and in transformers' own, also beside an ELECTRA's config."""
    draw = random.Random(0)
    texts = ["".join(draw.choices(letters, k=draw.randint(90, 3000))) for _ in range(40)]
    flags = ["--type", "wordpiece", "--lower_case", "0", "--vocab_size", "200", "--out_dir", str(tmp_path)]
    assert main([*flags, "--data_path", write_texts(tmp_path / "a.jsonl", texts)]) == 0
    (tmp_path / "config.json").write_text('{"model_type": "electra"}')
    for tokenizer in (load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)):
        tokens = tokenizer.tokenize(texts[0] + letters * 2000)
        assert "".join(tokens).replace("##", "") == texts[0] + letters * 2000
        assert tokenizer("a").input_ids == [2, 1, 3]


def test_the_largest_size_is_named(tmp_path):
    """Numbers of two digits: 100 merges are all there are, and more such text has no others."""
    texts = [f"{number:02}" for number in range(100)] * 3
    largest = len(SPECIAL_TOKENS) + 256 + 100
    with pytest.raises(ValueError, match=f"pass --vocab_size {largest},"):
        train_bpe(texts, 5000)
    assert train_bpe(texts, largest).get_vocab_size() == largest


@needs_shared
@pytest.mark.parametrize("corpus_name, least", [("en_wiki", 3.05), ("zh_wiki", 3.12), ("code_python", 2.75)])
def test_more_bytes_per_token_than_the_public_tokenizers(corpus_name, least):
    """Reference: both public tokenizers on the same validation text, and what was asked of ours."""
    texts = [record["text"] for record in records(SHARED / "corpora" / f"{corpus_name}.valid.jsonl", None)]
    n_bytes = sum(len(text.encode()) for text in texts)
    ratios = []
    for folder in (MODEL, SHARED / "tokenizers" / "minimind2", SHARED / "tokenizers" / "minimind3"):
        backend = AutoTokenizer.from_pretrained(folder).backend_tokenizer
        backend.encode_special_tokens = True
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        ratios.append(n_bytes / sum(len(encoding.ids) for encoding in encodings))
    ours, *public = ratios
    assert ours > 1.05 * max(public)
    assert ours >= least


def test_a_sample_of_chats_is_what_is_said_in_them(tmp_path, capsys):
    """Files of both kinds: fields, roles and quotes are not learned."""
    (tmp_path / "a.jsonl").write_text('{"instruction": "Hi", "output": "Yes", "tag": 1}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "a text", "output": "Yes", "instruction": "Hi"}\n', encoding="utf-8")
    settings = TokenizerSettings(data_path=[str(tmp_path)], out_dir=str(tmp_path / "out"))
    assert list(draw_sample(settings.data_path, [1.0], 1e6, settings)) == ["Hi\nYes", "a text"]
    assert "passed over: tag (1 line)" in capsys.readouterr().err

"""Texts in parts, and fastokens in the place of the tokenizers library. Reference: the library on the whole text."""

import sys
import unicodedata
from dataclasses import replace
from functools import cache
from itertools import groupby
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.errors import DataError
from dataset.reading.settings import TextSettings
from dataset.store import build
from dataset.store.build import open_or_build
from dataset.tokenizing import byte_level_bpe
from dataset.tokenizing import encoder as encoder_module
from dataset.tokenizing.byte_level_bpe import MARKS, parts_of
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.test_encoder import small_tokenizer
from tests.dataset.tokenizing.tokenizer_kinds import KINDS, LEARNED, tokenizer_of
from tests.helpers import write_texts

# What pieces, normalizers and added tokens could join, and anything else.
SNIPPETS = [
    "the", "cat", "at", "'s", "'S", "'ll", "12", "3", " ", "  ", "\n", "\r\n", "\t", ",", ".", "..", "。", "，", "二", "好", "é",
    "e\u0301", "\u0301", "ß", "ſ", "ﬁ", "İ", "Σ", "\u00a0", "\u2028", "\u200d", "😀", "🏳️\u200d🌈", "ᄀ", "ᅡ", "ᆨ", "각", "か\u3099",
    "<x>", "<s>", "</s>", "a b", "。我", "▁", "`", "/", "-", "_", "A", "B", "\0", "ा", "क", "्", "Ａ", "…", "‼", "\ue000", "ꟑ",
]  # fmt: skip
TEXTS = st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=3)), max_size=30).map("".join)


@cache
def encoder_of(kind: str, parse: bool = False, sample: tuple[str, ...] = ()) -> DocumentEncoder:
    encoder = DocumentEncoder(tokenizer_of(KINDS[kind]()), parse)
    encoder.use_fastokens(sample)
    return encoder


def whole(encoder: DocumentEncoder, text: str) -> list[int]:
    backend = Tokenizer.from_str(encoder._backend.to_str())
    backend.encode_special_tokens = not encoder.parse_special_tokens
    return backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("parse", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_of_parts_are_those_of_the_whole(kind, parse):
    encoder = encoder_of(kind, parse)

    @settings(max_examples=40, deadline=None)
    @given(TEXTS, st.integers(1, 6))
    def check(text, most):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(encoder_module, "PART_CHARACTERS", most)
            assert encoder.encode([text]) == [whole(encoder, text)]

    check()


@pytest.mark.parametrize("kind", ["own", "gpt2", "llama3", "qwen", "qwen3.5", "gpt-4o", "deepseek", "bert"])
def test_text_for_the_public_families_is_cut_behind_words_and_numbers(kind):
    assert encoder_of(kind)._cuts_long_texts
    words = ("The cats sat on a mat. It was there\nYes. ", "我们 在这里，你好！ 東京に行く\n北京，")
    for text in (*words, "12,34,567\n", "-1.50\r\n+27\r\n", '"1";"2";"[3]"\n'):
        parts = list(parts_of(text * 50, 64))
        assert "".join(parts) == text * 50
        assert max(map(len, parts)) <= 64
        assert text not in words or all(part[0] in MARKS for part in parts[1:])


def test_what_cannot_be_encoded_in_bounded_memory_is_a_bad_line(tmp_path, monkeypatch):
    """Letters without a gap, and any long text for a tokenizer of which nothing is known: file and line, no traceback."""
    for module in (byte_level_bpe, encoder_module):
        monkeypatch.setattr(module, "LONGEST_WHOLE", 1000)
    monkeypatch.setattr(encoder_module, "PART_CHARACTERS", 100)
    texts = ["the cat", "a" * 1001, "a" * 1000, "the cat " * 500, "at"]
    path = write_texts(tmp_path / "data.jsonl", texts)
    known = DocumentEncoder(small_tokenizer())
    for encoder, bad in ((known, [2]), (encoder_of("numbers alone"), [2, 4]), (encoder_of("llama2"), [2, 4])):
        strict = TextSettings(cache_dir=str(tmp_path / encoder.fingerprint))
        with pytest.raises(DataError, match=r"data\.jsonl:2: .*allows no cut"):
            open_or_build(path, encoder, strict)
        store = open_or_build(path, encoder, replace(strict, skip_bad_lines=True))
        assert [fault.line for fault in store.bad_lines.places["too long"]] == bad
        assert len(store) == len(texts) - len(bad)
    with pytest.raises(ValueError, match="allows no cut"):
        known.encode(["a" * 1001])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "gpt2", "llama3", "qwen", "qwen3.5", "gpt-4o", "deepseek"])
def test_ids_are_those_of_the_library_for_every_character(kind):
    """Each beside letters, digits, spaces, line ends and apostrophes; of a thousand or more of one category the ends and every 16th."""
    pytest.importorskip("fastokens")
    encoder = encoder_of(kind)
    assert encoder.fast is not None
    codes = []
    for category, group in groupby(range(0x32000), key=lambda code: unicodedata.category(chr(code))):
        alike = list(group)
        if category != "Cs":
            codes += alike if len(alike) < 1000 else [*alike[::16], alike[-1]]
    for begin in range(0, len(codes), 500):
        characters = map(chr, codes[begin : begin + 500])
        text = "".join(f"a{c}b 1{c}2 {c}{c} \n{c}\n\n  {c}. it'{c} i'{c}e i'l{c} " for c in characters)
        assert encoder._encode_whole(text).tolist() == encoder._by_library(text).tolist(), hex(codes[begin])


def test_a_store_is_the_same_by_either(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "BLOCK_BYTES", 1 << 16)
    texts = [f"{LEARNED}{number} <|im_end|>" * 50 for number in range(20)]
    path = write_texts(tmp_path / "data.jsonl", texts)
    stores = []
    for folder, from_bytes, num_procs in (("slow", 1 << 40, 1), ("fast", 0, 1), ("faster", 0, 2)):
        monkeypatch.setattr(build, "MANY_CHARACTERS", from_bytes)
        reading = TextSettings(cache_dir=str(tmp_path / folder))
        encoder = DocumentEncoder(tokenizer_of(KINDS["own"]()))
        stores.append(open_or_build(path, encoder, reading, num_procs=num_procs).folder)
    assert len({store.name for store in stores}) == 1
    assert len({(store / "meta.json").read_bytes() for store in stores}) == 1


@pytest.mark.parametrize("kind", ["added tokens", "bert", "llama2", "numbers alone"])
def test_other_tokenizers_stay_with_the_library_silently(kind, capsys):
    assert encoder_of(kind, sample=(LEARNED,)).fast is None
    assert capsys.readouterr() == ("", "")


def test_without_the_package_or_with_other_ids_the_library_encodes(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert encoder_of("own", sample=(LEARNED,)).fast is None
    assert capsys.readouterr() == ("", "")
    wrong = SimpleNamespace(encode_batch_flat=lambda texts, split_special_tokens: (bytes(4), b""))
    monkeypatch.setattr(encoder_module, "fast_tokenizer", lambda content: wrong)
    assert encoder_of("own", sample=(LEARNED,) * 2).fast is None
    assert capsys.readouterr().out.count("fastokens gives other ids for") == 1

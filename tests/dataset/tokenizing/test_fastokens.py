"""fastokens in the place of the tokenizers library. Reference: the library; test_long_texts.py compares hostile texts."""

import sys
import unicodedata
from itertools import groupby
from types import SimpleNamespace

import pytest

from dataset.reading.settings import TextSettings
from dataset.store import build
from dataset.tokenizing import encoder as encoder_module
from dataset.tokenizing.encoder import DocumentEncoder
from tests.dataset.tokenizing.tokenizer_kinds import KINDS, LEARNED, tokenizer_of
from tests.helpers import write_texts


def encoder_of(kind: str, sample=()) -> DocumentEncoder:
    encoder = DocumentEncoder(tokenizer_of(KINDS[kind]()))
    encoder.use_fastokens(sample)
    return encoder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "gpt2", "llama3", "qwen", "gpt-4o", "deepseek"])
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
        text = ""
        for c in map(chr, codes[begin : begin + 500]):
            text += f"a{c}b 1{c}2 {c}{c} \n{c}\n\n  {c}. it'{c} i'{c}e i'l{c} "
        assert encoder._encode_whole(text).tolist() == encoder._by_library(text).tolist(), hex(codes[begin])


def test_a_store_is_the_same_by_either(tmp_path, monkeypatch):
    """By the library, by fastokens in this process and in two others: the same name and the same bytes."""
    monkeypatch.setattr(build, "BLOCK_BYTES", 1 << 16)
    texts = [f"{LEARNED}{number} <|im_end|>" * 50 for number in range(20)]
    path = write_texts(tmp_path / "data.jsonl", texts)
    stores = []
    for folder, from_bytes, num_procs in (("slow", 1 << 40, 1), ("fast", 0, 1), ("faster", 0, 2)):
        monkeypatch.setattr(build, "MANY_CHARACTERS", from_bytes)
        reading = TextSettings(cache_dir=str(tmp_path / folder))
        encoder = DocumentEncoder(tokenizer_of(KINDS["own"]()))
        stores.append(build.open_or_build(path, encoder, reading, num_procs=num_procs).folder)
    assert len({store.name for store in stores}) == 1
    assert len({(store / "meta.json").read_bytes() for store in stores}) == 1


@pytest.mark.parametrize("kind", ["added tokens", "bert", "llama2", "numbers alone"])
def test_other_tokenizers_stay_with_the_library_silently(kind, capsys):
    assert encoder_of(kind, [LEARNED]).fast is None
    assert capsys.readouterr() == ("", "")


def test_without_the_package_or_with_other_ids_the_library_encodes(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert encoder_of("own", [LEARNED]).fast is None
    assert capsys.readouterr() == ("", "")
    wrong = SimpleNamespace(encode_batch_flat=lambda texts, split_special_tokens: (bytes(4), b""))
    monkeypatch.setattr(encoder_module, "fast_tokenizer", lambda content: wrong)
    assert encoder_of("own", [LEARNED] * 2).fast is None
    assert capsys.readouterr().out.count("fastokens gives other ids for") == 1

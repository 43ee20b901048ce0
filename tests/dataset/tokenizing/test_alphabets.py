"""Entries for letters. References: Unicode's letters by hand, training to a smaller vocabulary, the texts themselves."""

import json

import pytest

from dataset.tokenizing.alphabets import ALPHABETS, after_merges, letters_of, with_letters
from dataset.tokenizing.byte_level_bpe import train_bpe
from dataset.tokenizing.encoder import DocumentEncoder, load_tokenizer
from tests.helpers import ROOT

WORDS = "the cat sat on that mat, and their dogs ran over far green hills to where an old mill stood by its quiet river"
TEXTS = [f"{WORDS} 天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往 "] * 50
RUSSIAN = "абвгдежзийклмнопрстуфхцчшщъыьэюяёАБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯЁ"


def merges_of(tokenizer) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]


@pytest.mark.parametrize(
    "name, letters",
    [("cyrillic", RUSSIAN), ("kana", "あいうんアイウンー"), ("accents", "éàöñßÉ"), ("hebrew", "אבגדהת")],
)
def test_letters_are_those_of_everyday_text(name, letters):
    found = letters_of([name])
    assert set(letters) <= set(found)
    assert found == sorted(found) and len(found) == len(set(found)) < 200


@pytest.mark.parametrize("name", ALPHABETS)
def test_each_letter_is_one_entry(name):
    tokenizer = train_bpe(TEXTS, 340)
    letters = letters_of([name])
    # Without room for it, nothing is made.
    with pytest.raises(ValueError, match="--alphabets takes"):
        with_letters(tokenizer, letters[:1] + letters_of(ALPHABETS))
    few = letters[:20]
    changed = with_letters(tokenizer, few)
    assert changed.get_vocab_size() == 340
    for letter in few:
        assert len(changed.encode(letter, add_special_tokens=False).ids) == 1
        assert len(tokenizer.encode(letter, add_special_tokens=False).ids) > 1
    ids = changed.encode("".join(few) + TEXTS[0], add_special_tokens=False).ids
    assert changed.decode(ids) == "".join(few) + TEXTS[0]


def test_the_other_entries_are_those_of_a_smaller_vocabulary():
    """Reference: training to that size."""
    changed = with_letters(train_bpe(TEXTS, 340), letters_of(["cyrillic"])[:30])
    smaller = train_bpe(TEXTS, 340 - 30)
    assert merges_of(changed)[:-30] == merges_of(smaller)


def test_the_sample_may_hold_the_letters_already():
    texts = [*TEXTS, *[" ".join(RUSSIAN)] * 50]
    tokenizer = train_bpe(texts, 420, alphabets=["cyrillic"])
    assert tokenizer.get_vocab_size() == 420
    for letter in letters_of(["cyrillic"]):
        assert len(tokenizer.encode(letter, add_special_tokens=False).ids) == 1


def test_merges_are_taken_by_rank():
    """Reference: by hand."""
    rank_of = {("b", "c"): 0, ("a", "b"): 1, ("a", "bc"): 2}
    assert after_merges(list("abcab"), rank_of) == ["abc", "ab"]
    assert after_merges(list("xyz"), rank_of) == list("xyz")


def test_the_data_path_encodes_letters_fast_and_alike(tmp_path):
    """Reference: the tokenizer's own library."""
    tokenizer = train_bpe(TEXTS, 380, alphabets=["cyrillic"])
    (tmp_path / "tokenizer_config.json").write_bytes((ROOT / "model" / "tokenizer_config.json").read_bytes())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = DocumentEncoder(load_tokenizer(tmp_path))
    text = "the Кот сидел on the mat"
    tokenizer.encode_special_tokens = True
    assert encoder.prompt_ids(text) == [1, *tokenizer.encode(text, add_special_tokens=False).ids]

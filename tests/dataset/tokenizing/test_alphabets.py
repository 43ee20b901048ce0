"""Entries for letters. References: Unicode's letters by hand, training to a smaller vocabulary, the texts themselves."""

import json

import pytest

from dataset.tokenizing.alphabets import ALPHABETS, letters_of, with_letters
from dataset.tokenizing.byte_level_bpe import train_bpe

WORDS = "the cat sat on that mat, and their dogs ran over far green hills to where an old mill stood by its quiet river"
TEXTS = [f"{WORDS} 天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往 "] * 50
RUSSIAN = "абвгдежзийклмнопрстуфхцчшщъыьэюяёАБВГДЕЖЗИЙКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯЁ"


def merges_of(tokenizer) -> list[list[str]]:
    return json.loads(tokenizer.to_str())["model"]["merges"]


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

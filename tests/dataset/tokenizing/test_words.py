"""The words of a text. References: the text itself, and words that are cut by hand as BERT does it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.tokenizing.sentence_encoder import SentenceEncoder
from dataset.tokenizing.wordpiece import train_wordpiece
from dataset.tokenizing.words import words_of

TEXT = "The cat's mat, and a far-off hill: 42 dogs ran (over) it... "


@pytest.fixture(scope="module")
def encoder():
    return SentenceEncoder(train_wordpiece([TEXT * 3, "catch matter hilly dogged running"], 60))


def test_words_are_cut_at_blanks_and_around_punctuation(encoder):
    """In ASCII that is all that BERT's rules do. A word of several tokens is one."""
    tokens = encoder.encode_in_words(TEXT)
    words, after = words_of(TEXT, tokens)
    assert [word.text for word in words] == re.findall(r"[A-Za-z0-9]+|[^\sA-Za-z0-9]", TEXT)
    assert after == " " and len(tokens.ids) > len(words)


def test_each_word_has_the_tokens_that_it_has_alone(encoder):
    tokens = encoder.encode_in_words(TEXT)
    for word in words_of(TEXT, tokens)[0]:
        begin, end = word.tokens
        assert tokens.ids[begin:end].tolist() == encoder.encode([word.text])[0]


@given(st.text())
def test_words_and_what_stands_between_them_are_the_text(encoder, text):
    """With whatever the tokenizer drops, changes or does not know; each token belongs to one word."""
    tokens = encoder.encode_in_words(text)
    words, after = words_of(text, tokens)
    assert "".join(word.before + word.text for word in words) + after == text
    assert [i for word in words for i in range(*word.tokens)] == list(range(len(tokens.ids)))


def test_a_chinese_character_is_a_word_and_a_special_token_is_text(encoder):
    text = "[SEP]中文\x01é"
    words, after = words_of(text, encoder.encode_in_words(text))
    assert [word.text for word in words] == ["[", "SEP", "]", "中", "文", "é"] and after == ""
    assert words[-1].before == "\x01"

"""The words of a text, and which tokens each is made of."""

from typing import NamedTuple

from dataset.tokenizing.sentence_encoder import TokensOfText


class TextWord(NamedTuple):
    """A word of a text. before: what stands between it and the word before it. tokens: [first, behind the last)."""

    before: str
    text: str
    tokens: tuple[int, int]


def words_of(text: str, tokens: TokensOfText) -> tuple[list[TextWord], str]:
    """(the words of a text, what stands behind the last one). Together they are the text, to the character.

    A word is what the tokenizer cuts a text into before it looks for tokens; a comma is one by itself, and so is a Chinese
    character. Characters that the tokenizer drops stand between words.
    """
    words = []
    done = 0
    first = 0
    n = len(tokens.ids)
    while first < n:
        last = first
        while last + 1 < n and tokens.words[last + 1] == tokens.words[first]:
            last += 1
        begin = int(tokens.places[first, 0])
        end = int(tokens.places[last, 1])
        # Some tokenizers count the blank before a word to the word.
        while begin < end and text[begin].isspace():
            begin += 1
        # Tokens may share a character, and so may words, where a character becomes several.
        begin = max(begin, done)
        end = max(end, begin)
        words.append(TextWord(text[done:begin], text[begin:end], (first, last + 1)))
        done = end
        first = last + 1
    return words, text[done:]

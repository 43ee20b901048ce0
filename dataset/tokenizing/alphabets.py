"""Letters of writing systems that a sample of text may lack, and entries for them in a byte-level BPE.

A tokenizer that has seen no Russian writes it byte by byte: nothing is lost, but a text takes one token for each byte,
twice as many as it has letters. An entry for each letter halves that. It is no substitute for text of the language,
which gives entries for whole words.
"""

import json
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from tokenizers import Tokenizer, pre_tokenizers

# The blocks of Unicode in which the letters of everyday text lie: (first, last) code point.
ALPHABETS: dict[str, tuple[int, int]] = {
    "accents": (0x00C0, 0x00FF),
    "greek": (0x0384, 0x03CE),
    "cyrillic": (0x0400, 0x045F),
    "hebrew": (0x05B0, 0x05EA),
    "arabic": (0x060C, 0x0652),
    "devanagari": (0x0900, 0x094D),
    "thai": (0x0E01, 0x0E4E),
    "kana": (0x3041, 0x30FC),
}


def letters_of(alphabets: Sequence[str]) -> list[str]:
    """The letters and marks of these ALPHABETS, in the order of their code points."""
    letters = []
    for first, last in sorted({ALPHABETS[name] for name in alphabets}):
        for code in range(first, last + 1):
            if unicodedata.category(chr(code))[0] in "LM":
                letters.append(chr(code))
    return letters


def with_letters(tokenizer: Tokenizer, letters: Sequence[str]) -> Tokenizer:
    """A tokenizer of the same size in which each letter is one entry; the last merges make room.

    tokenizer: a byte-level BPE whose ids rise in the order of its merges. Errors: ValueError where there is no room.
    """
    # The merges of a smaller vocabulary are the first ones of a larger: training takes one after the other. So leaving out
    # the last ones gives what training would have given, and those of the letters stand behind all that text has earned.
    spec = json.loads(tokenizer.to_str())
    merges: list[list[str]] = spec["model"]["merges"]
    for kept in range(len(merges), -1, -1):
        # Asked anew each time: a merge that was left out may have been a letter's.
        added = merges_of_letters(merges[:kept], letters)
        if kept + len(added) <= len(merges):
            break
    else:
        raise ValueError(f"--alphabets takes {len(added)} entries, more than there are: give a larger --vocab_size")
    first_id = tokenizer.get_vocab_size() - len(merges)
    vocabulary = {token: i for token, i in spec["model"]["vocab"].items() if i < first_id}
    merges = merges[:kept] + added
    for number, (left, right) in enumerate(merges):
        vocabulary[left + right] = first_id + number
    spec["model"]["merges"] = merges
    spec["model"]["vocab"] = vocabulary
    return Tokenizer.from_str(json.dumps(spec))


def merges_of_letters(merges: Sequence[Sequence[str]], letters: Sequence[str]) -> list[list[str]]:
    """The merges that, behind those given, make one entry of each letter."""
    rank_of: dict[tuple[str, str], int] = {}
    for rank, (left, right) in enumerate(merges):
        rank_of[left, right] = rank
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = []
    for letter in letters:
        # One character for each byte
        ((spelling, _),) = to_bytes.pre_tokenize_str(letter)
        parts = after_merges(list(spelling), rank_of)
        while len(parts) > 1:
            added.append(parts[:2])
            rank_of[parts[0], parts[1]] = len(merges) + len(added)
            parts = after_merges(parts, rank_of)
    return added


def after_merges(parts: list[str], rank_of: dict[tuple[str, str], int]) -> list[str]:
    """What the merges leave of neighbouring parts: the pair of the lowest rank first, until none is left."""
    while True:
        pairs = [pair for pair in pairwise(parts) if pair in rank_of]
        if not pairs:
            return parts
        first = min(pairs, key=rank_of.__getitem__)
        at = list(pairwise(parts)).index(first)
        parts = [*parts[:at], first[0] + first[1], *parts[at + 2 :]]

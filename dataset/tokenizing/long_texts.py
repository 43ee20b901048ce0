"""Long texts in parts whose token ids, one after the other, are those of the whole text.

A tokenizer holds more than 100 bytes for each byte of a text until the text is done, so a long text is encoded in parts. A
part ends behind a letter and before a line end, a space, a comma or a full stop. There the pre-tokenizers of the
families below end a piece whatever follows: a run of letters is over, and what comes next begins a piece of its own; no
merge crosses a border between two pieces. A text for another tokenizer, or without such a place, is encoded whole, up to
LONGEST_WHOLE characters.
"""

import json
import unicodedata
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

from dataset.tokenizing.byte_level_bpe import GPT2, LLAMA_BPE, QWEN2

# A longer text is encoded in parts of at most so many characters.
PART_CHARACTERS = 1 << 18
# About 700 MB in the tokenizer where every character is a token.
LONGEST_WHOLE = 1 << 21
# What a part may end before.
MARKS = "\n ,.，。"

# Of GPT-4o and gpt-oss, and the three of DeepSeek V3, which are applied one after the other.
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
KNOWN_PATTERNS = {GPT2, LLAMA_BPE, QWEN2, GPT4O, *DEEPSEEK}


class TooLongToEncode(ValueError):
    """A text that cannot be encoded both exactly and in bounded memory."""


def can_be_cut(content: str, parse_special_tokens: bool) -> bool:
    """Whether long texts may be cut for the tokenizer of this tokenizer.json."""
    spec = json.loads(content)
    for token in spec["added_tokens"]:
        # These are taken out of the text before it is cut into pieces. One that spans a cut, or looks beside itself, forbids it.
        if parse_special_tokens or not token["special"]:
            spans = any(pair[0].isalpha() and pair[1] in MARKS for pair in pairwise(token["content"]))
            if spans or token["rstrip"] or token["single_word"]:
                return False
    normalizer = (spec["normalizer"] or {"type": "none"})["type"]
    if normalizer == "BertNormalizer":
        return bool(spec["pre_tokenizer"] and spec["pre_tokenizer"]["type"] == "BertPreTokenizer")
    step = spec["pre_tokenizer"]
    if normalizer not in ("none", "NFC") or step is None or spec["model"].get("dropout"):
        return False
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    # One without a pattern would leave the text whole.
    return all(map(_is_known, steps)) and any(step["type"] == "Split" or step.get("use_regex") for step in steps)


def _is_known(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        # A prefix would stand before each part.
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        return step["behavior"] in ("Isolated", "Removed") and step["pattern"].get("Regex") in KNOWN_PATTERNS
    return bool(step["type"] == "Digits")


def parts_of(text: str, most: int) -> Iterator[str]:
    """The text in parts of at most `most` characters; a longer one only where it has no place to be cut."""
    category = unicodedata.ucd_3_2_0.category
    begin = 0
    while len(text) - begin > most:
        # As much as tells that a part is too long
        furthest = min(len(text), begin + LONGEST_WHOLE + 1)
        # The last place within the part, else the first one behind it
        places = chain(range(begin + most, begin, -1), range(begin + most + 1, furthest))
        # Behind a letter since 2002, of which all tables of Unicode say the same
        cuts = (at for at in places if text[at] in MARKS and category(text[at - 1])[0] == "L")
        end = next(cuts, furthest)
        yield text[begin:end]
        begin = end
    yield text[begin:]

"""Byte-level BPE by the package tiktoken, in half the time, with the very ids of the tokenizers library.

It serves the piece rule of the shipped tokenizers. Both merge two neighbours of a piece at a time, chosen differently: the
library takes the pair that stands first in its list of merges, tiktoken the one whose token has the smallest id. That is the
same pair where the ids rise in the order of the merges and merging makes each of the tokens out of its bytes; `fast_bpe` looks.
The classes of the rule are read by two engines of regular expressions: a text goes to the library where it has a character
that tables of Unicode disagree on.
"""

import json
import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from dataset.tokenizing.byte_level_bpe import bytes_of_characters
from dataset.tokenizing.byte_level_bpe import LLAMA_BPE

if TYPE_CHECKING:
    from tiktoken import Encoding

# In characters. A longer text has a stretch that cannot be cut, on which engines differ in time and memory.
LONGEST_TEXT = 1 << 18


def fast_bpe(content: str) -> "Encoding | None":
    """tiktoken's encoder for a tokenizer.json; None where it is not the same, or tiktoken is not installed."""
    try:
        import tiktoken
    except ImportError:
        return None
    spec = json.loads(content)
    model = spec["model"]
    split = {"type": "Split", "pattern": {"Regex": LLAMA_BPE}, "behavior": "Isolated", "invert": False}
    steps = (spec["pre_tokenizer"] or {}).get("pretokenizers", [{}])
    to_bytes = steps[-1].get("type") == "ByteLevel" and not steps[-1]["add_prefix_space"] and not steps[-1]["use_regex"]
    if spec["normalizer"] is not None or model["type"] != "BPE" or steps[:-1] != [split] or not to_bytes:
        return None
    if any(model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")):
        return None
    # These are taken out of a text before it is cut into pieces.
    if not all(token["special"] for token in spec["added_tokens"]):
        return None
    byte_of = bytes_of_characters()
    results = [left + right for left, right in model["merges"]]
    # What is an entry, and neither a byte nor made by merging, must not be a piece: here it is a special token.
    entries = {*results, *byte_of, *(token["content"] for token in spec["added_tokens"])}
    ids = [model["vocab"][result] for result in results]
    if not model["vocab"].keys() <= entries or not byte_of.keys() <= model["vocab"].keys() or ids != sorted(set(ids)):
        return None
    # By merging alone, and not because a piece that is an entry becomes it at once.
    merging = Tokenizer.from_str(json.dumps(spec | {"model": model | {"ignore_merges": False}})).model
    if any(len(merging.tokenize(result)) != 1 for result in results):
        return None
    ranks = {}
    for token in [*byte_of, *results]:
        ranks[bytes(byte_of[character] for character in token)] = model["vocab"][token]
    return tiktoken.Encoding("pieces", pat_str=LLAMA_BPE, mergeable_ranks=ranks, special_tokens={})


def encode(encoding: "Encoding", text: str) -> list[int] | None:
    """The ids of a text; None where the library has to encode it."""
    if len(text) > LONGEST_TEXT or _doubtful().search(text):
        return None
    try:
        return encoding.encode_ordinary(text)
    except BaseException as error:
        # A fault in tiktoken's Rust code, such as a limit of its regular expressions, is no Exception.
        if type(error).__name__ == "PanicException":
            return None
        raise


@cache
def _doubtful() -> re.Pattern[str]:
    """Any character that may be a letter, a digit or white space for one engine only."""
    # What was the same in the tables of 2002 and is today is so in all between; later signs and marks are neither.
    settled = []
    for code in range(0x10000):
        old, new = (table.category(chr(code)) for table in (unicodedata.ucd_3_2_0, unicodedata))
        if new not in ("Cs", "Cn") and (old == new or (old == "Cn" and new[0] in "PSM")):
            settled.append(re.escape(chr(code)))
    # Emoji, and Han characters beyond the basic plane.
    return re.compile(f"[^{''.join(settled)}\U0001f000-\U0001faff\U00020000-\U0002a6d6]")

"""Byte-level BPE by the package tiktoken, where it gives the very ids of the tokenizer's own library.

Both merge two neighbours of a piece at a time, until there is nothing more to merge. They choose them differently. The
library has a list of merges and takes the pair that stands first in it. tiktoken has no list: it takes the neighbours
that together spell the token with the smallest id, whether or not a merge makes this token of these two. Three
conditions make both alike, and `_ranks` checks them:
1. In the order of the merges the ids of their results rise.
2. No two merges have the same result.
3. The library encodes the text of each result as this one token.

By 1 and 2, both choose the same pair as long as all neighbours that spell a token are in the list. It remains to show
that they always are. Suppose that they are not, and look at the first time that tiktoken joins two neighbours l and r to
a token t while (l, r) is not in the list. Up to then both did the same. All merges within t so far are those that the
library makes when t is a piece by itself, since nothing was merged across the borders of t. So there too it comes to l
and r, and stops, since the list does not have this pair. But by 3 it ends with the single token t.

The pattern that cuts pieces is read by two engines of regular expressions. Only constructs that both read alike are
taken (piece_pattern.py), and the classes in it are compared character by character: a text with a character of which
they disagree, or which the pattern may leave out, goes to the library. So does whatever else is in doubt.
"""

import json
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

from dataset.tokenizing.piece_pattern import PiecePattern
from dataset.tokenizing.piece_rules import GPT2
from dataset.tokenizing.split_rules import PatternRule, Step, Unprovable, matches_wholly

if TYPE_CHECKING:
    from tiktoken import Encoding

# Characters are compared in blocks of so many.
CHARACTERS_AT_ONCE = 1 << 12
# In characters. A longer text has a stretch that cannot be cut, on which engines differ in time and memory.
LONGEST_TEXT = 1 << 18


class NotExact(ValueError):
    """tiktoken would not, or not provably, give the same ids."""


class TiktokenEngine:
    """Encodes with the vocabulary of a tokenizer.json. Errors: NotExact; ImportError where tiktoken is missing.

    `parse_special_tokens`: whether special tokens that are spelt out in a text become those tokens.
    """

    def __init__(self, content: str, parse_special_tokens: bool) -> None:
        import tiktoken

        spec = json.loads(content)
        pattern = _pattern(spec)
        try:
            rule = PatternRule(pattern)
        except Unprovable as error:
            raise NotExact(str(error)) from None
        if not rule.pattern.same_everywhere:
            raise NotExact("its pattern is not read alike by all engines")
        self._encoding = _encoding(tiktoken, pattern, _ranks(spec, content))
        self._characters = _Characters(tiktoken, rule.pattern)
        # Texts that the library takes out as tokens of their own. tiktoken knows nothing of them.
        self._added: list[str] = []
        for token in spec["added_tokens"]:
            if parse_special_tokens or not token["special"]:
                self._added.append(token["content"])

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text; None where the library has to encode it."""
        if len(text) > LONGEST_TEXT or any(content in text for content in self._added):
            return None
        if not self._characters.agree_on(text):
            return None
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            # A fault in tiktoken's Rust code, such as a limit of its regular expressions, is no Exception.
            if type(error).__name__ == "PanicException":
                return None
            raise


class _Characters:
    """Of which characters both engines say the same, found out block by block as texts contain them.

    A pattern is read alike by both if each of its atoms matches the same characters for both. This cannot be read off the
    pattern, since `\\p{L}` depends on the year of an engine's Unicode tables. So both are asked about each character. There
    are a million, of which a text has a few thousand: they are asked about when a text first contains one of their block.
    """

    def __init__(self, tiktoken: ModuleType, pattern: PiecePattern) -> None:
        # tiktoken drops what no alternative matches, the library makes a piece of it. A character that an alternative
        # matches by itself, whatever follows, is never left out.
        self._simple = "|".join(pattern.simple)
        if not self._simple:
            raise NotExact("every alternative of its pattern looks ahead")
        # For each atom both engines: one gives the characters that it does not match, the other the bytes of those
        # that it does, since its vocabulary is the bytes alone.
        bytes_alone = {bytes([i]): i for i in range(256)}
        self._classes: list[tuple[pre_tokenizers.Split, Encoding]] = []
        for source in sorted({atom.pattern for atom in pattern.atoms}):
            splitter = pre_tokenizers.Split(Regex(source), "removed")
            self._classes.append((splitter, _encoding(tiktoken, source, bytes_alone)))
        self._blocks: set[int] = set()
        # The inside of a class of `re`: looking for a character outside of it takes no loop in Python.
        self._agreed = ""
        self._look_at_block(0)

    def agree_on(self, text: str) -> bool:
        """Whether both engines put every character of the text into the same classes."""
        while True:
            found = self._doubtful.search(text)
            if found is None:
                return True
            block = ord(found[0]) // CHARACTERS_AT_ONCE
            # Both have been asked about it, and it was not found good. Else it was only new.
            if block in self._blocks:
                return False
            self._look_at_block(block)

    def _look_at_block(self, block: int) -> None:
        """Ask both engines about the characters of a block, and remember those on which they agree."""
        first = block * CHARACTERS_AT_ONCE
        codes = range(first, first + CHARACTERS_AT_ONCE)
        # Half a surrogate pair is no text; the library says so.
        characters = [chr(code) for code in codes if not 0xD800 <= code <= 0xDFFF]
        disputed = self._disputed("".join(characters))
        agreed = []
        for character in characters:
            if character not in disputed and matches_wholly(self._simple, character):
                agreed.append(character)
        self._blocks.add(block)
        self._agreed += _ranges(agreed)
        self._doubtful = re.compile(f"[^{self._agreed}]")

    def _disputed(self, characters: str) -> set[str]:
        """Those of which one engine says that they belong to a class, and the other that they do not."""
        disputed: set[str] = set()
        for splitter, encoding in self._classes:
            outside: set[str] = set()
            for piece, _ in splitter.pre_tokenize_str(characters):
                outside.update(piece)
            matched_bytes = bytes(encoding.encode_ordinary(characters))
            inside = set(matched_bytes.decode("utf-8"))
            # In the class for one engine only: for tiktoken, and then for the library.
            disputed |= outside & inside
            disputed |= set(characters) - outside - inside
        return disputed


def _ranges(characters: list[str]) -> str:
    """The inside of a class of these characters, which rise, for `re`."""
    # [first, last] of each run of neighbours.
    ranges: list[list[int]] = []
    for character in characters:
        code = ord(character)
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)


def _encoding(tiktoken: ModuleType, pattern: str, ranks: dict[bytes, int]) -> "Encoding":
    """tiktoken's encoder. Errors: NotExact for a pattern that its regular expressions do not know."""
    try:
        return tiktoken.Encoding("pieces", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except ValueError as error:
        raise NotExact(f"tiktoken does not take the pattern {pattern[:60]!r}: {error}") from None


def _pattern(spec: dict[str, Any]) -> str:
    """The pattern that cuts the pieces; errors: NotExact for steps that are not those of a plain byte-level BPE."""
    if spec["normalizer"] is not None:
        raise NotExact("it has a normalizer")
    no_step: Step = {"type": "none"}
    step: Step = spec["pre_tokenizer"] or no_step
    steps: list[Step] = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    # Either ByteLevel alone, which cuts by GPT-2's pattern, or a Split by a pattern of one's own and then ByteLevel.
    bytes_step = steps[-1] if steps else no_step
    if bytes_step["type"] != "ByteLevel" or bytes_step["add_prefix_space"]:
        raise NotExact("its pieces are not bytes, or begin with a space that the text has not")
    if len(steps) == 1 and bytes_step["use_regex"]:
        return GPT2
    if len(steps) != 2 or steps[0]["type"] != "Split" or bytes_step["use_regex"]:
        raise NotExact("its pieces are not cut by one pattern")
    # tiktoken keeps the matches and drops the rest. "Isolated" keeps both, and `_Characters` sees to it that there is no
    # rest; "Removed" with `invert` keeps the matches.
    behavior = steps[0]["behavior"]
    if behavior != "Isolated" and not (behavior == "Removed" and steps[0]["invert"]):
        raise NotExact("its pieces are not the matches of its pattern")
    try:
        return steps[0]["pattern"]["Regex"]
    except KeyError:
        raise NotExact("its pieces are cut by a text, not by a pattern") from None


def _ranks(spec: dict[str, Any], content: str) -> dict[bytes, int]:
    """The ids of single bytes and of what merges make of them; errors: NotExact.

    Checks the three conditions that the module's docstring gives.
    """
    model = spec["model"]
    if model["type"] != "BPE":
        raise NotExact(f"its model is {model['type']}, not BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotExact(f"its model has {option}")
    byte_of = bytes_of_characters()
    vocabulary: dict[str, int] = model["vocab"]
    missing = [character for character in byte_of if character not in vocabulary]
    if missing:
        raise NotExact(f"{len(missing)} bytes have no token")
    ranks = {bytes([byte]): vocabulary[character] for character, byte in byte_of.items()}
    results = [_result(merge) for merge in model["merges"]]
    # Ids that rise are all different, so this is the second condition as well as the first.
    latest_id = -1
    for result in results:
        if vocabulary[result] <= latest_id:
            raise NotExact("the ids do not rise in the order of the merges")
        latest_id = vocabulary[result]
    if not all(set(result) <= byte_of.keys() for result in results):
        raise NotExact("it merges what is not bytes")
    _want_reachable(spec, content, results)
    for result in results:
        spelling = bytes(byte_of[character] for character in result)
        ranks[spelling] = vocabulary[result]
    return ranks


def _want_reachable(spec: dict[str, Any], content: str, results: list[str]) -> None:
    """Raises NotExact unless merging alone makes each of these tokens out of its bytes: the third condition."""
    model = spec["model"]
    # `ignore_merges`: a piece that is an entry becomes this entry at once, which says nothing of what merging makes of it.
    # tiktoken does the same, of the entries that it is given.
    whole_pieces = bool(model.get("ignore_merges"))
    if whole_pieces:
        content = json.dumps(spec | {"model": model | {"ignore_merges": False}})
    library = Tokenizer.from_str(content)
    for result in results:
        if len(library.model.tokenize(result)) != 1:
            raise NotExact(f"the token {result!r} is not made by merging")
    if whole_pieces:
        # An entry that no merge makes is not given to tiktoken. The library would take it for the piece that it spells, if
        # the pattern ever leaves such a piece whole.
        alphabet = bytes_of_characters().keys()
        others = model["vocab"].keys() - set(results) - alphabet
        for other in others:
            text = library.decoder.decode([other])
            if len(library.pre_tokenizer.pre_tokenize_str(text)) == 1:
                raise NotExact(f"the token {other!r} is not made by merging")


def _result(merge: list[str] | str) -> str:
    """What a merge makes; older files write it as one text with a space."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return "".join(parts)


def bytes_of_characters() -> dict[str, int]:
    """The byte behind each character of ByteLevel's alphabet: itself where it is visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    byte_of = {chr(byte): byte for byte in visible}
    hidden = [byte for byte in range(256) if byte not in visible]
    for number, byte in enumerate(hidden):
        byte_of[chr(0x100 + number)] = byte
    return byte_of

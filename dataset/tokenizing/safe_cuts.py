"""Long texts in parts whose token ids, one after the other, are those of the whole text.

A tokenizer holds more than 100 bytes for each byte of a text until the text is done, so a long text is encoded in
parts. A cut is made only where it is proved that no step of the tokenizer sees over it: added tokens, normalizer and
pre-tokenizer (split_rules.py), and for tokenizers without pieces the merges themselves. A tokenizer of which this is
not known, and a stretch of text without such a place, is encoded whole, up to LONGEST_WHOLE characters.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from dataset.tokenizing.split_rules import Unprovable, normalizer_rules, settled, splitter_rules

PART_CHARACTERS = 1 << 18
# About 700 MB in the tokenizer where every character is a token.
LONGEST_WHOLE = 1 << 21


class TooLongToEncode(ValueError):
    """A text that cannot be encoded both exactly and in bounded memory."""


class SafeCuts:
    """Where a text may be cut for the tokenizer of a tokenizer.json; errors: Unprovable.

    `parse_special_tokens`: whether special tokens that are spelt out in a text become those tokens.
    """

    def __init__(self, content: str, parse_special_tokens: bool = False) -> None:
        spec = json.loads(content)
        self._normalizer_step, self._prepends = _without_prepend(spec["normalizer"])
        self._normalizers = normalizer_rules(self._normalizer_step)
        self._splitters = splitter_rules(spec["pre_tokenizer"])
        self._model = spec["model"]
        self._added = _AddedTokens(spec["added_tokens"], self._normalizers)
        self._extracted = [t["content"] for t in spec["added_tokens"] if parse_special_tokens or not t["special"]]
        if self._model.get("dropout"):
            raise Unprovable("a model with dropout")
        self._joined = None if _makes_pieces(spec["pre_tokenizer"]) else _joined_characters(self._model)
        self.safe = lru_cache(maxsize=1 << 16)(self._safe)
        self.continuation = None
        if self._prepends:
            self.continuation = json.dumps(spec | {"normalizer": self._normalizer_step})

    def parts(self, text: str, most: int = PART_CHARACTERS) -> Iterator[str]:
        """The text in parts of at most `most` characters, longer ones only where no cut is safe."""
        if self._prepends and any(content in text for content in self._extracted):
            # The normalizer puts its prefix after each added token too, which a continuation would leave out.
            yield text
            return
        begin = 0
        while len(text) - begin > most:
            cut = self._cut(text, begin, begin + most)
            yield text[begin:cut]
            begin = cut
        yield text[begin:]

    def _cut(self, text: str, begin: int, target: int) -> int:
        """The last safe place in (begin, target], or else the first one behind it."""
        for i in range(target, begin, -1):
            if self.safe(text[i - 1], text[i]):
                return i
        for i in range(target + 1, min(len(text), begin + LONGEST_WHOLE + 1)):
            if self.safe(text[i - 1], text[i]):
                return i
        return len(text)

    def _safe(self, x: str, y: str) -> bool:
        """Whether any text that has y behind x may be cut between the two."""
        if not settled(x) or not (settled(y) or y in " \n"):
            return False
        pair: tuple[str, str] | None = (x, y)
        assert pair is not None
        for normalizer in self._normalizers:
            pair = normalizer.apply(pair)
            if pair is None:
                return False
        if self._added.join(x, y) or self._added.join(*pair):
            return False
        splits = False
        for rule in self._splitters:
            splits = splits or rule.splits(pair)
            pair = rule.apply(pair)
            if pair is None:
                return False
        if self._joined is not None:
            vocabulary = self._model["vocab"]
            return pair[0] in vocabulary and pair[1] in vocabulary and "".join(pair) not in self._joined
        return splits


class _AddedTokens:
    """Which neighbours an added token can contain, or look at from where it ends or begins."""

    def __init__(self, tokens: list[dict[str, Any]], normalizers: list[Any]) -> None:
        self.pairs: set[str] = set()
        self.ends: set[str] = set()
        self.begins: set[str] = set()
        for token in tokens:
            for content in self._spellings(token, normalizers):
                self.pairs.update(content[i : i + 2] for i in range(len(content) - 1))
                # It takes the white space behind it, or wants to stand alone.
                if token["rstrip"] or token["single_word"]:
                    self.ends.add(content[-1])
                if token["single_word"]:
                    self.begins.add(content[0])

    @staticmethod
    def _spellings(token: dict[str, Any], normalizers: list[Any]) -> list[str]:
        """Its content, and what the normalizer makes of it where it is looked for in the normalized text."""
        content = token["content"]
        normal = content
        if token["normalized"]:
            for rule in normalizers:
                normal = rule.normalizer.normalize_str(normal)
        return [spelling for spelling in (content, normal) if spelling]

    def join(self, x: str, y: str) -> bool:
        return x + y in self.pairs or x in self.ends or y in self.begins


def _without_prepend(step: dict | None) -> tuple[dict | None, bool]:
    """(the normalizer without the step that puts a prefix before the whole text, whether it had one)."""
    if step is None:
        return None, False
    if step["type"] == "Prepend":
        return None, True
    if step["type"] == "Sequence" and step["normalizers"] and step["normalizers"][0]["type"] == "Prepend":
        return step | {"normalizers": step["normalizers"][1:]}, True
    return step, False


def _makes_pieces(step: dict | None) -> bool:
    """Whether the model gets pieces of a text, not the whole of it."""
    if step is None:
        return False
    return step["type"] != "Metaspace" or step.get("split", True)


def _joined_characters(model: dict) -> set[str]:
    """All neighbours within the entries of a BPE vocabulary: merges cannot join any others. Errors: Unprovable."""
    plain = not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
    if model["type"] != "BPE" or not plain or model.get("ignore_merges"):
        raise Unprovable(f"a model {model['type']} without pieces")
    joined: set[str] = set()
    for token in model["vocab"]:
        joined.update(token[i : i + 2] for i in range(len(token) - 1))
    return joined

"""Long texts in parts whose token ids, one after the other, are those of the whole text.

A tokenizer holds more than 100 bytes for each byte of a text until the text is done, so a long text is encoded in
parts. A cut is made only where it is proved that no step of the tokenizer sees over it: added tokens, normalizer and
pre-tokenizer (split_rules.py), and for tokenizers without pieces the merges themselves. A tokenizer of which this is
not known, and a stretch of text without such a place, is encoded whole, up to LONGEST_WHOLE characters.

A place is judged by the two characters beside it alone, x before and y behind: the proof has to hold whatever else the
text contains. So the answer for a pair can be kept, and looking for a place costs next to nothing.
"""

import json
from collections.abc import Iterator
from functools import lru_cache

from dataset.tokenizing.split_rules import (
    NormalizerRule,
    Pair,
    Step,
    Unprovable,
    normalizer_rules,
    settled,
    splitter_rules,
)

# A longer text is encoded in parts of at most so many characters.
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
        # The texts that are taken out as tokens of their own before the other steps.
        self._extracted: list[str] = []
        for token in spec["added_tokens"]:
            if parse_special_tokens or not token["special"]:
                self._extracted.append(token["content"])
        # It draws random numbers as it goes, and parts would draw others.
        if self._model.get("dropout"):
            raise Unprovable("a model with dropout")
        # A model that gets the text whole could merge over any cut; its vocabulary tells over which it cannot.
        self._joined: set[str] | None = None
        if not _makes_pieces(spec["pre_tokenizer"]):
            self._joined = _joined_characters(self._model)
        self.safe = lru_cache(maxsize=1 << 16)(self._safe)
        # Llama 2's normalizer puts a "▁" before the text. The first part gets it as the whole text would; the others
        # are encoded by a copy of the tokenizer without this step, of which this is the tokenizer.json.
        self.continuation: str | None = None
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
        # The cut before the target keeps the part within bounds. One behind it makes a longer part, up to the place where
        # the text would be refused as too long in any case.
        for i in range(target, begin, -1):
            if self.safe(text[i - 1], text[i]):
                return i
        for i in range(target + 1, min(len(text), begin + LONGEST_WHOLE + 1)):
            if self.safe(text[i - 1], text[i]):
                return i
        return len(text)

    def _safe(self, x: str, y: str) -> bool:
        """Whether any text that has y behind x may be cut between the two."""
        # The pair goes through the tokenizer step by step, as the step before leaves it. Each step has to come out the
        # same for the two parts as for the whole text; then so does the next one, which sees only what this one leaves.
        #
        # 0. The proof leans on tables of Unicode: Python's here, those of the tokenizer's libraries there. Only characters
        #    are taken of which all tables say the same, the space and the end of a line among them.
        if not settled(x) or not (settled(y) or y in " \n"):
            return False
        # 1. The normalizer turns x into something that ends in pair[0], and y into something that begins with pair[1],
        #    and makes nothing else of them because of the other part.
        pair: Pair = (x, y)
        for normalizer in self._normalizers:
            normalized = normalizer.apply(pair)
            if normalized is None:
                return False
            pair = normalized
        # 2. No added token is looked for in this place, neither in the plain text nor in the normalized one.
        if self._added.join(x, y) or self._added.join(*pair):
            return False
        # 3. Each pre-tokenizer cuts both parts as it cuts the whole, and one of them ends a piece here. A piece that one
        #    step has ended stays ended in the steps behind it.
        splits = False
        for rule in self._splitters:
            splits = splits or rule.splits(pair)
            passed_on = rule.apply(pair)
            if passed_on is None:
                return False
            pair = passed_on
        # 4. The model works on each piece alone, so a border between pieces is enough. If there are no pieces, it merges
        #    neighbours into entries of the vocabulary. An entry over the cut would hold pair[0] beside pair[1], and no
        #    entry does. Both have to be entries themselves: unknown ones in a row may become a single [UNK].
        if self._joined is None:
            return splits
        vocabulary = self._model["vocab"]
        both_known = pair[0] in vocabulary and pair[1] in vocabulary
        return both_known and "".join(pair) not in self._joined


class _AddedTokens:
    """Which neighbours an added token can contain, or look at from where it ends or begins."""

    def __init__(self, tokens: list[Step], normalizers: list[NormalizerRule]) -> None:
        # Neighbours within a token, as texts of two characters.
        self.pairs: set[str] = set()
        # Last characters of tokens that look at what stands behind them; first ones of those that look before them.
        self.ends: set[str] = set()
        self.begins: set[str] = set()
        for token in tokens:
            for content in self._spellings(token, normalizers):
                self.pairs.update(_neighbours(content))
                # No token that takes the white space before it (lstrip) has to be looked for: there x is that white
                # space, and `settled` refuses such an x.
                # It takes the white space behind it, or wants to stand alone.
                if token["rstrip"] or token["single_word"]:
                    self.ends.add(content[-1])
                if token["single_word"]:
                    self.begins.add(content[0])

    @staticmethod
    def _spellings(token: Step, normalizers: list[NormalizerRule]) -> list[str]:
        """Its content, and what the normalizer makes of it where it is looked for in the normalized text."""
        content = token["content"]
        normal = content
        if token["normalized"]:
            for rule in normalizers:
                normal = rule.normalizer.normalize_str(normal)
        return [spelling for spelling in (content, normal) if spelling]

    def join(self, x: str, y: str) -> bool:
        """Whether a token might lie over the two, or be taken at one of them because of the other."""
        return x + y in self.pairs or x in self.ends or y in self.begins


def _neighbours(text: str) -> set[str]:
    """All pairs of characters that stand side by side in the text."""
    return {text[i : i + 2] for i in range(len(text) - 1)}


def _without_prepend(step: Step | None) -> tuple[Step | None, bool]:
    """(the normalizer without the step that puts a prefix before the whole text, whether it had one)."""
    if step is None:
        return None, False
    if step["type"] == "Prepend":
        return None, True
    if step["type"] == "Sequence":
        steps = step["normalizers"]
        if steps and steps[0]["type"] == "Prepend":
            return step | {"normalizers": steps[1:]}, True
    return step, False


def _makes_pieces(step: Step | None) -> bool:
    """Whether the model gets pieces of a text, not the whole of it."""
    if step is None:
        return False
    return step["type"] != "Metaspace" or step.get("split", True)


def _joined_characters(model: Step) -> set[str]:
    """All neighbours within the entries of a BPE vocabulary: merges cannot join any others. Errors: Unprovable."""
    plain = not model.get("continuing_subword_prefix") and not model.get("end_of_word_suffix")
    if model["type"] != "BPE" or not plain or model.get("ignore_merges"):
        # Unigram weighs all ways to cut the whole text. Prefixes and suffixes make an entry depend on where a word ends.
        # With ignore_merges a whole text that is an entry becomes this entry.
        raise Unprovable(f"a model {model['type']} without pieces")
    joined: set[str] = set()
    for token in model["vocab"]:
        joined.update(_neighbours(token))
    return joined

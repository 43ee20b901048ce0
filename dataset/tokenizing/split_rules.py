"""The first two steps of a tokenizer, normalizer and pre-tokenizer, as rules about two neighbouring characters.

Each rule takes the neighbours x and y as they reach its step. It returns them as they leave it, or None where a text
that is cut between them could come out of the step in another way. `splits` says whether the step always ends a piece
between them. What is known of each step is in docs/data.md; a step that is not known is refused with Unprovable.
"""

import json
import unicodedata
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from dataset.tokenizing.piece_pattern import Atom, PiecePattern, UnknownPattern
from dataset.tokenizing.piece_rules import GPT2

# Steps that have no pattern of their own, written as patterns that cut in the same places.
WHITESPACE_SPLIT = r"\s"
WHITESPACE = r"\w+|[^\w\s]+"
DIGITS_APART = r"\p{N}"
DIGITS_TOGETHER = r"\p{N}+"
PUNCTUATION_APART = r"[!-/:-@\[-`\{-~\p{P}]"
PUNCTUATION_TOGETHER = PUNCTUATION_APART + "+"

Pair = tuple[str, str]
# A step as the JSON of tokenizer.json has it: its "type", and fields that depend on the type.
Step = dict[str, Any]


class Unprovable(ValueError):
    """The tokenizer has a step that is not known."""


class Rule(Protocol):
    """What is known of one step of a pre-tokenizer; the module's docstring says what the two methods answer."""

    def apply(self, pair: Pair) -> Pair | None: ...

    def splits(self, pair: Pair) -> bool: ...


@lru_cache(maxsize=4096)
def _splitter(pattern: str) -> pre_tokenizers.Split:
    """What leaves of a text only that which the pattern does not match."""
    return pre_tokenizers.Split(Regex(pattern), "removed")


def matches_wholly(pattern: str, text: str) -> bool:
    """Whether the tokenizer's own engine finds the pattern all over the text."""
    return not _splitter(pattern).pre_tokenize_str(text)


@lru_cache(maxsize=1 << 16)
def _atom_matches(atom: Atom, character: str) -> bool:
    """Asked of the engine, whose Unicode tables decide what a class holds; ours may be of another year."""
    return matches_wholly(atom.pattern, character)


# Why a text may be cut between x and y where no pair of atoms in `follow` has one that matches x and one that
# matches y. The engine tries to match at one place after the other, from left to right, and goes on behind each match.
# - An attempt that begins at x or before it comes to y only by testing an atom on y right after another one took x. No
#   such test succeeds, just as none succeeds at the end of a text that stops after x. So the attempt goes the same way.
# - Hence no match crosses from x to y. The engine attempts one that begins with y, as it does at the start of the
#   second part; and the pattern cannot look back, so that attempt and all later ones go as they do in this part alone.
# The matches of the whole text are thus those of the first part and then those of the second. What stands between
# matches is a piece too. If x and y both lie outside of matches, that piece goes on over the cut, and cutting would make
# two of it. So `splits` asks for more: that a match certainly ends after x or certainly begins with y.


class PatternRule:
    """A pattern that cuts: no attempt to match may see both neighbours (see piece_pattern.py)."""

    def __init__(self, source: str) -> None:
        try:
            self.pattern = PiecePattern(source)
            self.pattern.refuse_folds(_atom_matches)
        except UnknownPattern as error:
            raise Unprovable(f"the pattern {source[:60]!r}: {error}") from None
        self.source = source
        self.atoms_of = lru_cache(maxsize=1 << 14)(self._atoms_of)

    def apply(self, pair: Pair) -> Pair | None:
        """The pair as it is, unless one attempt could see both."""
        left = self.atoms_of(pair[0])
        right = self.atoms_of(pair[1])
        for before, after in self.pattern.follow:
            if before in left and after in right:
                return None
        return pair

    def splits(self, pair: Pair) -> bool:
        """Whether a match ends or begins between the two for certain; of pairs that `apply` lets pass."""
        # Where x stands before y, a match of x alone succeeds, since it cannot see y. So a match ends after x.
        if matches_wholly(self.source, pair[0]):
            return True
        # No match that began earlier takes y, and one that begins with y succeeds whatever follows.
        return any(matches_wholly(alternative, pair[1]) for alternative in self.pattern.simple)

    def _atoms_of(self, character: str) -> frozenset[int]:
        """The numbers of the atoms that match the character."""
        return frozenset(i for i, atom in enumerate(self.pattern.atoms) if _atom_matches(atom, character))


class SpacePrefixRule:
    """A step that puts a space before a text that begins without one: the second part has to begin with one."""

    def apply(self, pair: Pair) -> Pair | None:
        """The pair where the second part gets no space that the whole text has not."""
        return pair if pair[1] == " " else None

    def splits(self, pair: Pair) -> bool:
        """The step cuts nothing."""
        return False


class MetaspaceRule:
    """Spaces become `replacement`, and a piece begins at each of them."""

    def __init__(self, step: Step) -> None:
        self.replacement = step["replacement"]
        # Left out, both fields mean what older files mean by it.
        self.begins_pieces = step.get("split", True)
        self.prefixes = step.get("prepend_scheme", "always") != "never"

    def apply(self, pair: Pair) -> Pair | None:
        """The pair with y replaced; a second part that begins with the replacement gets no prefix."""
        x, y = pair
        if y == " ":
            return x, self.replacement
        # A prefix would stand before the second part that the whole text has not. And a replacement that stands in the
        # text already begins a piece as a replaced space does, which `splits` does not consider.
        if self.prefixes or self.replacement in pair:
            return None
        return pair

    def splits(self, pair: Pair) -> bool:
        """Whether a piece begins with the space."""
        return self.begins_pieces and pair[1] == " "


class NormalizerRule:
    """A normalizer, asked for what it makes of each neighbour.

    Those that are known work character by character, with two exceptions. Marks and jamo join what stands before them;
    `_steady` and `_begins_anew` leave such neighbours out. And Strip takes white space away at the ends of a text, which
    it would do at a cut as well: a neighbour of which nothing is left is refused.
    """

    def __init__(self, step: Step) -> None:
        normalizer = _with_model_of_nothing(normalizer=step).normalizer
        assert normalizer is not None
        self.normalizer = normalizer

    def apply(self, pair: Pair) -> Pair | None:
        """What becomes of the neighbours: the last character that x turns into, the first one that y turns into."""
        x, y = pair
        if not _steady(x) or not _begins_anew(y):
            return None
        before = self.normalizer.normalize_str(x)
        after = self.normalizer.normalize_str(y)
        if not before or not after:
            return None
        return before[-1], after[0]


class ReplaceRule(NormalizerRule):
    """One character replaced; or a longer text or a pattern, which neither neighbour may have part in."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        # {"String": text} or {"Regex": pattern}
        kind, source = next(iter(step["pattern"].items()))
        self.rule: PatternRule | None = None
        if kind == "Regex":
            self.rule = PatternRule(source)
        elif kind != "String" or len(source) != 1:
            self.rule = PatternRule(_literal(source))

    def apply(self, pair: Pair) -> Pair | None:
        """As a normalizer for one character; else the pair where neither neighbour can be part of a match."""
        if self.rule is None:
            return super().apply(pair)
        for character in pair:
            if self.rule.atoms_of(character):
                return None
        return pair


KNOWN_NORMALIZERS = frozenset(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "BertNormalizer"])


def normalizer_rules(step: Step | None) -> list[NormalizerRule]:
    """The rules of tokenizer.json's `normalizer`; errors: Unprovable."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        rules: list[NormalizerRule] = []
        for part in step["normalizers"]:
            rules.extend(normalizer_rules(part))
        return rules
    if kind == "Replace":
        return [ReplaceRule(step)]
    if kind not in KNOWN_NORMALIZERS:
        raise Unprovable(f"the normalizer {kind}")
    return [NormalizerRule(step)]


def splitter_rules(step: Step | None) -> list[Rule]:
    """The rules of tokenizer.json's `pre_tokenizer`; errors: Unprovable."""
    if step is None:
        return []
    rules: list[Rule] = []
    kind = step["type"]
    if kind == "Sequence":
        parts = step["pretokenizers"]
        # Behind ByteLevel a step would get stand-ins for bytes, not the characters that the rules are about. A sequence
        # may end with ByteLevel.
        for part in parts[:-1]:
            if part["type"] in ("ByteLevel", "Sequence"):
                raise Unprovable("a pre-tokenizer behind ByteLevel or behind a sequence")
        for part in parts:
            rules.extend(splitter_rules(part))
        return rules
    if kind == "ByteLevel":
        if step["add_prefix_space"]:
            rules.append(SpacePrefixRule())
        if step.get("use_regex", True):
            rules.append(PatternRule(GPT2))
        return rules
    if kind == "Metaspace":
        return [MetaspaceRule(step)]
    if kind == "BertPreTokenizer":
        return [PatternRule(WHITESPACE_SPLIT), PatternRule(PUNCTUATION_APART)]
    return [PatternRule(_pattern_of(step))]


def _pattern_of(step: Step) -> str:
    """The pattern that cuts where the pre-tokenizer does."""
    kind = step["type"]
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed"):
        pattern = step["pattern"]
        return pattern["Regex"] if "Regex" in pattern else _literal(pattern["String"])
    if kind == "WhitespaceSplit":
        return WHITESPACE_SPLIT
    if kind == "Whitespace":
        return WHITESPACE
    if kind == "Digits":
        return DIGITS_APART if step["individual_digits"] else DIGITS_TOGETHER
    if kind == "Punctuation" and step["behavior"] in ("Isolated", "Removed"):
        return PUNCTUATION_APART
    if kind == "Punctuation" and step["behavior"] == "Contiguous":
        return PUNCTUATION_TOGETHER
    raise Unprovable(f"the pre-tokenizer {kind}")


def _literal(text: str) -> str:
    """A pattern for the text itself."""
    source = ""
    for character in text:
        is_sign = character.isascii() and not character.isalnum() and not character.isspace()
        source += f"\\{character}" if is_sign else character
    return source


def _with_model_of_nothing(**steps: Step) -> Tokenizer:
    """A tokenizer with these steps and an empty vocabulary: the library makes a step from its JSON only as a part of one."""
    spec = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(spec | steps))


@lru_cache(maxsize=1 << 14)
def _steady(character: str) -> bool:
    """Whether no normalizer changes it by what stands before it."""
    # Hangul jamo are letters without a decomposition, and NFC joins them to syllables all the same.
    if "\u1100" <= character <= "\u11ff":
        return False
    letter_or_digit = unicodedata.category(character)[0] in "LN"
    return letter_or_digit and unicodedata.normalize("NFKD", character) == character


@lru_cache(maxsize=1 << 14)
def _begins_anew(character: str) -> bool:
    """Whether no normalizer joins it to what stands before it."""
    # What joins is a mark, or a letter outside of ASCII.
    return character.isascii() or unicodedata.category(character)[0] == "P"


@lru_cache(maxsize=1 << 16)
def settled(character: str) -> bool:
    """Whether every table of Unicode since version 3.2 (2002) says the same of it, and it is visible."""
    category = unicodedata.category(character)
    return category[0] in "LNPS" and unicodedata.ucd_3_2_0.category(character) == category

"""The first two steps of a tokenizer, normalizer and pre-tokenizer, as rules about two neighbouring characters.

Each rule takes the neighbours x and y as they reach its step. It returns them as they leave it, or None where a text
that is cut between them could come out of the step in another way. `splits` says whether the step always ends a piece
between them. What is known of each step is in docs/data.md; a step that is not known is refused with Unprovable.
"""

import json
import unicodedata
from functools import lru_cache

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from dataset.tokenizing.piece_pattern import Atom, PiecePattern, UnknownPattern

# How ByteLevel cuts where `use_regex` is set: the pattern of GPT-2.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Steps that have no pattern of their own, written as patterns that cut in the same places.
WHITESPACE_SPLIT = r"\s"
WHITESPACE = r"\w+|[^\w\s]+"
DIGITS_APART = r"\p{N}"
DIGITS_TOGETHER = r"\p{N}+"
PUNCTUATION_APART = r"[!-/:-@\[-`\{-~\p{P}]"
PUNCTUATION_TOGETHER = PUNCTUATION_APART + "+"

Pair = tuple[str, str]


class Unprovable(ValueError):
    """The tokenizer has a step that is not known."""


@lru_cache(maxsize=4096)
def _splitter(pattern: str) -> pre_tokenizers.Split:
    return pre_tokenizers.Split(Regex(pattern), "removed")


def matches_wholly(pattern: str, text: str) -> bool:
    """Whether the tokenizer's own engine finds the pattern all over the text."""
    return not _splitter(pattern).pre_tokenize_str(text)


@lru_cache(maxsize=1 << 16)
def _atom_matches(atom: Atom, character: str) -> bool:
    return matches_wholly(atom.pattern, character)


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
        left = self.atoms_of(pair[0])
        right = self.atoms_of(pair[1])
        for before, after in self.pattern.follow:
            if before in left and after in right:
                return None
        return pair

    def splits(self, pair: Pair) -> bool:
        # Where x stands before y, a match of x alone succeeds, since it cannot see y. So a match ends after x.
        if matches_wholly(self.source, pair[0]):
            return True
        # No match that began earlier takes y, and one that begins with y succeeds whatever follows.
        return any(matches_wholly(alternative, pair[1]) for alternative in self.pattern.simple)

    def _atoms_of(self, character: str) -> frozenset[int]:
        return frozenset(i for i, atom in enumerate(self.pattern.atoms) if _atom_matches(atom, character))


class SpacePrefixRule:
    """A step that puts a space before a text that begins without one: the second part has to begin with one."""

    def apply(self, pair: Pair) -> Pair | None:
        return pair if pair[1] == " " else None

    def splits(self, pair: Pair) -> bool:
        return False


class MetaspaceRule:
    """Spaces become `replacement`, and a piece begins at each of them."""

    def __init__(self, step: dict) -> None:
        self.replacement = step["replacement"]
        self.begins_pieces = step.get("split", True)
        self.prefixes = step.get("prepend_scheme", "always") != "never"

    def apply(self, pair: Pair) -> Pair | None:
        x, y = pair
        if y == " ":
            return x, self.replacement
        if self.prefixes or self.replacement in pair:
            return None
        return pair

    def splits(self, pair: Pair) -> bool:
        return self.begins_pieces and pair[1] == " "


class NormalizerRule:
    """A normalizer, asked for what it makes of each neighbour.

    Those that are known work character by character, but for marks and jamo that join what stands before them (not
    among `steady`), and for white space at the ends of a text, which they make nothing of here too.
    """

    def __init__(self, step: dict) -> None:
        self.normalizer = _with_model_of_nothing(normalizer=step).normalizer

    def apply(self, pair: Pair) -> Pair | None:
        x, y = pair
        if not _steady(x) or not _begins_anew(y):
            return None
        before = self.normalizer.normalize_str(x)
        after = self.normalizer.normalize_str(y)
        if not before or not after:
            return None
        return before[-1], after[0]

    def splits(self, pair: Pair) -> bool:
        return False


class ReplaceRule(NormalizerRule):
    """One character replaced; or a longer text or a pattern, which neither neighbour may have part in."""

    def __init__(self, step: dict) -> None:
        super().__init__(step)
        kind, source = next(iter(step["pattern"].items()))
        self.single = kind == "String" and len(source) == 1
        self.rule = None if self.single else PatternRule(source if kind == "Regex" else _literal(source))

    def apply(self, pair: Pair) -> Pair | None:
        if self.rule is not None:
            for character in pair:
                if self.rule.atoms_of(character):
                    return None
            return pair
        return super().apply(pair)


KNOWN_NORMALIZERS = frozenset(["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip", "BertNormalizer"])


def normalizer_rules(step: dict | None) -> list[NormalizerRule]:
    """The rules of tokenizer.json's `normalizer`; errors: Unprovable."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        rules = []
        for part in step["normalizers"]:
            rules.extend(normalizer_rules(part))
        return rules
    if kind == "Replace":
        return [ReplaceRule(step)]
    if kind not in KNOWN_NORMALIZERS:
        raise Unprovable(f"the normalizer {kind}")
    return [NormalizerRule(step)]


def splitter_rules(step: dict | None) -> list[PatternRule | SpacePrefixRule | MetaspaceRule]:
    """The rules of tokenizer.json's `pre_tokenizer`; errors: Unprovable."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        parts = step["pretokenizers"]
        if any(part["type"] in ("ByteLevel", "Sequence") for part in parts[:-1]):
            raise Unprovable("a pre-tokenizer behind ByteLevel or behind a sequence")
        rules = []
        for part in parts:
            rules.extend(splitter_rules(part))
        return rules
    if kind == "ByteLevel":
        rules = []
        if step["add_prefix_space"]:
            rules.append(SpacePrefixRule())
        if step.get("use_regex", True):
            rules.append(PatternRule(GPT2_PATTERN))
        return rules
    if kind == "Metaspace":
        return [MetaspaceRule(step)]
    if kind == "BertPreTokenizer":
        return [PatternRule(WHITESPACE_SPLIT), PatternRule(PUNCTUATION_APART)]
    return [PatternRule(_pattern_of(step))]


def _pattern_of(step: dict) -> str:
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
    return "".join(f"\\{c}" if c.isascii() and not c.isalnum() and not c.isspace() else c for c in text)


def _with_model_of_nothing(**steps: dict) -> Tokenizer:
    spec = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(spec | steps))


@lru_cache(maxsize=1 << 14)
def _steady(character: str) -> bool:
    """Whether no normalizer changes it by what stands before it."""
    if "\u1100" <= character <= "\u11ff":
        return False
    letter_or_digit = unicodedata.category(character)[0] in "LN"
    return letter_or_digit and unicodedata.normalize("NFKD", character) == character


@lru_cache(maxsize=1 << 14)
def _begins_anew(character: str) -> bool:
    """Whether no normalizer joins it to what stands before it."""
    return character.isascii() or unicodedata.category(character)[0] == "P"


@lru_cache(maxsize=1 << 16)
def settled(character: str) -> bool:
    """Whether every table of Unicode since version 3.2 (2002) says the same of it, and it is visible."""
    category = unicodedata.category(character)
    return category[0] in "LNPS" and unicodedata.ucd_3_2_0.category(character) == category

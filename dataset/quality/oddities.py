"""What is odd about a document: signs that it is no text to learn from, or should be cleaned first."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

# Control characters other than tab, line feed and carriage return, and the sign for what could not be decoded.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
# Tags and entities of HTML and XML
MARKUP = re.compile(r"</?[a-zA-Z!][^<>\n]{0,300}>|&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[0-9a-fA-F]{1,6});")
# Of the characters of a document. Programs and manuals about them may have a few tags.
MARKUP_SHARE = 0.05
# No word is so long. Base64, keys, minified code.
UNBROKEN = re.compile(r"(?<![!-~])[!-~]{500}")
# A line that is most of a text, of so many lines that are not blank
LINES = 8
REPEATED_SHARE = 0.5
# What zlib makes so short says one thing again and again; prose comes to 0.3 to 0.6 of its size.
COMPRESSED_SHARE = 0.1
COMPRESSED_BYTES = 1 << 16
COMPRESSED_FROM = 1000
# Of the characters that are not white space
LETTERS_SHARE = 0.3
LETTERS_FROM = 50
LONG_ROWS = 64

CONTROL_CHARACTERS = "control characters"
REPEATED_LINE = "one repeated line"
REPEATS_ITSELF = "repeats itself"
MOSTLY_MARKUP = "markup"
UNBROKEN_RUN = "500 characters without a space"
FEW_LETTERS = "hardly any letters"
SPECIAL_TOKENS = "special tokens spelt out"
VERY_LONG = "very long"


@dataclass(frozen=True)
class Oddity:
    """A kind of fault, and where in the text it shows."""

    kind: str
    at: int = 0


class OddityFinder:
    """Finds what is odd. special_tokens: as a text may spell them. row_tokens: of a row of training."""

    def __init__(self, special_tokens: Iterable[str], row_tokens: int) -> None:
        spelt = [re.escape(token) for token in special_tokens if token.strip()]
        # A class that nothing is in, where there is no such token.
        self.special = re.compile("|".join(spelt) or r"[^\s\S]")
        self.long_from = LONG_ROWS * row_tokens

    def oddities_of(self, body: str, tokens: int) -> list[Oddity]:
        """body: the text without BOS and EOS. tokens: of the document."""
        found = []
        for kind, pattern in (
            (CONTROL_CHARACTERS, CONTROL),
            (UNBROKEN_RUN, UNBROKEN),
            (SPECIAL_TOKENS, self.special),
        ):
            match = pattern.search(body)
            if match is not None:
                found.append(Oddity(kind, match.start()))
        if markup_share(body) >= MARKUP_SHARE:
            first = MARKUP.search(body)
            assert first is not None
            found.append(Oddity(MOSTLY_MARKUP, first.start()))
        line = repeated_line(body)
        if line is not None:
            found.append(Oddity(REPEATED_LINE, body.index(line)))
        elif repeats_itself(body):
            found.append(Oddity(REPEATS_ITSELF))
        if has_few_letters(body):
            found.append(Oddity(FEW_LETTERS))
        if tokens >= self.long_from:
            found.append(Oddity(VERY_LONG))
        return found


def markup_share(body: str) -> float:
    """The part of the characters that are tags and entities."""
    # Both begin with one of these, which most texts do not have.
    if "<" not in body and "&" not in body:
        return 0.0
    return sum(len(match) for match in MARKUP.findall(body)) / len(body)


def repeated_line(body: str) -> str | None:
    """The line that most of the lines are, if there is one."""
    lines = [line for line in body.split("\n") if line.strip()]
    if len(lines) < LINES:
        return None
    line, count = Counter(lines).most_common(1)[0]
    return line if count >= REPEATED_SHARE * len(lines) else None


def repeats_itself(body: str) -> bool:
    """Whether the beginning of the text says the same again and again, in lines or without."""
    raw = body[:COMPRESSED_BYTES].encode("utf-8", "surrogatepass")
    if len(raw) < COMPRESSED_FROM:
        return False
    return len(zlib.compress(raw, 1)) < COMPRESSED_SHARE * len(raw)


def has_few_letters(body: str) -> bool:
    """Whether the beginning of the text is mostly digits and signs."""
    characters = "".join(body[:COMPRESSED_BYTES].split())
    if len(characters) < LETTERS_FROM:
        return False
    return sum(map(str.isalpha, characters)) < LETTERS_SHARE * len(characters)

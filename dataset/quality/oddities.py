"""What is odd about a document: signs that it is no text to learn from, or should be cleaned first."""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator

# Control characters other than tab, line feed and carriage return, and the sign for what could not be decoded.
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
# Tags and entities of HTML and XML
MARKUP = re.compile(r"</?[a-zA-Z!][^<>\n]{0,300}>|&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[0-9a-fA-F]{1,6});")
# share of a document's characters; programs and manuals about them may have a few tags
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
# share of the characters that are not white space
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


class OddityFinder:
    """Finds what is odd. special_tokens: as a text may spell them. row_tokens: of a row of training."""

    def __init__(self, special_tokens: Iterable[str], row_tokens: int) -> None:
        spelt = [re.escape(token) for token in special_tokens if token.strip()]
        # A class that nothing is in, where there is no such token.
        self.special = re.compile("|".join(spelt) or r"[^\s\S]")
        self.long_from = LONG_ROWS * row_tokens

    def oddities_of(self, body: str, tokens: int) -> Iterator[tuple[str, int]]:
        """(kind, where in the text it shows). body: the text without BOS and EOS. tokens: of the document."""
        for kind, pattern in (
            (CONTROL_CHARACTERS, CONTROL),
            (UNBROKEN_RUN, UNBROKEN),
            (SPECIAL_TOKENS, self.special),
        ):
            match = pattern.search(body)
            if match is not None:
                yield kind, match.start()
        # Tags and entities begin with one of these, which most texts do not have.
        if "<" in body or "&" in body:
            first = MARKUP.search(body)
            length = sum(len(match.group()) for match in MARKUP.finditer(body))
            if first is not None and length >= MARKUP_SHARE * len(body):
                yield MOSTLY_MARKUP, first.start()
        lines = [line for line in body.split("\n") if line.strip()]
        line, count = Counter(lines).most_common(1)[0] if len(lines) >= LINES else ("", 0)
        # The beginning of a text may say the same again and again without lines, too.
        beginning = body[:COMPRESSED_BYTES]
        raw = beginning.encode("utf-8", "surrogatepass")
        if count and count >= REPEATED_SHARE * len(lines):
            yield REPEATED_LINE, body.index(line)
        elif len(raw) >= COMPRESSED_FROM and len(zlib.compress(raw, 1)) < COMPRESSED_SHARE * len(raw):
            yield REPEATS_ITSELF, 0
        characters = "".join(beginning.split())
        n_letters = sum(map(str.isalpha, characters))
        if len(characters) >= LETTERS_FROM and n_letters < LETTERS_SHARE * len(characters):
            yield FEW_LETTERS, 0
        if tokens >= self.long_from:
            yield VERY_LONG, 0

"""Signs that a document is no text to learn from, or should be cleaned first."""

import re
import zlib
from collections import Counter
from collections.abc import Iterator

# Control characters other than tab, line feed and carriage return, and the replacement character
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
# Tags and entities of HTML and XML
MARKUP = re.compile(r"</?[a-zA-Z!][^<>\n]{0,300}>|&(?:[a-zA-Z]{2,8}|#\d{1,6}|#x[0-9a-fA-F]{1,6});")
# minimum share of a document's characters; programs and their manuals may have a few tags
MARKUP_SHARE = 0.05
# Longer than any word: Base64, keys, minified code
UNBROKEN = re.compile(r"(?<![!-~])[!-~]{500}")
# minimum lines, without blank ones, and minimum share of them that are the same
LINES = 8
REPEATED_SHARE = 0.5
# Text that zlib compresses below this share of its size is repetitive; prose comes to 0.3 to 0.6.
COMPRESSED_SHARE = 0.1
# maximum characters to compress, and minimum bytes
COMPRESSED_CHARACTERS = 1 << 16
COMPRESSED_FROM = 1000
# minimum share of letters among visible characters, from so many of these on
LETTERS_SHARE = 0.3
LETTERS_FROM = 50
# A document that fills so many rows is very long.
LONG_ROWS = 64

VERY_LONG = "very long"


def oddities_of(body: str, tokens: int, special_tokens: re.Pattern[str], row_tokens: int) -> Iterator[tuple[str, int]]:
    """Yields (kind, position in the text). body: the text without BOS and EOS. tokens: of the document. special_tokens: their
    spellings. row_tokens: of a training row."""
    for kind, pattern in (
        ("control characters", CONTROL),
        ("500 characters without a space", UNBROKEN),
        ("special tokens spelt out", special_tokens),
    ):
        match = pattern.search(body)
        if match is not None:
            yield kind, match.start()
    # Tags and entities start with one of these, which most texts do not have.
    if "<" in body or "&" in body:
        first = MARKUP.search(body)
        length = sum(len(match.group()) for match in MARKUP.finditer(body))
        if first is not None and length >= MARKUP_SHARE * len(body):
            yield "markup", first.start()
    lines = [line for line in body.split("\n") if line.strip()]
    line, count = Counter(lines).most_common(1)[0] if len(lines) >= LINES else ("", 0)
    # The start of a text may also repeat itself without line breaks.
    beginning = body[:COMPRESSED_CHARACTERS]
    raw = beginning.encode("utf-8", "surrogatepass")
    if count and count >= REPEATED_SHARE * len(lines):
        yield "one repeated line", body.index(line)
    elif len(raw) >= COMPRESSED_FROM and len(zlib.compress(raw, 1)) < COMPRESSED_SHARE * len(raw):
        yield "repeats itself", 0
    characters = "".join(beginning.split())
    n_letters = sum(map(str.isalpha, characters))
    if len(characters) >= LETTERS_FROM and n_letters < LETTERS_SHARE * len(characters):
        yield "hardly any letters", 0
    if tokens >= LONG_ROWS * row_tokens:
        yield VERY_LONG, 0

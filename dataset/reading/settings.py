"""The settings of reading text."""

import argparse
from dataclasses import dataclass

from common.settings import Settings, setting, switch
from dataset.reading.file_kinds import TEXT_SUFFIXES_HELP, text_suffix

# Choices of --deduplicate
OFF = "none"
EXACT = "exact"
NEAR = "near"
# Values of --split_text, besides a mark; PARAGRAPHS, for ELECTRA, is BLANK, but a document keeps its last line end.
LINES = "lines"
BLANK = "blank"
PARAGRAPHS = "paragraphs"
# What is typed for these
NO_MARKS = (LINES, BLANK, "line", "newline", "blanks", "blank_lines", "paragraph", PARAGRAPHS, r"\n", r"\n\n", "")


def text_split(value: str) -> str:
    """A value of --split_text."""
    if value not in (LINES, BLANK) and value.lower() in NO_MARKS:
        raise argparse.ArgumentTypeError(f"{value!r} is no mark: {LINES}, {BLANK} or a mark such as '</s>'")
    return value


@dataclass(kw_only=True)
class FileSettings(Settings):
    """data"""

    text_field: str = setting("text", help="field of the text; a.b: within objects; 2: of tables without a header")
    skip_bad_lines: bool = switch(False, help="skip and count faulty lines instead of stopping at the first")
    text_suffixes: list[str] | None = setting(
        None, check=text_suffix, several=True, metavar="SUFFIX", help=TEXT_SUFFIXES_HELP
    )
    split_text: str | None = setting(
        None,
        check=text_split,
        metavar="lines|blank|MARK",
        help="in files of plain text, each line is a document, or what blank lines or a mark such as '<|endoftext|>' separate",
    )


@dataclass(kw_only=True)
class TextSettings(FileSettings):
    """data"""

    cache_dir: str | None = setting(None, help="folder for tokenised data (default: .token_store beside the data)")


# .jsonl files with a field "text", and the default folder
DEFAULTS = TextSettings()


@dataclass(kw_only=True)
class DocumentSettings(TextSettings):
    """data"""

    # None: not given. Then False, or the value with which the initial weights were trained.
    parse_special_tokens: bool | None = switch(
        None, help="special tokens spelt out in a text, such as <|im_start|>, become special tokens (default: False)"
    )
    deduplicate: str = setting(
        OFF,
        choices=(OFF, EXACT, NEAR),
        help="leave out copies of earlier documents; exact: identical texts; near: also texts that share three quarters of their "
        "runs of five characters (pip install rensa)",
    )

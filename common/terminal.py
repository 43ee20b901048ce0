"""Words that stand out in lines for a person: by colour on a terminal, by marks where there is none.

A foreign text is made printable first, and our own colours are put around it then. So the result is a `TerminalText`:
what prints it must not make it printable once more, which would show the colours as codes.
"""

import os
import shutil
from dataclasses import dataclass
from typing import TextIO

from common.wording import printable

# Ends whatever was switched on.
RESET = "\x1b[0m"
# Of lines that go elsewhere than to a terminal
USUAL_WIDTH = 100


class TerminalText(str):
    """Lines whose foreign parts are printable already, and which may hold colours of our own."""

    __slots__ = ()


@dataclass(frozen=True)
class Style:
    """How a word stands out. codes: numbers of ECMA-48's "select graphic rendition". before, after: marks in place of them."""

    codes: str
    before: str = ""
    after: str = ""


# What stands before a word, the word, and how it stands out
ShownWord = tuple[str, str, Style | None]


def for_terminal(text: str, stream: TextIO) -> str:
    """The text as a terminal may show it, with its characters spelt out that the stream cannot encode.

    Without this a sample in another alphabet, or a file name that is not UTF-8, would end the work.
    """
    if not isinstance(text, TerminalText):
        text = printable(text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


def nowhere() -> TextIO:
    """A stream in the place of one that nobody reads any more. It stays open for the rest of the process."""
    return open(os.devnull, "w", encoding="utf-8")


def has_colours(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours to a person who wants them (https://no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    # The older console of Windows prints the codes; the newer one says that it is there.
    if os.name == "nt" and not os.environ.get("WT_SESSION"):
        return False
    return stream.isatty()


def marked(text: str, style: Style | None, in_colour: bool) -> TerminalText:
    """A text as a terminal may show it, made to stand out. style None: it does not."""
    shown = printable(text)
    if style is None:
        return TerminalText(shown)
    if in_colour:
        return TerminalText(f"\x1b[{style.codes}m{shown}{RESET}")
    return TerminalText(f"{style.before}{shown}{style.after}")


def width_of_terminal() -> int:
    """Columns of the terminal of this process; of none a usual number."""
    return shutil.get_terminal_size((USUAL_WIDTH, 24)).columns


def filled(label: str, indent: int, words: list[ShownWord], width: int, in_colour: bool) -> list[str]:
    """Lines of at most `width` characters, where no word is longer: the label, and behind it the words, indented. Line breaks of
    the text stay. Others come where it has a blank, unless more than a line stands there without one."""
    lines = [label.ljust(indent)]
    column = indent
    # Colours take no room.
    lengths = [len(marked(text, None if in_colour else style, False)) for _, text, style in words]
    for (before, text, style), length, joined in zip(words, lengths, joined_lengths(words, lengths), strict=True):
        gap = printable(before).replace("\t", "    ")
        begins_line = column == indent
        if "\n" in gap:
            gap = gap[gap.rindex("\n") + 1 :]
            breaks = not begins_line
        else:
            together = joined if gap and indent + joined <= width else length
            breaks = not begins_line and column + len(gap) + together > width
            if breaks or begins_line:
                gap = ""
        if breaks:
            lines.append(" " * indent)
            column = indent
        lines[-1] += gap + marked(text, style, in_colour)
        column += len(gap) + length
    return [line.rstrip() for line in lines]


def joined_lengths(words: list[ShownWord], lengths: list[int]) -> list[int]:
    """Of each word the characters up to the next blank: a full stop stands right behind its word. lengths: of the words."""
    found: list[int] = []
    joined = 0
    for (before, _, _), length in zip(reversed(words), reversed(lengths), strict=True):
        joined += length
        found.append(joined)
        if before:
            joined = 0
    return found[::-1]

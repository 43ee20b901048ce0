"""Lines for a person, as the stream that they go to can show them."""

import os
from typing import TextIO

from common.wording import printable


def for_terminal(text: str, stream: TextIO) -> str:
    """The text as a terminal may show it, with its characters spelt out that the stream cannot encode.

    Without this a sample in another alphabet, or a file name that is not UTF-8, would end the work.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, errors="backslashreplace").decode(encoding)


def nowhere() -> TextIO:
    """A stream in the place of one that nobody reads any more. It stays open for the rest of the process."""
    return open(os.devnull, "w", encoding="utf-8")

"""Wording of messages: counts, untrusted text as printable text, reasons of errors; and printing."""

import os
import re
import sys
from typing import TextIO

# Control characters of terminals and browsers but line feed and tab, and the marks, embeddings, overrides and isolates of Unicode's
# bidirectional algorithm (UAX #9): they could hide, forge or reorder the text of a line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# user and password of a web address, and the rest of its query from a key on
_SECRETS = re.compile(r"(?i)(://)[^\s/]+(?=@)|([?&][\w-]*(?:token|key|sig|passw|secret)[\w-]*=)[^\s:]+")
# maximum characters of a compiler's message in our lines
LONGEST_REASON = 200


def printable(text: str) -> str:
    """Returns `text` with <U+001B> and the like for each control character; line feeds and tabs stay."""
    return _CONTROLS.sub(lambda match: f"<U+{ord(match[0]):04X}>", text)


def one_line(text: object) -> str:
    """The text of an error or a notice as a single printable line, without the passwords of web addresses."""
    return without_passwords(printable(" ".join(str(text).split())))


def without_passwords(text: str) -> str:
    """Returns `text` with *** for user, password and keys of web addresses."""
    return _SECRETS.sub(r"\1\2***", text)


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 document", "1,200 documents". plural: if it is not the noun and an s."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def compiler_error_line(error: BaseException) -> str:
    """Returns the error line of a compiler's output; part of a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    first = f"{type(error).__name__}: {lines[0]}"
    return next((line for line in lines if "error:" in line.lower()), first)[:LONGEST_REASON]


def loader_error_reason(error: BaseException) -> str:
    """Returns why a loader of transformers failed; part of a line."""
    # transformers advises to run the Python code in the folder.
    if "trust_remote_code" in str(error):
        return "it needs Python code from its folder, which is never run here; use a kind built into transformers"
    return f"{type(error).__name__}: {one_line(error)[:160]}"


def null_stream() -> TextIO:
    """Returns a stream to os.devnull, to replace one without a reader. It stays open for the rest of the process."""
    return open(os.devnull, "w", encoding="utf-8")


def announce(text: str, to_stderr: bool = False) -> None:
    """Print the text, made printable and without passwords, and flush. If nobody reads any more, output is dropped."""
    stream = sys.stderr if to_stderr else sys.stdout
    # Escape what the stream cannot encode: a sample in another alphabet must not end the run, nor a file name that is not
    # UTF-8.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = without_passwords(printable(text)).encode(encoding, errors="backslashreplace").decode(encoding)
    try:
        print(shown, file=stream, flush=True)
    except OSError:
        # The reader of the pipe is gone, or the terminal is closed.
        setattr(sys, "stderr" if to_stderr else "stdout", null_stream())

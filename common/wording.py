"""Wording of messages: counts, untrusted text as printable text, reasons of errors; and printing."""

import os
import sys
from typing import TextIO

# Control characters of terminals and browsers: they could hide, forge or reorder the text of a line. Line feed and tab are
# harmless.
_C0_CONTROLS = [code for code in range(0x20) if chr(code) not in "\n\t"]
_C1_CONTROLS = range(0x80, 0xA0)
# Marks, embeddings, overrides and isolates of Unicode's bidirectional algorithm (UAX #9)
_BIDIRECTIONAL = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]

# maximum characters of a compiler's message in our lines
LONGEST_REASON = 200

# Unicode's control pictures for C0 and DEL, code points for the others
_VISIBLE = {code: chr(0x2400 + code) for code in _C0_CONTROLS} | {0x7F: "\u2421"}
_VISIBLE |= {code: f"<U+{code:04X}>" for code in [*_C1_CONTROLS, *_BIDIRECTIONAL]}


def printable(text: str) -> str:
    """Returns `text` with a visible substitute for each control character; line feeds and tabs stay."""
    return text.translate(_VISIBLE)


def one_line(text: object) -> str:
    """The text of an error or a notice as a single printable line."""
    return printable(" ".join(str(text).split()))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 document", "1,200 documents". plural: if it is not the noun and an s."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def compiler_error_line(error: Exception) -> str:
    """Returns the error line of a compiler's output; part of a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for line in lines:
        if "error:" in line.lower():
            return line[:LONGEST_REASON]
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first}"[:LONGEST_REASON]


def loader_error_reason(error: Exception) -> str:
    """Returns why a loader of transformers failed; part of a line."""
    # transformers advises to run the Python code in the folder.
    if "trust_remote_code" in str(error):
        return "it needs Python code from its folder, which is never run here; use a kind that transformers has itself"
    return f"{type(error).__name__}: {one_line(error)[:160]}"


def null_stream() -> TextIO:
    """Returns a stream to os.devnull, to replace one without a reader. It stays open for the rest of the process."""
    return open(os.devnull, "w", encoding="utf-8")


def announce(text: str, to_stderr: bool = False) -> None:
    """Print the text, made printable, and flush. If nobody reads any more, output is dropped from here on."""
    stream = sys.stderr if to_stderr else sys.stdout
    # Escape what the stream cannot encode: a sample in another alphabet must not end the run, nor a file name that is not
    # UTF-8.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = printable(text).encode(encoding, errors="backslashreplace").decode(encoding)
    try:
        print(shown, file=stream, flush=True)
    except OSError:
        # The reader of the pipe is gone, or the terminal is closed.
        if to_stderr:
            sys.stderr = null_stream()
        else:
            sys.stdout = null_stream()

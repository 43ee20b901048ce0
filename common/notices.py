"""Lines for the person who watches a command whose work goes into files."""

import os
import sys

from common.terminal import TerminalText
from common.wording import printable


def announce(text: str, to_stderr: bool = False) -> None:
    """Print the text as a terminal may show it, at once. If nobody reads any more, the work goes on without.

    What the stream cannot encode is spelt out: a file name that is not UTF-8 is no reason to end, either.
    """
    stream = sys.stderr if to_stderr else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if not isinstance(text, TerminalText):
        text = printable(text)
    shown = text.encode(encoding, errors="backslashreplace").decode(encoding)
    try:
        print(shown, file=stream, flush=True)
    except OSError:
        # The reader of a pipe has left, or the terminal was closed.
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays for the rest of the process
        if to_stderr:
            sys.stderr = nowhere
        else:
            sys.stdout = nowhere

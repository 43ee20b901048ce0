"""Lines for the person who watches a command whose work goes into files."""

import os
import sys

from common.terminal import TerminalText, encodable
from common.wording import printable


def announce(text: str, to_stderr: bool = False) -> None:
    """Print the text as a terminal may show it, at once. If nobody reads any more, the work goes on without."""
    stream = sys.stderr if to_stderr else sys.stdout
    if not isinstance(text, TerminalText):
        text = printable(text)
    try:
        print(encodable(text, stream), file=stream, flush=True)
    except OSError:
        # The reader of a pipe has left, or the terminal was closed.
        nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays for the rest of the process
        if to_stderr:
            sys.stderr = nowhere
        else:
            sys.stdout = nowhere

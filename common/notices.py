"""Lines for the person who watches a command whose work goes into files."""

import sys

from common.terminal import for_terminal, nowhere


def announce(text: str, to_stderr: bool = False) -> None:
    """Print the text as a terminal may show it, at once. If nobody reads any more, the work goes on without."""
    stream = sys.stderr if to_stderr else sys.stdout
    try:
        print(for_terminal(text, stream), file=stream, flush=True)
    except OSError:
        # The reader of a pipe has left, or the terminal was closed.
        if to_stderr:
            sys.stderr = nowhere()
        else:
            sys.stdout = nowhere()

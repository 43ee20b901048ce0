"""How long the command has been running, from the start of Python on: --budget counts that too.

Import this early. Where the system does not tell when a process was started, the clock begins with the import.
"""

import os
import time

from common.processes import fields_behind_name

# In place of the start of the process, where the system does not tell that, or where the process was something else for
# longer than this: a shell script that ends with `exec python` hands its process on, with the age of it.
_IMPORTED = time.monotonic()
MOST_S_TO_IMPORT = 60.0
# When the command was called, where that was not the start of the process.
_called: float | None = None


def count_from_here() -> None:
    """From here on `seconds_since_start` counts: another program, such as a notebook, calls the command as a function."""
    global _called
    _called = time.monotonic()


def seconds_since_start() -> float:
    """How long the command has been running."""
    if _called is not None:
        return time.monotonic() - _called
    since_import = time.monotonic() - _IMPORTED
    try:
        # The 22nd field of all, counted in ticks since the machine was started.
        started = int(fields_behind_name("self")[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return since_import
    return age if age - since_import < MOST_S_TO_IMPORT else since_import

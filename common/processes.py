"""Processes: how they end (those that must not outlive the one that they work for, and Ctrl-C), environment variables for a
block of code, and how long the command has been running.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

from common.start import STARTED

POLL_S = 0.2
# linux/prctl.h.
PR_SET_PDEATHSIG = 1


def id_for_children() -> int:
    """What a process hands to those that it starts, for their `end_with`."""
    # The kernel takes the end of the thread that started a process for the end of its parent.
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def end_with(parent: int) -> None:
    """Let this process be killed as soon as its parent is gone, in the middle of whatever it does.

    parent: the parent's `id_for_children`. On Linux the kernel does it. Elsewhere a thread looks every 0.2 s. 0: nothing
    is done; such a process has to notice by itself that its pipe has no other end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    if not parent:
        return
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    elif os.name == "posix" and os.getppid() == parent:
        threading.Thread(target=watch, name="parent", daemon=True).start()
    # A server that forks for others (multiprocessing's) is a parent of its own: the pipe tells there too.
    # Gone before this line.
    if os.getppid() == 1 != parent:
        os._exit(1)


def obey_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again, where a script let it end the process during its imports."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_signals() -> list[int]:
    """The signals that ask a run to stop. Windows has no SIGHUP, the others have no SIGBREAK (Ctrl-Break, a closed window)."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
    return [int(getattr(signal, name)) for name in names if hasattr(signal, name)]


def ignore_stop_signals() -> None:
    """Signals to the process group are for the main process: it saves first and ends its workers later."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Within the block the environment variable `name` is `value`."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# --------------------------------------------------------------------------- how long the command has been running

# When the command began
_began = STARTED


def count_from_here() -> None:
    """From here on `seconds_since_start` counts: another program, such as a notebook, calls the command as a function."""
    global _began
    _began = time.monotonic()


def seconds_since_start() -> float:
    """How long the command has been running."""
    return time.monotonic() - _began

"""Stop signals: a run that gets one saves and ends."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

# A handler runs between any two instructions of the main thread: in the middle of a print, or of a collective in which the
# other ranks wait. So it only notes what came. The loop hands the note to its next update, whose reduction tells it to all
# ranks; these stop after the same update, save together, and end.

STOP = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
# Windows has no SIGHUP, the others have no SIGBREAK.
STOP_NUMBERS = tuple(int(getattr(signal, name)) for name in STOP if hasattr(signal, name))


def name_of(signum: int) -> str:
    """What a user calls a signal."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


class StopSignals:
    """SIGTERM, SIGINT, SIGHUP and on Windows SIGBREAK (Ctrl-Break, a closed window) ask for a stop after the current update, SIGUSR1 for a save.

    Until `arm()` is called there is nothing to save, and a stop signal ends the process at once. A second stop signal
    ends it at once too; the launcher repeats a Ctrl-C within milliseconds, so that repeats inside a second count as
    one. Every further SIGTERM counts as the first one. A context manager: the handlers that were there before come back.

    SIGHUP stays ignored where it was ignored at the start: so nohup keeps a run when its terminal closes.

    In another thread than the main one nothing is caught, since Python calls handlers in the main thread alone: there the
    program that has started the thread, such as Ray Train, decides how signals end it.
    """

    SAME_SIGNAL_S = 1.0

    def __init__(self) -> None:
        # The stop signal that came, 0: none.
        self.signum = 0
        self._save_requested = False
        self._armed = False
        # When the first stop signal came, on the monotonic clock.
        self._first = 0.0
        # The handlers that were there. Any: that is what the signal module says of them.
        self._before: dict[str, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = dict.fromkeys(STOP, self._stop)
        handlers["SIGUSR1"] = self._save
        for name, handler in handlers.items():
            # Windows has no SIGHUP and no SIGUSR1, the others have no SIGBREAK.
            if hasattr(signal, name) and not is_kept_off(name):
                self._before[name] = signal.signal(getattr(signal, name), handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, handler in self._before.items():
            signal.signal(getattr(signal, name), handler)

    def arm(self) -> None:
        """From here on a stop signal waits for the end of the update."""
        self._armed = True

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        requested = self._save_requested
        self._save_requested = False
        return requested

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A scheduler and the launcher both send SIGTERM, and a handler may run long after its signal came: behind a call that
        # does not return to Python. Whoever asks by it once more gets the save all the same.
        is_repeat = now - self._first <= self.SAME_SIGNAL_S or signum == self.signum == signal.SIGTERM
        is_second = self.signum and not is_repeat
        if not self._armed or is_second:
            # At once: an exception could be caught by whatever code is running, and ranks may wait in a collective.
            os._exit(128 + signum)
        if not self.signum:
            self.signum = signum
            self._first = now

    def _save(self, signum: int, frame: FrameType | None) -> None:
        self._save_requested = True


def is_kept_off(name: str) -> bool:
    """Whether whoever started this process wants it to go on when that stop signal comes.

    nohup is asked for, and ignores SIGHUP. A script's shell ignores SIGINT too, for all that it starts with &, but nobody has asked
    for that: Ctrl-C on a script that waits for its runs, or kill -INT, is meant to save and end them.
    """
    return name == "SIGHUP" and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

"""Stop signals: a run that gets one saves and ends.

A handler may run between any two instructions of the main thread, within a save too. So the handlers here only note that
a signal came. The training loop looks at the note after each update, when everything is in order, and acts.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], None]


class StopSignals:
    """SIGTERM, SIGINT and SIGHUP ask for a stop after the current update, SIGUSR1 for a save.

    Until `arm()` is called there is nothing to save, and a stop signal ends the process at once. A second stop signal
    ends it at once too; the launcher repeats a Ctrl-C within milliseconds, so that repeats inside a second count as
    one. A context manager: the handlers that were there before come back.
    """

    STOP = ("SIGTERM", "SIGINT", "SIGHUP")
    SAME_SIGNAL_S = 1.0

    def __init__(self) -> None:
        # The stop signal that came, 0: none.
        self.signum = 0
        self._save_requested = False
        self._armed = False
        # When the first stop signal came.
        self._first = 0.0
        # {name of a signal: the handler that was there before}
        self._before: dict[str, Any] = {}

    def __enter__(self) -> "StopSignals":
        handlers: dict[str, Handler] = dict.fromkeys(self.STOP, self._stop)
        handlers["SIGUSR1"] = self._save
        for name, handler in handlers.items():
            # Windows has no SIGHUP and no SIGUSR1.
            if hasattr(signal, name):
                self._before[name] = signal.signal(getattr(signal, name), handler)
        return self

    def __exit__(self, *exception: object) -> None:
        for name, handler in self._before.items():
            signal.signal(getattr(signal, name), handler)

    def arm(self) -> None:
        """From now on there is something to save: a stop signal is noted, and does not end the process."""
        self._armed = True

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        requested = self._save_requested
        self._save_requested = False
        return requested

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._armed or (self.signum and now - self._first > self.SAME_SIGNAL_S):
            os._exit(128 + signum)
        if not self.signum:
            self.signum = signum
            self._first = now

    def _save(self, signum: int, frame: FrameType | None) -> None:
        self._save_requested = True

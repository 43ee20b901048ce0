"""Stop signals: a run that gets one saves and ends."""

import os
import signal
import time


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
        self._save_requested = self._armed = False
        self._first = 0.0
        self._before = {}

    def __enter__(self):
        for name, handler in [*((name, self._stop) for name in self.STOP), ("SIGUSR1", self._save)]:
            # Windows has no SIGHUP and no SIGUSR1.
            if hasattr(signal, name):
                self._before[name] = signal.signal(getattr(signal, name), handler)
        return self

    def __exit__(self, *exception) -> None:
        for name, handler in self._before.items():
            signal.signal(getattr(signal, name), handler)

    def arm(self) -> None:
        self._armed = True

    def take_save_request(self):
        requested, self._save_requested = self._save_requested, False
        return requested

    def _stop(self, signum, frame) -> None:
        now = time.monotonic()
        if not self._armed or (self.signum and now - self._first > self.SAME_SIGNAL_S):
            os._exit(128 + signum)
        if not self.signum:
            self.signum, self._first = signum, now

    def _save(self, signum, frame) -> None:
        self._save_requested = True

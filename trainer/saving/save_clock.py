"""When a run is saved by itself: after so many micro-batches, after so many minutes, or both."""

import time
from typing import Protocol

from common.flags import AUTO

# Of `--save_minutes auto` on a GPU. A kill costs two minutes at most, and a save of the 26 M model about a tenth of a second.
GPU_MINUTES = 2.0


class SaveSettings(Protocol):
    """The flags that say how often a run is saved."""

    save_interval: int
    save_minutes: str


def by_time_alone(save_minutes: str, device_type: str) -> bool:
    """Whether `auto` puts minutes in the place of --save_interval. device_type: of a torch device."""
    return save_minutes == AUTO and device_type == "cuda"


class SaveClock:
    """The micro-batches and the seconds between two saves; 0: they do not count.

    A GPU does the usual number of micro-batches in a second or two. So where the user has said nothing of saves, a run
    on one is saved by time.

    Ranks have clocks of their own, which never agree. So only rank 0 looks at its one, and asks all ranks for a save in
    the way in which a signal does.
    """

    def __init__(self, settings: SaveSettings, device_type: str) -> None:
        """device_type: of a torch device."""
        self.interval = settings.save_interval
        self.seconds = 0.0
        if by_time_alone(settings.save_minutes, device_type):
            self.interval = 0
            self.seconds = 60 * GPU_MINUTES
        elif settings.save_minutes != AUTO:
            self.seconds = 60 * float(settings.save_minutes)
        # On the monotonic clock: when training began, or when a save was last asked for or made.
        self._last = time.monotonic()

    def restart(self) -> None:
        """From here on the time counts: training begins, or a save is made."""
        self._last = time.monotonic()

    def asks(self) -> bool:
        """Whether it is time for a save. It is asked for once: on CUDA the ranks learn of it an update later."""
        if not self.seconds or time.monotonic() - self._last < self.seconds:
            return False
        self.restart()
        return True

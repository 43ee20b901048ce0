"""When a run is saved: after so many micro-batches, or after so much time."""

import time

from common.flags import AUTO
from trainer.updates import RunSettings

# --save_minutes auto on a GPU. A kill costs two minutes at most, and a save of the 26 M model about a tenth of a second.
GPU_MINUTES = 2.0


class SaveClock:
    """The micro-batches and the seconds between two saves; 0: they do not count.

    A GPU does the usual number of micro-batches in a second or two. So where the user has said nothing of saves, a run
    on one is saved by time.

    Ranks have clocks of their own, which never agree. So only rank 0 looks at its one, and asks all ranks for a save in
    the way in which a signal does.
    """

    def __init__(self, settings: RunSettings, device_type: str) -> None:
        """device_type: of a torch device."""
        self.interval = settings.save_interval
        self.seconds = 0.0
        if settings.save_minutes != AUTO:
            self.seconds = 60 * float(settings.save_minutes)
        elif device_type == "cuda":
            self.interval = 0
            self.seconds = 60 * GPU_MINUTES
        self.restart()

    def restart(self) -> None:
        """From here on the time counts: training begins, or a save is made."""
        self._last = time.monotonic()

    def asks(self) -> bool:
        """Whether it is time for a save. It is asked for once: on CUDA the ranks learn of it an update later."""
        if not self.seconds or time.monotonic() - self._last < self.seconds:
            return False
        self.restart()
        return True

"""What comes now and then while a run goes on, and whether it is due: log lines, saves, evaluations, samples.

An interval of the flags counts micro-batches, as in MiniMind, or updates where the job says so (`Evaluation.counts_updates`).
Log lines come after any micro-batch. Whatever else is due comes after an update, and so it may come some micro-batches
late: an interval of 100 micro-batches ends within the update that does number 100.
"""

import time
from collections.abc import Container
from dataclasses import dataclass

from common.flags import AUTO
from trainer.job import Evaluation, Progress, RunSettings

# --save_minutes auto on a GPU. A kill costs two minutes at most, and a save of the 26 M model about a tenth of a second.
GPU_MINUTES = 2.0


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """What is due. `steps` below are the micro-batches of the update that was done last, counted over all epochs from 0.

    `finished`: that update was the last one of the run.
    """

    evaluation: Evaluation
    log_interval: int
    # 0 where the run is saved by time alone
    save_interval: int
    # further updates that are saved
    save_at: Container[int]
    accumulation_steps: int

    def log_is_due(self, step: int, n_steps: int) -> bool:
        """Whether a log line comes after micro-batch `step` of the n_steps of an epoch, counted from 0."""
        if step == n_steps - 1:
            return True
        number = step
        if self.evaluation.counts_updates:
            number, place_in_update = divmod(step, self.accumulation_steps)
            # A line is of whole updates.
            if place_in_update != self.accumulation_steps - 1:
                return False
        return number % self.log_interval == 0

    def save_is_due(self, progress: Progress, steps: range, finished: bool) -> bool:
        """Whether the run is saved now, though nobody has asked for it."""
        if finished or progress.update in self.save_at:
            return True
        return self._ends(self.save_interval, progress, steps)

    def evaluation_is_due(self, progress: Progress, steps: range, finished: bool) -> bool:
        """Whether the run is evaluated now, with the samples that belong to an evaluation."""
        is_evaluated = self.evaluation.evaluate is not None
        if finished and (self.evaluation.has_samples or is_evaluated):
            return True
        return is_evaluated and self._ends(self.evaluation.eval_interval, progress, steps)

    def samples_are_due(self, progress: Progress, finished: bool) -> bool:
        """Whether samples come now that belong to no evaluation."""
        every = self.evaluation.sample_interval
        return every > 0 and (finished or progress.update % every == 0)

    def _ends(self, interval: int, progress: Progress, steps: range) -> bool:
        """Whether a multiple of `interval` is completed by the update that was done last. An interval of 0 never ends."""
        counted = range(progress.update - 1, progress.update) if self.evaluation.counts_updates else steps
        return interval > 0 and counted.stop // interval > counted.start // interval


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

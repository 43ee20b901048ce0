"""The clock of --budget: it moves the last update of a run, so that it ends on time with a learning rate of 0.

A run with a time budget is planned as a number of updates, from the measured speed of the machine. Then another program
takes a core for a while, or a laptop gets hot or sleeps. The learning rate of such a run is constant first, then decays
to zero. A run that is cut off before the decay gives a much worse model. So the end must move.

The clock checks the pace 200 times in a run. It estimates the seconds of an update from the last ones. If the run would miss its
time by more than a hundredth of the budget, the end moves to an earlier or later update. Before the decay the constant
phase gets shorter or longer, and the decay shorter where nothing is left of that phase. Within the decay, the rate falls
from its current value to zero at the new end. As long as nothing moves, a resume trains the same updates.

An update that takes far longer than the others is a pause, not a sign of a slow machine: the program was stopped by
Ctrl-Z, or the laptop slept. It is left out of the estimate, so a pause costs only its own time.

Rank 0 keeps the time. The other ranks get a new end at the same update.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median

from trainer.machine.compiling import COMPILED_TIME, EAGER_TIME
from trainer.machine.ranks import Ranks, on_main

# Checks of the remaining time in a run
CHECKS = 200
# Share of the budget by which a run may miss its target, the end of the budget less half of this
TOLERANCE = 0.01
# Share of the remaining time in which updates are timed before the first check
FIRST_CHECK = 0.04
# Updates that an estimate is based on, as a share of the planned ones, and their minimum
WINDOW = 0.2
FEWEST_TIMED = 6
# Updates after a start that are not timed: they compile
UNTIMED = 2
# An update is a pause if it takes more than this many times the median, and more than this share of the budget.
PAUSE_TIMES = 20
PAUSE_SHARE = 0.01
# Updates of the shortest decay. An end this near is not moved: a run that is out of time would never end.
NEAREST_END = 3
# Time of an eager micro-batch relative to a compiled one
EAGER_SLOWDOWN = EAGER_TIME / COMPILED_TIME
# Time of an evaluation, an eager forward pass, relative to a compiled training step on as many positions
EVALUATION_COST = 0.75
# Seconds after the last evaluation, for files and for a report; seconds of a sample, per layer
FILES_S = 2.0
REPORT_S = 2.0
SAMPLE_S_OF_LAYER = 0.25


@dataclass(frozen=True)
class Course:
    """The schedule for the rest of a run: a decay from `fall_rate` at update `fall_from` to 0 at update `end`.

    fall_rate: a factor of the learning rate, 1 before the decay.
    """

    fall_from: int
    end: int
    fall_rate: float = 1.0

    def factor(self, update: int) -> float:
        """Factor of the learning rate after `update` updates."""
        if update < self.fall_from:
            return self.fall_rate
        # max: the decay may have no updates
        return self.fall_rate * (self.end - update) / max(self.end - self.fall_from, 1)

    def with_end(self, update: int, end: int) -> "Course":
        """The course with another end, decided after `update` updates."""
        end = max(end, update + NEAREST_END)
        if update >= self.fall_from:
            # The rate continues from where it is, without a jump.
            return Course(update, end, self.factor(update))
        # The decay keeps its length if there is room for it.
        fall_from = max(end - (self.end - self.fall_from), update)
        return Course(fall_from, end, self.fall_rate)


@dataclass
class Clock:
    """Moves the end of a run with a time budget. All ranks have one.

    seconds: the budget, of which `spent_before` had passed. planned: the course if nothing moves. moved: the course after the
    last move, else None. seconds_at_end: needed after the last update, for files. evaluation_updates: time of an
    evaluation in updates; there is one after every `evaluation_every` updates (0: none) and at the end. sample_seconds: for
    the samples of an evaluation. most_updates: upper bound of the run's updates, however much time is left.
    """

    seconds: float
    spent_before: float
    planned: Course
    ranks: Ranks
    seconds_at_end: float = 0.0
    evaluation_updates: float = 0.0
    evaluation_every: int = 0
    sample_seconds: float = 0.0
    most_updates: float = math.inf
    moved: Course | None = None

    def __post_init__(self) -> None:
        self.started = time.monotonic() - self.spent_before
        self.check_every = max(1, self.planned.end // CHECKS)
        self.has_checked = False
        # Seconds of the last updates, without evaluations
        self.gaps: deque[float] = deque(maxlen=max(FEWEST_TIMED, round(WINDOW * self.planned.end)))
        self.untimed = UNTIMED
        self.last_update = time.monotonic()
        # Seconds of the fastest evaluation so far: another may include a pause.
        self.fastest_evaluation = math.inf

    @property
    def end(self) -> int:
        """The last update of the run."""
        return (self.moved or self.planned).end

    def factor(self, update: int) -> float | None:
        """Factor of the learning rate after `update` updates, once the end has moved; None: follow the schedule."""
        return None if self.moved is None else self.moved.factor(update)

    def spent(self) -> float:
        """Seconds of the budget that have passed."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Counts the time of the block as spent, but not as an update's."""
        start = time.monotonic()
        yield
        took = time.monotonic() - start
        self.last_update += took
        self.fastest_evaluation = min(self.fastest_evaluation, took)

    def after_update(self, update: int) -> None:
        """To be called on all ranks after each update. It may move the end."""
        now = time.monotonic()
        if self.untimed:
            self.untimed -= 1
        else:
            self.gaps.append(now - self.last_update)
        self.last_update = now
        if update % self.check_every == 0:
            self.moved = on_main(self.ranks, lambda: self._new_course(update)) or self.moved

    def _new_course(self, update: int) -> Course | None:
        """The new course after `update` updates; None: no change."""
        left = self.seconds * (1 - TOLERANCE / 2) - self.spent()
        if len(self.gaps) < FEWEST_TIMED or self.end - update <= NEAREST_END:
            return None
        longest = max(PAUSE_TIMES * median(self.gaps), PAUSE_SHARE * self.seconds)
        without_pauses = [gap for gap in self.gaps if gap <= longest]
        is_full = len(self.gaps) == self.gaps.maxlen
        if not self.has_checked and not is_full and sum(without_pauses) < FIRST_CHECK * left:
            return None
        self.has_checked = True
        seconds_of_update = fmean(without_pauses)

        updates_left = self.end - update
        evaluations = 1 + (updates_left // self.evaluation_every if self.evaluation_every else 0)
        evaluation_seconds = self.fastest_evaluation
        if math.isinf(evaluation_seconds):
            evaluation_seconds = self.evaluation_updates * seconds_of_update + self.sample_seconds
        for_updates = left - self.seconds_at_end - evaluations * evaluation_seconds
        possible = min(int(max(for_updates, 0.0) / seconds_of_update), self.most_updates - update)
        if abs(possible - updates_left) * seconds_of_update <= TOLERANCE * self.seconds:
            return None
        return (self.moved or self.planned).with_end(update, update + int(possible))

    def state_dict(self) -> dict[str, float | None]:
        """What a resume needs."""
        course = asdict(self.moved) if self.moved else dict.fromkeys(("fall_from", "end", "fall_rate"))
        return {"seconds_spent": self.spent(), **course}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore the `state_dict` of the run before."""
        spent, fall_from, end, fall_rate = (state[name] for name in ("seconds_spent", "fall_from", "end", "fall_rate"))
        self.started -= spent or 0.0
        if fall_from is not None and end is not None and fall_rate is not None:
            self.moved = Course(int(fall_from), int(end), fall_rate)


def evaluation_cost(compiled: bool) -> float:
    """Time of an evaluation relative to a training step on as many positions. compiled: the training is; the evaluation
    never is."""
    return EVALUATION_COST if compiled else EVALUATION_COST / EAGER_SLOWDOWN

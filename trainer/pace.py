"""Keeping a run on time: where its learning rate begins to fall, and with which update it ends.

A run with a time budget is planned as a number of updates, from what the machine was measured to do. Then another
program takes a core for a while, or a laptop gets hot. The rate of such a run is constant first and falls to zero
afterwards, and a run that is cut off before its rate has fallen is a much worse model. So the end must move:

1. Once the first updates are timed, the end is set to what the time allows.
2. From then on it stays, and a resume trains the same updates. Only where the clock says that the run would miss its
   time by more than a small part of the budget, the end moves. Before the fall only the constant phase gets shorter or
   longer. Within the fall, the rate goes on from where it is to zero at the new end.

Rank 0 has the clock. What it proposes goes to the other ranks with the next update, and every rank takes over what
comes back, at the same update. The course is saved with every checkpoint.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Parts of the budget. A run that is off by less is left alone: the speed of a shared machine goes up and down by some
# percent from one moment to the next.
TOLERANCE = 0.015
# The first updates that are timed before the end is set, and the last ones by which the speed is judged.
FIRST_LOOK = 0.04
WINDOW = 0.2
# Fewer updates say little about the speed; the first ones compile.
FEWEST_TIMED = 6
UNTIMED = 2
# Between two updates: so many times as long as an update takes, and at least such a part of the budget. That is no slow
# machine but one that stood still, as a program that was stopped by Ctrl-Z or a laptop whose disk woke up.
STALL_TIMES = 20
STALL_PART = 0.01
# The proposal comes back with the next update, on CUDA one later. The end must not have passed by then.
NEAREST_END = 3


@dataclass(frozen=True)
class Course:
    """The rest of a run: from update `fall_from` on the rate falls from `fall_rate` to 0 at update `end`.

    fall_rate: a factor of the learning rate, 1 before the fall.
    """

    fall_from: int
    end: int
    fall_rate: float = 1.0

    def factor(self, update: int) -> float:
        """Of the learning rate, for the update behind `update` others."""
        if update < self.fall_from:
            return self.fall_rate
        return self.fall_rate * (self.end - update) / max(self.end - self.fall_from, 1)


# What a rank without anything to propose sends
NO_PROPOSAL = (0.0, 0.0, 0.0)


def as_numbers(course: Course | None) -> Sequence[float]:
    """A Course as the numbers that ranks exchange."""
    if course is None:
        return NO_PROPOSAL
    return (float(course.fall_from), float(course.end), course.fall_rate)


def course_of(numbers: Sequence[float]) -> Course | None:
    """What `as_numbers` wrote; None: nothing was proposed."""
    fall_from, end, fall_rate = numbers
    if not end:
        return None
    return Course(round(fall_from), round(end), fall_rate)


class Pace:
    """The clock of a run.

    seconds: the budget, of which `spent` have passed when this is made. planned: the Course without surprises.
    seconds_at_end: what is wanted behind the last update, for files. evaluation: how many updates take as long as an
    evaluation; there is one after every `evaluation_every` updates (0: none) and one at the end. samples: seconds that are
    sampled with each of them. most_updates: the run has no more, however much time is left.
    """

    def __init__(
        self,
        seconds: float,
        spent: float,
        planned: Course,
        seconds_at_end: float = 0.0,
        evaluation: float = 0.0,
        evaluation_every: int = 0,
        samples: float = 0.0,
        most_updates: float = math.inf,
    ) -> None:
        self.seconds = seconds
        self.most_updates = most_updates
        self.planned = planned
        self.seconds_at_end = seconds_at_end
        self.evaluation = evaluation
        self.evaluation_every = evaluation_every
        self.samples = samples
        self.started = time.monotonic() - spent
        # (update, training seconds until then) of the last ones.
        self.ticks: deque[tuple[int, float]] = deque()
        self.paused_s = 0.0
        # Of the last evaluation with its samples; None: there was none yet.
        self.last_pause: float | None = None
        # Of an update, as it was judged last, and when the end was set first.
        self.speed: float | None = None
        self.first_speed: float | None = None
        self.first_update: int | None = None

    def spent(self) -> float:
        """Seconds of the budget that have passed."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the block takes counts as spent, but says nothing about the speed of updates."""
        start = time.monotonic()
        yield
        self.last_pause = time.monotonic() - start
        self.paused_s += self.last_pause

    def proposal(self, update: int, course: Course | None) -> Course | None:
        """What should become of the run after `update` updates; None: all is well. course: what holds now, if any."""
        speed = self._seconds_per_update(update)
        if speed is None:
            return None
        self.speed = speed
        first_look = self.first_speed is None
        if self.first_speed is None:
            self.first_speed = speed
        # A machine that got slower evaluates and saves more slowly too.
        slower = max(speed / self.first_speed, 1.0)
        now = course or self.planned
        left = now.end - update
        if left <= NEAREST_END:
            # Too near to be moved: a run that is out of time would never end.
            return None
        evaluations = left // self.evaluation_every if self.evaluation_every else 0
        of_evaluation = self.last_pause
        if of_evaluation is None:
            of_evaluation = self.evaluation * speed + self.samples
        at_end = self.seconds_at_end * slower + (evaluations + 1) * of_evaluation
        time_left = self.seconds - self.spent() - at_end
        time_left = min(time_left, (self.most_updates - update) * speed)
        missed_by = abs(left * speed - time_left)
        tolerance = TOLERANCE / 2 if first_look else TOLERANCE
        if missed_by <= tolerance * self.seconds:
            return None
        return moved(now, update, int(time_left / speed))

    def _seconds_per_update(self, update: int) -> float | None:
        """Of the last updates; None: too few are timed."""
        now = self.spent()
        if self.first_update is None:
            self.first_update = update
        if update - self.first_update < UNTIMED:
            return None
        self._pass_over_stall(now)
        self.ticks.append((update, now - self.paused_s))
        while len(self.ticks) > FEWEST_TIMED + 1 and self.ticks[1][1] < self.ticks[-1][1] - WINDOW * self.seconds:
            self.ticks.popleft()
        first_update, first_seconds = self.ticks[0]
        updates = update - first_update
        seconds = self.ticks[-1][1] - first_seconds
        if updates < FEWEST_TIMED or (self.first_speed is None and seconds < FIRST_LOOK * self.seconds):
            return None
        return seconds / updates

    def _pass_over_stall(self, now: float) -> None:
        """Count the time since the last tick as a pause, if nothing moved in it."""
        if self.speed is None:
            return
        since_last = now - self.paused_s - self.ticks[-1][1]
        if since_last > max(STALL_TIMES * self.speed, STALL_PART * self.seconds):
            self.paused_s += since_last - self.speed


def moved(course: Course, update: int, possible: int) -> Course:
    """`course` with the end `possible` updates behind `update`."""
    end = update + max(possible, NEAREST_END)
    if update < course.fall_from:
        fall = course.end - course.fall_from
        # The proposal is taken over one or two updates later. Until then the rate is the constant one.
        fall_from = max(end - fall, update + 1)
        return Course(min(fall_from, end - 1), end, course.fall_rate)
    return Course(update, end, course.factor(update))

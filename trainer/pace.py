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

# Part of the budget. A run that is off by less is left alone: the speed of a shared machine goes up and down by some
# percent from one moment to the next.
TOLERANCE = 0.015
# Part of what is left of the budget. So long updates are timed before the end is set.
FIRST_LOOK = 0.04
# Part of the budget. The speed is that of the updates in so much training time before now.
WINDOW = 0.2
# Updates. Fewer say little about the speed.
FEWEST_TIMED = 6
# Updates at the beginning that are not timed, since they compile.
UNTIMED = 2
# An update that takes so many times as long as the ones before, and at least such a part of the budget, tells of no slow
# machine but of one that stood still: the program was stopped by Ctrl-Z, or a laptop's disk had to wake up.
STALL_TIMES = 20
STALL_PART = 0.01
# Updates from now to the end, at least. A proposal comes back with the next update, on CUDA one later, and the end must not
# have passed by then.
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
        # A straight line: `fall_rate` at `fall_from`, 0 at `end`. max: a fall of no updates divides by nothing.
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


class UpdateTimer:
    """How long an update takes, judged by the last ones.

    budget_s: seconds of the whole run's budget, of which the window and the first look are parts. `spent` below is how many
    of them have passed.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        # Seconds of an update: as judged last, and when it was judged first. None: too few are timed.
        self.last_speed: float | None = None
        self.first_speed: float | None = None
        # The update after which the run began or was resumed.
        self.began_after: int | None = None
        # Seconds of updates that are timed before the speed is known; set once the first update is done.
        self.first_look_s = math.inf
        # (update, training seconds until then) of the last ones. Training seconds are those of the budget without the pauses.
        self.ticks: deque[tuple[int, float]] = deque()
        self.paused_s = 0.0

    def seconds_per_update(self, update: int, spent: float) -> float | None:
        """To be asked once after each update. None: too few are timed."""
        if self.began_after is None:
            self.began_after = update
            # A run that is resumed near its end must not take as long to look.
            self.first_look_s = FIRST_LOOK * max(self.budget_s - spent, 0.0)
        # The first updates compile, so they are slower than all others.
        if update - self.began_after < UNTIMED:
            return None
        self._pass_over_stall(spent)
        self.ticks.append((update, spent - self.paused_s))
        self._forget_old_ticks()
        first_update, first_s = self.ticks[0]
        last_update, last_s = self.ticks[-1]
        updates = last_update - first_update
        seconds = last_s - first_s
        if updates < FEWEST_TIMED:
            return None
        if self.first_speed is None and seconds < self.first_look_s:
            return None
        self.last_speed = seconds / updates
        if self.first_speed is None:
            self.first_speed = self.last_speed
        return self.last_speed

    def _pass_over_stall(self, spent: float) -> None:
        """Count the time since the last tick as a pause, if nothing moved in it."""
        if self.last_speed is None:
            return
        since_last = spent - self.paused_s - self.ticks[-1][1]
        longest_update = max(STALL_TIMES * self.last_speed, STALL_PART * self.budget_s)
        if since_last > longest_update:
            # One update was done in this time too, at the usual speed.
            self.paused_s += since_last - self.last_speed

    def _forget_old_ticks(self) -> None:
        """Drop what is older than the window, but keep as many ticks as FEWEST_TIMED updates lie between."""
        begin_of_window = self.ticks[-1][1] - WINDOW * self.budget_s
        # The newest tick before the window stays: the window begins within the update that follows it.
        while len(self.ticks) > FEWEST_TIMED + 1 and self.ticks[1][1] < begin_of_window:
            self.ticks.popleft()


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
        self.timer = UpdateTimer(seconds)
        # Of the last evaluation with its samples; None: there was none yet.
        self.last_pause: float | None = None

    def spent(self) -> float:
        """Seconds of the budget that have passed."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What the block takes counts as spent, but says nothing about the speed of updates."""
        start = time.monotonic()
        yield
        self.last_pause = time.monotonic() - start
        self.timer.paused_s += self.last_pause

    def proposal(self, update: int, course: Course | None) -> Course | None:
        """What should become of the run after `update` updates; None: all is well. course: what holds now, if any."""
        is_first_look = self.timer.first_speed is None
        speed = self.timer.seconds_per_update(update, self.spent())
        if speed is None:
            return None
        now = course or self.planned
        updates_left = now.end - update
        # Too near to be moved: a run that is out of time would never end.
        if updates_left <= NEAREST_END:
            return None
        seconds_left = self._seconds_for_updates(update, updates_left, speed)
        # How far before or behind its time the run would end if nothing changed.
        missed_by = abs(updates_left * speed - seconds_left)
        # The first look sets the end, and does so more exactly. From then on the end should stay where it is, also where the run is
        # resumed and looks for a first time again.
        assert self.timer.began_after is not None, "the speed is known"
        is_resumed = self.timer.began_after > UNTIMED
        tolerance = TOLERANCE / 2 if is_first_look and not is_resumed else TOLERANCE
        if missed_by <= tolerance * self.seconds:
            return None
        return moved(now, update, int(seconds_left / speed))

    def _seconds_for_updates(self, update: int, updates_left: int, speed: float) -> float:
        """The seconds that the updates behind `update` may take: what is left of the budget without evaluations and files.

        updates_left: until the end that holds now. speed: seconds of an update.
        """
        seconds_left = self.seconds - self.spent() - self._seconds_besides(updates_left, speed)
        # Time for more updates than the run may have is left over.
        return min(seconds_left, (self.most_updates - update) * speed)

    def _seconds_besides(self, updates_left: int, speed: float) -> float:
        """The seconds that the rest of the run takes beside its updates. The arguments are as above."""
        # The one at the end, and those before it.
        evaluations = 1
        if self.evaluation_every:
            evaluations += updates_left // self.evaluation_every
        # The last evaluation is the best guess at the next one. Before the first, it is what was planned: an evaluation computes
        # as much as so many updates, and a text takes its time.
        seconds_of_evaluation = self.last_pause
        if seconds_of_evaluation is None:
            seconds_of_evaluation = self.evaluation * speed + self.samples
        # A machine that got slower since the first look writes its files more slowly too. One that got quicker may still
        # write them as slowly as was planned.
        assert self.timer.first_speed is not None
        times_slower = max(speed / self.timer.first_speed, 1.0)
        return self.seconds_at_end * times_slower + evaluations * seconds_of_evaluation


def moved(course: Course, update: int, possible: int) -> Course:
    """`course` with the end `possible` updates behind `update`."""
    # A proposal that came back behind its own end could not be followed.
    end = update + max(possible, NEAREST_END)
    if update < course.fall_from:
        # The fall stays as long as it was planned, so the constant phase before it gets shorter or longer.
        updates_of_fall = course.end - course.fall_from
        # The proposal is taken over one or two updates later. Until then the rate is the constant one.
        fall_from = max(end - updates_of_fall, update + 1)
        # The last update at least belongs to the fall.
        return Course(min(fall_from, end - 1), end, course.fall_rate)
    # The rate goes on from where it is, without a jump, to 0 at the new end.
    return Course(update, end, course.factor(update))

"""The clock of --budget: it moves the last update of a run, so that the run ends on time with its learning rate at 0.

A run with a time budget is planned as a number of updates, from what the machine was measured to do. Then another
program takes a core for a while, a laptop gets hot, or sleeps. The rate of such a run is constant first and falls to
zero afterwards, and a run that is cut off before its rate has fallen is a much worse model. So the end must move.

The clock looks 200 times in a run. It estimates the seconds of an update from the last ones. Where the run would
miss its time by more than a hundredth of the budget, the end moves, to an earlier or a later update. Before the fall
only the constant phase gets shorter or longer. Within the fall, the rate goes on from where it is to zero at the new
end. As long as nothing moves, a resume trains the same updates.

An update that takes far longer than the others tells of no slow machine but of one that stood still: the program was
stopped by Ctrl-Z, or the laptop slept. It is left out of the estimate, so what such a pause costs is its own time.

Rank 0 has the time. The other ranks learn of a new end at the same update.
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, median

from trainer.machine.compiling import COMPILED_TIME, PLAIN_TIME
from trainer.machine.ranks import Ranks, on_main

LOOKS = 200
# Part of the budget by which a run may miss its aim. The aim is half of it before the end of the time.
TOLERANCE = 0.01
# Part of the time that is left, in which updates are timed before the first look
FIRST_LOOK = 0.04
# Part of the planned updates from which the seconds of an update are estimated, and the fewest of them
WINDOW = 0.2
FEWEST_TIMED = 6
# Updates after a start that are not timed, since they compile
UNTIMED = 2
# An update is a pause if it takes more than so many times the median, and more than such a part of the budget.
PAUSE_TIMES = 20
PAUSE_PART = 0.01
# Updates of the shortest fall. An end so near is not moved: a run that is out of time would never end.
NEAREST_END = 3
# Times that an eager micro-batch takes, of a compiled one.
EAGER_TIMES = PLAIN_TIME / COMPILED_TIME
# An evaluation, a forward pass that is not compiled, as a share of a compiled training step on as many positions
EVALUATION_SHARE = 0.75
# Seconds behind the last update and its evaluation, for files, and for a report; of a sample, for each layer.
FILES_S = 2.0
REPORT_S = 2.0
SAMPLE_S_OF_LAYER = 0.25


@dataclass(frozen=True)
class Course:
    """The rest of a run: from update `fall_from` on the rate falls from `fall_rate` to 0 at update `end`.

    fall_rate: a factor of the learning rate, 1 before the fall.
    """

    fall_from: int
    end: int
    fall_rate: float = 1.0

    def factor(self, update: int) -> float:
        """Factor of the learning rate for the update that comes after `update` others."""
        if update < self.fall_from:
            return self.fall_rate
        # max: a fall of no updates divides by nothing.
        return self.fall_rate * (self.end - update) / max(self.end - self.fall_from, 1)

    def with_end(self, update: int, end: int) -> "Course":
        """The course with another end, decided after `update` updates."""
        end = max(end, update + NEAREST_END)
        if update >= self.fall_from:
            # The rate goes on from where it is, without a jump.
            return Course(update, end, self.factor(update))
        # The fall keeps its length.
        fall_from = max(end - (self.end - self.fall_from), update)
        return Course(fall_from, end, self.fall_rate)


@dataclass
class Clock:
    """What a budget run hands to the training loop. All ranks have one.

    seconds: the budget, of which `spent_before` had passed. planned: the course without surprises. moved: the course, once the
    end has moved; None: the run goes as planned. seconds_at_end: needed behind the last update, for files. evaluation: updates
    that take as long as an evaluation; there is one after every `evaluation_every` updates (0: none) and one at the end.
    samples: seconds of the samples of an evaluation. most_updates: limit of the run's updates, however much time is left.
    """

    seconds: float
    spent_before: float
    planned: Course
    ranks: Ranks
    seconds_at_end: float = 0.0
    evaluation: float = 0.0
    evaluation_every: int = 0
    samples: float = 0.0
    most_updates: float = math.inf
    moved: Course | None = None

    def __post_init__(self) -> None:
        self.started = time.monotonic() - self.spent_before
        self.look_every = max(1, self.planned.end // LOOKS)
        self.has_looked = False
        # Seconds of the last updates, without evaluations
        self.gaps: deque[float] = deque(maxlen=max(FEWEST_TIMED, round(WINDOW * self.planned.end)))
        self.untimed = UNTIMED
        self.last_update = time.monotonic()
        # Seconds of the fastest evaluation so far: a pause may have come within another one.
        self.fastest_evaluation = math.inf

    @property
    def end(self) -> int:
        """The last update of the run."""
        return (self.moved or self.planned).end

    def factor(self, update: int) -> float | None:
        """Factor of the learning rate after so many updates, once the end has moved; None: that of the schedule holds."""
        return None if self.moved is None else self.moved.factor(update)

    def spent(self) -> float:
        """Seconds of the budget that have passed."""
        return time.monotonic() - self.started

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The time of the block is spent, but is no update's."""
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
        if update % self.look_every == 0:
            self.moved = on_main(self.ranks, lambda: self._new_course(update)) or self.moved

    def _new_course(self, update: int) -> Course | None:
        """What should become of the run after `update` updates; None: it stays on its course."""
        left = self.seconds * (1 - TOLERANCE / 2) - self.spent()
        if len(self.gaps) < FEWEST_TIMED or self.end - update <= NEAREST_END:
            return None
        longest = max(PAUSE_TIMES * median(self.gaps), PAUSE_PART * self.seconds)
        moving = [gap for gap in self.gaps if gap <= longest]
        is_full = len(self.gaps) == self.gaps.maxlen
        if not self.has_looked and not is_full and sum(moving) < FIRST_LOOK * left:
            return None
        self.has_looked = True
        speed = fmean(moving)

        updates_left = self.end - update
        evaluations = 1 + (updates_left // self.evaluation_every if self.evaluation_every else 0)
        of_evaluation = self.fastest_evaluation
        if math.isinf(of_evaluation):
            of_evaluation = self.evaluation * speed + self.samples
        for_updates = left - self.seconds_at_end - evaluations * of_evaluation
        possible = min(int(max(for_updates, 0.0) / speed), self.most_updates - update)
        if abs(possible - updates_left) * speed <= TOLERANCE * self.seconds:
            return None
        return (self.moved or self.planned).with_end(update, update + int(possible))

    def state_dict(self) -> dict[str, float | None]:
        """What a resume needs."""
        course = asdict(self.moved) if self.moved else dict.fromkeys(("fall_from", "end", "fall_rate"))
        return {"seconds_spent": self.spent(), **course}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Take over what `state_dict` gave in the run before."""
        spent, fall_from, end, fall_rate = (state[name] for name in ("seconds_spent", "fall_from", "end", "fall_rate"))
        self.started -= spent or 0.0
        if fall_from is not None and end is not None and fall_rate is not None:
            self.moved = Course(int(fall_from), int(end), fall_rate)


def evaluation_share(compiled: bool) -> float:
    """An evaluation as a share of a training step on as many positions. compiled: whether the training is; the evaluation
    never is."""
    return EVALUATION_SHARE if compiled else EVALUATION_SHARE / EAGER_TIMES

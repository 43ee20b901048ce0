"""The clock of --budget: it moves the last update of a run, so that it ends on time with a learning rate of 0.

A run with a time budget is planned as a number of updates, from the measured speed of the machine. Then another program takes a core
for a while, or a laptop gets hot or sleeps. The learning rate of such a run is constant first, then decays to zero. A run that is cut
off before the decay gives a much worse model. So the end must move.

The clock checks the pace 200 times in a run, and more often where updates are slow. If the run would miss its time by more than a
hundredth of the budget, the end moves to the last update that fits, with the evaluations until there. The constant phase gets shorter
or longer; once it is over, the rate falls from its current value to zero at the new end, or from the one planned with so many updates
left if that is higher. As long as nothing moves, a resume trains the same updates. The last three updates are only dropped if the time is over, and only get company if two more fit.

An update takes as long as the last ones on average. One that takes far longer is a pause (Ctrl-Z, a laptop that sleeps) and costs only
its own time. Two in a row are a new pace, until an update is fast again; what was measured before is forgotten. An evaluation takes as
long as the fastest so far. Unless a second one took about as long, or two more where it took over five times as long as planned, it may include a
pause, and counts a hundredth of the budget more than planned at most.

Rank 0 keeps the time. The other ranks get a new end at the same update.
"""

import contextlib
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import NamedTuple

from common.processes import seconds_since_start
from common.wording import announce, counted
from trainer.budget import laws
from trainer.engine import Engine
from trainer.evaluation import evaluation_seconds
from trainer.forecast import Forecast, told_end
from trainer.machine.measure import slowness
from trainer.machine.ranks import Ranks, on_main
from trainer.pretrain.parts import Parts
from trainer.pretrain.settings import seconds_of

# Checks of the remaining time in a run
CHECKS = 200
# Share of the budget by which a run may miss its target, the end of the budget less half of this
TOLERANCE = 0.01
# Share of the remaining time in which updates are timed before the first check
FIRST_CHECK = 0.04
# and seconds of them, for short runs, whose first updates are slow; at most this share of the remaining time
FIRST_CHECK_S = 6.0
MAX_FIRST_CHECK = 0.2
# Updates that an estimate is based on, as a share of the planned ones, and their minimum
WINDOW = 0.2
MIN_TIMED = 6
# Updates after a start that are not timed: they compile
UNTIMED = 2
# An update is a pause if it takes more than this many times the median, and more than this share of the budget.
PAUSE_TIMES = 5
PAUSE_SHARE = 0.01
# Evaluations that differ by at most this factor take as long as they have to: pauses within them would differ by more.
ALIKE = 1.1
# An end is told if it differs by more than this share from the one told before.
TOLD_SHARE = 0.1
# As many such updates in a row are the new pace.
NEW_PACE = 2
# Updates of the shortest decay; without time for it, only the last of them is trained.
MIN_DECAY_UPDATES = 3
# Seconds after the last evaluation on an idle machine, for files and for a report
FILES_S = 2.0
REPORT_S = 2.0
# At most this share of the budget on a busy one: what was so for a tenth of a second may pass
MAX_FILES_SHARE = 0.3
# Seconds of a sample, per layer
SAMPLE_S_OF_LAYER = 0.12


class DecaySchedule(NamedTuple):
    """The rest of a run: a decay from `start_factor` at update `decay_start` to 0 at update `end`.

    start_factor: of the learning rate, 1 in the plan.
    """

    decay_start: int
    end: int
    start_factor: float = 1.0

    def factor(self, update: int) -> float:
        """Factor of the learning rate after `update` updates."""
        if update < self.decay_start:
            return self.start_factor
        # max: the decay may have no updates
        return self.start_factor * (self.end - update) / max(self.end - self.decay_start, 1)

    def with_end(self, update: int, end: int, factor: float) -> "DecaySchedule":
        """The schedule with another end, decided after `update` updates. factor: the one now."""
        length = max(self.end - self.decay_start, 1)
        # The decay keeps its length if there is room for it.
        decay_start = max(end - length, min(update, end - MIN_DECAY_UPDATES))
        # Not lower than planned with so many updates left: an end that was near for a moment may have lowered it.
        return DecaySchedule(decay_start, end, max(factor, min((end - update) / length, 1.0)))


# Names of these three in a checkpoint
SAVED_NAMES = ("fall_from", "end", "fall_rate")


@dataclass
class Clock:
    """Moves the end of a run with a time budget. All ranks have one.

    seconds: the budget, of which `spent_before` had passed. planned: the schedule if nothing moves. moved: the one after the
    last move, else None. seconds_at_end: needed after the last update, for files. evaluation_seconds: time of an evaluation
    with its samples; there is one after every `evaluation_every` updates (0: none) and at the end. max_updates: upper bound of
    the run's updates, however much time is left. forecast: for the lines.
    """

    seconds: float
    spent_before: float
    planned: DecaySchedule
    ranks: Ranks
    seconds_at_end: float = 0.0
    evaluation_seconds: float = 0.0
    evaluation_every: int = 0
    max_updates: float = math.inf
    moved: DecaySchedule | None = None
    forecast: Forecast | None = None

    def __post_init__(self) -> None:
        self.started = time.monotonic() - self.spent_before
        self.check_every = max(1, self.planned.end // CHECKS)
        # Seconds of updates since the last check, and of one update: about those planned, until enough are timed
        self.unchecked = 0.0
        evaluations = 1 + (self.planned.end - 1) // (self.evaluation_every or math.inf)
        # On a busy machine the evaluations alone may take longer.
        for_updates = max(self.seconds - evaluations * self.evaluation_seconds, TOLERANCE * self.seconds)
        self.pace = for_updates / self.planned.end
        # The first one that was measured
        self.first_pace = 0.0
        self.knows_pace = self.has_new_pace = False
        self.told_end = self.planned.end
        # Seconds of the last updates, without evaluations
        self.update_seconds: deque[float] = deque(maxlen=max(MIN_TIMED, round(WINDOW * self.planned.end)))
        self.untimed = UNTIMED
        self.last_update = time.monotonic()
        # Seconds of the evaluations at this pace
        self.evaluations: list[float] = []

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
        self.evaluations.append(took)

    def after_update(self, update: int) -> None:
        """To be called on all ranks after each update. It may move the end."""
        now = time.monotonic()
        self.unchecked += now - self.last_update
        if self.untimed:
            self.untimed -= 1
        else:
            self.update_seconds.append(now - self.last_update)
        self.last_update = now
        # Several ranks can only check after an update that all of them know.
        is_slow = self.ranks.world_size == 1 and (self.has_new_pace or self.unchecked > TOLERANCE * self.seconds)
        if update % self.check_every == 0 or is_slow:
            self.unchecked = 0.0
            self.moved = on_main(self.ranks, lambda: self._new_schedule(update)) or self.moved

    def _estimate_pace(self) -> None:
        """Set `pace`, once enough updates are timed."""
        is_enough = self.knows_pace or len(self.update_seconds) >= MIN_TIMED
        usual = median(self.update_seconds) if is_enough else self.pace
        latest = list(reversed(self.update_seconds))
        slow = list(takewhile(lambda seconds: seconds > PAUSE_TIMES * usual, latest))
        fast = list(takewhile(lambda seconds: self.has_new_pace and seconds * PAUSE_TIMES < usual, latest))
        if fast or (len(slow) >= NEW_PACE and sum(slow) > PAUSE_SHARE * self.seconds):
            # Not more of them than each update can be checked with
            self.update_seconds = deque(reversed(fast or slow), CHECKS)
            self.evaluations.clear()
            self.knows_pace = self.has_new_pace = True
        elif not is_enough:
            return
        longest = max(PAUSE_TIMES * median(self.update_seconds), PAUSE_SHARE * self.seconds)
        without_pauses = [seconds for seconds in self.update_seconds if seconds <= longest]
        left = self.seconds * (1 - TOLERANCE / 2) - self.spent()
        first_check = max(FIRST_CHECK * left, min(FIRST_CHECK_S, MAX_FIRST_CHECK * left))
        # Before many of few planned updates are done
        is_full = len(self.update_seconds) == self.update_seconds.maxlen
        if self.knows_pace or is_full or sum(without_pauses) >= first_check:
            self.knows_pace = True
            self.pace = fmean(without_pauses)
            self.first_pace = self.first_pace or self.pace

    def _new_schedule(self, update: int) -> DecaySchedule | None:
        """The new schedule after `update` updates; None: no change."""
        self._estimate_pace()
        # A machine that is slower than at the start is so for evaluations too.
        evaluation_seconds = self.evaluation_seconds * max(self.pace / (self.first_pace or self.pace), 1.0)
        fastest = sorted(self.evaluations)
        # Two pauses may have about one length.
        enough = 3 if fastest and fastest[0] > PAUSE_TIMES * evaluation_seconds else 2
        if len(fastest) >= enough and fastest[enough - 1] <= ALIKE * fastest[0]:
            evaluation_seconds = fastest[0]
        elif fastest:
            evaluation_seconds = min(fastest[0], evaluation_seconds + PAUSE_SHARE * self.seconds)

        def needed(updates: int) -> float:
            every = self.evaluation_every or math.inf
            # If one is due after this very update, it is still to come.
            evaluations = 1 + (update + updates - 1) // every - (update - 1) // every
            return updates * self.pace + evaluations * evaluation_seconds

        tolerance = TOLERANCE * self.seconds
        left = self.seconds - tolerance / 2 - self.spent() - self.seconds_at_end
        for_updates = left - needed(0)
        if not self.knows_pace and for_updates > self.pace:
            return None
        most = min(int(max(for_updates, 0.0) / self.pace), self.max_updates - update)
        possible = bisect_right(range(1, int(most) + 1), left, key=needed)
        updates_left = self.end - update
        if abs(possible - updates_left) * self.pace <= tolerance and needed(updates_left) - left <= tolerance:
            return None
        if updates_left <= MIN_DECAY_UPDATES and possible <= updates_left + 1 and for_updates >= -tolerance:
            return None
        end = update + max(possible, min(updates_left, 1))
        if end == self.end:
            return None
        if abs(end - self.told_end) > TOLD_SHARE * self.told_end:
            self.told_end = end
            why = f"an update takes {self.pace:.2g} s now" if self.knows_pace else "there is no time for more"
            announce(
                f"{why}, so the run ends after {counted(end, 'update')} "
                f"({self.planned.end:,} were planned){told_end(self.forecast, end)}"
            )
        # At its end the schedule has no rate left to go on with.
        return self.planned.with_end(update, end, (self.moved or self.planned).factor(min(update, self.end - 1)))

    def state_dict(self) -> dict[str, float | None]:
        """What a resume needs."""
        schedule = dict(zip(SAVED_NAMES, self.moved or (None, None, None), strict=True))
        return {"seconds_spent": self.spent(), **schedule}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Restore the `state_dict` of the run before."""
        spent = state["seconds_spent"]
        self.started -= spent or 0.0
        decay_start, end, start_factor = (state[name] for name in SAVED_NAMES)
        if decay_start is not None and end is not None and start_factor is not None:
            self.moved = DecaySchedule(int(decay_start), int(end), start_factor)


def clock_of(parts: Parts, engine: Engine) -> Clock | None:
    """The clock of a run with a time budget; None: it has none. A collective: an evaluation is timed."""
    settings = parts.settings
    if not settings.budget:
        return None
    updates, update_rows = settings.max_updates, parts.batching.rows
    # However fast the machine is, the clock adds no passes beyond the planner's maximum. unique / targets: epochs until all text has
    # been read once, more than one in a mixture, whose epoch ends with its scarcest source.
    first_plan = parts.corpus.plan(0)
    targets = first_plan.row_targets(0, first_plan.n_rows)
    unique = laws.unique_tokens(laws.parts_of(parts.corpus, targets))
    most_rows = laws.max_passes(settings.from_weight) * first_plan.n_rows * unique / targets
    evaluation = evaluation_seconds(engine, parts.validation) if parts.validation else 0.0
    evaluation += SAMPLE_S_OF_LAYER * parts.model.config.num_hidden_layers * len(parts.prompts)
    interval = int(parts.batching.updates_in(settings.eval_interval))
    seconds = seconds_of(settings.budget)
    return Clock(
        seconds,
        seconds_since_start(),
        DecaySchedule(decay_start=updates - round(settings.decay_share * updates), end=updates),
        parts.ranks,
        seconds_at_end=min((FILES_S + REPORT_S * settings.report) * slowness(), MAX_FILES_SHARE * seconds),
        evaluation_seconds=evaluation,
        # Without validation there are samples only at the end.
        evaluation_every=max(1, interval) if settings.eval_interval and parts.validation else 0,
        max_updates=max(updates, int(most_rows / update_rows)),
    )

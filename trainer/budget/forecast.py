"""The curve that a run is expected to follow, and what to say where it leaves it."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.budget import laws

# Before the rate falls, a loss is higher than that of a run that ends there, by this part of it: by 0.02 in eight runs of three
# minutes (docs/experiments.md, "A plan of 3 minutes"), and by about 0.1 in one of two hours.
PREMIUM_OF_FULL_RATE = 0.06
# The first steps of a run are not told.
FEWEST_TOKENS = 3e5
# How far above the expected loss a run may be, and how many log lines in a row, before something is said. Guesses: the expected loss
# of another text may be wrong by 10 % (LOSS_ERROR_ELSEWHERE in laws.py), which is no reason for a warning.
FAR_ABOVE = 1.3
LINES_IN_A_ROW = 10
# Above the lowest loss of the lines before, what counts as a spike, and how many lines it may last. Guesses: no run with a spike is
# noted in docs/experiments.md.
SPIKE = 1.2
LINES_OF_A_SPIKE = 20
# Log lines that are averaged: a line of a few rows jumps up and down by itself.
SMOOTHED = 5


@dataclass(frozen=True)
class Forecast:
    """What a run may expect. unique: as of laws.effective_tokens. T: positions of a row. text_scale: see
    trainer/budget/text.py."""

    parameters: float
    depth: laws.Depth
    unique: float | Sequence[laws.Part]
    T: int
    text_scale: float
    muon: bool = True

    def loss(self, tokens: float, rate_factor: float) -> float | None:
        """The training loss after so many tokens, while the rate is `rate_factor` of the full one; None: not told."""
        passes = tokens / laws.different_tokens(self.unique)
        if tokens < FEWEST_TOKENS or laws.is_repeated_too_often(passes):
            return None
        scale = self.text_scale * laws.row_scale(self.T)
        at_the_end = laws.expected_loss(self.parameters, self.depth, tokens, self.unique, scale, self.muon)
        return at_the_end * (1 + PREMIUM_OF_FULL_RATE * min(rate_factor, 1.0))


class Alarm:
    """Says once when a run's loss leaves the expected curve, and once for each rise that does not heal."""

    def __init__(self, rates: Sequence[str] = ("learning_rate",)) -> None:
        """rates: the settings that hold the learning rates of the run."""
        self.rates = ", ".join(f"--{name}" for name in rates)
        self.last: deque[float] = deque(maxlen=SMOOTHED)
        self.lowest = math.inf
        self.lines_above = 0
        self.lines_of_spike = 0
        self.has_said_above = False

    def look(self, loss: float, expected: float | None) -> str | None:
        """A line for the user, or None. loss: of a log line; expected: of the Forecast there."""
        if not math.isfinite(loss):
            return None
        self.last.append(loss)
        if len(self.last) < SMOOTHED:
            return None
        smooth = sum(self.last) / len(self.last)
        self.lowest = min(self.lowest, smooth)
        return self._spike(smooth) or self._far_above(smooth, expected)

    def _spike(self, smooth: float) -> str | None:
        """A rise that has lasted."""
        if smooth <= SPIKE * self.lowest:
            self.lines_of_spike = 0
            return None
        self.lines_of_spike += 1
        if self.lines_of_spike != LINES_OF_A_SPIKE:
            return None
        before = self.lowest
        # From here on it is compared with what it is now: a second rise is told again.
        self.lowest = smooth
        self.lines_of_spike = 0
        return (
            f"warning: the loss rose from {before:.2f} to {smooth:.2f} and does not come down again: stop (Ctrl-C) and "
            f"start again with half of the rates ({self.rates}), or look at the data there"
        )

    def _far_above(self, smooth: float, expected: float | None) -> str | None:
        """A loss that stays above the curve."""
        if expected is None or smooth <= FAR_ABOVE * expected:
            self.lines_above = 0
            return None
        self.lines_above += 1
        if self.lines_above < LINES_IN_A_ROW or self.has_said_above:
            return None
        self.has_said_above = True
        return (
            f"warning: the loss is {smooth:.2f}, and runs of this size reach {expected:.2f} by now: other rates "
            f"({self.rates}) or a smaller batch may mend it; so may a look at the data (encoding, order, "
            "a tokenizer of another language)"
        )

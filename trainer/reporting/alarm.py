"""Notices a run that goes wrong, for the user to end it: nothing here does."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any

# Above what guessing reaches, in nats
MARGIN = 0.5
# Rises of the validation loss in a row, by this factor in all, also of the last loss above the lowest: less is chance
RISES = 3
RISEN = 1.01
# A loss stands still if its mean over half of the last log lines is above this ratio to that of the half before. There are so many
# lines and updates at least.
STILL = 0.98
LINES = 20
UPDATES = 100


class Alarm:
    """Watches a run behind its warm-up, in nats per token. `tell` gets each kind of line once.

    guess: the loss of guessing, the logarithm of the vocabulary: a sampled head estimates the same loss. entropy: that of single
    tokens, the loss of a model that knows only how frequent each is.
    """

    def __init__(self, guess: float, entropy: float, tell: Callable[[str], None], state: dict[str, Any]) -> None:
        """state: what it has seen and told so far, in the run's Progress, so that a resume goes on with it; empty at first."""
        self.guess, self.entropy, self.tell, self.state = guess, entropy, tell, state
        state.setdefault("lowest", math.inf)
        self.told: list[str] = state.setdefault("told", [])
        # (update, loss) of log lines, and validation losses
        self.losses: list[tuple[int, float]] = state.setdefault("losses", [])
        self.validation: list[float] = state.setdefault("validation", [])

    def after_log(self, update: int, loss: float, is_warm: bool) -> None:
        # Weights that begin with a high loss may still come down.
        is_bad = loss > max(self.guess, self.state["lowest"]) + MARGIN
        self.state["lowest"] = min(self.state["lowest"], loss)
        if not is_warm:
            return
        if is_bad:
            self._tell("a loss of", f"{loss:.2f} is worse than guessing ({self.guess:.2f}): the rate is too high")
        self.losses.append((update, loss))
        while len(self.losses) > LINES and self.losses[1][0] <= update - UPDATES:
            del self.losses[0]
        if len(self.losses) >= LINES and self.losses[0][0] <= update - UPDATES:
            values, half = [loss for _, loss in self.losses], len(self.losses) // 2
            before, latest = fmean(values[:half]), fmean(values[half:])
            if latest > STILL * max(before, self.entropy):
                why = f"and a model that only knows how frequent each token is has {self.entropy:.2f}"
                self._tell("the loss stands at", f"{latest:.2f}, {why}: a wrong rate, or text without order")

    def after_evaluation(self, loss: float) -> None:
        """loss: of the validation text."""
        self.validation.append(loss)
        del self.validation[: -1 - RISES]
        rises = sum(one < other for one, other in pairwise(self.validation))
        if rises == RISES and loss > RISEN * self.validation[0]:
            from_to = f"from {self.validation[0]:.3f} to {loss:.3f} in {RISES} evaluations"
            self._tell("the validation loss rises", f"{from_to}: the rate is too high, or the model memorises its text")

    def _tell(self, what: str, rest: str) -> None:
        if what not in self.told:
            self.told.append(what)
            self.tell(f"{what} {rest}")

"""What a run is told to reach, and the lines about it. The formulas are in trainer/budget/laws.py."""

import math
from collections.abc import Callable
from typing import NamedTuple

from common.wording import counted


class Expectation(NamedTuple):
    """What a run of so many tokens is expected to reach: its validation loss, in nats per token, and the relative error of that."""

    tokens: float
    loss: float
    error: float

    def __str__(self) -> str:
        return f"{self.loss:.3f} ({self.loss * (1 - self.error):.2f} to {self.loss * (1 + self.error):.2f})"


# updates of a run -> what is expected at its end; None: unknown
Forecast = Callable[[float], Expectation | None]


def told_end(forecast: Forecast | None, updates: float) -> str:
    """The end of a line about a run that ends after so many updates; empty where nothing is known of such a run."""
    expected = forecast and forecast(updates)
    return f"; the end is expected at {expected}" if expected else ""


def end_line(forecast: Forecast, val_loss: float, updates: int, planned: float) -> str:
    """What a run has reached in its updates, beside what was expected of them, and of those that were planned."""
    line = f"reached a validation loss of {val_loss:.3f} in {counted(updates, 'update')}, for which "
    line += f"{forecast(updates) or 'nothing'} was expected"
    if planned not in (updates, math.inf) and (of_plan := forecast(planned)):
        line += f", and {of_plan.loss:.3f} of the {planned:,} planned"
    return line

"""The flags that say how much a run may cost; the planner chooses the rest."""

import argparse
import re
from collections.abc import Collection
from dataclasses import dataclass

from common.flags import positive
from common.settings import Settings, field_default, setting, switch

BUDGETS = ("budget", "budget_tokens", "budget_flops")
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
# A shorter run learns nothing; a longer one is a typing error.
SHORTEST_S = 20
LONGEST_S = 366 * 24 * 3600
# Tokens or floating-point operations: more than the largest run that was ever published
LARGEST_AMOUNT = 10**27


def seconds_of(text: str) -> float:
    """Seconds of `90s`, `10m`, `1h30m`. Errors: argparse.ArgumentTypeError."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or not any(found.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 10m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    total = 3600 * hours + 60 * minutes + seconds
    if not SHORTEST_S <= total <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} must be from {SHORTEST_S}s to {LONGEST_S // 3600}h")
    return total


def duration(text: str) -> str:
    """The text itself, checked to be a time: so a settings file shows it as typed."""
    seconds_of(text)
    return text.strip()


def length_flags(settings: Settings, given: Collection[str]) -> list[str]:
    """The given flags that say where a run ends, but for defaults, which a settings file names too."""
    return [
        name
        for name in ("epochs", "max_updates")
        if name in given and getattr(settings, name) != field_default(type(settings), name)
    ]


@dataclass(kw_only=True)
class BudgetSettings(Settings):
    """budget"""

    budget: str | None = setting(
        None,
        check=duration,
        help="how long the command may take, as 90s, 10m or 1h30m: size, rows, batch, rates and updates are planned for it",
        first=True,
    )
    budget_tokens: float | None = setting(
        None, check=positive(float, LARGEST_AMOUNT), help="a budget of tokens instead, as 5e7"
    )
    budget_flops: float | None = setting(
        None, check=positive(float, LARGEST_AMOUNT), help="a budget of floating-point operations instead, as 1e16"
    )
    dry_run: bool = switch(False, help="print the plan of a budget, and stop there")

    def check(self) -> None:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"--{given[0]} and --{given[1]} exclude each other: drop one")
        if self.dry_run and not given:
            raise ValueError("--dry_run prints a budget's plan: add --budget 10m, --budget_tokens or --budget_flops")

    @property
    def has_budget(self) -> bool:
        """The run is planned."""
        return any(getattr(self, name) is not None for name in BUDGETS)

"""The settings of what a run writes and where it reports."""

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

from common.flags import AUTO, not_negative, positive
from common.paths import ROOT
from common.settings import Settings, setting, switch

USUAL_SAVE_INTERVAL = 100


def minutes(text: str) -> str:
    """`auto`, or a number of minutes; as text, since a setting has one type."""
    if text != AUTO:
        try:
            not_negative(float)(text)
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(f"{text!r} must be auto or a number of minutes, 0 for none") from None
    return text


def save_interval(usual: int, unit: str = "micro-batches") -> Any:
    """The field of --save_interval. usual: where neither it nor --save_minutes is given."""
    # None: not given. OutputSettings.fill_in gives it a value.
    return setting(
        None,
        check=not_negative(int),
        help=f"{unit} between saves; 0: they do not count (default: {usual} without --save_minutes, else 0)",
    )


def log_interval(unit: str = "micro-batches") -> Any:
    """The field of --log_interval."""
    return setting(100, check=positive(int), help=f"{unit} between log lines")


@dataclass(kw_only=True)
class OutputSettings(Settings):
    """output"""

    usual_save_interval: ClassVar[int] = USUAL_SAVE_INTERVAL

    out_dir: str = setting(
        str(ROOT / "out"),
        help="folder for weights, checkpoints and metrics",
        aliases=("--save_dir",),
        first=True,
    )
    save_interval: int = save_interval(USUAL_SAVE_INTERVAL)
    # None: not given. As above.
    save_minutes: str = setting(
        None,
        check=minutes,
        help="minutes between saves; 0: they do not count (default: 0 with --save_interval; else auto: 2 in the place of "
        "its default on a CUDA GPU, 0 elsewhere)",
    )
    keep_checkpoints: int = setting(2, check=positive(int), help="resume checkpoints to keep")
    log_interval: int = log_interval()
    report: bool = switch(True, help="write {name}.report.html and .loss.png at the end")
    tracker: str = setting("none", choices=("none", "wandb", "swanlab"), help="log to an experiment tracker too")
    use_wandb: bool = switch(False, help="--tracker wandb (WANDB_MODE=offline needs no network)")
    wandb_project: str = setting("MiniMind-Pretrain", help="project in the tracker")

    def check(self) -> None:
        if self.use_wandb and self.tracker not in ("none", "wandb"):
            raise ValueError(f"--use_wandb and --tracker {self.tracker} exclude each other: drop one")

    def fill_in(self) -> None:
        """The tracker that --use_wandb means; and of the two flags on saves, the one that is not given."""
        if self.use_wandb:
            self.tracker = "wandb"
        if self.save_minutes is None:
            self.save_minutes = AUTO if self.save_interval is None else "0"
        if self.save_interval is None:
            by_time_alone = self.save_minutes != AUTO and float(self.save_minutes) > 0
            self.save_interval = 0 if by_time_alone else self.usual_save_interval

"""The settings of what a run writes and where it reports."""

import argparse
from dataclasses import dataclass
from typing import ClassVar

from common.flags import AUTO, not_negative, positive
from common.paths import ROOT
from common.settings import Settings, setting, switch


def minutes(text: str) -> str:
    """`auto`, or a number of minutes; as text, since a setting has one type."""
    if text != AUTO:
        try:
            not_negative(float)(text)
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(f"{text!r} must be auto or a number of minutes, 0 for none") from None
    return text


@dataclass(kw_only=True)
class OutputSettings(Settings):
    """output"""

    # save_interval where neither it nor save_minutes is given
    usual_save_interval: ClassVar[int] = 100

    out_dir: str = setting(
        str(ROOT / "out"),
        help="folder for weights, checkpoints and metrics",
        aliases=("--save_dir",),
        first=True,
    )
    # None: not given. `fill_in` gives it a value.
    save_interval: int = setting(
        None,
        check=not_negative(int),
        help="micro-batches (ELECTRA, GLUE: updates) between saves; 0: they do not count (default: 100, ELECTRA 1000, GLUE "
        "500; 0 with --save_minutes)",
    )
    # None: not given. As above.
    save_minutes: str = setting(
        None,
        check=minutes,
        help="minutes between saves; 0: they do not count (default: 0 with --save_interval; else auto: 2 in the place of "
        "its default on a CUDA GPU, 0 elsewhere)",
    )
    keep_checkpoints: int = setting(2, check=positive(int), help="resume checkpoints to keep")
    log_interval: int = setting(
        100, check=positive(int), help="micro-batches (ELECTRA, GLUE: updates) between log lines"
    )
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

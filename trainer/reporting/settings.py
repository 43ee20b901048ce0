"""The settings of what a run writes and where it reports."""

from dataclasses import dataclass

from common.flags import positive
from common.paths import ROOT
from common.settings import Settings, setting, switch
from trainer.reporting.trackers import TRACKERS


@dataclass(kw_only=True)
class OutputSettings(Settings):
    """output"""

    out_dir: str = setting(
        str(ROOT / "out"),
        help="folder for weights, checkpoints and metrics",
        aliases=("--save_dir",),
        first=True,
    )
    save_interval: int = setting(100, check=positive(int), help="micro-batches between saves")
    keep_checkpoints: int = setting(2, check=positive(int), help="resume checkpoints to keep")
    log_interval: int = setting(100, check=positive(int), help="micro-batches between log lines")
    report: bool = switch(True, help="write {name}.report.html and .loss.png at the end")
    tracker: str = setting("none", choices=("none", *TRACKERS), help="log to an experiment tracker too")
    use_wandb: bool = switch(False, help="--tracker wandb (WANDB_MODE=offline needs no network)")
    wandb_project: str = setting("MiniMind-Pretrain", help="project in the tracker")

    def check(self) -> None:
        if not self.use_wandb:
            return
        if self.tracker not in ("none", "wandb"):
            raise ValueError(f"--use_wandb and --tracker {self.tracker} exclude each other: drop one")
        self.tracker = "wandb"

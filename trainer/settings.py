"""Flags that several trainers share, in groups. Those of one trainer are in its folder.

The docstring of a group is its title in --help. Once the flags are read, `check` and then `fill_in` of each group run
(common/settings.py).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from common.flags import AUTO, not_negative, positive, seed
from common.settings import Settings, setting, switch
from common.start import ROOT

MAX_PROCESSES = 64
# values of --shard
NONE = "none"
FULL = "full"


def auto_or(convert: Callable[[str], float]) -> Callable[[str], str]:
    """Returns a converter for `auto` and whatever `convert` takes; as text, since a setting has one type."""

    def as_text(text: str) -> str:
        if text != AUTO:
            convert(text)
        return text

    # shown in argparse's error message
    as_text.__name__ = f"{convert.__name__} or {AUTO}"
    return as_text


@dataclass(kw_only=True)
class MachineSettings(Settings):
    """machine"""

    device: str | None = setting(None, help="cuda:0, mps or cpu (default: the best available)")
    dtype: str = setting(
        "bfloat16", choices=("bfloat16", "float16", "float32"), help="precision of matrix products (autocast)"
    )
    use_compile: str = setting("auto", choices=("auto", "0", "1"), help="torch.compile")
    num_workers: int = setting(1, check=not_negative(int), help="processes that load batches; 0: none")
    gradient_checkpointing: bool = switch(
        False, help="recompute activations in the backward pass: less memory, more time"
    )
    deterministic: bool = switch(
        False,
        help="the same bits in every run, on a GPU too; an operation without a deterministic form ends the run",
    )
    dist_timeout: int = setting(600, check=positive(int), help="seconds after which a silent rank ends the job")
    shard: str = setting(
        NONE,
        choices=(NONE, FULL),
        help="full: the ranks share weights, gradients and optimiser states; none: each has its own",
    )
    verify_every: int = setting(
        0,
        check=not_negative(int),
        help="find faults of the hardware: compute every N-th update twice, and watch weights between updates (on a GPU "
        "with --deterministic 1); 0: off (a --budget of an hour or more, on a CPU: 100)",
    )
    local_rank: int | None = setting(None, check=int, help="no effect: LOCAL_RANK counts", aliases=("--local-rank",))

    def fill_in(self) -> None:
        # Another one on each rank: no setting of the run.
        self.local_rank = None


@dataclass(kw_only=True)
class UpdateSettings(Settings):
    """training"""

    batch_size: int = setting(32, check=positive(int), help="rows per micro-batch and rank", first=True)
    accumulation_steps: int = setting(8, check=positive(int), help="micro-batches per update", first=True)
    rows_per_update: int = setting(
        0,
        check=not_negative(int),
        help="rows per update over all ranks, instead of --accumulation_steps: updates stay the same for any number of ranks; "
        "0: off",
    )
    learning_rate: float = setting(
        5e-4, check=positive(float), help="learning rate, before the factor of --lr_schedule", first=True
    )
    weight_decay: float = setting(0.01, check=not_negative(float), help="weight decay, on matrices only")
    grad_clip: float = setting(1.0, check=not_negative(float), help="maximum norm of the gradient; 0: no clipping")
    max_bad_updates: int = setting(10, check=positive(int), help="stop after this many non-finite updates in a row")
    seed: int = setting(42, check=seed, help="seed of weights, data order and samples")
    from_resume: bool = switch(False, help="continue from the newest intact checkpoint, if there is one", first=True)


# built by build_optimizers in trainer/optim/build.py
OPTIMIZERS = ("adamw", "muon")


@dataclass(kw_only=True)
class OptimizerSettings(UpdateSettings):
    """training"""

    optimizer: str = setting(
        "adamw", choices=OPTIMIZERS, help="muon: for the matrices of the blocks, AdamW elsewhere", first=True
    )
    muon_lr: float = setting(0.02, check=positive(float), help="Muon's learning rate, on the same schedule")
    embed_lr: float = setting(
        0.0,
        check=not_negative(float),
        help="with muon: AdamW's learning rate for other matrices (embeddings, head, routers); 0: --learning_rate",
    )
    cpu_processes: str = setting(
        "auto",
        check=auto_or(positive(int, MAX_PROCESSES)),
        help="processes that share each micro-batch on a CPU (Linux only); 1: one process with all threads",
    )


@dataclass(kw_only=True)
class OutputSettings(Settings):
    """output"""

    # save_interval if neither it nor save_minutes is given
    default_save_interval: ClassVar[int] = 100

    out_dir: str = setting(
        str(ROOT / "out"),
        help="folder for weights, checkpoints and metrics",
        aliases=("--save_dir",),
        first=True,
    )
    # None: not given; set by `fill_in`.
    save_interval: int = setting(
        None,
        check=not_negative(int),
        help="micro-batches (ELECTRA, GLUE: updates) between saves; 0: off (default: 100, ELECTRA 1000, GLUE 500; "
        "0 with --save_minutes)",
    )
    # as above
    save_minutes: str = setting(
        None,
        check=auto_or(not_negative(float)),
        help="minutes between saves; 0: off; auto: 2 on a CUDA GPU, instead of --save_interval; 0 elsewhere "
        "(default: 0 with --save_interval, else auto)",
    )
    keep_checkpoints: int = setting(2, check=positive(int), help="number of checkpoints to keep")
    log_interval: int = setting(100, check=positive(int), help="micro-batches per log line (ELECTRA, GLUE: updates)")
    report: bool = switch(True, help="write {name}.report.html and .loss.png at the end")
    tracker: str = setting("none", choices=("none", "wandb", "swanlab", "trackio"), help="also log to this tracker")
    use_wandb: bool = switch(False, help="same as --tracker wandb (WANDB_MODE=offline needs no network)")
    wandb_project: str = setting("MiniMind-Pretrain", help="project in the tracker (WANDB_PROJECT)")

    def check(self) -> None:
        if self.use_wandb and self.tracker not in ("none", "wandb"):
            raise ValueError(f"--use_wandb and --tracker {self.tracker} exclude each other: drop one")

    def fill_in(self) -> None:
        """Expand ~, and set the tracker for --use_wandb, and save_interval and save_minutes if not given."""
        # No shell has done it for --out_dir=~/runs, nor for a call.
        self.out_dir = os.path.expanduser(self.out_dir)
        if self.use_wandb:
            self.tracker = "wandb"
        if self.save_minutes is None:
            self.save_minutes = AUTO if self.save_interval is None else "0"
        if self.save_interval is None:
            by_time_alone = self.save_minutes != AUTO and float(self.save_minutes) > 0
            self.save_interval = 0 if by_time_alone else self.default_save_interval


class RunSettings(Protocol):
    """Flags of every trainer; the settings of a job have more."""

    def values(self) -> dict[str, Any]:
        """{flag: value}"""

    batch_size: int
    accumulation_steps: int
    rows_per_update: int
    max_bad_updates: int
    num_workers: int
    verify_every: int
    log_interval: int
    save_interval: int
    save_minutes: str
    keep_checkpoints: int
    from_resume: bool
    report: bool
    tracker: str
    wandb_project: str
    user_set: frozenset[str]

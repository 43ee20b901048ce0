"""The flags that every trainer has, and what follows from them: how many rows an update has, and who gets which."""

import math
from typing import Protocol

from dataset.loader import UpdateSchedule
from trainer.machine.ranks import Ranks


class RunSettings(Protocol):
    """The flags that every trainer has; the settings of a job have more."""

    batch_size: int
    accumulation_steps: int
    rows_per_update: int
    grad_clip: float
    max_bad_updates: int
    gradient_checkpointing: bool
    num_workers: int
    log_interval: int
    save_interval: int
    save_minutes: str
    keep_checkpoints: int
    from_resume: bool
    report: bool
    tracker: str
    wandb_project: str


def rows_of_update(settings: RunSettings, ranks: Ranks) -> int:
    """Rows of an update over all ranks."""
    rows = settings.batch_size * settings.accumulation_steps * ranks.micro_batches_at_once
    return settings.rows_per_update or rows


def schedule_of(settings: RunSettings, ranks: Ranks, n_rows: int, start_row: int = 0) -> UpdateSchedule:
    """How the rows of an epoch, from start_row on, are dealt out."""
    micro_batches = settings.accumulation_steps
    if settings.rows_per_update:
        micro_batches = math.ceil(settings.rows_per_update / (settings.batch_size * ranks.micro_batches_at_once))
    rows_of_rank = ranks.rows_of(settings.batch_size)
    return UpdateSchedule(n_rows, rows_of_rank, micro_batches, ranks.world_size, start_row, settings.rows_per_update)

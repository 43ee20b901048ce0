"""How many rows an update has and how they are dealt out: from the flags, and from the ranks that are there."""

import copy
import math
from typing import Protocol, TypeVar

from dataset.loader import UpdateSchedule
from trainer.machine.ranks import Ranks


class RowFlags(Protocol):
    """The flags on the rows of an update, and on how many are computed at once."""

    batch_size: int
    accumulation_steps: int
    rows_per_update: int
    gradient_checkpointing: bool


FlagsT = TypeVar("FlagsT", bound=RowFlags)


def rows_of_update(settings: RowFlags, ranks: Ranks) -> int:
    """Rows of an update over all ranks."""
    rows = settings.batch_size * settings.accumulation_steps * ranks.micro_batches_at_once
    return settings.rows_per_update or rows


def with_accumulation(settings: FlagsT, ranks: Ranks) -> FlagsT:
    """The settings with the micro-batches that --rows_per_update takes on these ranks; without that flag as they are."""
    if not settings.rows_per_update:
        return settings
    settled = copy.copy(settings)
    settled.accumulation_steps = math.ceil(
        settings.rows_per_update / (settings.batch_size * ranks.micro_batches_at_once)
    )
    return settled


def schedule_of(settings: RowFlags, ranks: Ranks, n_rows: int, start_row: int = 0) -> UpdateSchedule:
    """How the rows of an epoch, from start_row on, are dealt out."""
    steps = with_accumulation(settings, ranks).accumulation_steps
    rows_of_rank = ranks.rows_of(settings.batch_size)
    return UpdateSchedule(n_rows, rows_of_rank, steps, ranks.world_size, start_row, settings.rows_per_update)


def plain_advice(settings: RowFlags, shorter: str) -> str:
    """What helps where nothing can be worked out. shorter: flags that make rows or the model smaller."""
    ways = []
    rows_of_update = settings.batch_size * settings.accumulation_steps
    for rows in range(settings.batch_size // 2, 0, -1):
        if rows_of_update % rows == 0:
            # With --rows_per_update the number of micro-batches follows.
            steps = "" if settings.rows_per_update else f" --accumulation_steps {rows_of_update // rows}"
            ways.append(f"--batch_size {rows}{steps}, which leaves the updates as they are")
            break
    if not settings.gradient_checkpointing:
        ways.append("--gradient_checkpointing 1")
    ways.append(shorter)
    return f"try {', or '.join(ways)}"

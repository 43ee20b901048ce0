"""How an update is cut: into micro-batches, and these among the ranks.

With --batch_size 32 and --accumulation_steps 2, eight ranks are one of two things:

                                     rows of an update   micro-batches, one after the other   rows of one on a rank   at once
    torchrun: each has its own              512                          2                              32                8
    one command: shared ones                 64                          2                               4                1
"""

import math
from dataclasses import dataclass
from typing import Any

from common.settings import field_default
from dataset.batches import UpdateSchedule
from trainer.machine.rank import Ranks
from trainer.settings import RunSettings


@dataclass(frozen=True)
class Batching:
    """How a run cuts its updates. With the same `rows` another number of ranks trains the same updates.

    rows: of an update, over all ranks. micro_rows: of a micro-batch, on one rank. flag_rows: rows that flags such as --warmup_iters
    count as a micro-batch.
    """

    ranks: Ranks
    rows: int
    micro_rows: int
    flag_rows: int

    @classmethod
    def of(cls, settings: RunSettings, ranks: Ranks) -> "Batching":
        """As the flags say; with --batch_size auto the rows of its default, in whatever micro-batches they will be."""
        kind: Any = type(settings)
        batch_size = settings.batch_size or field_default(kind, "batch_size")
        rows_at_once = batch_size * ranks.batches_at_once
        rows = settings.rows_per_update or settings.accumulation_steps * rows_at_once
        # Micro-batches of equal size: if all but the last were full, some ranks might have no rows in the last one.
        micro_batches = math.ceil(rows / rows_at_once)
        micro_rows = math.ceil(rows / (micro_batches * ranks.world_size))
        # Micro-batches that ranks compute at once count as one; but with --rows_per_update a warm-up must not depend on the ranks.
        return cls(ranks, rows, micro_rows, flag_rows=batch_size if settings.rows_per_update else rows_at_once)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an update, one after the other on each rank."""
        return math.ceil(self.rows / (self.micro_rows * self.ranks.world_size))

    @property
    def batch_size(self) -> int:
        """Rows of a micro-batch, whichever ranks share it."""
        return self.micro_rows * self.ranks.world_size // self.ranks.batches_at_once

    def updates_in(self, interval: int) -> float:
        """Updates in an interval of so many micro-batches, as flags count them."""
        return interval * self.flag_rows / self.rows

    def completes(self, interval: int, before: int, after: int) -> bool:
        """Whether one of a rank's micro-batches `before` to `after` completes a multiple of the interval, by rows; never for 0."""
        rows, rows_at_once = interval * self.flag_rows, self.micro_rows * self.ranks.world_size
        return interval > 0 and after * rows_at_once // rows > before * rows_at_once // rows

    def schedule(self, n_rows: int, start_row: int = 0) -> UpdateSchedule:
        """Distribution of an epoch's rows, from start_row on."""
        return UpdateSchedule(n_rows, self.rows, self.micro_rows, self.ranks.world_size, start_row)

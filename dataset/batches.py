"""From row numbers to batches: which rank trains which rows, and what is in them. Without torch, in worker processes too.

Shapes. R: rows of a batch, T: positions of a row.
"""

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dataset.packing import Recipe
from dataset.store.token_store import Documents
from model.config import IGNORE

if TYPE_CHECKING:
    import torch


class UpdateSchedule(NamedTuple):
    """Assigns the rows of an epoch to updates, micro-batches and ranks.

    Each update takes the next `update_rows` rows. The first one starts at `start_row`, the end of an earlier update, which may have
    had another number. The last update of the epoch takes the rest in as few micro-batches as possible; a rank may have a
    short or an empty slice there. Updates are numbered within the epoch, including those before start_row.

    Rows are dealt micro_rows at a time, first across the ranks and then to the next micro-batch, so that ranks have about
    the same number of rows at the end of an epoch too. 11 rows with update_rows 8, micro_rows 2 and world_size 2:

        update 0   micro-batch 0   rank 0: rows 0 1   rank 1: rows 2 3
                   micro-batch 1   rank 0: rows 4 5   rank 1: rows 6 7
        update 1   micro-batch 0   rank 0: rows 8 9   rank 1: row 10

    The rows of an update do not depend on the ranks, so another number of them trains the same updates.
    """

    n_rows: int
    update_rows: int  # of an update, over all ranks
    micro_rows: int  # of a micro-batch on one rank
    world_size: int = 1
    start_row: int = 0

    def rows(self, update: int) -> tuple[int, int]:
        """The global rows (lo, hi) of an update."""
        lo = self.start_row + (update - self.first_update) * self.update_rows
        return lo, min(lo + self.update_rows, self.n_rows)

    def micro_batches(self, rows: int) -> int:
        """Micro-batches of an update of so many rows, the same number on every rank."""
        return math.ceil(rows / (self.micro_rows * self.world_size))

    def slices(self, update: int, rank: int) -> Iterator[tuple[int, int]]:
        """The rows (lo, hi) of each micro-batch of an update on one rank; empty if lo == hi."""
        lo, hi = self.rows(update)
        for micro in range(self.micro_batches(hi - lo)):
            at = lo + (micro * self.world_size + rank) * self.micro_rows
            yield min(at, hi), min(at + self.micro_rows, hi)

    @property
    def first_update(self) -> int:
        """The number of the update that starts at start_row."""
        return math.ceil(self.start_row / self.update_rows)

    @property
    def n_updates(self) -> int:
        """Updates of the epoch, those before start_row included."""
        return self.first_update + math.ceil((self.n_rows - self.start_row) / self.update_rows)

    @property
    def n_steps(self) -> int:
        """Micro-batches (of one rank) of the epoch, those before start_row included."""
        # Full updates from start_row on, and a last one, which may have fewer micro-batches.
        full, rest = divmod(self.n_rows - self.start_row, self.update_rows)
        return (self.first_update + full) * self.micro_batches(self.update_rows) + self.micro_batches(rest)


class Batch(NamedTuple):
    """int64 tensors [R, T], or NumPy's arrays, and two counts.

    Positions without a token: input 0, target -100, document -1, position 0. In padded rows a document's last
    token follows its pairs as in PretrainDataset; it is an input without a target and counts as padding (document -1).
    """

    input_ids: "torch.Tensor"
    targets: "torch.Tensor"
    document_ids: "torch.Tensor"  # 0, 1, ... within a row
    position_ids: "torch.Tensor"  # restart with each document
    n_targets: int
    # Pieces of documents: a document split over rows counts in each of them, as in the statistics of experts.
    n_documents: int


# from arrays to arrays
TargetFilter = Callable[[Batch], Batch]


class Assembler:
    """assembler[recipe] is the Batch of a Recipe, in worker processes too.

    It holds only the store, a mapped file that each process opens itself; of a plan workers get recipes alone.

    n_rows: batches of fewer rows are padded with empty ones to this number, so that all have one shape. These change no
    count, and no sum over targets or documents. target_filter: masks some targets of a batch.
    """

    def __init__(self, store: Documents, n_rows: int = 0, target_filter: TargetFilter | None = None) -> None:
        self.store = store
        self.n_rows = n_rows
        self.target_filter = target_filter

    def __getitem__(self, recipe: Recipe) -> Batch:
        # as long an import as all others together; inspect_data.py does without
        import torch

        batch = self.arrays(recipe)
        return Batch._make([*map(torch.from_numpy, batch[:4]), *batch[4:]])

    def arrays(self, recipe: Recipe) -> Batch:
        """The Batch as arrays."""
        tokens, T = self.store.tokens, recipe.T
        shape = (max(self.n_rows, len(recipe.per_row)), T)
        # Positions that no piece overwrites below stay padding. It is not trained, so any valid id will do.
        inputs = np.zeros(shape, dtype=np.int64)
        targets = np.full(shape, IGNORE, dtype=np.int64)
        documents = np.full(shape, -1, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        numbers = np.arange(T)
        pieces = zip(recipe.begin.tolist(), recipe.pairs.tolist(), strict=True)
        for row, count in enumerate(recipe.per_row.tolist()):
            at = 0
            for number, (begin, pairs) in enumerate(islice(pieces, count)):
                ids = tokens[begin : begin + pairs + 1]
                end = at + pairs
                inputs[row, at:end] = ids[:-1]
                targets[row, at:end] = ids[1:]
                documents[row, at:end] = number
                positions[row, at:end] = numbers[:pairs]
                if recipe.is_padded and end < T:
                    # The last token of a document, never the input of a pair, follows its pairs.
                    inputs[row, end] = ids[-1]
                at = end
        batch = Batch._make([inputs, targets, documents, positions, int(recipe.pairs.sum()), len(recipe.pairs)])
        return batch if self.target_filter is None else self.target_filter(batch)

"""From row numbers to tensors: who trains which rows when, and the batches themselves.

Shapes. R: rows of a batch, P: its pieces, T: positions of a row.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from dataset.loader_workers import LoaderError, WorkerPool, assemble_or_explain

IGNORE = -100  # the target of a position that has none
# On CUDA the ranks learn of a request to stop one update after it was made, so it must be known two before.
UPDATES_AHEAD = 2


def to_device(batch, device):
    """A batch (a NamedTuple of tensors and numbers) with its tensors on `device`."""
    on_cuda = torch.device(device).type == "cuda"  # where a copy from pinned memory need not be waited for
    return type(batch)(*(x.to(device, non_blocking=on_cuda) if isinstance(x, torch.Tensor) else x for x in batch))


def pinned(batch):
    return type(batch)(*(x.pin_memory() if isinstance(x, torch.Tensor) else x for x in batch))


class Batch(NamedTuple):
    """int64 tensors [R, T] and two counts.

    Positions without a token: input `pad_id`, target -100, document -1, position 0. In padded rows a document's last
    token stands behind its pairs as in PretrainDataset; it is an input without a target and counts as padding
    (document -1).
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    document_ids: torch.Tensor  # 0, 1, ... within a row
    position_ids: torch.Tensor  # restart with each document
    n_targets: int
    n_documents: int

    to = to_device
    pin_memory = pinned


def gather(tokens, what, pad_id=0, n_rows=None):
    """The Batch of a Recipe, from the array of all tokens.

    n_rows: fill up with empty rows to that many, so that all batches have one shape (evaluation).
    """
    count, begin, pairs, T, padded = what
    R = n_rows or len(count)
    inputs = np.full((R, T), pad_id, dtype=np.int64)
    targets = np.full((R, T), IGNORE, dtype=np.int64)
    documents = np.full((R, T), -1, dtype=np.int64)
    positions = np.zeros((R, T), dtype=np.int64)

    row = np.repeat(np.arange(len(count)), count)  # of each piece
    before = np.cumsum(pairs) - pairs  # pairs of all earlier pieces
    first = np.cumsum(count) - count  # number of each row's first piece
    row_before = np.append(before, pairs.sum())[first]  # the same of each row
    place = row * T + before - row_before[row]  # where each piece begins in the flat batch
    n = int(pairs.sum())
    run = np.arange(n)
    within = run - np.repeat(before, pairs)
    to = run + np.repeat(place - before, pairs)
    source = run + np.repeat(begin - before, pairs)
    inputs.reshape(-1)[to] = tokens[source]
    targets.reshape(-1)[to] = tokens[source + 1]
    documents.reshape(-1)[to] = np.repeat(np.arange(len(pairs)) - first[row], pairs)
    positions.reshape(-1)[to] = within
    if padded:
        short = pairs < T
        inputs[row[short], pairs[short]] = tokens[(begin + pairs)[short]]
    return Batch(*map(torch.from_numpy, (inputs, targets, documents, positions)), n, len(pairs))


def assemble(store, plan, rows, pad_id=0):
    """The Batch of the given rows of a plan; `store` has `.tokens`, the plan's documents end to end."""
    return gather(store.tokens, plan.recipe(rows), pad_id)


class UpdateSchedule(NamedTuple):
    """How the rows of an epoch are dealt out to updates, micro-batches and ranks.

    Update after update takes the next G = batch_size · accumulation_steps · world_size rows, beginning at
    `start_row`, which is the end of an update, perhaps of one with another G. The last update of the epoch takes what
    is left, in as few micro-batches as hold it; a rank may have a short or an empty slice there. Updates are numbered
    within the epoch, those before start_row included.
    """

    n_rows: int
    batch_size: int
    accumulation_steps: int = 1
    world_size: int = 1
    start_row: int = 0

    @property
    def rows_per_update(self):
        return self.batch_size * self.accumulation_steps * self.world_size

    @property
    def first_update(self):
        return -(-self.start_row // self.rows_per_update)

    @property
    def n_updates(self):
        """Updates of the epoch, those before start_row included."""
        return self.first_update - (self.start_row - self.n_rows) // self.rows_per_update

    @property
    def n_steps(self):
        """Micro-batches (of one rank) of the epoch, those before start_row included."""
        full, rest = divmod(self.n_rows - self.start_row, self.rows_per_update)
        return (self.first_update + full) * self.accumulation_steps - (-rest // (self.batch_size * self.world_size))

    def rows(self, update):
        """The global rows (lo, hi) of an update."""
        lo = self.start_row + (update - self.first_update) * self.rows_per_update
        return lo, min(lo + self.rows_per_update, self.n_rows)

    def micro_batches(self, update):
        """Micro-batches of an update, the same number on every rank."""
        lo, hi = self.rows(update)
        return -(-(hi - lo) // (self.batch_size * self.world_size))

    def slices(self, update, rank):
        """The rows (lo, hi) of each micro-batch of an update on one rank; empty where lo == hi."""
        lo, hi = self.rows(update)
        for micro in range(self.micro_batches(update)):
            at = lo + (micro * self.world_size + rank) * self.batch_size
            yield min(at, hi), min(at + self.batch_size, hi)

    def steps(self, rank):
        """(update, micro-batch within it, lo, hi) from start_row to the end of the epoch."""
        for update in range(self.first_update, self.n_updates):
            for micro, (lo, hi) in enumerate(self.slices(update, rank)):
                yield update, micro, lo, hi


class Assembler(Dataset):
    """Turns recipes into batches, in worker processes too. Holds the store alone: no plan is copied to the workers."""

    def __init__(self, store, pad_id=0):
        self.store, self.pad_id = store, pad_id

    def __getitem__(self, what):
        return gather(self.store.tokens, what, self.pad_id)


class Loader:
    """Gives one rank its batches, epoch after epoch. Its worker processes live from the first epoch until `close`."""

    def __init__(self, assembler, rank: int = 0, num_workers: int = 0, pin_memory: bool = False):
        """assembler[plan.recipe(rows)] is the batch of some rows of a plan, made here or in a worker process.

        The batches do not depend on num_workers, and torch's global random numbers are left alone.
        """
        self.assembler, self.rank = assembler, rank
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.failure: LoaderError | None = None  # why the batches end too early, as soon as that is known
        self._pool: WorkerPool | None = None

    def updates(self, plan, schedule: UpdateSchedule) -> Iterator[tuple[int, list[Any]]]:
        """Yields (number of an update, its batches) from `schedule.start_row` on; None in place of an empty batch.

        An update begins when all of its batches are here, so that an error never leaves one half done: LoaderError
        comes between two updates. Where other ranks take part it is known in `failure` some updates before, so that
        all of them can stop together.
        """
        updates_ahead = UPDATES_AHEAD if schedule.world_size > 1 else 0
        coming = self._whole_updates(plan, schedule)
        ready = deque()
        while True:
            while len(ready) <= updates_ahead and self.failure is None:
                try:
                    update = next(coming, None)
                except LoaderError as error:
                    self.failure = error
                    break
                if update is None:
                    break
                ready.append(update)
            if not ready:
                break
            yield ready.popleft()
        if self.failure is not None:
            raise self.failure

    def _whole_updates(self, plan, schedule: UpdateSchedule) -> Iterator[tuple[int, list[Any]]]:
        """(number, batches) of one update after the other."""
        batches = self._batches(_recipes(plan, schedule, self.rank), schedule.accumulation_steps)
        for update in range(schedule.first_update, schedule.n_updates):
            slices = schedule.slices(update, self.rank)
            yield update, [next(batches) if lo < hi else None for lo, hi in slices]

    def _batches(self, recipes: Iterator[Any], per_update: int) -> Iterator[Any]:
        if self.num_workers:
            if self._pool is None:
                self._pool = WorkerPool(self.assembler, self.num_workers, self.pin_memory)
            yield from self._pool.batches(recipes, per_update)
            return
        for recipe in recipes:
            batch = assemble_or_explain(self.assembler, recipe)
            yield batch.pin_memory() if self.pin_memory else batch

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _recipes(plan, schedule: UpdateSchedule, rank: int) -> Iterator[Any]:
    """The recipes of the non-empty micro-batches in order, made when they are asked for."""
    for _, _, lo, hi in schedule.steps(rank):
        if lo < hi:
            yield plan.recipe(range(lo, hi))


def make_loader(assembler, plan, schedule: UpdateSchedule, rank: int = 0, num_workers: int = 0, pin_memory=False):
    """Yields (update, micro-batch within it, batch) of one epoch. Worker processes end with the iterator."""
    loader = Loader(assembler, rank, num_workers, pin_memory)
    try:
        for update, batches in loader.updates(plan, schedule):
            for micro_batch, batch in enumerate(batches):
                yield update, micro_batch, batch
    finally:
        loader.close()

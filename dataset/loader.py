"""From row numbers to tensors: who trains which rows when, and the batches themselves.

Shapes. R: rows of a batch, P: its pieces, T: positions of a row.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from dataset.loader_workers import BatchT, LoaderError, MakesBatches, RecipeT, WorkerPool, assemble_or_explain
from dataset.packing import Recipe, RowPlan
from dataset.store.format import Column, Documents, Ints

# The target of a position that has none.
IGNORE = -100
# Updates whose batches are ready beyond the one that is computed. When a rank's loader fails, the others learn of it with
# its next update, on CUDA one later. Until then it must still have batches to take part with.
UPDATES_AHEAD = 2

# A NamedTuple. That its constructor takes its own parts is more than a type can say: hence the Any.
PartsT = TypeVar("PartsT", bound=tuple[Any, ...])
RecipeT_co = TypeVar("RecipeT_co", covariant=True)


def to_device(batch: PartsT, device: torch.device | str) -> PartsT:
    """A batch (a NamedTuple of tensors and numbers) with its tensors on `device`."""
    # There the host need not wait for a copy from pinned memory.
    on_cuda = torch.device(device).type == "cuda"
    # The type of the batch is kept: `tuple` would lose the names of its parts.
    moved = []
    for part in batch:
        moved.append(part.to(device, non_blocking=on_cuda) if isinstance(part, torch.Tensor) else part)
    return type(batch)(*moved)


def pinned(batch: PartsT) -> PartsT:
    """A batch with its tensors in memory that a GPU can fetch from by itself."""
    parts = []
    for part in batch:
        parts.append(part.pin_memory() if isinstance(part, torch.Tensor) else part)
    return type(batch)(*parts)


class Batch(NamedTuple):
    """int64 tensors [R, T] and two counts.

    Positions without a token: input `pad_id`, target -100, document -1, position 0. In padded rows a document's last
    token stands behind its pairs as in PretrainDataset; it is an input without a target and counts as padding
    (document -1).
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    # 0, 1, ... within a row.
    document_ids: torch.Tensor
    # Restart with each document.
    position_ids: torch.Tensor
    n_targets: int
    # Pieces of documents: a document that is split over rows counts in each of them, as the statistics of experts do.
    n_documents: int

    def to(self, device: torch.device | str) -> "Batch":
        return to_device(self, device)

    def pin_memory(self) -> "Batch":
        return pinned(self)


OnlySome = Callable[[Batch], Batch]


def gather(tokens: Column, what: Recipe, pad_id: int = 0, n_rows: int | None = None) -> Batch:
    """The Batch of a Recipe, from the array of all tokens.

    n_rows: fill up with empty rows to that many, so that all batches have one shape. They change no count, and no sum over
    targets or documents.

    There is no loop over the pieces. The pairs of all pieces, one after the other, are numbered from 0; for each of them
    two index arrays say from where in `tokens` it comes and to where in the flat batch it goes. Within a piece both go
    up by one, so each is the running number plus a shift of the piece. The test has the loop.
    """
    per_row, begin, pairs, T, padded = what
    R = n_rows or len(per_row)
    # What no piece overwrites below stays as padding.
    inputs = np.full((R, T), pad_id, dtype=np.int64)
    targets = np.full((R, T), IGNORE, dtype=np.int64)
    documents = np.full((R, T), -1, dtype=np.int64)
    positions = np.zeros((R, T), dtype=np.int64)

    n_pieces = len(pairs)
    n_pairs = int(pairs.sum())
    # Of each piece: its row, and how many pairs the pieces before it have.
    row = np.repeat(np.arange(len(per_row)), per_row)
    pairs_before = np.cumsum(pairs) - pairs
    # Of each row: the number of its first piece, and how many pairs the rows before it have.
    first_piece = np.cumsum(per_row) - per_row
    pairs_before_row = np.append(pairs_before, n_pairs)[first_piece]
    # Where each piece begins in the flat batch: behind the pieces before it in its row.
    place = row * T + pairs_before - pairs_before_row[row]

    # The two index arrays: `source` into the tokens, `to` into the batch.
    run = np.arange(n_pairs)
    source = run + np.repeat(begin - pairs_before, pairs)
    to = run + np.repeat(place - pairs_before, pairs)
    inputs.reshape(-1)[to] = tokens[source]
    targets.reshape(-1)[to] = tokens[source + 1]
    number_in_row = np.arange(n_pieces) - first_piece[row]
    documents.reshape(-1)[to] = np.repeat(number_in_row, pairs)
    positions.reshape(-1)[to] = run - np.repeat(pairs_before, pairs)
    if padded:
        # The last token of a document, which is never an input of a pair, stands behind its pairs.
        short = pairs < T
        inputs[row[short], pairs[short]] = tokens[(begin + pairs)[short]]
    return Batch(
        input_ids=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        document_ids=torch.from_numpy(documents),
        position_ids=torch.from_numpy(positions),
        n_targets=n_pairs,
        n_documents=n_pieces,
    )


def assemble(store: Documents, plan: RowPlan, rows: range | Ints, pad_id: int = 0) -> Batch:
    """The Batch of the given rows of a plan; `store` has `.tokens`, the plan's documents end to end."""
    return gather(store.tokens, plan.recipe(rows), pad_id)


class UpdateSchedule(NamedTuple):
    """How the rows of an epoch are dealt out to updates, micro-batches and ranks.

    Update after update takes the next G = batch_size · accumulation_steps · world_size rows. Where `asked_rows` is given, G is
    that number, and accumulation_steps are those that these rows take. The first update begins at `start_row`, which is the
    end of an update, perhaps of one with another G. The last update of the epoch takes what is left, in as few micro-batches
    as hold it; a rank may have a short or an empty slice there. Updates are numbered within the epoch, those before start_row
    included.

    Rows are dealt like cards, batch_size at a time, first round the ranks and then to the next micro-batch. So the ranks
    get rows of about the same number at the end of an epoch too. 11 rows with batch_size 2, accumulation_steps 2 and
    world_size 2:

        update 0   micro-batch 0   rank 0: rows 0 1   rank 1: rows 2 3
                   micro-batch 1   rank 0: rows 4 5   rank 1: rows 6 7
        update 1   micro-batch 0   rank 0: rows 8 9   rank 1: row 10

    Which rows an update has depends on G alone. So another number of ranks with the same G trains the same updates.
    """

    n_rows: int
    batch_size: int
    accumulation_steps: int = 1
    world_size: int = 1
    start_row: int = 0
    # The rows of an update where the user says them; 0: they follow from the numbers above.
    asked_rows: int = 0

    @property
    def rows_of_update(self) -> int:
        """Of all ranks: G above."""
        return self.asked_rows or self.batch_size * self.accumulation_steps * self.world_size

    @property
    def first_update(self) -> int:
        """The number of the update that begins at start_row."""
        return math.ceil(self.start_row / self.rows_of_update)

    @property
    def n_updates(self) -> int:
        """Updates of the epoch, those before start_row included."""
        rows_left = self.n_rows - self.start_row
        return self.first_update + math.ceil(rows_left / self.rows_of_update)

    @property
    def n_steps(self) -> int:
        """Micro-batches (of one rank) of the epoch, those before start_row included."""
        # From start_row on: full updates, and the rows of a last one, which may have fewer micro-batches.
        full, rest = divmod(self.n_rows - self.start_row, self.rows_of_update)
        in_the_last = math.ceil(rest / (self.batch_size * self.world_size))
        return (self.first_update + full) * self.accumulation_steps + in_the_last

    def rows(self, update: int) -> tuple[int, int]:
        """The global rows (lo, hi) of an update."""
        lo = self.start_row + (update - self.first_update) * self.rows_of_update
        return lo, min(lo + self.rows_of_update, self.n_rows)

    def micro_batches(self, update: int) -> int:
        """Micro-batches of an update, the same number on every rank."""
        lo, hi = self.rows(update)
        return math.ceil((hi - lo) / (self.batch_size * self.world_size))

    def slices(self, update: int, rank: int) -> Iterator[tuple[int, int]]:
        """The rows (lo, hi) of each micro-batch of an update on one rank; empty where lo == hi."""
        lo, hi = self.rows(update)
        for micro in range(self.micro_batches(update)):
            at = lo + (micro * self.world_size + rank) * self.batch_size
            yield min(at, hi), min(at + self.batch_size, hi)

    def steps(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """(update, micro-batch within it, lo, hi) from start_row to the end of the epoch."""
        for update in range(self.first_update, self.n_updates):
            for micro, (lo, hi) in enumerate(self.slices(update, rank)):
                yield update, micro, lo, hi


class Assembler:
    """Turns recipes into batches, in worker processes too.

    It holds the store alone. A plan takes some bytes for each document and is another one in each epoch; the recipe that
    goes to a worker has the few numbers of it that one batch needs. A store is a mapped file, which every process opens by
    itself.
    """

    def __init__(self, store: Documents, pad_id: int = 0, n_rows: int = 0, only: OnlySome | None = None) -> None:
        """n_rows: batches of fewer rows are filled up to that many, see `gather`. only: leaves some targets of a batch."""
        self.store = store
        self.pad_id = pad_id
        self.n_rows = n_rows
        self.only = only

    def __getitem__(self, what: Recipe) -> Batch:
        batch = gather(self.store.tokens, what, self.pad_id, max(self.n_rows, len(what.per_row)))
        return batch if self.only is None else self.only(batch)


class HasRecipes(Protocol[RecipeT_co]):
    """A plan, as far as a loader asks: what goes to the process that makes a batch."""

    def recipe(self, rows: range) -> RecipeT_co: ...


class Loader(Generic[RecipeT, BatchT]):
    """Gives one rank its batches, epoch after epoch. Its worker processes live from the first epoch until `close`."""

    def __init__(
        self,
        assembler: MakesBatches[RecipeT, BatchT],
        rank: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        """assembler[plan.recipe(rows)] is the batch of some rows of a plan, made here or in a worker process.

        The batches do not depend on num_workers, and torch's global random numbers are left alone.
        """
        self.assembler = assembler
        self.rank = rank
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        # Why the batches end too early, as soon as that is known; the trainer asks with every update.
        self.failure: LoaderError | None = None
        self._pool: WorkerPool[RecipeT, BatchT] | None = None

    def updates(self, plan: HasRecipes[RecipeT], schedule: UpdateSchedule) -> Iterator[tuple[int, list[BatchT | None]]]:
        """Yields (number of an update, its batches) from `schedule.start_row` on; None in place of an empty batch.

        An update begins when all of its batches are here, so that an error never leaves one half done: LoaderError
        comes between two updates. Where other ranks take part it is known in `failure` some updates before, so that
        all of them can stop together.
        """
        updates_ahead = UPDATES_AHEAD if schedule.world_size > 1 else 0
        numbers = iter(range(schedule.first_update, schedule.n_updates))
        # made when they are asked for
        recipes = (plan.recipe(range(lo, hi)) for _, _, lo, hi in schedule.steps(self.rank) if lo < hi)
        batches = self._batches(recipes, schedule.accumulation_steps)
        # Updates whose batches are here, the next one first. One is taken only while `updates_ahead` more lie behind it. So
        # after a failure this rank can still do as many as the other ranks begin before they hear of it.
        ready: deque[tuple[int, list[BatchT | None]]] = deque()
        while True:
            while len(ready) <= updates_ahead and self.failure is None:
                update = next(numbers, None)
                if update is None:
                    break
                slices = schedule.slices(update, self.rank)
                try:
                    # The recipes leave the empty slices out too, so the next batch is the one of this slice.
                    ready.append((update, [next(batches) if lo < hi else None for lo, hi in slices]))
                except LoaderError as error:
                    self.failure = error
            if not ready:
                break
            yield ready.popleft()
        if self.failure is not None:
            raise self.failure

    def _batches(self, recipes: Iterator[RecipeT], per_update: int) -> Iterator[BatchT]:
        """The batches of the recipes, made here or by the workers."""
        if self.num_workers:
            if self._pool is None:
                self._pool = WorkerPool(self.assembler, self.num_workers, self.pin_memory, per_update)
            yield from self._pool.batches(recipes)
            return
        for recipe in recipes:
            batch = assemble_or_explain(self.assembler, recipe)
            yield batch.pin_memory() if self.pin_memory else batch

    def close(self) -> None:
        """End the worker processes. Further updates start new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def make_loader(
    assembler: MakesBatches[RecipeT, BatchT],
    plan: HasRecipes[RecipeT],
    schedule: UpdateSchedule,
    rank: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[tuple[int, int, BatchT | None]]:
    """Yields (update, micro-batch within it, batch) of one epoch. Worker processes end with the iterator."""
    loader = Loader(assembler, rank, num_workers, pin_memory)
    try:
        for update, batches in loader.updates(plan, schedule):
            for micro_batch, batch in enumerate(batches):
                yield update, micro_batch, batch
    finally:
        loader.close()

"""From row numbers to tensors: who trains which rows when, the batches themselves, and the processes that make them.

Shapes. R: rows of a batch, P: its pieces, T: positions of a row.
"""

import math
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from common.processes import WorkerLost, Workers
from dataset.packing import Recipe
from dataset.store.format import Documents
from model.loss import IGNORE

# Updates whose batches are ready beyond the one that is computed. When a rank's loader fails, the others learn of it with
# its next update, on CUDA one later. Until then it must still have batches to take part with.
UPDATES_AHEAD = 2

# batches that each loader process makes before they are asked for, beside those of an update, which are taken at once
BATCHES_AHEAD = 4

# A NamedTuple of tensors and numbers. That its constructor takes its own parts is more than a type can say: hence the Any.
BatchT = TypeVar("BatchT", bound=tuple[Any, ...])


def with_tensors(batch: BatchT, change: Callable[[torch.Tensor], Any]) -> BatchT:
    """A batch with something else in the place of each tensor."""
    # The type of the batch is kept: `tuple` would lose the names of its parts.
    return type(batch)(*(change(part) if isinstance(part, torch.Tensor) else part for part in batch))


def to_device(batch: BatchT, device: torch.device | str) -> BatchT:
    """A batch with its tensors on `device`."""
    # There the host need not wait for a copy from pinned memory.
    on_cuda = torch.device(device).type == "cuda"
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=on_cuda))


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


OnlySome = Callable[[Batch], Batch]


class Assembler:
    """assembler[recipe] is the Batch of a Recipe, in worker processes too.

    It holds the store alone. A plan takes some bytes for each document and is another one in each epoch; the recipe that
    goes to a worker has the few numbers of it that one batch needs. A store is a mapped file, which every process opens by
    itself.

    n_rows: batches of fewer rows are filled up with empty ones to that many, so that all have one shape. They change no
    count, and no sum over targets or documents. only: leaves some targets of a batch.
    """

    def __init__(self, store: Documents, pad_id: int = 0, n_rows: int = 0, only: OnlySome | None = None) -> None:
        self.store = store
        self.pad_id = pad_id
        self.n_rows = n_rows
        self.only = only

    def __getitem__(self, recipe: Recipe) -> Batch:
        # There is no loop over the pieces. The pairs of all pieces, one after the other, are numbered from 0; for each of them
        # two index arrays say from where in `tokens` it comes and to where in the flat batch it goes. Within a piece both go
        # up by one, so each is the running number plus a shift of the piece. The test has the loop.
        per_row, begin, pairs, T, padded = recipe
        tokens = self.store.tokens
        R = max(self.n_rows, len(per_row))
        # What no piece overwrites below stays as padding.
        inputs = np.full((R, T), self.pad_id, dtype=np.int64)
        targets = np.full((R, T), IGNORE, dtype=np.int64)
        documents = np.full((R, T), -1, dtype=np.int64)
        positions = np.zeros((R, T), dtype=np.int64)

        n_pieces = len(pairs)
        n_pairs = int(pairs.sum())
        # each piece's row, and how many pairs the pieces before it have
        row = np.repeat(np.arange(len(per_row)), per_row)
        pairs_before = np.cumsum(pairs) - pairs
        # each row's first piece, and how many pairs the rows before it have
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
        batch = Batch(
            input_ids=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            document_ids=torch.from_numpy(documents),
            position_ids=torch.from_numpy(positions),
            n_targets=n_pairs,
            n_documents=n_pieces,
        )
        return batch if self.only is None else self.only(batch)


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
        """G above, over all ranks."""
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


# ------------------------------------------------------------------------------------------ the processes


class MakesBatches(Protocol):
    """An assembler: makes the batch, a NamedTuple, of a recipe. It is pickled to each loader process where these are not forked."""

    def __getitem__(self, recipe: Any, /) -> Any: ...


class LoaderError(RuntimeError):
    """The batches cannot go on: one line that says why. is_fault_of_data: what was tokenised has to be mended."""

    def __init__(self, message: str, is_fault_of_data: bool = False) -> None:
        super().__init__(message)
        self.is_fault_of_data = is_fault_of_data


def assembled(assembler: MakesBatches, recipe: Any) -> Any:
    """The batch of a recipe. Errors: LoaderError."""
    try:
        return assembler[recipe]
    except MemoryError as error:
        raise LoaderError(f"no memory is left to assemble a batch ({error})") from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise LoaderError(
            f"a batch cannot be assembled ({type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}): what "
            "was tokenised may be damaged; delete the folder .token_store beside the data, or that of --cache_dir, and it "
            "is made anew",
            is_fault_of_data=True,
        ) from error


def assembled_arrays(assembler: MakesBatches, recipe: Any) -> Any:
    """The batch of a recipe with numpy arrays in the place of its tensors: between processes these go through a pipe, where tensors
    would go through shared memory, of which some machines have little. Errors: LoaderError."""
    return with_tensors(assembled(assembler, recipe), torch.Tensor.numpy)


class Loader:
    """Gives one rank its batches, epoch after epoch. Its processes live from the first epoch until `close`.

    assembler[recipe(rows)] is the batch of some rows of a plan, made here or, with num_workers, in a pool of processes. The
    batches do not depend on num_workers, and torch's global random numbers are left alone.
    pin_memory: put them into memory that a GPU fetches from by itself.
    """

    def __init__(
        self,
        assembler: MakesBatches,
        rank: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.assembler = assembler
        self.rank = rank
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        # Why the batches end too early, as soon as that is known; the trainer asks with every update.
        self.failure: LoaderError | None = None
        self._workers: Workers | None = None

    def updates(self, recipe: Callable[[range], Any], schedule: UpdateSchedule) -> Iterator[tuple[int, list[Any]]]:
        """Yields (number of an update, its batches) from `schedule.start_row` on; None in place of an empty batch.
        recipe: of a plan.

        An update begins when all of its batches are here, so that an error never leaves one half done: LoaderError
        comes between two updates. Where other ranks take part it is known in `failure` some updates before, so that
        all of them can stop together.
        """
        updates_ahead = UPDATES_AHEAD if schedule.world_size > 1 else 0
        numbers = iter(range(schedule.first_update, schedule.n_updates))
        # made when they are asked for
        recipes = (
            recipe(range(lo, hi))
            for update in range(schedule.first_update, schedule.n_updates)
            for lo, hi in schedule.slices(update, self.rank)
            if lo < hi
        )
        if self.num_workers:
            batches = self._from_processes(recipes, schedule.accumulation_steps)
        else:
            batches = (assembled(self.assembler, one) for one in recipes)
        # Updates whose batches are here, the next one first. One is taken only while `updates_ahead` more lie behind it. So
        # after a failure this rank can still do as many as the other ranks begin before they hear of it.
        ready: deque[tuple[int, list[Any]]] = deque()
        while True:
            while len(ready) <= updates_ahead and self.failure is None:
                update = next(numbers, None)
                if update is None:
                    break
                slices = schedule.slices(update, self.rank)
                try:
                    # The recipes leave the empty slices out too, so the next batch is the one of this slice.
                    ready.append((update, [self._pinned(next(batches)) if lo < hi else None for lo, hi in slices]))
                except LoaderError as error:
                    self.failure = error
            if not ready:
                break
            yield ready.popleft()
        if self.failure is not None:
            raise self.failure

    def _pinned(self, batch: Any) -> Any:
        return with_tensors(batch, torch.Tensor.pin_memory) if self.pin_memory else batch

    def _from_processes(self, recipes: Iterator[Any], per_update: int) -> Iterator[Any]:
        """The batches of the recipes, made in processes, which are started for the first ones. Errors: LoaderError."""
        try:
            if self._workers is None:
                one_thread = partial(torch.set_num_threads, 1)
                self._workers = Workers(self.num_workers, partial(assembled_arrays, self.assembler), one_thread)
            for arrays in self._workers.results(recipes, ahead=BATCHES_AHEAD * self.num_workers + per_update):
                yield type(arrays)(
                    *(torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in arrays)
                )
        except WorkerLost as lost:
            raise LoaderError(f"the loader's {lost}; --num_workers 0 does without processes") from lost

    def close(self) -> None:
        """End the processes at once: they hold nothing that would be lost. Further updates start new ones."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

"""From row numbers to tensors: which rank trains which rows, the batches, and the processes that build them.

Shapes. R: rows of a batch, T: positions of a row.
"""

import math
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from common.errors import LoaderError
from common.processes import WorkerDied, Workers
from dataset.packing import Recipe
from dataset.store.token_store import Documents
from model.loss import IGNORE

# Updates prefetched beyond the current one. When a rank's loader fails, the others learn of it with its next update, on
# CUDA one later. Until then it needs batches to take part.
UPDATES_AHEAD = 2

# batches prefetched per loader process, besides those of an update, which are taken at once
BATCHES_AHEAD = 4

# A NamedTuple of tensors and numbers. Any: types cannot say that its constructor takes its own fields.
BatchT = TypeVar("BatchT", bound=tuple[Any, ...])


def map_tensors(batch: BatchT, change: Callable[[Any], Any]) -> BatchT:
    """A batch with `change` applied to each tensor, or array in place of one."""
    # Keeps the type of the batch: `tuple` would lose the field names.
    return type(batch)(*(change(part) if isinstance(part, torch.Tensor | np.ndarray) else part for part in batch))


def to_device(batch: BatchT, device: torch.device | str) -> BatchT:
    """A batch with its tensors on `device`."""
    # On CUDA the host need not wait for a copy from pinned memory.
    on_cuda = torch.device(device).type == "cuda"
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=on_cuda))


class Batch(NamedTuple):
    """int64 tensors [R, T] and two counts.

    Positions without a token: input 0, target -100, document -1, position 0. In padded rows a document's last
    token follows its pairs as in PretrainDataset; it is an input without a target and counts as padding (document -1).
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    # 0, 1, ... within a row.
    document_ids: torch.Tensor
    # Restart with each document.
    position_ids: torch.Tensor
    n_targets: int
    # Pieces of documents: a document split over rows counts in each of them, as in the statistics of experts.
    n_documents: int


TargetFilter = Callable[[Batch], Batch]


class Assembler:
    """assembler[recipe] is the Batch of a Recipe, in worker processes too.

    It holds only the store, a mapped file that each process opens itself. A plan takes some bytes per document and
    changes with each epoch; workers get recipes instead, the few numbers of the plan that one batch needs.

    n_rows: batches of fewer rows are padded with empty ones to this number, so that all have one shape. These change no
    count, and no sum over targets or documents. target_filter: masks some targets of a batch.
    """

    def __init__(self, store: Documents, n_rows: int = 0, target_filter: TargetFilter | None = None) -> None:
        self.store = store
        self.n_rows = n_rows
        self.target_filter = target_filter

    def __getitem__(self, recipe: Recipe) -> Batch:
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
        batch = Batch(
            input_ids=torch.from_numpy(inputs),
            targets=torch.from_numpy(targets),
            document_ids=torch.from_numpy(documents),
            position_ids=torch.from_numpy(positions),
            n_targets=int(recipe.pairs.sum()),
            n_documents=len(recipe.pairs),
        )
        return batch if self.target_filter is None else self.target_filter(batch)


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
    # rows of an update, over all ranks
    update_rows: int
    # rows of a micro-batch on one rank
    micro_rows: int
    world_size: int = 1
    start_row: int = 0

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

    def micro_batches(self, rows: int) -> int:
        """Micro-batches of an update of so many rows, the same number on every rank."""
        return math.ceil(rows / (self.micro_rows * self.world_size))

    def rows(self, update: int) -> tuple[int, int]:
        """The global rows (lo, hi) of an update."""
        lo = self.start_row + (update - self.first_update) * self.update_rows
        return lo, min(lo + self.update_rows, self.n_rows)

    def slices(self, update: int, rank: int) -> Iterator[tuple[int, int]]:
        """The rows (lo, hi) of each micro-batch of an update on one rank; empty if lo == hi."""
        lo, hi = self.rows(update)
        for micro in range(self.micro_batches(hi - lo)):
            at = lo + (micro * self.world_size + rank) * self.micro_rows
            yield min(at, hi), min(at + self.micro_rows, hi)


# ------------------------------------------------------------------------------------------ the processes


class MakesBatches(Protocol):
    """An assembler: builds a batch, a NamedTuple, from a recipe. Pickled to each loader process unless these are forked."""

    def __getitem__(self, recipe: Any, /) -> Any: ...


def assembled(assembler: MakesBatches, recipe: Any) -> Any:
    """The batch of a recipe. Errors: LoaderError."""
    try:
        return assembler[recipe]
    except MemoryError as error:
        raise LoaderError(f"no memory is left to assemble a batch ({error})") from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise LoaderError(
            f"a batch cannot be assembled ({type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}: {error}): the "
            "tokenised data may be damaged; delete the folder .token_store beside the data, or that of --cache_dir, to "
            "rebuild it",
            is_data_fault=True,
        ) from error


def assembled_arrays(assembler: MakesBatches, recipe: Any) -> Any:
    """The batch of a recipe with numpy arrays instead of tensors: between processes arrays go through a pipe, tensors
    through shared memory, which is scarce on some machines. Errors: LoaderError."""
    return map_tensors(assembled(assembler, recipe), torch.Tensor.numpy)


class Loader:
    """Gives one rank its batches, epoch after epoch. Its processes live from the first epoch until `close`.

    assembler[recipe(rows)] is the batch of some rows of a plan, built here or, with num_workers, in a pool of
    processes. The batches do not depend on num_workers, and torch's global random state is left alone.
    pin_memory: put them into pinned memory, from which a GPU copies asynchronously.
    """

    def __init__(self, assembler: MakesBatches, rank: int = 0, num_workers: int = 0, pin_memory: bool = False) -> None:
        self.assembler = assembler
        self.rank = rank
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        # Why the batches end early, once known; the trainer checks it with every update.
        self.failure: LoaderError | None = None
        self._workers: Workers | None = None

    def updates(self, recipe: Callable[[range], Any], schedule: UpdateSchedule) -> Iterator[tuple[int, list[Any]]]:
        """Yields (update number, its batches) from `schedule.start_row` on; None in place of an empty batch.
        recipe: the method of a plan.

        An update starts once all of its batches are ready, so that LoaderError comes between two updates and never leaves
        one half done. With several ranks `failure` is set some updates earlier, so that all of them can stop together.
        """
        assembled_updates = self._assembled_updates(recipe, schedule)
        # An update is taken only while `updates_ahead` more are ready, so after a failure this rank can still join the
        # updates that other ranks start before they learn of it.
        updates_ahead = UPDATES_AHEAD if schedule.world_size > 1 else 0
        ready = deque(islice(assembled_updates, updates_ahead))
        for update in assembled_updates:
            ready.append(update)
            yield ready.popleft()
        yield from ready
        if self.failure is not None:
            raise self.failure

    def _assembled_updates(
        self, recipe: Callable[[range], Any], schedule: UpdateSchedule
    ) -> Iterator[tuple[int, list[Any]]]:
        """As `updates`, but ends at a LoaderError, which is then in `failure`."""
        numbers = range(schedule.first_update, schedule.n_updates)
        # made lazily
        recipes = (
            recipe(range(lo, hi)) for update in numbers for lo, hi in schedule.slices(update, self.rank) if lo < hi
        )
        if self.num_workers:
            batches = self._from_processes(recipes, schedule.micro_batches(schedule.update_rows))
        else:
            batches = (assembled(self.assembler, of_batch) for of_batch in recipes)
        if self.pin_memory:
            batches = (map_tensors(batch, torch.Tensor.pin_memory) for batch in batches)
        for update in numbers:
            try:
                # The recipes skip empty slices too, so the next batch belongs to this slice.
                of_update = [next(batches) if lo < hi else None for lo, hi in schedule.slices(update, self.rank)]
            except LoaderError as error:
                self.failure = error
                return
            yield update, of_update

    def _from_processes(self, recipes: Iterator[Any], per_update: int) -> Iterator[Any]:
        """The batches of the recipes, built in processes, which start lazily. Errors: LoaderError."""
        try:
            if self._workers is None:
                one_thread = partial(torch.set_num_threads, 1)
                self._workers = Workers(self.num_workers, partial(assembled_arrays, self.assembler), one_thread)
            for arrays in self._workers.results(recipes, ahead=BATCHES_AHEAD * self.num_workers + per_update):
                yield map_tensors(arrays, torch.from_numpy)
        except WorkerDied as lost:
            raise LoaderError(
                f"the loader's {lost}; --num_workers 0 does without processes, and a script of your own needs "
                "`if __name__ == '__main__':`"
            ) from lost

    def close(self) -> None:
        """End the processes at once: they hold no state. Further updates start new ones."""
        if self._workers is not None:
            self._workers.close()
        self._workers = None

"""The batches of a rank as tensors, and the processes that build them."""

import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from common.errors import LoaderError
from common.processes import WorkerDied, Workers
from dataset.batches import UpdateSchedule

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
        """Iterates over (update number, its batches) from `schedule.start_row` on; None in place of an empty batch.
        recipe: the method of a plan.

        An update starts once all of its batches are ready, so that LoaderError comes between two updates and never leaves
        one half done. With several ranks `failure` is set some updates earlier, so that all of them can stop together; that of
        the first update is set at once.
        """
        assembled_updates = self._assembled_updates(recipe, schedule)
        # An update is taken only while `updates_ahead` more are ready, so after a failure this rank can still join the
        # updates that other ranks start before they learn of it.
        updates_ahead = UPDATES_AHEAD if schedule.world_size > 1 else 0
        ready = deque(islice(assembled_updates, 1 + updates_ahead))

        def in_order() -> Iterator[tuple[int, list[Any]]]:
            while ready:
                yield ready.popleft()
                ready.extend(islice(assembled_updates, 1))
            if self.failure is not None:
                raise self.failure

        return in_order()

    def _assembled_updates(
        self, recipe: Callable[[range], Any], schedule: UpdateSchedule
    ) -> Iterator[tuple[int, list[Any]]]:
        """As `updates`, but ends at a LoaderError, which is then in `failure`."""
        numbers = range(schedule.first_update, schedule.n_updates)
        # made lazily
        slices = chain.from_iterable(schedule.slices(update, self.rank) for update in numbers)
        recipes = (recipe(range(lo, hi)) for lo, hi in slices if lo < hi)
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

"""Worker processes that turn recipes into batches: torch's DataLoader, and how their errors and deaths reach the trainer.

A recipe goes to a process in the place of an index, and the batch comes back as numpy arrays through a pipe, so a small
/dev/shm or a low limit of open files is enough. The batches come in the order of the recipes, however many processes there
are. What is wrong with a batch comes in its place as a LoaderError.
"""

import atexit
import contextlib
import math
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from common.errors import DataError
from common.processes import end_with, id_for_children, ignore_stop_signals

# batches that each worker makes before they are asked for, beside those that are taken at once
BATCHES_AHEAD = 4


class Loadable(Protocol):
    """What is sent from a worker: a NamedTuple of CPU tensors and numbers."""

    def __iter__(self) -> Iterator[object]: ...

    def to(self, device: torch.device | str) -> Self:
        """The same with its tensors on a device."""

    def pin_memory(self) -> Self:
        """The same with its tensors in memory that a GPU can fetch from by itself."""


RecipeT = TypeVar("RecipeT")
BatchT = TypeVar("BatchT", bound=Loadable)
RecipeT_contra = TypeVar("RecipeT_contra", contravariant=True)
BatchT_co = TypeVar("BatchT_co", bound=Loadable, covariant=True)


class MakesBatches(Protocol[RecipeT_contra, BatchT_co]):
    """An assembler: makes the batch of a recipe. It is pickled to each worker where these are not forked."""

    def __getitem__(self, recipe: RecipeT_contra, /) -> BatchT_co: ...


class LoaderError(RuntimeError):
    """The batches cannot go on: one line that says why. `is_fault_of_data`: what was tokenised has to be mended."""

    def __init__(self, message: str, is_fault_of_data: bool = False) -> None:
        super().__init__(message)
        self.is_fault_of_data = is_fault_of_data

    def __reduce__(self) -> tuple[type["LoaderError"], tuple[str, bool]]:
        # By default an exception is pickled with its message alone.
        return LoaderError, (str(self), self.is_fault_of_data)


def assemble_or_explain(assembler: MakesBatches[RecipeT, BatchT], recipe: RecipeT) -> BatchT:
    """assembler[recipe]; whatever goes wrong in there becomes a LoaderError."""
    try:
        return assembler[recipe]
    except MemoryError as error:
        raise LoaderError(f"no memory is left to assemble a batch ({error})") from error
    except DataError as error:
        raise LoaderError(str(error), is_fault_of_data=True) from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise LoaderError(
            f"a batch cannot be assembled ({type(error).__name__} in {where}: {error}): what was tokenised may be "
            "damaged; delete the folder .token_store beside the data, or that of --cache_dir, and it is made anew",
            is_fault_of_data=True,
        ) from error


class PackedBatch(Generic[BatchT]):
    """A batch with numpy arrays in the place of its tensors, which pickle would put into shared memory."""

    def __init__(self, batch: BatchT) -> None:
        self.kind: Callable[..., BatchT] = type(batch)
        self.parts = [part.numpy() if isinstance(part, torch.Tensor) else part for part in batch]

    def unpacked(self) -> BatchT:
        return self.kind(*(torch.from_numpy(part) if hasattr(part, "dtype") else part for part in self.parts))

    def pin_memory(self) -> BatchT:
        """For the thread of DataLoader that pins what has come."""
        return self.unpacked().pin_memory()


class _Batches(Generic[RecipeT, BatchT]):
    """The data set of DataLoader: a recipe in the place of an index."""

    def __init__(self, assembler: MakesBatches[RecipeT, BatchT]) -> None:
        self.assembler = assembler

    def __getitem__(self, recipe: RecipeT) -> PackedBatch[BatchT] | LoaderError:
        try:
            return PackedBatch(assemble_or_explain(self.assembler, recipe))
        except LoaderError as error:
            return error


class WorkerPool(Generic[RecipeT, BatchT]):
    """Processes that live until `close`, from epoch to epoch. `batches` gives what they make."""

    def __init__(
        self, assembler: MakesBatches[RecipeT, BatchT], num_workers: int, pin_memory: bool = False, at_once: int = 0
    ) -> None:
        """pin_memory: put the batches into memory that a GPU can fetch from by itself. at_once: how many batches the caller
        takes before it works for a while; as many are made meanwhile."""
        self._recipes: Iterable[RecipeT] = ()
        self._workers: list[multiprocessing.process.BaseProcess] = []
        # Whether this process waits for a batch.
        self._waits = False
        self._loader: DataLoader[Any] | None = DataLoader(
            cast(Any, _Batches(assembler)),
            batch_size=None,
            sampler=self,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=BATCHES_AHEAD + math.ceil(at_once / num_workers),
            persistent_workers=True,
            pin_memory=pin_memory,
            worker_init_fn=partial(_begin, id_for_children()),
            # torch's global random numbers are left alone.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[RecipeT]:
        return iter(self._recipes)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("the recipes stay in this process")

    def batches(self, recipes: Iterable[RecipeT]) -> Iterator[BatchT]:
        """The batches of the recipes in their order. Errors: LoaderError after those that were made before it."""
        assert self._loader is not None
        self._recipes = recipes
        try:
            answers = self._started(self._loader)
            while (answer := self._next(answers)) is not None:
                if isinstance(answer, LoaderError):
                    raise answer
                yield answer.unpacked() if isinstance(answer, PackedBatch) else answer
        except (OSError, RuntimeError) as error:
            if isinstance(error, LoaderError):
                raise
            raise self._explained(error) from error

    def _started(self, loader: "DataLoader[Any]") -> Iterator[Any]:
        """The answers to the recipes; the first call starts the processes."""
        if self._workers:
            return iter(loader)
        others = set(multiprocessing.active_children())
        try:
            return iter(loader)
        finally:
            self._workers = [child for child in multiprocessing.active_children() if child not in others]
            # torch would raise the death of a process in the middle of whatever the trainer does.
            if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, self._notice)
            # Behind torch's own, so that it comes first: the workers ignore that they are asked to end.
            atexit.register(self.close)

    def _next(self, answers: Iterator[Any]) -> Any:
        """The next answer, None at the end. Errors: RuntimeError where a process is gone."""
        # One that was killed while it sent a batch leaves half of it in the pipe, and the wait for the rest has no end: so the
        # signal of its death ends the wait, and no wait begins after it.
        self._waits = True
        try:
            if not all(worker.is_alive() for worker in self._workers):
                raise RuntimeError("a process is gone")
            return next(answers, None)
        finally:
            self._waits = False

    def _notice(self, number: int, frame: object) -> None:
        """A process has ended, of these or of others."""
        if self._waits and not all(worker.is_alive() for worker in self._workers):
            raise RuntimeError("a process is gone")

    def _explained(self, error: Exception) -> LoaderError:
        """How a process ended that should still be there, or why none could be started."""
        for worker in self._workers:
            worker.join(timeout=0.1)
            code = worker.exitcode
            if code is None:
                continue
            how = f"ended with code {code}"
            if code < 0:
                with contextlib.suppress(ValueError):
                    how = f"was killed by {signal.Signals(-code).name}"
                if -code == getattr(signal, "SIGKILL", 9):
                    how += " (out of memory?)"
            return LoaderError(f"a loader process (pid {worker.pid}) {how}; --num_workers 0 does without one")
        reason = " ".join(str(error).split())[:200]
        return LoaderError(f"the loader's processes failed ({reason}): raise the machine's limit, or --num_workers 0")

    def close(self) -> None:
        """End the workers at once: they hold nothing that would be lost."""
        atexit.unregister(self.close)
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join()
        if self._workers and hasattr(signal, "SIGCHLD") and signal.getsignal(signal.SIGCHLD) == self._notice:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._workers = []
        # torch ends its threads and pipes with the last reference.
        self._loader = None


def _as_it_is(answer: Any) -> Any:
    """In the place of torch's, which would make tensors of the arrays."""
    return answer


# ------------------------------------------------------------------------------------------ in the worker


def _begin(parent: int, number: int) -> None:
    """A worker's first act. It ends with the trainer's process; torch lets it compute with one thread."""
    ignore_stop_signals()
    for name in ("SIGSEGV", "SIGBUS", "SIGFPE"):
        # torch's handlers would write lines of their own.
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    end_with(parent)

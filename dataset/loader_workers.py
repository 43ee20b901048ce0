"""Worker processes that turn recipes into batches, and how their errors and deaths reach the trainer.

Each worker has a pipe of its own: recipes go in, batches come out as plain bytes. Nothing lies in shared memory and no
open files change hands, so a small /dev/shm or a low limit of open files is enough. A thread of the trainer's process
takes what comes, so that neither side ever waits for the other one to read. When a worker dies its pipe ends, which
the thread sees at once.

A *task* is one batch to make. Tasks are numbered through the life of the pool, epoch after epoch. Worker i gets the tasks
i, i + n, i + 2 n and so on, and the trainer takes their answers in the order of their numbers. So the batches come in one
order, however many workers there are and whichever of them is slow. An answer is the batch, or the LoaderError that making
it led to.

    trainer's thread      batches() --_send--> pipe -----------> worker: _work
                          _take()  <-_arrived- thread: _receive <-- pipe
"""

import atexit
import contextlib
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar, cast

import numpy as np
import torch

from common.errors import DataError
from common.processes import end_with, id_for_children

# Batches that each worker makes before they are asked for, beside those that are taken at once.
BATCHES_AHEAD = 4
# A worker that gives no batch for so long is taken for stopped.
SILENCE_S = 300


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


# A batch on its way through a pipe: what puts it together again, and its parts.
Packed = tuple[Callable[..., BatchT], list[object]]


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


class WorkerPool(Generic[RecipeT, BatchT]):
    """Processes that live until `close`, from epoch to epoch. `batches` gives what they make."""

    def __init__(self, assembler: MakesBatches[RecipeT, BatchT], num_workers: int, pin_memory: bool = False) -> None:
        """pin_memory: put the batches into memory that a GPU can fetch from by itself.

        Errors: LoaderError where the machine starts no more processes.
        """
        # Shared with the thread, under `_changed`: {number of a task: its answer}, what happened to a worker itself, and
        # the first task whose answer is still of use.
        self._changed = threading.Condition()
        self._arrived: dict[int, BatchT | LoaderError] = {}
        self._failure: LoaderError | None = None
        self._oldest_wanted = 0
        self._next_task = 0
        self._device_index = torch.cuda.current_device() if pin_memory else None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._receiver = threading.Thread(target=self._receive, name="loader", daemon=True)
        atexit.register(self.close)
        try:
            for _ in range(num_workers):
                self._start_worker(assembler)
            self._receiver.start()
        except (OSError, RuntimeError) as error:
            # RuntimeError is what a thread that cannot be started raises.
            self.close()
            raise LoaderError(
                f"no process can be started for the loader ({error}): raise the machine's limit, or --num_workers 0"
            ) from error

    def _start_worker(self, assembler: MakesBatches[RecipeT, BatchT]) -> None:
        own_end, worker_end = multiprocessing.Pipe()
        self._connections.append(own_end)
        # Once this process has closed its copy, the pipe ends with the worker.
        with worker_end:
            process = multiprocessing.Process(
                target=_work, args=(worker_end, assembler, id_for_children()), name="loader", daemon=True
            )
            process.start()
            self._processes.append(process)

    def batches(self, recipes: Iterable[RecipeT], at_once: int = 0) -> Iterator[BatchT]:
        """The batches of the recipes in their order. Errors: LoaderError after those that were made before it.

        at_once: how many the caller takes before it works for a while; as many are made meanwhile.
        """
        recipes = iter(recipes)
        # Recipes are sent before their batches are taken, up to this many. Fewer, and the workers would wait while the
        # trainer computes; without a bound, whole epochs of batches would lie in memory. The caller takes `at_once` of
        # them in one go and then computes for a while: so many come on top, or the workers would not keep up with that.
        ahead = at_once + BATCHES_AHEAD * len(self._processes)
        first = self._next_task
        # What an epoch that was broken off has asked for is thrown away.
        with self._changed:
            self._oldest_wanted = first
            self._arrived.clear()
        taken = first
        more = True
        while True:
            while more and self._next_task - taken < ahead:
                try:
                    recipe = next(recipes)
                except StopIteration:
                    more = False
                else:
                    self._send(recipe)
            if taken == self._next_task:
                return
            yield self._take(taken)
            taken += 1

    def _send(self, recipe: RecipeT) -> None:
        """Hand the next task to the worker whose turn it is."""
        connection = self._connections[self._next_task % len(self._connections)]
        # If the worker is gone, `_take` says so when its turn comes.
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps((self._next_task, recipe), protocol=5))
        self._next_task += 1

    def _take(self, task: int) -> BatchT:
        """Wait for the batch of a task. Errors: LoaderError, its own or that of a worker that is gone."""
        silent_s = 0
        with self._changed:
            self._oldest_wanted = task
            # What has come is good, whatever happened to a worker since: so the failure is looked at second.
            while task not in self._arrived:
                if self._failure is not None:
                    raise self._failure
                # Seconds are counted by waking up, not by the clock: a trainer that was stopped (Ctrl-Z) together with its
                # workers has not waited for them.
                if not self._changed.wait(timeout=1):
                    silent_s += 1
                if silent_s >= SILENCE_S:
                    raise LoaderError(
                        f"the loader's processes gave no batch for {SILENCE_S} s (stopped, or the disk does not answer?)"
                    )
            answer = self._arrived.pop(task)
        if isinstance(answer, LoaderError):
            raise answer
        return answer

    def _receive(self) -> None:
        """The thread: takes what the workers send, until all of them are gone."""
        try:
            if self._device_index is not None:
                # A thread begins with the first GPU, whatever the rank's is.
                torch.cuda.set_device(self._device_index)
            # Those that are still there. The pipe of one that is gone ends, and `wait` names it as ready: `recv_bytes` then
            # raises EOFError.
            process_of = dict(zip(self._connections, self._processes, strict=True))
            while process_of:
                for ready in wait(list(process_of)):
                    connection = cast(Connection, ready)
                    try:
                        # Unpickling could run code, but this comes from our own process over a private pipe.
                        task, answer = pickle.loads(connection.recv_bytes())
                    except (EOFError, OSError):
                        self._fail(_end_of(process_of.pop(connection)))
                        continue
                    self._keep(task, answer)
        except BaseException as error:
            # Whatever it is, the trainer must not wait for this thread.
            self._fail(LoaderError(f"the loader's batches cannot be received ({type(error).__name__}: {error})"))

    def _keep(self, task: int, answer: Packed[BatchT] | LoaderError) -> None:
        """Make the answer to a task ready, and let the trainer have it."""
        kept = answer if isinstance(answer, LoaderError) else self._batch_of(answer)
        with self._changed:
            # A worker may still be busy with an epoch that was broken off.
            if task >= self._oldest_wanted:
                self._arrived[task] = kept
            self._changed.notify_all()

    def _batch_of(self, answer: Packed[BatchT]) -> BatchT:
        """The batch that a worker packed. It is pinned here, since pinned memory belongs to one process."""
        batch = _unpack(answer)
        return batch if self._device_index is None else batch.pin_memory()

    def _fail(self, error: LoaderError) -> None:
        """Let the trainer know. The first error counts: the others follow from it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the workers at once: they hold nothing that would be lost."""
        atexit.unregister(self.close)
        # Killed, not asked to end: the workers ignore SIGTERM.
        for process in self._processes:
            process.kill()
        # The thread ends when the last pipe does. It reads from the connections, so these are closed after it.
        if self._receiver.is_alive() and self._receiver is not threading.current_thread():
            self._receiver.join()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []


def _end_of(process: multiprocessing.process.BaseProcess) -> LoaderError:
    """How a worker ended that should still be there."""
    process.join(timeout=10)
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == getattr(signal, "SIGKILL", 9):
                how += " (out of memory?)"
            return LoaderError(f"a loader process (pid {process.pid}) {how}; --num_workers 0 does without one")
    return LoaderError(f"a loader process (pid {process.pid}) ended with code {code}; --num_workers 0 does without one")


# ------------------------------------------------------------------------------------------ in the worker


def _work(connection: Connection, assembler: MakesBatches[RecipeT, BatchT], parent: int) -> None:
    """The worker's life: it ends with the trainer's process."""
    _ignore_stop_signals()
    end_with(parent)
    # The workers share the cores with the trainer, and a batch is made by numpy.
    torch.set_num_threads(1)
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer_gone = trainer.sentinel
    while trainer_gone not in wait([connection, trainer_gone]):
        try:
            # Unpickling could run code, but this comes from the trainer over a private pipe.
            task, recipe = pickle.loads(connection.recv_bytes())
            answer: Packed[BatchT] | LoaderError
            try:
                answer = _pack(assemble_or_explain(assembler, recipe))
            except LoaderError as error:
                answer = error
            connection.send_bytes(pickle.dumps((task, answer), protocol=5))
        except (EOFError, OSError):
            # The trainer is gone.
            return


def _ignore_stop_signals() -> None:
    """Signals to the process group are for the main process: it saves first and ends its workers later."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _pack(batch: BatchT) -> Packed[BatchT]:
    """A batch (a NamedTuple of CPU tensors and numbers) without tensors, which pickle would put into shared memory."""
    parts: list[object] = []
    for part in batch:
        parts.append(part.numpy() if isinstance(part, torch.Tensor) else part)
    return type(batch), parts


def _unpack(packed: Packed[BatchT]) -> BatchT:
    """The batch that `_pack` was given."""
    kind, packed_parts = packed
    parts: list[object] = []
    for part in packed_parts:
        parts.append(torch.from_numpy(part) if isinstance(part, np.ndarray) else part)
    return kind(*parts)

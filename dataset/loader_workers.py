"""Worker processes that turn recipes into batches, and how their errors and deaths reach the trainer.

Each worker has a pipe of its own: recipes go in, batches come out as plain bytes. Nothing lies in shared memory and no
open files change hands, so a small /dev/shm or a low limit of open files is enough. A thread of the trainer's process
takes what comes, so that neither side ever waits for the other one to read. When a worker dies its pipe ends, which
the thread sees at once.
"""

import atexit
import contextlib
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.errors import DataError
from common.processes import end_with, id_for_children

BATCHES_AHEAD = 4  # of each worker, beside those that are taken at once
SILENCE_S = 300  # a worker that gives no batch for so long is taken for stopped


class LoaderError(RuntimeError):
    """The batches cannot go on: one line that says why. `is_fault_of_data`: what was tokenised has to be mended."""

    def __init__(self, message: str, is_fault_of_data: bool = False):
        super().__init__(message)
        self.is_fault_of_data = is_fault_of_data

    def __reduce__(self):
        return LoaderError, (str(self), self.is_fault_of_data)


def assemble_or_explain(assembler: Any, recipe: Any) -> Any:
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


class WorkerPool:
    """Processes that live until `close`, from epoch to epoch. `batches` gives what they make."""

    def __init__(self, assembler: Any, num_workers: int, pin_memory: bool = False):
        """pin_memory: put the batches into memory that a GPU can fetch from by itself.

        Errors: LoaderError where the machine starts no more processes.
        """
        self._arrived: dict[int, Any] = {}  # {number of a task: its batch, or the LoaderError that it led to}
        self._failure: LoaderError | None = None  # what happened to a worker itself
        self._oldest_wanted = 0
        self._next_task = 0
        self._changed = threading.Condition()
        self._device_index = torch.cuda.current_device() if pin_memory else None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._receiver = threading.Thread(target=self._receive, name="loader", daemon=True)
        atexit.register(self.close)
        try:
            for _ in range(num_workers):
                self._start_worker(assembler)
            self._receiver.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: of a thread that cannot be started
            self.close()
            raise LoaderError(
                f"no process can be started for the loader ({error}): raise the machine's limit, or --num_workers 0"
            ) from error

    def _start_worker(self, assembler: Any) -> None:
        own_end, worker_end = multiprocessing.Pipe()
        self._connections.append(own_end)
        # Once this process has closed its copy, the pipe ends with the worker.
        with worker_end:
            process = multiprocessing.Process(
                target=_work, args=(worker_end, assembler, id_for_children()), name="loader", daemon=True
            )
            process.start()
            self._processes.append(process)

    def batches(self, recipes: Iterable[Any], at_once: int = 0) -> Iterator[Any]:
        """The batches of the recipes in their order. Errors: LoaderError after those that were made before it.

        at_once: how many the caller takes before it works for a while; as many are made meanwhile.
        """
        recipes = iter(recipes)
        ahead = at_once + BATCHES_AHEAD * len(self._processes)
        first = self._next_task
        with self._changed:
            self._oldest_wanted = first  # what a broken-off epoch has asked for is thrown away
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

    def _send(self, recipe: Any) -> None:
        connection = self._connections[self._next_task % len(self._connections)]
        with contextlib.suppress(OSError):  # the worker is gone: `_take` says so when its turn comes
            connection.send_bytes(pickle.dumps((self._next_task, recipe), protocol=5))
        self._next_task += 1

    def _take(self, task: int) -> Any:
        silent_s = 0
        with self._changed:
            self._oldest_wanted = task
            while task not in self._arrived:
                if self._failure is not None:
                    raise self._failure
                # Seconds are counted by waking up: a trainer that was stopped with its workers has not waited.
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
                torch.cuda.set_device(self._device_index)  # a thread begins with the first GPU, whatever the rank's is
            process_of = dict(zip(self._connections, self._processes, strict=True))
            while process_of:
                for connection in wait(list(process_of)):
                    try:
                        task, answer = pickle.loads(connection.recv_bytes())  # of our own process, over a private pipe
                    except (EOFError, OSError):
                        self._fail(_end_of(process_of.pop(connection)))
                        continue
                    self._keep(task, answer)
        except BaseException as error:  # whatever it is, the trainer must not wait for this thread
            self._fail(LoaderError(f"the loader's batches cannot be received ({type(error).__name__}: {error})"))

    def _keep(self, task: int, answer: Any) -> None:
        if not isinstance(answer, LoaderError):
            answer = _unpack(answer)
            if self._device_index is not None:
                answer = answer.pin_memory()
        with self._changed:
            if task >= self._oldest_wanted:
                self._arrived[task] = answer
            self._changed.notify_all()

    def _fail(self, error: LoaderError) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the workers at once: they hold nothing that would be lost."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        if self._receiver.is_alive() and self._receiver is not threading.current_thread():
            self._receiver.join()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []


def _end_of(process: multiprocessing.process.BaseProcess) -> LoaderError:
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


def _work(connection: Connection, assembler: Any, parent: int) -> None:
    """The worker's life: it ends with the trainer's process."""
    _ignore_stop_signals()
    end_with(parent)
    torch.set_num_threads(1)
    trainer_gone = multiprocessing.parent_process().sentinel
    while trainer_gone not in wait([connection, trainer_gone]):
        try:
            task, recipe = pickle.loads(connection.recv_bytes())  # of the trainer, over a private pipe
            try:
                answer = _pack(assemble_or_explain(assembler, recipe))
            except LoaderError as error:
                answer = error
            connection.send_bytes(pickle.dumps((task, answer), protocol=5))
        except (EOFError, OSError):  # the trainer is gone
            return


def _ignore_stop_signals() -> None:
    """Signals to the process group are for the main process: it saves first and ends its workers later."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _pack(batch: Any) -> tuple[type, list[Any]]:
    """A batch (a NamedTuple of CPU tensors and numbers) without tensors, which pickle would put into shared memory."""
    return type(batch), [x.numpy() if isinstance(x, torch.Tensor) else x for x in batch]


def _unpack(packed: tuple[type, list[Any]]) -> Any:
    kind, parts = packed
    return kind(*(torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in parts))

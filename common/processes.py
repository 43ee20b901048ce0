"""Processes: how they end (those that must not outlive the one that they work for, and Ctrl-C), a pool of them, environment
variables for a block of code, and how long the command has been running.
"""

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import register_after_fork
from queue import SimpleQueue
from typing import Any

from common.start import STARTED

POLL_S = 0.2
# linux/prctl.h.
PR_SET_PDEATHSIG = 1


def id_for_children() -> int:
    """What a process hands to those that it starts, for their `end_with`."""
    # The kernel takes the end of the thread that started a process for the end of its parent.
    return os.getpid() if threading.current_thread() is threading.main_thread() else 0


def end_with(parent: int) -> None:
    """Let this process be killed as soon as its parent is gone, in the middle of whatever it does.

    parent: the parent's `id_for_children`. On Linux the kernel does it. Elsewhere a thread looks every 0.2 s. 0: nothing
    is done; such a process has to notice by itself that its pipe has no other end.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(1)

    if not parent:
        return
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    elif os.name == "posix" and os.getppid() == parent:
        threading.Thread(target=watch, name="parent", daemon=True).start()
    # A server that forks for others (multiprocessing's) is a parent of its own: the pipe tells there too.
    # Gone before this line.
    if os.getppid() == 1 != parent:
        os._exit(1)


def obey_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again, where a script let it end the process during its imports."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stop_signals() -> list[int]:
    """The signals that ask a run to stop. Windows has no SIGHUP, the others have no SIGBREAK (Ctrl-Break, a closed window)."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
    return [int(getattr(signal, name)) for name in names if hasattr(signal, name)]


def ignore_stop_signals() -> None:
    """Signals to the process group are for the main process: it saves first and ends its workers later."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


# -------------------------------------------------------------------------------------------------- a pool of processes


class WorkerLost(Exception):
    """How a process of a pool has ended, or that none can be started; a part of a line."""


class Workers:
    """A pool of processes that all do `work`. They end with this process, and leave the signals of the terminal to it.

    Each has a pipe of its own, so that its death is the end of its pipe, even in the middle of a result: those of the standard
    library share one, in which the wait for the rest of that result would have no end.
    begin: what each of them does first. Where processes are not forked, both are pickled. Errors: WorkerLost.
    """

    def __init__(self, number: int, work: Callable[[Any], Any], begin: Callable[[], object]) -> None:
        self._processes: list[BaseProcess] = []
        self._free: SimpleQueue[tuple[BaseProcess, Connection]] = SimpleQueue()
        # One thread for each process, which waits for its result
        self._threads = ThreadPoolExecutor(number)
        # multiprocessing joins its processes at exit, and these ignore that they are asked to end.
        atexit.register(self.close)
        try:
            for _ in range(number):
                own_end, other_end = multiprocessing.Pipe()
                # A pipe whose near end lived on in forked processes would not end with this one.
                register_after_fork(own_end, Connection.close)
                process = multiprocessing.Process(target=_serve, args=(other_end, id_for_children(), work, begin))
                process.start()
                other_end.close()
                self._processes.append(process)
                self._free.put((process, own_end))
        except OSError as error:
            self.close()
            raise WorkerLost(f"processes cannot be started ({error}); raise the machine's limit") from error

    def results(self, items: Iterator[Any], ahead: int) -> Iterator[Any]:
        """work(item) of each item, in the order of the items. ahead: how many are given to the processes before they are asked for.

        Errors: those of the work; WorkerLost.
        """
        waiting = deque(self._threads.submit(self._result, item) for item in islice(items, ahead))
        while waiting:
            # Known at once, and not when the results that are here already are used up
            for process in self._processes:
                if not process.is_alive():
                    raise _lost(process)
            yield waiting.popleft().result()
            waiting.extend(self._threads.submit(self._result, item) for item in islice(items, 1))

    def _result(self, item: Any) -> Any:
        process, pipe = self._free.get()
        try:
            pipe.send(item)
            error, result = pipe.recv()
        except (EOFError, OSError) as ended:
            raise _lost(process) from ended
        finally:
            # A dead one too: whoever takes it next learns of it as well.
            self._free.put((process, pipe))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """End the processes at once: they hold nothing that would be lost."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()


def _lost(process: BaseProcess) -> WorkerLost:
    """How a process ended that should still be there."""
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name} (out of memory?)" if code < 0 else f"ended with code {code}"
    return WorkerLost(f"process {process.pid} {how}")


def _serve(pipe: Connection, parent: int, work: Callable[[Any], Any], begin: Callable[[], object]) -> None:
    """What a process of a pool does, until its pipe has no other end."""
    ignore_stop_signals()
    end_with(parent)
    begin()
    answer: tuple[Exception | None, Any]
    # Either error, by what the other process was doing when it ended
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            item = pipe.recv()
            try:
                answer = None, work(item)
            except Exception as error:
                # In the other process its traceback begins anew.
                error.add_note(traceback.format_exc())
                answer = error, None
            pipe.send(answer)


# --------------------------------------------------------------------------------------------------------- environment


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Within the block the environment variable `name` is `value`."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# --------------------------------------------------------------------------- how long the command has been running

# When the command began
_began = STARTED


def count_from_here() -> None:
    """From here on `seconds_since_start` counts: another program, such as a notebook, calls the command as a function."""
    global _began
    _began = time.monotonic()


def seconds_since_start() -> float:
    """How long the command has been running."""
    return time.monotonic() - _began

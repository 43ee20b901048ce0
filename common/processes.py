"""Processes: how they end (those that must not outlive the one that they work for, and Ctrl-C), a pool of them, environment
variables for a block of code, and how long the command has been running.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
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

# How often a wait for a result asks whether the processes are alive
ALIVE_EVERY_S = 1.0


class WorkerLost(Exception):
    """How a process of a pool has ended, or that none can be started; a part of a line."""


class Workers:
    """A pool of processes that all do `work`. They end with this process, and leave the signals of the terminal to it.

    begin: what each of them does first. Where processes are not forked, both are pickled.
    """

    def __init__(self, number: int, work: Callable[[Any], Any], begin: Callable[[], object]) -> None:
        self._others = set(multiprocessing.active_children())
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pool = ProcessPoolExecutor(number, initializer=_begin, initargs=(id_for_children(), work, begin))

    def results(self, items: Iterator[Any], ahead: int) -> Iterator[Any]:
        """work(item) of each item, in the order of the items. ahead: how many are given to the processes before they are asked for.

        Errors: those of the work; WorkerLost.
        """
        waiting = deque(map(self._submit, islice(items, ahead)))
        if not self._processes:
            self._processes = [one for one in multiprocessing.active_children() if one not in self._others]
        while waiting:
            result = self._result(waiting.popleft())
            waiting.extend(map(self._submit, islice(items, 1)))
            yield result

    def _submit(self, item: Any) -> Future[Any]:
        try:
            return self._pool.submit(_do, item)
        except (OSError, RuntimeError) as error:
            raise self._lost(error) from error

    def _result(self, future: Future[Any]) -> Any:
        # Asked again and again: one that was killed while it sent a result leaves half of it in the pipe, and the pool would wait for
        # the rest for ever.
        while all(one.is_alive() for one in self._processes):
            try:
                return future.result(timeout=ALIVE_EVERY_S)
            except TimeoutError:
                if future.done():
                    # an error of the work
                    raise
            except BrokenProcessPool:
                break
        raise self._lost()

    def _lost(self, error: Exception | None = None) -> WorkerLost:
        for one in self._processes:
            one.join(timeout=0.1)
            # The others may end by themselves, with code 0.
            if code := one.exitcode:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                return WorkerLost(f"process {one.pid} {how} (out of memory?)")
        return WorkerLost(f"processes cannot be started ({str(error)[:200]}); raise the machine's limit")

    def close(self) -> None:
        """End the processes at once: they hold nothing that would be lost."""
        for one in self._processes:
            one.kill()
        self._pool.shutdown(cancel_futures=True)


# what a process of a pool does
_work: Callable[[Any], Any] | None = None


def _begin(parent: int, work: Callable[[Any], Any], begin: Callable[[], object]) -> None:
    """The first act of a process of a pool."""
    global _work
    ignore_stop_signals()
    end_with(parent)
    begin()
    _work = work


def _do(item: Any) -> Any:
    assert _work is not None
    return _work(item)


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

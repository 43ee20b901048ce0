"""Processes that end with their parent, signals, a process pool, run time of the command."""

import atexit
import contextlib
import ctypes
import math
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
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common.start import STARTED

# Tests replace it.
SYSTEM_ROOT = Path("/")
# from linux/prctl.h
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """On Linux, kill this process as soon as its parent is gone, whatever it is doing.

    parent: its process id; 0: no-op. On other systems, in children of multiprocessing's fork server, and with 0, the process
    notices the end of its parent only when it next uses its pipe.
    """
    if not parent:
        return
    if sys.platform == "linux" and os.getppid() == parent:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before this line.
    if os.getppid() == 1 != parent:
        os._exit(1)


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the CPU limits of its cgroups, rounded up (Linux)."""
    limits: list[float] = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for folder in cgroups("cpu"):
        # `150000 100000`, microseconds of each period. No limit: `max 100000`, in version 1 a quota of -1
        quota, _, period = text_of_file(folder / "cpu.max").strip().partition(" ")
        quota = quota or text_of_file(folder / "cpu.cfs_quota_us").strip()
        period = period or text_of_file(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return max(1, math.ceil(min(limits)))


def cgroups(controller: str) -> list[Path]:
    """Folders of the process's cgroup and of its ancestors: limits of containers, systemd units and cluster jobs.

    controller: "cpu" or "memory". In version 1, as on RHEL 8, each has folders of its own; in version 2 they share them.
    """
    folders = []
    for line in text_of_file(SYSTEM_ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = SYSTEM_ROOT / "sys/fs/cgroup" / (controller if controllers else "")
        group = Path(path.removeprefix("/"))
        # In a container the path may be the host's, which does not exist here; then the top is the container's own cgroup.
        folders += [top] if ".." in group.parts else [top / group, *(top / around for around in group.parents)]
    return folders


def text_of_file(path: Path) -> str:
    """The content of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def stop_signals() -> list[int]:
    """The signals that ask a run to stop. Windows has no SIGHUP, the others have no SIGBREAK (Ctrl-Break, a closed window)."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK")
    return [int(getattr(signal, name)) for name in names if hasattr(signal, name)]


def ignore_stop_signals() -> None:
    """Leave signals to the process group to the main process: it saves first and ends its workers later."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block the signals of a run: for good in processes started inside, until the end of the block in this one.

    Slurm sends them to all processes. SIGUSR1 would end data loaders, and any of them multiprocessing's fork server,
    whose children then count as dead.
    """
    # Windows has neither the mask nor SIGUSR1
    mask = getattr(signal, "pthread_sigmask", None)
    before = mask and mask(signal.SIG_BLOCK, [*stop_signals(), signal.SIGUSR1])
    try:
        yield
    finally:
        if mask:
            mask(signal.SIG_SETMASK, before)


# -------------------------------------------------------------------------------------------------- a pool of processes


class WorkerDied(Exception):
    """A process of a pool ended, or could not be started. The message is part of a line."""


class Workers:
    """A pool of processes that run `work`. They end with this process, and leave the signals of the terminal to it.

    Each has its own pipe, so its death closes the pipe even in the middle of a result. The pools of the standard library share
    one, and would wait forever for the rest of that result.
    init: called first in each process. Without fork both functions are pickled. Errors: WorkerDied.
    """

    def __init__(self, number: int, work: Callable[[Any], Any], init: Callable[[], object] | None = None) -> None:
        self._processes: list[BaseProcess] = []
        self._free: SimpleQueue[tuple[BaseProcess, Connection]] = SimpleQueue()
        # one thread per process, to wait for its result
        self._threads = ThreadPoolExecutor(number)
        # The kernel ends the processes with the thread that starts them: only the main thread lasts as long as this process.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        # At exit multiprocessing would wait for these processes forever: they ignore SIGTERM.
        atexit.register(self.close)
        try:
            for _ in range(number):
                own_end, other_end = multiprocessing.Pipe()
                # Forked processes close this end: the pipe has to close with this process.
                register_after_fork(own_end, Connection.close)
                process = multiprocessing.Process(target=_serve, args=(other_end, parent, work, init))
                with signals_blocked():
                    process.start()
                    # A Ctrl-C that came meanwhile is raised at the end of the block: `close` has to know the process by then.
                    self._processes.append(process)
                other_end.close()
                self._free.put((process, own_end))
        except OSError as error:
            self.close()
            raise WorkerDied(f"processes cannot be started ({error}); raise the machine's limit") from error

    def results(self, items: Iterator[Any], ahead: int) -> Iterator[Any]:
        """Yields work(item) for each item, in order. ahead: number of items submitted in advance.

        Errors: those of work; WorkerDied.
        """
        waiting = deque(self._threads.submit(self._result, item) for item in islice(items, ahead))
        while waiting:
            # A dead process is an error at once, not after the ready results.
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
            # Also if the process is dead, so that its next user gets the error too.
            self._free.put((process, pipe))
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Kill the processes: they hold nothing that would be lost."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.join()


def _lost(process: BaseProcess) -> WorkerDied:
    """The error for a process that ended too early."""
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name} (out of memory?)" if code < 0 else f"ended with code {code}"
    return WorkerDied(f"process {process.pid} {how}")


def _serve(pipe: Connection, parent: int, work: Callable[[Any], Any], init: Callable[[], object] | None) -> None:
    """Main loop of a process of a pool, until its pipe is closed."""
    ignore_stop_signals()
    die_with_parent(parent)
    if init is not None:
        init()
    answer: tuple[Exception | None, Any]
    # Raised once the parent has ended, while this process waits for an item or sends an answer
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            item = pipe.recv()
            try:
                answer = None, work(item)
            except Exception as error:
                # Pickling drops the traceback.
                error.add_note(traceback.format_exc())
                answer = error, None
            pipe.send(answer)


# --------------------------------------------------------------------------------------------- run time of the command

_start_time = STARTED


def restart_clock() -> None:
    """Restart `seconds_since_start`: another program, such as a notebook, calls the command as a function."""
    global _start_time
    _start_time = time.monotonic()


def seconds_since_start() -> float:
    """Run time of the command, in seconds."""
    return time.monotonic() - _start_time

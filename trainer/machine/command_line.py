"""How a command begins and ends: its errors in one line, its exit code, the line that started it, and stop signals, behind which a run saves and ends."""

import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from common.errors import UserError
from common.processes import obey_ctrl_c, stop_signals
from common.start import ROOT
from common.wording import nowhere, one_line
from dataset.loader import LoaderError
from trainer.machine.measure import what_the_machine_lacks
from trainer.machine.ranks import loss_of_a_rank


def plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as a line for users: Python's own form shows a place in our source, and its code."""
    return f"warning: {one_line(message)}\n"


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main()`; print what the user can mend, or what the machine lacks, as one line on stderr and exit with 2.

    Exit code 1 where nothing is to be mended: a worker process died, or another rank.
    """
    # Python has none where the command was started without: under pythonw on Windows, or by a shell's >&-.
    sys.stdout = sys.stdout or nowhere()
    sys.stderr = sys.stderr or nowhere()
    warnings.formatwarning = plain_warning
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sample's characters must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    obey_ctrl_c()
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read the output has left.
        sys.stdout = nowhere()
        sys.exit(1)
    except Exception as error:
        end_process(error)


def line_of(error: Exception) -> tuple[str, int] | None:
    """(the line for the user, the exit code) of an error; None for a defect of ours, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, LoaderError):
        return str(error), 2 if error.is_fault_of_data else 1
    loss = loss_of_a_rank(error)
    if loss is not None:
        return loss, 1
    operation, is_refused, _ = str(error).partition(" does not have a deterministic implementation")
    if is_refused:
        return (
            f"--deterministic 1: {operation} has no form that gives the same bits: --deterministic 0 trains without",
            2,
        )
    if isinstance(error, (MemoryError, RuntimeError, OSError)):
        lack = what_the_machine_lacks(error)
        if lack is not None:
            return lack, 2
    return None


def end_process(error: Exception) -> NoReturn:
    """End this process with the line and the exit code of an error; a defect of ours is raised again."""
    ending = line_of(error)
    if ending is None:
        raise error
    message, code = ending
    # SaidByAnotherRank has none.
    if message:
        print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    # The other ranks may be waiting in a collective that this one will never join: leave without a handshake.
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


def launch_line(script: str, arguments: Sequence[str]) -> str:
    """The command that started this process, as a user types it in the same folder.

    script: its path in the repository.
    """
    if Path.cwd() != ROOT:
        script = str(ROOT / script)
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = ["python"]
    if nodes != "1":
        launcher = ["torchrun", "--nnodes", nodes, "--nproc_per_node", processes]
    elif processes != "1":
        launcher = ["torchrun", "--nproc_per_node", processes]
    return shlex.join([*launcher, script, *map(str, arguments)])


# A handler runs between any two instructions of the main thread: in the middle of a print, or of a collective in which the
# other ranks wait. So it only notes what came. The loop hands the note to its next update, whose reduction tells it to all
# ranks; these stop after the same update, save together, and end.


def name_of(signum: int) -> str:
    """What a user calls a signal."""
    return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name


class StopSignals:
    """The stop signals ask for a stop after the current update, SIGUSR1 for a save.

    Until `arm()` is called there is nothing to save, and a stop signal ends the process at once. A second stop signal
    ends it at once too; the launcher repeats a Ctrl-C within milliseconds, so that repeats inside a second count as
    one. Every further SIGTERM counts as the first one. A context manager: the handlers that were there before come back.

    SIGHUP stays ignored where it was ignored at the start: so nohup keeps a run when its terminal closes.

    In another thread than the main one nothing is caught, since Python calls handlers in the main thread alone.
    """

    SAME_SIGNAL_S = 1.0

    def __init__(self) -> None:
        # The stop signal that came, 0: none.
        self.signum = 0
        self._save_requested = False
        self._armed = False
        # When the first stop signal came, on the monotonic clock.
        self._first = 0.0
        # The handlers that were there. Any: that is what the signal module says of them.
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = dict.fromkeys(stop_signals(), self._stop)
        # Windows has none of these two.
        if hasattr(signal, "SIGUSR1"):
            handlers[signal.SIGUSR1] = self._save
        # nohup is asked for, and ignores SIGHUP. A script's shell ignores SIGINT too, for all that it starts with &, but nobody
        # has asked for that: Ctrl-C on a script that waits for its runs, or kill -INT, is meant to save and end them.
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        for number, handler in handlers.items():
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """From here on a stop signal waits for the end of the update."""
        self._armed = True

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        requested = self._save_requested
        self._save_requested = False
        return requested

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A scheduler and the launcher both send SIGTERM, and a handler may run long after its signal came: behind a call that
        # does not return to Python. Whoever asks by it once more gets the save all the same.
        is_repeat = now - self._first <= self.SAME_SIGNAL_S or signum == self.signum == signal.SIGTERM
        is_second = self.signum and not is_repeat
        if not self._armed or is_second:
            # At once: an exception could be caught by whatever code is running, and ranks may wait in a collective.
            os._exit(128 + signum)
        if not self.signum:
            self.signum = signum
            self._first = now

    def _save(self, signum: int, frame: FrameType | None) -> None:
        self._save_requested = True

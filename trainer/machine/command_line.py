"""Start and end of a command or a call: errors as one line, exit codes, and stop signals, on which a run saves and exits."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from common.errors import LoaderError, UserError, is_panic
from common.processes import restart_clock, stop_signals
from common.settings import Settings
from common.start import open_standard_streams
from common.wording import loader_error_reason, null_stream, one_line
from trainer.calls import Caller, Event, OnLog, Result

# stop request of a caller's event
EVENT = 1 << 15
# Random states, locks of files and the clock of --budget are the process's.
_one_call = threading.Lock()


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main()`; print a mistake of the user, or what the machine lacks, as one line on stderr and exit with 2.

    Exit code 1 for what the user cannot fix: a worker process or another rank died, a GPU has failed.
    """
    open_standard_streams()
    # one line for users; Python's own format adds our file name, line and code
    warnings.formatwarning = lambda message, *_: f"warning: {one_line(message)}\n"
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sample's characters must not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    for number in stop_signals():
        # `guard_imports` has let Ctrl-C kill the process. What is half written is removed on the way out.
        if signal.getsignal(number) is signal.SIG_DFL:
            interrupt = signal.default_int_handler
            signal.signal(number, interrupt if number == signal.SIGINT else lambda signum, _: sys.exit(128 + signum))
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output is gone.
        sys.stdout = null_stream()
        sys.exit(1)
    except Exception as error:
        end_process(error)
    except BaseException as error:
        if not is_panic(error):
            raise
        reason = loader_error_reason(error)
        end_process(
            UserError(f"a library has failed ({reason}): look at the tokenizer and the files that it was given")
        )


def call(
    command: type[Settings], main: Callable[..., int], on_log: OnLog = None, stop: Event | None = None, **flags: object
) -> Result:
    """The result of main(command line, caller, settings), see `trainer.train`. Errors: UserError where a command ends with 2."""
    if not _one_call.acquire(blocking=False):
        raise UserError("another run is going on in this process: wait for its end, or start a process for each")
    restart_clock()
    caller = Caller(on_log, stop or Event())
    try:
        settings, words = command.of_call(flags)
        with interrupts_deferred():
            # Half imported, torch would fail in all later calls.
            importlib.import_module("trainer.command")
            # An earlier call has left a model in reference cycles, and code that counts towards the compiler's limit.
            gc.collect()
            if "torch._dynamo" in sys.modules:
                sys.modules["torch"].compiler.reset()
        main(words, caller, settings)
        return caller.result
    except Exception as error:
        if isinstance(error, UserError):
            raise
        line, exit_code = error_line(error) or ("", 1)
        if exit_code == 2:
            raise UserError(line) from error
        if line:
            error.add_note(line)
        raise
    finally:
        _one_call.release()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A Ctrl-C within the block acts after it. What it raises in the collector of garbage would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: received.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def error_line(error: Exception) -> tuple[str, int] | None:
    """Returns (line for the user, exit code) of an error; None for a bug of ours, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, LoaderError):
        return str(error), 2 if error.is_data_fault else 1
    # They import torch, which report.py does without.
    from trainer.machine.measure import exhausted_line, lost_card_line, lost_rank_line

    if card := lost_card_line(error):
        return card, 1
    if loss := lost_rank_line(error):
        return loss, 1
    operation, is_refused, _ = str(error).partition(" does not have a deterministic implementation")
    if is_refused:
        return f"--deterministic 1: {operation} has no deterministic form; use --deterministic 0", 2
    line = exhausted_line(error)
    return None if line is None else (line, 2)


def end_process(error: Exception) -> NoReturn:
    """End this process with the line and exit code of an error; a bug of ours is raised again."""
    ending = error_line(error)
    if ending is None:
        raise error
    message, code = ending
    # PrintedByAnotherRank has none
    if message:
        print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    # The other ranks may be waiting in a collective that this one will never join: leave without a handshake.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        os._exit(code)
    sys.exit(code)


# A handler runs between any two instructions of the main thread: in the middle of a print, or of a collective in which the
# other ranks wait. So it only sets a flag, which the all-reduce of the next update shares with all ranks: they stop after the
# same update, save together, and exit.


def signal_name(signum: int) -> str:
    """Name of a signal, or of EVENT, for users."""
    return {signal.SIGINT: "Ctrl-C", EVENT: "its caller"}.get(signum) or signal.Signals(signum).name


class StopSignals:
    """Stop signals request a stop after the current update, SIGUSR1 a save. A context manager; it restores the old handlers.

    Until `arm()` is called there is nothing to save, and a stop signal ends the process at once. So does a second stop
    signal later on. (During a call both do what they did before.) The launcher repeats a Ctrl-C within milliseconds:
    repeats within a second count as one signal, and so does a repeated SIGTERM at any time.

    SIGHUP stays ignored if it was ignored at the start, so a run under nohup outlives its terminal.

    Nothing is caught outside the main thread, the only one in which Python runs handlers.
    """

    SAME_SIGNAL_S = 1.0

    def __init__(self, event: Event | None = None) -> None:
        # of a caller
        self._event = event
        # The stop signal received; 0: none
        self.signum = 0
        self._save_requested = False
        self._armed = False
        # Time of the first stop signal, on the monotonic clock
        self._first_time = 0.0
        # {signal: previous handler}. Any: their type in the signal module
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():
            return self
        handlers = dict.fromkeys(stop_signals(), self._stop)
        # Windows lacks SIGUSR1 and SIGHUP
        if hasattr(signal, "SIGUSR1"):
            handlers[signal.SIGUSR1] = self._save
        # nohup ignores SIGHUP because the user wants it to. A script's shell also ignores SIGINT for everything started with &, but
        # nobody wants that: Ctrl-C on a script that waits for its runs, or kill -INT, should save and end them.
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

    def disarm(self) -> None:
        """From here on a stop signal ends the process at once; so does one that came since the last update."""
        self._armed = False
        if self.signum:
            os._exit(128 + self.signum)

    @property
    def stop_request(self) -> int:
        """The stop signal received, EVENT if the caller's event is set, or 0."""
        return self.signum or (EVENT if self._event and self._event.is_set() else 0)

    def take_save_request(self) -> bool:
        """True if a save was requested since the last call."""
        requested = self._save_requested
        self._save_requested = False
        return requested

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A scheduler and the launcher both send SIGTERM, and a handler may run long after its signal: after a call that does
        # not return to Python. So a repeated SIGTERM still leads to the save.
        is_repeat = now - self._first_time <= self.SAME_SIGNAL_S or signum == self.signum == signal.SIGTERM
        is_second = self.signum and not is_repeat
        if self._event and (not self._armed or is_second):
            # Ctrl-C in a notebook raises KeyboardInterrupt.
            signal.signal(signum, self._before[signum])
            signal.raise_signal(signum)
        elif not self._armed or is_second:
            # At once: an exception could be caught by whatever code is running, and ranks may wait in a collective.
            os._exit(128 + signum)
        elif not self.signum:
            self.signum = signum
            self._first_time = now

    def _save(self, signum: int, frame: FrameType | None) -> None:
        self._save_requested = True

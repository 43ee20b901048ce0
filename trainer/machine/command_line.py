"""How a command begins and ends: its errors in one line, its exit code, and the line that started it."""

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from common.errors import DataError, ProcessLostError, UserError
from common.paths import ROOT
from common.processes import obey_ctrl_c
from common.wording import nowhere, one_line
from dataset.loader_workers import LoaderError
from trainer.machine.collectives import loss_of_a_rank
from trainer.machine.out_of_memory import what_the_machine_lacks


def plain_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as a line for users: Python's own form shows a place in our source, and its code."""
    return f"warning: {one_line(message)}\n"


def run_cli(main: Callable[[], int | None]) -> None:
    """Run `main()`; print what the user can mend, or what the machine lacks, as one line on stderr and exit with 2.

    Exit code 1 where nothing is to be mended: a worker process died, or another rank.
    """
    open_standard_streams()
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
        ending = line_of(error)
        if ending is None:
            raise
        end_process(*ending)


def line_of(error: Exception) -> tuple[str, int] | None:
    """(the line for the user, the exit code) of an error; None for a defect of ours, which keeps its traceback."""
    if isinstance(error, (UserError, DataError)):
        return str(error), 2
    if isinstance(error, LoaderError):
        return str(error), 2 if error.is_fault_of_data else 1
    if isinstance(error, ProcessLostError):
        return str(error), 1
    loss = loss_of_a_rank(error)
    if loss is not None:
        return loss, 1
    if isinstance(error, (MemoryError, RuntimeError, OSError)):
        lack = what_the_machine_lacks(error)
        if lack is not None:
            return lack, 2
    return None


def open_standard_streams() -> None:
    """Where a standard stream is closed, put nowhere in its place.

    The next file that is opened would get its number, and what a library prints would go into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdout is None:
        sys.stdout = nowhere()
    if sys.stderr is None:
        sys.stderr = nowhere()


def end_process(message: str, code: int) -> NoReturn:
    """End this process with an exit code and a line. message: "" of SaidByAnotherRank, for which nothing is printed."""
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

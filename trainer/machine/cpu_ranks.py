"""The ranks of one command on a CPU: how many, and how they start and end. Linux only.

The threads of a process meet at a barrier after each operation, a thousand times per update, so anything that takes one core for
a moment stalls them all. Processes with fewer threads that share the rows of each micro-batch wait for each other a few times
per update (docs/performance.md, "One process or several"), and flags and counts keep their meaning.

The command is the launcher of its ranks, which find in the environment what torchrun tells its own. They are forked: new
processes would import PyTorch and transformers for seconds. Forking is safe only before the process has computed anything,
since OpenMP's threads are not copied. How they end:
- The command dies, even by kill -9: the kernel kills its ranks at once.
- A rank is killed: the others cannot go on without its rows. The command ends with one line and exit code 1.
- A rank has an error. The others may have the same one, so they wait for a moment: rank 0 prints it, and they are killed.
  If rank 0 does not, the rank prints its own, and the command ends with its exit code.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from types import FrameType

import torch
import torch.distributed as dist

from common.errors import PrintedByAnotherRank, UserError
from common.flags import AUTO
from common.processes import die_with_parent, usable_cores
from common.wording import announce, counted
from trainer.machine.command_line import StopSignals
from trainer.machine.devices import pick_device
from trainer.machine.measure import lost_rank_line, total_memory
from trainer.machine.ranks import SHARE_BATCHES, ranks_of_launcher

# ------------------------------------------------------------------------------------------------------ how many

# Obstacle of a call: a fork does not copy the threads of the program that calls, which may hold locks.
IS_CALL = "a program that calls a function is not forked"
# Minimum positions of a micro-batch per process: matrix products of fewer rows take longer per row
MIN_POSITIONS = 1024
# Upper bound for "auto": each process goes over all gradients and weights, and the gain is measured on two cores only
MAX_AUTO_PROCESSES = 8
# bytes of a process besides its tensors: PyTorch's code and buffers, and compiled code
BYTES_OF_PROCESS = 600 << 20
# The rest is for activations, which do not grow with the number of processes, and for other programs.
SHARE_OF_MEMORY = 0.5


def processes_of(
    asked: str,
    device: str | None,
    rows: int,
    positions: int,
    parameters: int,
    obstacle: str = "",
    rows_are_open: bool = False,
) -> tuple[int, list[str]]:
    """Returns (number of ranks, lines for the user about it): that of --cpu_processes, or what suits the machine.

    asked: by the flag. device: as in `pick_device`. rows, positions: of a micro-batch. obstacle: why this run cannot be divided, or
    "". rows_are_open: more or fewer may still be chosen. Errors: UserError for a number that does not divide the rows, a device
    that is not available, or a broken launch.
    """
    if ranks_of_launcher() is not None:
        obstacle = "the launcher sets the number of processes"
    elif (kind := pick_device(device).type) != "cpu":
        obstacle = f"the run is on {kind}"
    elif sys.platform != "linux":
        obstacle = "it works only on Linux"
    if obstacle:
        return 1, [] if asked in (AUTO, "1") else [f"warning: --cpu_processes {asked} has no effect: {obstacle}"]
    if asked == AUTO:
        n = suitable_number(available_threads(), rows, positions, parameters, total_memory(torch.device("cpu")))
    else:
        n = int(asked)
    # Else an update would have fewer micro-batches, which the flags of intervals count.
    if rows % n and not rows_are_open:
        raise UserError(
            f"--cpu_processes {n}: --batch_size {rows} cannot be divided by it; use a number that does, or auto"
        )
    if n == 1:
        return 1, []
    threads = max(1, available_threads() // n)
    line = (
        f"{n} processes of {counted(threads, 'thread')} share each micro-batch: processes wait "
        "for each other a few times per update, threads after every operation; --cpu_processes 1 trains in one process"
    )
    return n, [line]


def available_threads() -> int:
    """Threads that PyTorch uses (OMP_NUM_THREADS limits them), at most one for each core that this process may use."""
    # A container may have two processors of a machine with a hundred; more threads would be throttled again and again.
    return min(torch.get_num_threads(), usable_cores())


def suitable_number(n_threads: int, rows: int, positions: int, parameters: int, memory: int | None) -> int:
    """Number of processes that suits a run best. memory: bytes that it may use; None: unknown.

    The largest that divides threads and rows, leaves MIN_POSITIONS to each, and fits the memory. It depends on nothing that changes
    between starts, such as free memory or the plan of a budget: a resume on the same machine has the same ranks, and
    continues bit for bit.
    """
    best = 1
    for n in range(2, min(n_threads, MAX_AUTO_PROCESSES) + 1):
        divides = n_threads % n == 0 and rows % n == 0
        is_large = rows // n * positions >= MIN_POSITIONS
        # 16 bytes: weight, gradient and AdamW's two moments
        needed = n * (BYTES_OF_PROCESS + 16 * parameters)
        if divides and is_large and (memory is None or needed <= SHARE_OF_MEMORY * memory):
            best = n
    return best


# --------------------------------------------------------------------------------------- how they start and end

# Seconds that a rank with an error waits for rank 0 to report it, and that the command then waits for rank 0 to exit
GRACE_S = 2.0


def run_ranks(n: int, work: Callable[[], int]) -> int:
    """Run work() in n forked processes, as torchrun would start them, or here if n is 1. Returns the exit code.

    Nothing may have been computed before. In a rank this returns, or raises, as its `work` does. Errors: UserError if no
    process can be started.
    """
    if n == 1:
        return work()
    listener = socket.create_server(("127.0.0.1", 0), backlog=n)
    port = listener.getsockname()[1]
    # If it is ignored, as some programs leave it, there are no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Else each rank would print what is buffered.
    sys.stdout.flush()
    launcher = os.getpid()
    pids: list[int] = []
    for rank in range(n):
        try:
            pids.append(os.fork())
        except OSError as error:
            raise UserError(f"processes cannot be started ({error.strerror}): --cpu_processes 1 needs none") from error
        if pids[-1] == 0:
            die_with_parent(launcher)
            # It died before that: nobody would answer this rank.
            if os.getppid() != launcher:
                os._exit(1)
            return run_rank(rank, n, port, work)
    # After the forks, since threads are not copied; it serves them until the end.
    _kept = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return wait_for_ranks(pids)


def run_rank(rank: int, n: int, port: int, work: Callable[[], int]) -> int:
    """The exit code of work(), as a rank of a launcher whose store listens on a port of this machine."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "MASTER_PORT": port,
        SHARE_BATCHES: 1,
    }
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    # Otherwise Gloo looks up the address of the host name, which not every machine can resolve.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, available_threads() // n))
    try:
        return work()
    except Exception as error:
        # The rank that has the error itself goes first, and of several rank 0.
        is_caused_by_peer = isinstance(error, PrintedByAnotherRank) or lost_rank_line(error) is not None
        time.sleep(4 * GRACE_S if is_caused_by_peer else GRACE_S if rank else 0)
        raise


class ForwardedSignals(StopSignals):
    """Passes stop signals and SIGUSR1 on to the ranks."""

    def __init__(self, pids: Collection[int]) -> None:
        super().__init__()
        self.pids = pids

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        for pid in self.pids:
            # It may have ended this moment.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    _save = _stop


def wait_for_ranks(pids: list[int]) -> int:
    """Wait until all ranks have done their work, or one has failed: then the others are ended. Returns the exit code."""
    exit_code, left = 0, [*pids]
    with ForwardedSignals(left):
        while left and not exit_code:
            pid, status = os.wait()
            # As the first process of a container this one gets orphans too.
            if pid in left:
                left.remove(pid)
                exit_code = os.waitstatus_to_exitcode(status)
    was_killed = exit_code < 0
    # A rank that exits by itself has printed why.
    if was_killed:
        announce(
            f"error: process {pids.index(pid) + 1} of {len(pids)} (pid {pid}) was killed by signal {-exit_code}, and the others cannot "
            "continue without it; --from_resume 1 continues from the last save, --cpu_processes 1 needs less memory",
            to_stderr=True,
        )
        exit_code = 1
    # Rank 0 writes the files, so it may end by itself.
    end_ranks(left, GRACE_S if pids[0] in left and not was_killed else 0)
    return exit_code


def end_ranks(pids: list[int], grace_s: float) -> None:
    """Kill the ranks that are still there after this many seconds, and wait until all are gone."""
    end = time.monotonic() + grace_s
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() >= end:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)

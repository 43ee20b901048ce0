"""Several ranks of one command on a CPU: how many, and how they start and end.

The threads of a process meet at a barrier after each operation, a thousand times per update, so anything that takes one core for
a moment stalls them all. Processes with fewer threads that share the rows of each micro-batch wait for each other a few times
per update (docs/performance.md, "One process or several"), and flags and counts keep their meaning. Linux only.

The ranks are forked copies of the command: new processes would import PyTorch and transformers for seconds. Forking is safe
only before the process has computed anything, since OpenMP's threads are not copied. How they end:
- The command dies, even by kill -9: the kernel kills the copies at once. They write no files.
- A copy dies: the others cannot go on without its rows. The command ends with one line and exit code 1.
- A copy has an error. The others may have the same one, so it waits for a moment: rank 0 prints it, and the copies are killed.
  If rank 0 does not, the copy prints its own, and the command ends with its exit code.
"""

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from common.errors import PrintedByAnotherRank, UserError
from common.flags import AUTO
from common.processes import die_with_parent, usable_cores
from common.wording import announce, counted
from trainer.machine.command_line import end_process
from trainer.machine.devices import pick_device
from trainer.machine.measure import total_memory
from trainer.machine.ranks import Ranks, SharedMemory, lost_rank_line, ranks_of_launcher
from trainer.settings import DividedMachineSettings

# makes this process a rank
Join = Callable[[], tuple[Ranks, torch.device]]


@dataclass(frozen=True)
class ShareableBatch:
    """A micro-batch that processes may share.

    rows: --batch_size, or the most that may still be chosen (rows_are_open). obstacle: why its loss cannot be computed in parts, or "".
    """

    rows: int
    positions: int
    parameters: int
    obstacle: str = ""
    rows_are_open: bool = False


# ------------------------------------------------------------------------------------------------------ how many

# Minimum positions of a micro-batch per process: matrix products of fewer rows take longer per row
MIN_POSITIONS = 1024
# Upper bound for "auto": each process goes over all gradients and weights, and the gain is measured on two cores only
MAX_AUTO_PROCESSES = 8
# bytes of a process besides its tensors: PyTorch's code and buffers, and compiled code
BYTES_OF_PROCESS = 600 << 20
# The rest is for activations, which do not grow with the number of processes, and for other programs.
SHARE_OF_MEMORY = 0.5


def processes_of(
    settings: DividedMachineSettings, batch_of: Callable[[], ShareableBatch | None]
) -> tuple[int, list[str]]:
    """Returns (number of processes, lines for the user about it): that of --cpu_processes, or what suits the machine.

    batch_of: gives the run's micro-batch, None if its flags clash.
    Errors: UserError for a number that does not fit the run, a device that is not available, or a broken launch.
    """
    asked = settings.cpu_processes
    obstacle = ""
    if ranks_of_launcher() is not None:
        obstacle = "the launcher sets the number of processes"
    elif (device := pick_device(settings.device).type) != "cpu":
        obstacle = f"the run is on {device}"
    elif sys.platform != "linux":
        obstacle = "it works only on Linux"
    if obstacle and asked not in (AUTO, "1"):
        return 1, [f"warning: --cpu_processes {asked} has no effect: {obstacle}"]
    batch = None if obstacle or asked == "1" else batch_of()
    if batch is None:
        return 1, []
    if asked == AUTO:
        n = suitable_number(available_threads(), batch, total_memory(torch.device("cpu")))
    elif batch.obstacle:
        raise UserError(f"--cpu_processes {asked}: {batch.obstacle}; drop the flag")
    else:
        n = int(asked)
        # Else an update would have fewer micro-batches, which the flags of intervals count.
        if not batch.rows_are_open and batch.rows % n:
            raise UserError(
                f"--cpu_processes {n}: --batch_size {batch.rows} cannot be divided by it; use a number that does, or auto"
            )
    if n == 1:
        return 1, []
    line = (
        f"{n} processes of {counted(threads_of_each(n), 'thread')} share each micro-batch: processes wait "
        "for each other a few times per update, threads after every operation; --cpu_processes 1 trains in one process"
    )
    return n, [line]


def available_threads() -> int:
    """Threads that PyTorch uses (OMP_NUM_THREADS limits them), at most one for each core that this process may use."""
    # A container may have two processors of a machine with a hundred; more threads would be throttled again and again.
    return min(torch.get_num_threads(), usable_cores())


def threads_of_each(processes: int) -> int:
    """Threads of each process if this many share a micro-batch."""
    return max(1, available_threads() // processes)


def suitable_number(n_threads: int, batch: ShareableBatch, memory: int | None) -> int:
    """Number of processes that suits a run best. memory: bytes that it may use; None: unknown.

    The largest that divides threads and rows, leaves MIN_POSITIONS to each, and fits the memory. It depends on nothing that changes
    between starts, such as free memory or the plan of a budget: a resume on the same machine has the same ranks, and
    continues bit for bit.
    """
    best = 1
    for n in range(2, min(n_threads, MAX_AUTO_PROCESSES) + 1):
        divides = n_threads % n == 0 and batch.rows % n == 0 and not batch.obstacle
        is_large = batch.rows // n * batch.positions >= MIN_POSITIONS
        # 16 bytes: weight, gradient and AdamW's two moments
        needed = n * (BYTES_OF_PROCESS + 16 * batch.parameters) + bytes_in_shared_memory(n, batch.parameters)
        if divides and is_large and (memory is None or needed <= SHARE_OF_MEMORY * memory):
            best = n
    return best


def bytes_in_shared_memory(n_processes: int, parameters: int) -> int:
    """Shared by n processes: the gradients of each, their sum, and Muon's orthogonal matrices."""
    return parameters * 4 * (n_processes + 2) if n_processes > 1 else 0


# --------------------------------------------------------------------------------------- how they start and end

# Seconds that a copy with an error waits for rank 0 to report it, and that rank 0 waits at the end for copies to exit
GRACE_S = 2.0
# Timeout of collectives, in effect none: `watch` notices the end of a rank, and a run may be suspended with Ctrl-Z.
WAIT = timedelta(days=30)
# from linux/memfd.h
MFD_CLOEXEC = 1


def run_forked(n: int, work: Callable[[Join], int]) -> int:
    """Run work(join) in n processes, which become ranks by `join()`; this one is rank 0. Returns its exit code.

    Nothing may have been computed before. Errors: what `work` raises here; UserError if no process can be started. If a copy
    ends before its work is done, this process exits, without an exception.
    """
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(n)
    context = multiprocessing.get_context("fork")
    copies: list[BaseProcess] = []
    is_over = threading.Event()
    # Started only after the last fork: threads are not copied.
    watcher = threading.Thread(target=watch, args=(copies, is_over), daemon=True)
    grace_s = 0.0
    try:
        try:
            memory = SharedMemory(anonymous_file(), n)
            for rank in range(1, n):
                work_of_rank = partial(work, partial(join_copies, rank, n, listener, memory))
                copies.append(context.Process(target=run_copy, args=(work_of_rank, os.getpid())))
                copies[-1].start()
        except OSError as error:
            raise UserError(f"processes cannot be started ({error.strerror}): --cpu_processes 1 needs none") from error
        watcher.start()
        exit_code = work(partial(join_copies, 0, n, listener, memory))
        grace_s = GRACE_S
        return exit_code
    except Exception as error:
        if is_caused_by_peer(error):
            # The watcher knows the reason, and ends this process.
            watcher.join(2 * GRACE_S)
        raise
    finally:
        is_over.set()
        for copy in copies:
            if copy.pid is not None:
                copy.join(grace_s)
                copy.kill()
                copy.join()


def anonymous_file() -> int:
    """Descriptor of an empty file without a name. Errors: OSError.

    By the C library: Pythons that are built for old systems, such as those of conda and uv, lack os.memfd_create.
    """
    file = int(ctypes.CDLL(None, use_errno=True).memfd_create(b"ranks", MFD_CLOEXEC))
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def join_copies(rank: int, n: int, listener: socket.socket, memory: SharedMemory) -> tuple[Ranks, torch.device]:
    """Join the process group of a command's n processes. listener: at 127.0.0.1, for rank 0."""
    port = listener.getsockname()[1]
    listening = listener.detach() if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, n, rank == 0, WAIT, master_listen_fd=listening)
    # Otherwise Gloo looks up the address of the host name, which not every machine can resolve.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads_of_each(n))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=WAIT)
    return Ranks(rank, rank, n, sharing=n, memory=memory), torch.device("cpu")


def run_copy(work: Callable[[], object], parent: int) -> None:
    """Main function of a copy. Exit code 0 tells the parent that its work is done, even if a signal has stopped the run."""
    die_with_parent(parent)
    # The parent may have died before die_with_parent took effect.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        work()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # The rank that has the error itself goes first.
        time.sleep(4 * GRACE_S if is_caused_by_peer(error) else GRACE_S)
        end_process(error)


def is_caused_by_peer(error: Exception) -> bool:
    """True if another rank is the cause, or prints it."""
    return isinstance(error, PrintedByAnotherRank) or lost_rank_line(error) is not None


def watch(copies: Sequence[BaseProcess], is_over: threading.Event) -> None:
    """End this process if a copy ends before its work is done."""
    ended = multiprocessing.connection.wait([copy.sentinel for copy in copies])[0]
    number, copy = next((number, copy) for number, copy in enumerate(copies, 2) if copy.sentinel == ended)
    copy.join()
    # None: this process inherited an ignored SIGCHLD. Then only `is_over` shows whether the run has come to its end.
    code = copy.exitcode
    if code == 0 or is_over.wait(GRACE_S if code is None else 0):
        return
    # A copy that exits by itself has printed why.
    if code is None or code < 0:
        how = "has ended" if code is None else f"was killed by signal {-code}"
        announce(
            f"error: process {number} of {len(copies) + 1} (pid {copy.pid}) {how}, and the others cannot continue without it; "
            "--from_resume 1 continues from the last save, --cpu_processes 1 needs less memory",
            to_stderr=True,
        )
    for other in copies:
        other.kill()
    os._exit(code if code is not None and code > 0 else 1)

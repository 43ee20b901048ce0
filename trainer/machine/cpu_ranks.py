"""The ranks of one command on a CPU: how many, how they start and end, and the memory in which they add up gradients.

Threads of a process meet at a barrier after each operation, a thousand times in an update, so whatever takes one core for a
moment holds them all up. Processes of fewer threads that share the rows of each micro-batch wait for each other a few times in
an update (docs/performance.md, "One process or several"), and flags and counts keep their meaning. Linux alone.

The ranks are copies of the command, forked and not started anew: the imports of PyTorch and transformers take seconds. That is
safe only before the process has computed anything, since the threads of OpenMP are not copied. How they end:
- The command is gone, even by kill -9: the kernel kills the copies at once. They write no files.
- A copy is gone: the others cannot go on without its rows. The command ends with one line and exit code 1.
- A copy has an error that a user can mend. It says nothing, since the others may have the same one. It leaves its line in a
  pipe, and the command ends with it, unless it has one of its own.
"""

import contextlib
import math
import mmap
import multiprocessing
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from common.errors import ProcessLostError, SaidByAnotherRank, UserError
from common.processes import end_with
from common.wording import announce, counted
from trainer.machine.collectives import on_main
from trainer.machine.command_line import line_of
from trainer.machine.devices import pick_device
from trainer.machine.measure import processor_limit, total_memory
from trainer.machine.ranks import Ranks, network_of, ranks_of_launcher
from trainer.machine.settings import DividedMachineSettings
from trainer.optim import muon

ResultT = TypeVar("ResultT")

# ------------------------------------------------------------------------------------------------ how many

# positions of a micro-batch that each process keeps at least: matrix products of fewer rows take longer for each of them
LEAST_POSITIONS = 1024
# Each process goes over all gradients and weights once in an update, and their gain is measured on two cores alone.
MOST_BY_ITSELF = 8
# bytes of a process beside its tensors: PyTorch's code and buffers, and what it compiles
BYTES_OF_PROCESS = 600 << 20
# of the memory; the rest is for activations, which do not grow with the number of processes, and for other programs
SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True)
class Divisible:
    """What there is to divide: a micro-batch of --batch_size rows, or of as many as a plan can choose (is_planned).

    whole: why the loss cannot be computed in parts. processes: that a run has had which is gone on with.
    """

    rows: int
    positions: int
    parameters: int
    whole: str = ""
    is_planned: bool = False
    processes: int | None = None


@dataclass(frozen=True)
class Division:
    """The processes of a command, and lines for the user on them. threads: of each process; None: those that PyTorch takes."""

    processes: int = 1
    threads: int | None = None
    notices: Sequence[str] = ()


ONE_PROCESS = Division()


def divide(
    settings: DividedMachineSettings, micro_batch_of: Callable[[], Divisible | None], by_itself: bool
) -> Division:
    """What --cpu_processes asks for, or what suits the machine.

    micro_batch_of: the run's, None where its flags do not fit each other. by_itself: whether "auto" may start processes.
    Errors: UserError where the flag's number does not fit the run, for a device that is not there, and for a broken launch.
    """
    asked = settings.cpu_processes
    n_threads = available_threads()
    obstacle = ""
    if ranks_of_launcher() is not None:
        obstacle = "the launcher has decided on the processes"
    elif (kind := pick_device(settings.device).type) != "cpu":
        obstacle = f"the run is on {kind}"
    elif sys.platform != "linux":
        obstacle = "it works on Linux alone"
    if obstacle and asked not in ("auto", "1"):
        return Division(1, n_threads, [f"warning: --cpu_processes {asked} has no effect: {obstacle}"])
    is_one = obstacle or asked == "1" or (asked == "auto" and (n_threads == 1 or not by_itself))
    micro_batch = None if is_one else micro_batch_of()
    if micro_batch is None:
        return Division(1, n_threads)
    if asked != "auto":
        n = int(asked)
        if micro_batch.whole:
            raise UserError(f"--cpu_processes {n}: {micro_batch.whole}; drop the flag")
        # A plan takes rows that any number of processes can share.
        if not micro_batch.is_planned and micro_batch.rows % n:
            raise UserError(
                f"--cpu_processes {n}: --batch_size {micro_batch.rows} cannot be divided by it; take a number that divides "
                "the batch, or auto"
            )
    elif micro_batch.processes is not None and micro_batch.processes <= n_threads:
        n = micro_batch.processes
    else:
        n = choose(n_threads, micro_batch, total_memory(torch.device("cpu")))
    threads = max(1, n_threads // n)
    if n == 1:
        return Division(1, threads)
    of_all = "" if micro_batch.is_planned else f" ({micro_batch.rows // n} of its {micro_batch.rows} rows each)"
    line = (
        f"{n} processes of {counted(threads, 'thread')} share each micro-batch{of_all}: they wait for each other a few "
        "times an update, threads at every operation; --cpu_processes 1 trains in one process"
    )
    return Division(n, threads, [line])


def available_threads() -> int:
    """The threads that PyTorch takes here (OMP_NUM_THREADS limits them), on the processors that this process may use."""
    limits = [torch.get_num_threads()]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    # A container may have two processors of a machine with a hundred; more threads would be stopped together again and again.
    limit = processor_limit()
    if limit is not None:
        limits.append(max(1, math.ceil(limit)))
    return min(limits)


def choose(n_threads: int, micro_batch: Divisible, memory: int | None) -> int:
    """How many processes suit a run best. memory: bytes that it may use, None: not known.

    The most that divide threads and rows, keep LEAST_POSITIONS each, and fit the memory. The answer depends on nothing that changes
    from one start to the next, such as what is free: a resume on the same machine has the same ranks, and goes on bit for bit.
    """
    best = 1
    for n in range(2, min(n_threads, MOST_BY_ITSELF) + 1):
        divides = n_threads % n == 0 and micro_batch.rows % n == 0 and not micro_batch.whole
        is_large = micro_batch.rows // n * micro_batch.positions >= LEAST_POSITIONS
        # Weight, gradient and AdamW's two moments are 16 bytes.
        needed = n * (BYTES_OF_PROCESS + 16 * micro_batch.parameters)
        needed += bytes_in_shared_memory(n, micro_batch.parameters)
        if divides and is_large and (memory is None or needed <= SHARE_OF_MEMORY * memory):
            best = n
    return best


def bytes_in_shared_memory(n_processes: int, parameters: int) -> int:
    """What n processes share: the gradients of each, their sum, and Muon's matrices in bf16."""
    return parameters * (4 * (n_processes + 1) + 2) if n_processes > 1 else 0


# --------------------------------------------------------------------------------------- how they start and end

# When a copy is gone, most often the command's own next message to it fails, and it ends by itself within this time. Copies
# that have done all their work are waited for as long.
GRACE_S = 2.0
# exit code of a copy where another process is gone or says what happened
NOTHING_TO_SAY = 75
# How long they wait for a message. The end of one is noticed otherwise; a limit would end a run that was stopped with Ctrl-Z.
WAIT = timedelta(days=30)

# the work of one rank: (its number, the listening socket of 127.0.0.1 that rank 0 serves) -> exit code
Work = Callable[[int, socket.socket], int]


def side_by_side(n: int, work: Work) -> int:
    """work(rank, meeting_place) in n processes: this one is rank 0. Returns its exit code.

    Nothing may have been computed before. Errors: what `work` raises here, or what a user can mend of a copy's;
    ProcessLostError where a copy is gone; UserError where none can be started.
    """
    meeting_place = socket.socket()
    meeting_place.bind(("127.0.0.1", 0))
    meeting_place.listen(n)
    with Copies(n, work, meeting_place):
        return work(0, meeting_place)


def join_copies(rank: int, n: int, meeting_place: socket.socket) -> Ranks:
    """Join the n processes into which a command has divided itself; returns this one's place. The arguments are those of Work."""
    port = meeting_place.getsockname()[1]
    listening = meeting_place.detach() if rank == 0 else None
    store = dist.TCPStore("127.0.0.1", port, n, rank == 0, WAIT, master_listen_fd=listening)
    ranks = Ranks(rank, rank, n, sharing=n, timeout=WAIT)
    with network_of(ranks):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=WAIT)
    return ranks


def is_of_a_lost_peer(error: Exception) -> bool:
    """Whether another process is the reason, or says it: an error of Gloo, which carries the messages."""
    return isinstance(error, SaidByAnotherRank) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def be_a_copy(work: Work, rank: int, meeting_place: socket.socket, parent: int, line_to: Connection) -> NoReturn:
    """In a copy: do its work, and end. line_to: takes its line for the user, if there is one."""
    end_with(parent)
    # Otherwise it was gone before the kernel was asked to tell.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        sys.exit(work(rank, meeting_place))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if is_of_a_lost_peer(error):
            sys.exit(NOTHING_TO_SAY)
        ending = line_of(error)
        if ending is None:
            # A defect of ours keeps its traceback.
            raise
        line_to.send(ending[0])
        sys.exit(ending[1])


class Copies:
    """The processes beside this one: a context manager, behind which none is left, however it ends."""

    def __init__(self, n: int, work: Work, meeting_place: socket.socket) -> None:
        context = multiprocessing.get_context("fork")
        # (process, where its line comes from)
        self.copies: list[tuple[ForkProcess, Connection]] = []
        for rank in range(1, n):
            line_from, line_to = context.Pipe(duplex=False)
            arguments = (work, rank, meeting_place, os.getpid(), line_to)
            self.copies.append((context.Process(target=be_a_copy, args=arguments), line_from))
        self._watchers: list[threading.Thread] = []
        self._leaving = threading.Event()
        # (a line on the first copy that has ended for a reason of its own, the command's exit code for it), once there is one
        self.explanation = ("", 0)
        self._is_explained = threading.Event()

    def __enter__(self) -> None:
        try:
            for process, _ in self.copies:
                process.start()
        except OSError as error:
            self._kill()
            raise UserError(f"no further process starts ({error.strerror}): --cpu_processes 1 needs none") from error
        # Not before the last one is forked: threads are not copied.
        for number in range(len(self.copies)):
            self._watchers.append(threading.Thread(target=self._wait_for, args=(number,), daemon=True))
            self._watchers[-1].start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving.set()
        if error is None:
            self._join()
        # A lost peer, or a defect: a copy may have the better explanation.
        is_unclear = isinstance(error, Exception) and (is_of_a_lost_peer(error) or line_of(error) is None)
        is_explained = is_unclear and self._is_explained.wait(GRACE_S)
        self._kill()
        if is_explained:
            line, code = self.explanation
            raise ProcessLostError(line) if code == 1 else UserError(line) from error

    def _wait_for(self, number: int) -> None:
        """Note how a copy ends. End this process too where it does not notice by itself."""
        process, line_from = self.copies[number]
        process.join()
        # None: whoever started this process has it ignore the ends of others.
        code = process.exitcode or 0
        if code == NOTHING_TO_SAY or self._is_explained.is_set():
            return
        how = f"was killed by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        line = f"process {number + 2} of {len(self.copies) + 1} (pid {process.pid}) {how}, and the others cannot go on without it"
        advice = "--from_resume 1 goes on from the last save, --cpu_processes 1 needs less memory"
        self.explanation = (f"{line}; {advice}", 1)
        with contextlib.suppress(EOFError):
            if line_from.poll():
                self.explanation = (line_from.recv(), code)
        self._is_explained.set()
        if not self._leaving.wait(GRACE_S):
            announce(f"error: {self.explanation[0]}", to_stderr=True)
            self._kill()
            os._exit(self.explanation[1])

    def _join(self) -> None:
        """Wait until all copies have ended, or for GRACE_S."""
        deadline = time.monotonic() + GRACE_S
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for process, _ in self.copies:
            if process.pid is not None:
                process.kill()
        self._join()


# ---------------------------------------------------------------------------------------- what they share

# processors that show others their writes in the order in which they were made: who sees a count sees what was written before
ORDERED = ("x86_64", "AMD64")
# bytes of a line of the cache, which two ranks never write into at the same time
LINE = 64
# After so many looks a rank leaves the core to others for a moment: that may be the rank which is waited for.
LOOKS = 200
NAP_S = 5e-5
# numbers that a rank can tell the others with its gradients, at most
MOST_NUMBERS = 64


class SharedMemory:
    """Memory that all copies see, and in which they wait for each other many times in an update.

    A file without a name: it is gone with the last process that has it, even after kill -9, and no limit of /dev/shm counts, which
    containers keep at 64 MB. A barrier of Gloo wakes a thread, which takes milliseconds where every core computes; here each rank
    counts its waits where all of them see it.
    """

    def __init__(self, size: int, ranks: Ranks) -> None:
        """size: bytes of `data`. A collective. Errors: OSError on all ranks where the system gives none."""
        of_counts = LINE * ranks.world_size
        own: list[int] = []

        def make() -> str:
            # A limit of the shell, or a sandbox that refuses it.
            with contextlib.suppress(OSError):
                own.append(os.memfd_create("ranks", os.MFD_CLOEXEC))
                os.ftruncate(own[0], of_counts + size)
                return f"/proc/{os.getpid()}/fd/{own[0]}"
            return ""

        path = on_main(ranks, make)
        if not path:
            raise OSError("no memory that processes can share")
        descriptor = own[0] if own else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        memory = torch.frombuffer(mmap.mmap(descriptor, of_counts + size), dtype=torch.uint8)
        # Rank 0 keeps its file open until all have it. The mapping stays without it.
        dist.barrier()
        os.close(descriptor)
        # uint8 [size], zeros
        self.data = memory[of_counts:]
        self._counts = memory[:of_counts].numpy().view(np.int64).reshape(ranks.world_size, -1)[:, 0]
        self._own = ranks.rank
        self._waits = 0

    def wait(self) -> None:
        """Return when all ranks have called it as often as this one. What they wrote before can be read."""
        if platform.machine() not in ORDERED:
            dist.barrier()
            return
        self._waits += 1
        self._counts[self._own] = self._waits
        looks = 0
        while self._counts.min() < self._waits:
            looks += 1
            if looks > LOOKS:
                time.sleep(NAP_S)


class SharedReducer:
    """Sums fp32 gradients over the ranks in shared memory, after the backward pass of an update.

    The memory has a region for each rank and one for the sum, each of all gradients end to end, and of what the ranks tell
    each other:

        region 0    gradients and numbers of rank 0
        region 1    gradients and numbers of rank 1
        sum         slice 0 | slice 1      slice r is added up by rank r

    1. Each rank copies its gradients into its own region, and waits until all have.
    2. Each adds up its own slice of all regions, in the order of the ranks. It waits until all have.
    3. Each copies the sum into its gradients. Nobody waits after that: a rank writes into its region again with step 2 over for
       all, and into the sum after the next update's first wait, which the others reach with step 3 done.
    """

    last_needs_every_rank = False
    keeps_gradients = False

    def __init__(self, parameters: Sequence[torch.nn.Parameter], ranks: Ranks) -> None:
        """A collective. Errors: OSError on all ranks where they cannot share memory."""
        self.parameters = list(parameters)
        n = ranks.world_size
        sizes = [*(parameter.numel() for parameter in self.parameters), MOST_NUMBERS]
        # numbers of a slice: whole lines of the cache
        length = math.ceil(math.ceil(sum(sizes) / n) / LINE) * LINE
        self.memory = SharedMemory(torch.float32.itemsize * (n + 1) * n * length, ranks)
        regions = self.memory.data.view(torch.float32).view(n + 1, n * length)
        shapes = [*(parameter.shape for parameter in self.parameters), (MOST_NUMBERS,)]

        def views_of(region: torch.Tensor) -> list[torch.Tensor]:
            parts = region[: sum(sizes)].split(sizes)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        *self.own_gradients, self.own_numbers = views_of(regions[ranks.rank])
        *self.sums, self.sum_of_numbers = views_of(regions[n])
        *self.slices, self.slice_of_sum = regions[:, ranks.rank * length : (ranks.rank + 1) * length]

    def forward(self, compute: Callable[[], ResultT], last: bool) -> ResultT:
        """compute(). While the backward pass runs there is nothing to do: it needs all of the processor that copying would use."""
        return compute()

    def finish(self, message: torch.Tensor) -> torch.Tensor:
        """Make every gradient the sum over the ranks; returns the sum of the messages (1-d)."""
        gradients = []
        for parameter in self.parameters:
            # A rank without rows in the ragged last update.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        torch._foreach_copy_(self.own_gradients, gradients)
        self.own_numbers[: len(message)] = message
        self.memory.wait()
        torch.add(self.slices[0], self.slices[1], out=self.slice_of_sum)
        for of_rank in self.slices[2:]:
            self.slice_of_sum += of_rank
        self.memory.wait()
        torch._foreach_copy_(gradients, self.sums)
        return self.sum_of_numbers[: len(message)].clone()


class SharedOrthogonalise:
    """`orthogonalise`, nearly all of Muon's work: each rank computes every world-size-th matrix and reads the others' results.

    A rank writes its results into shared memory, waits until all have, and reads. It writes there again in the next update. By
    then all have read, since the sum of that update's gradients needed all of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        # {shape of the matrices: where the results are; None: the system gives no memory, and each rank does all}
        self._memories: dict[torch.Size, SharedMemory | None] = {}

    def __call__(self, matrices: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[n, rows, columns] -> the same in bf16, to be read until the next update. All ranks must call it."""
        if matrices.shape not in self._memories:
            self._memories[matrices.shape] = None
            with contextlib.suppress(OSError):
                self._memories[matrices.shape] = SharedMemory(muon.DTYPE.itemsize * matrices.numel(), self.ranks)
        memory = self._memories[matrices.shape]
        if memory is None:
            return muon.orthogonalise(matrices)
        results = memory.data.view(muon.DTYPE).view(matrices.shape)
        own = slice(self.ranks.rank, None, self.ranks.world_size)
        # There may be fewer matrices of a shape than ranks.
        if len(matrices[own]):
            results[own] = muon.orthogonalise(matrices[own])
        memory.wait()
        return results

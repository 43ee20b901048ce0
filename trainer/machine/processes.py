"""Into how many processes a run on a CPU divides itself, where a command is started plainly.

A process with several threads meets at a barrier after each operation, a thousand times in an update. Whatever takes one
of its cores for a moment, another program or the system itself, holds up all its threads until the next barrier. Several
processes of fewer threads that share the rows of each micro-batch wait for each other a few times in an update. Measured on two
cores with 26 M parameters: docs/performance.md, "One process or several".

What they share are the rows of a micro-batch, so the flags and everything that is counted keep their meaning. The ranks
are those that torchrun would start (machine/ranks.py); machine/children.py starts them.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.errors import UserError
from common.wording import counted
from trainer.machine.cgroups import processor_limit
from trainer.machine.devices import pick_device
from trainer.machine.measure import total_memory
from trainer.machine.ranks import ranks_of_launcher

# Positions of a micro-batch that each process keeps at least: matrix products of fewer rows take longer for each of them.
LEAST_POSITIONS = 1024
# Each process goes over all gradients and weights once in an update, and all of them share the machine's memory. Their
# gain is measured on two cores alone, so there are not many of them on a machine with many.
MOST_BY_ITSELF = 8
# From so many on a user may wonder why one process has them all.
MANY_THREADS = 4
# What a process needs beside its tensors: PyTorch's code and buffers, and what it compiles.
BYTES_OF_PROCESS = 600 << 20
# Weight, gradient and AdamW's two moments in fp32, of each process.
BYTES_PER_PARAMETER = 16
FP32 = 4
BF16 = 2
# Of the memory. The rest is for activations, which do not grow with the number of processes, and for other programs.
SHARE_OF_MEMORY = 0.5


@dataclass(frozen=True)
class Divisible:
    """What there is to divide. rows: --batch_size. positions: of a row. parameters: of the model, about.

    whole: why its loss cannot be computed in parts, "" where it can. is_planned: a plan will choose the rows, and `rows` is
    what it can choose. processes: that a run has had which is gone on with; None: it has no say.
    """

    rows: int
    positions: int
    parameters: int
    whole: str = ""
    is_planned: bool = False
    processes: int | None = None


@dataclass(frozen=True)
class Division:
    """The processes of a command, the threads of each (None: those that PyTorch takes), and lines for the user on them."""

    processes: int = 1
    threads: int | None = None
    notices: Sequence[str] = ()


ONE_PROCESS = Division()


class CpuSettings(Protocol):
    """The flags that decide about it."""

    device: str | None
    cpu_processes: str


def divide(settings: CpuSettings, micro_batch_of: Callable[[], Divisible | None], by_itself: bool) -> Division:
    """What --cpu_processes asks for, or what suits the machine.

    micro_batch_of: the run's, None where its flags do not fit each other. by_itself: whether "auto" may start processes.
    Errors: UserError where the flag's number does not fit the run.
    """
    asked = settings.cpu_processes
    obstacle = obstacle_here(settings.device)
    n_threads = available_threads()
    if obstacle:
        if asked in ("auto", "1"):
            return Division(1, n_threads)
        return Division(1, n_threads, [f"warning: --cpu_processes {asked} has no effect: {obstacle}"])
    if asked == "1" or (asked == "auto" and (n_threads == 1 or not by_itself)):
        return Division(1, n_threads)
    micro_batch = micro_batch_of()
    if micro_batch is None:
        return Division(1, n_threads)
    if asked == "auto" and micro_batch.processes is not None and micro_batch.processes <= n_threads:
        n = micro_batch.processes
    elif asked == "auto":
        n = choose(n_threads, micro_batch, total_memory(torch.device("cpu")))
        if n == 1 and n_threads >= MANY_THREADS:
            why = why_one(n_threads, micro_batch)
            return Division(1, n_threads, [f"1 process of {n_threads} threads (--cpu_processes auto): {why}"])
    else:
        n = int(asked)
        check(n, micro_batch)
    if n == 1:
        return Division(1, n_threads)
    threads = max(1, n_threads // n)
    is_told = micro_batch.rows != n and not micro_batch.is_planned
    of_all = f" ({micro_batch.rows // n} of its {micro_batch.rows} rows each)" if is_told else ""
    line = (
        f"{n} processes of {counted(threads, 'thread')} share each micro-batch{of_all}: they wait for each other a few "
        "times an update, threads at every operation; --cpu_processes 1 trains in one process"
    )
    return Division(n, threads, [line])


def obstacle_here(device: str | None) -> str:
    """Why a command cannot divide itself on this machine, device and launch; "" where it can.

    Errors: UserError for a device that is not there, and for the environment of a broken launch.
    """
    if ranks_of_launcher() is not None:
        return "the launcher has decided on the processes"
    kind = pick_device(device).type
    if kind != "cpu":
        return f"the run is on {kind}"
    if sys.platform != "linux":
        return "it works on Linux alone"
    return ""


def available_threads() -> int:
    """The threads that PyTorch takes here (OMP_NUM_THREADS limits them), on the processors that this process may use."""
    n_threads = torch.get_num_threads()
    if hasattr(os, "sched_getaffinity"):
        n_threads = min(n_threads, len(os.sched_getaffinity(0)))
    limit = processor_limit()
    if limit is not None:
        # A container may have two processors of a machine with a hundred. More threads than these would be stopped
        # together for a part of each tenth of a second.
        n_threads = min(n_threads, max(1, math.ceil(limit)))
    return n_threads


def choose(n_threads: int, micro_batch: Divisible, memory: int | None) -> int:
    """How many processes suit a run best. memory: bytes that it may use, None: not known.

    The most processes, up to MOST_BY_ITSELF, for which all of this holds:
    - They divide the threads, so that no core is left idle, and the rows of a micro-batch, so that all have as many.
    - Each keeps LEAST_POSITIONS of a micro-batch, so that its products stay large enough to be fast.
    - SHARE_OF_MEMORY holds all of them. Each has weights, gradients and moments of its own; in shared memory lie the
      gradients of each once more, and their sum. Activations are those of its rows, so together they are as before.
    Where the loss needs a whole micro-batch there is one. The answer depends on nothing that changes from one start to the
    next, such as the memory that is free: a resume on the same machine has the same ranks, and goes on bit for bit.
    """
    best = 1
    if micro_batch.whole:
        return best
    for n in dividing(n_threads, micro_batch):
        is_large = positions_of(n, micro_batch) >= LEAST_POSITIONS
        fits = memory is None or process_bytes(n, micro_batch.parameters) <= SHARE_OF_MEMORY * memory
        if is_large and fits:
            best = n
    return best


def dividing(n_threads: int, micro_batch: Divisible) -> list[int]:
    """The numbers of processes that divide the threads and the rows of a micro-batch, the smallest first."""
    numbers = range(2, min(n_threads, MOST_BY_ITSELF) + 1)
    return [n for n in numbers if n_threads % n == 0 and micro_batch.rows % n == 0]


def positions_of(n: int, micro_batch: Divisible) -> int:
    """The positions of a micro-batch that each of n processes has."""
    return micro_batch.rows // n * micro_batch.positions


def why_one(n_threads: int, micro_batch: Divisible) -> str:
    """Why `choose` has found nothing better than one process; a part of a line."""
    if micro_batch.whole:
        return micro_batch.whole
    possible = dividing(n_threads, micro_batch)
    if not possible:
        most = min(n_threads, MOST_BY_ITSELF)
        rows = counted(micro_batch.rows, "row")
        # Nobody has given the rows of a plan, which are not known yet: these are what most plans have.
        source = "of a usual micro-batch" if micro_batch.is_planned else "(--batch_size)"
        return f"no number of processes from 2 to {most} divides {n_threads} threads and {rows} {source}"
    positions = positions_of(possible[0], micro_batch)
    if positions < LEAST_POSITIONS:
        return f"each of {possible[0]} would have {positions:,} of a micro-batch's positions, and {LEAST_POSITIONS:,} keep it busy"
    return f"weights, gradients and moments of {possible[0]} would take more than half of the memory"


def process_bytes(n_processes: int, parameters: int) -> int:
    """Of n processes without their activations."""
    of_each = BYTES_OF_PROCESS + BYTES_PER_PARAMETER * parameters
    return n_processes * of_each + bytes_in_shared_memory(n_processes, parameters)


def bytes_in_shared_memory(n_processes: int, parameters: int) -> int:
    """Of n processes, for gradients (trainer/shared_reducer.py) and Muon's matrices (trainer/optim/shared_muon.py)."""
    if n_processes == 1:
        return 0
    return parameters * (FP32 * (n_processes + 1) + BF16)


def check(n: int, micro_batch: Divisible) -> None:
    """Errors: UserError where a micro-batch cannot be divided into n parts."""
    if n == 1:
        return
    if micro_batch.whole:
        raise UserError(f"--cpu_processes {n}: {micro_batch.whole}; drop the flag")
    # A plan takes rows that any number of processes can share.
    if not micro_batch.is_planned and micro_batch.rows % n:
        raise UserError(
            f"--cpu_processes {n}: --batch_size {micro_batch.rows} cannot be divided by it; take a number that divides "
            "the batch, or auto"
        )

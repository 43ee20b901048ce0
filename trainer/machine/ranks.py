"""The processes of a run: where this one stands among them, how they join, and what they do together: work that one of them does for
all, waiting for each other, small messages.

How an error of one rank ends all of them. A rank that raised while the others wait for it in a collective would leave
them there until the time limit of the process group. There are three cases:

- Work of rank 0 alone, such as choosing a checkpoint or making a folder, goes through `on_main`: the message that all
  ranks wait for says whether it failed, so all of them end, and rank 0 prints the line.
- A signal or a loader that failed is told with the next update's reduction (trainer/loop.py): all stop at the same place.
- What goes wrong on one rank alone ends that rank at once (command_line.end_process), without a handshake. The launcher
  sees it gone and ends the others; where the launcher itself was killed, the kernel ends each rank.
"""

import contextlib
import math
import mmap
import os
import platform
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from common.errors import SaidByAnotherRank, UserError, user_errors
from common.processes import end_with
from common.wording import announce
from trainer.machine.devices import pick_device
from trainer.machine.measure import versions

# processors that show others their writes in the order in which they were made: who sees a count sees what was written before
ORDERED = ("x86_64", "AMD64")
# bytes of a line of the processor's cache, which two ranks never write into at the same time
CACHE_LINE = 64
# After so many looks a rank leaves the core to others for a moment: that may be the rank which is waited for.
LOOKS = 200
NAP_S = 5e-5


class SharedMemory:
    """Memory that all copies of a command see (machine/cpu_ranks.py), and in which they wait for each other many times in an update.

    It is a file without a name, gone with the last process that has it, even after kill -9, and no limit of /dev/shm counts, which
    containers keep at 64 MB. A barrier of Gloo wakes a thread, which takes milliseconds where every core computes; here each rank
    counts its waits where all of them see it.
    """

    def __init__(self, file: int, n: int) -> None:
        """file: descriptor of an empty file that the n ranks have."""
        self._file = file
        self._taken = 0
        self._counts = self.take(CACHE_LINE * n).numpy().view(np.int64).reshape(n, -1)[:, 0]
        self._kept = self._taken

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size], zeros. All ranks take the same pieces in the same order. Errors: UserError where the system gives none."""
        start = self._taken
        self._taken += math.ceil(size / mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            os.posix_fallocate(self._file, start, size)
        except OSError as error:
            # Memory is full, or a limit of the shell or a sandbox forbids it.
            raise UserError(
                f"the processes get no {size:,} bytes to share ({error.strerror}): --cpu_processes 1 needs none"
            ) from error
        return torch.frombuffer(mmap.mmap(self._file, size, offset=start), dtype=torch.uint8)

    def give_back(self, rank: int) -> None:
        """Give all that was taken back to the system. All ranks must call it, and none may touch it any more."""
        self.wait(rank)
        self._taken = self._kept
        os.ftruncate(self._file, self._taken)
        # A slower rank would cut off what another one takes next.
        self.wait(rank)

    def wait(self, rank: int) -> None:
        """Return when all ranks have called it as often as this one. What they wrote before can be read."""
        if platform.machine() not in ORDERED:
            dist.barrier()
            return
        self._counts[rank] += 1
        looks = 0
        while self._counts.min() < self._counts[rank]:
            looks += 1
            if looks > LOOKS:
                time.sleep(NAP_S)


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the run.

    With --batch_size 32 and --accumulation_steps 2, eight ranks are one of two things:

                                sharing   rows that a rank computes at once   micro-batches at once   rows of an update
        torchrun                   1                     32                             8                   512
        a command that has         8                      4                             1                    64
        divided itself
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    # How many ranks share one micro-batch of --batch_size rows. 1 under a launcher, where each rank has micro-batches of its
    # own. All of them where the command has divided itself (machine/cpu_ranks.py), so that its flags mean what they mean in
    # one process.
    sharing: int = 1
    # How many ranks the launcher has started on this machine; 1 where it does not say, and for the copies of a command.
    local_world_size: int = 1
    # shared by the copies of a command
    memory: SharedMemory | None = None

    @property
    def micro_batches_at_once(self) -> int:
        """How many micro-batches of --batch_size rows the ranks compute side by side."""
        return self.world_size // self.sharing

    def rows_of(self, batch_size: int) -> int:
        """The rows that one rank computes at once, where a micro-batch has batch_size rows."""
        assert batch_size % self.sharing == 0, "machine/cpu_ranks.py divides what can be divided"
        return batch_size // self.sharing

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0


# A run of one process
ONE_RANK = Ranks()


def init_distributed_mode(
    device: str | None = None, timeout_s: float = 600, ddp: bool = False
) -> tuple[Ranks, torch.device]:
    """Join the process group that torchrun describes in the environment; returns (Ranks, torch.device).

    device: the user's choice ("cuda:0", "mps", "cpu") or None for the best there is. Under torchrun a CUDA rank takes
    the GPU of its local rank. Errors: UserError for `ddp` without torchrun or a device that is not there.
    """
    launched = ranks_of_launcher()
    own_device = pick_device(device)
    if launched is None:
        if ddp:
            raise UserError("--ddp needs a launcher: torchrun --nproc_per_node 2 trainer/train_pretrain.py")
        if own_device.type == "cuda":
            # Events and streams are of the current one.
            torch.cuda.set_device(own_device)
        return ONE_RANK, own_device
    # A rank that went on without its launcher, which was killed, would write over what the next launch trains. Only torchrun's ranks: a
    # process that somebody started in the background by hand is to go on when the shell is closed.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with(os.getppid())
    if own_device.type == "mps":
        raise UserError("data parallel does not work on mps: launch with python instead of torchrun, or --device cpu")
    backend = "gloo"
    if own_device.type == "cuda":
        if launched.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc_per_node asks for more processes than this machine has GPUs ({torch.cuda.device_count()})"
            )
        own_device = torch.device("cuda", launched.local_rank)
        torch.cuda.set_device(own_device)
        if dist.is_nccl_available():
            backend = "nccl"
        elif launched.is_main:
            announce("this PyTorch has no NCCL (on Windows it never has): the ranks use Gloo, which is slower")
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        store=rendezvous_store(timeout),
        rank=launched.rank,
        world_size=launched.world_size,
        timeout=timeout,
        device_id=own_device if backend == "nccl" else None,
    )
    return launched, own_device


def ranks_of_launcher() -> Ranks | None:
    """What the environment variables of torchrun say; None: there are none.

    No RANK, or -1 as old launch lines set it: there are none. Errors: UserError where some of them are missing.
    """
    if os.environ.get("RANK", "-1").strip() == "-1":
        return None
    missing = [name for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"RANK is set and {', '.join(missing)} is not: launch with torchrun, which sets them all, or unset RANK to train in "
            "one process"
        )
    with user_errors():
        n_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    return Ranks(rank, local_rank, world_size, local_world_size=n_here)


def rendezvous_store(timeout: timedelta) -> dist.Store:
    """The key-value store in which the ranks find each other.

    torchrun keeps one store over its restarts, so a restarted rank could read the address of a peer that is dead, and
    wait for it. Each restart gets names of its own. (Of several nodes each counts its own restarts, so not there.)
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    attempt = "0"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt_{attempt}", store)


ResultT = TypeVar("ResultT")

# How often ranks meet at least while one of them works and the others wait for it: well within any --dist_timeout
MEET_EVERY_S = 0.25
# Ends of the names of flags that each machine may have in its own way: devices, workers, and the places of its files. What is in the
# files of the data is compared by their digests, the shares of a --mixture and the shape of a --from_weight with the rest of the run's
# identity. The weights themselves are rank 0's.
OWN_OF_A_MACHINE = ("_dir", "_path", "_file", "device", "from_weight", "local_rank", "mixture", "num_workers")


# ---------------------------------------------------------------------------------------- one rank works for all


def on_main(ranks: Ranks, work: Callable[[], ResultT]) -> ResultT:
    """The result of `work()`, which rank 0 alone does while the others wait; small, since all ranks get it.

    It may take longer than the ranks wait for a message. Errors: what a user can mend ends all ranks; only rank 0 prints
    its line.
    """
    # The result, and whether it failed. Any: torch sends a list of objects of every kind.
    answer: list[Any] = [None, False]
    error: UserError | None = None
    with until_all_are_ready(ranks):
        if ranks.is_main:
            try:
                with user_errors():
                    answer[0] = work()
            except UserError as caught:
                error = caught
                answer[1] = True
    if ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    result, failed = answer
    if failed:
        raise error or SaidByAnotherRank
    return result


# ---------------------------------------------------------------------------------- each rank works for itself


@contextlib.contextmanager
def until_all_are_ready(ranks: Ranks) -> Iterator[None]:
    """A block of work that each rank does for itself, such as reading its data: it ends when all of them are done.

    A rank may take longer than the others wait for a message, since a thread of each meets those of the others again and again until
    all are done. One that is gone, or fails, no longer comes. All ranks must enter the block, which may have no collective within: its
    messages would come between those by which the ranks meet.
    """
    if ranks.world_size == 1:
        yield
        return
    gpu = torch.cuda.current_device() if dist.get_backend() == "nccl" else None
    is_done = threading.Event()
    failures: list[BaseException] = []

    def meet() -> None:
        # A thread begins on the first GPU.
        if gpu is not None:
            torch.cuda.set_device(gpu)
        all_are_done = False
        while not all_are_done:
            own = is_done.wait(MEET_EVERY_S)
            if failures:
                return
            try:
                all_are_done = least_of_ranks(ranks, float(own)) == 1
            except RuntimeError as error:
                failures.append(error)

    thread = threading.Thread(target=meet, name="until all are ready", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        failures.append(error)
        raise
    finally:
        is_done.set()
    thread.join()
    if failures:
        raise failures[0]


def first_rank_first(ranks: Ranks, work: Callable[[], ResultT]) -> ResultT:
    """The result of `work()`, which each rank does for itself: the first rank of each machine before the others of it.

    These find what the first one has made, such as a token store. Without an order any of them would make it, and the one that
    shows its progress might wait. All ranks must come here, and the work may have no collective. Errors: those of the work.
    """
    is_first = ranks.local_rank == 0
    failure: UserError | None = None
    with until_all_are_ready(ranks):
        if is_first:
            try:
                result = work()
            except UserError as error:
                failure = error
    # Raised here, where no rank waits for this one: the others find the same for themselves, instead of a rank that is gone.
    if failure is not None:
        raise failure
    with until_all_are_ready(ranks):
        if not is_first:
            result = work()
    return result


# --------------------------------------------------------------------------------------------- a rank is gone

# What NCCL says where another rank is the reason.
OF_OTHER_RANKS = re.compile(r"remote|connection|abort|time.?out|timed out", re.IGNORECASE)


def loss_of_a_rank(error: Exception) -> str | None:
    """One line for an error that says that another rank is gone or silent; None for any other error."""
    said = " ".join(str(error).split())
    is_loss = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    # Gloo raises plain RuntimeErrors.
    is_loss |= "gloo/transport" in said
    # NCCL has one error for all that goes wrong, wrong settings of this machine too.
    is_loss |= isinstance(error, dist.DistBackendError) and OF_OTHER_RANKS.search(said) is not None
    if not is_loss:
        return None
    # It begins with a place in its source, and ends with advice.
    said = re.sub(r"^\[\S+\] ", "", said).partition(" This is typically")[0].rstrip(".")
    return (
        f"another rank is gone, or silent for longer than --dist_timeout ({said}): launched again with --from_resume 1, the run "
        "goes on from its newest checkpoint"
    )


# ---------------------------------------------------------------------------------------------- small messages


def least_of_ranks(ranks: Ranks, number: float) -> float:
    """The smallest of the ranks' numbers, on all of them. A collective."""
    if ranks.world_size == 1:
        return number
    # NCCL sends what lies on a GPU alone, Gloo what lies in main memory.
    place = "cuda" if dist.get_backend() == "nccl" else "cpu"
    least = torch.tensor(number, dtype=torch.float64, device=place)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def end_all(ranks: Ranks, said: str) -> None:
    """End all ranks with a line, unless it is "". said: the same on all of them. Errors: UserError on rank 0, which prints it."""
    if said:
        raise UserError(said) if ranks.is_main else SaidByAnotherRank


# --------------------------------------------------------------------------------------- what ranks must agree in

# On several machines each rank reads its own command line, its own packages and its own copy of the data. The ranks of a run
# make the same plan without a word to each other, so with different ones they would train other rows than they should, or
# wait for messages that nobody sends.


def compare_settings(ranks: Ranks, settings: object) -> None:
    """All ranks must call it. settings: those of the command. Errors: UserError where a rank has other flags or packages."""
    flags = {f"--{name}": value for name, value in vars(settings).items() if not name.endswith(OWN_OF_A_MACHINE)}
    compare_with_main(ranks, {**flags, **versions()})


def compare_with_main(
    ranks: Ranks, facts: Mapping[str, object], needed: str = "the same flags, packages and data"
) -> None:
    """All ranks must call it. facts: of this rank, {what it is: value}. Errors: UserError where they are not those of rank 0.

    needed: what the line says that all ranks need.
    """
    if ranks.world_size == 1:
        return
    of_ranks: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(of_ranks, (socket.gethostname(), entries_of(facts)))
    _, main = of_ranks[0]
    for rank, (host, own) in enumerate(of_ranks):
        differing = [name for name in sorted({*own, *main}) if own.get(name) != main.get(name)]
        if differing:
            told = ", ".join(f"{name} {own.get(name)} (rank 0: {main.get(name)})" for name in differing)
            end_all(ranks, f"rank {rank} on {host!r} has {told}: all ranks need {needed}")


def entries_of(facts: Mapping[str, object]) -> dict[str, object]:
    """The facts, with those of a dict each by itself: of two architectures a line names what differs, and not all of them."""
    found: dict[str, object] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            found |= {f"{name} {entry}": below for entry, below in value.items()}
        else:
            found[name] = value
    return found

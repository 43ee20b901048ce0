"""The processes of a run: where this one stands among them, how they join, and work that one of them does for all."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.errors import DataError, SaidByAnotherRank, UserError, user_errors
from common.notices import announce
from common.processes import environment, watch_parent
from trainer.machine.devices import pick_device

ResultT = TypeVar("ResultT")

# How long the processes of a divided command wait for a message. The end of one of them is noticed otherwise and at once
# (machine/children.py); a limit would end a run that was stopped with Ctrl-Z over night.
COPIES_WAIT_S = 30 * 24 * 3600
# How often rank 0 says that it still works while the others wait for it, at least
SIGN_OF_LIFE_S = 30.0

# Whether this thread is in a block of `until_all_are_ready`.
_IN_OWN_WORK: ContextVar[bool] = ContextVar("in own work", default=False)

# How an error of one rank ends all of them. A rank that raised while the others wait for it in a collective would leave
# them there until the time limit of the process group. There are three cases:
#
# - Work of rank 0 alone, such as choosing a checkpoint or making a folder, goes through `on_main`: the message that all
#   ranks wait for says whether it failed, so all of them end, and rank 0 prints the line.
# - A signal or a loader that failed is told with the next update's reduction (trainer/loop.py): all stop at the same place.
# - What goes wrong on one rank alone ends that rank at once (command_line.end_process), without a handshake. The launcher
#   sees it gone and ends the others; where the launcher itself was killed, each rank sees that (`end_with_launcher`).


def on_main(ranks: "Ranks", work: Callable[[], ResultT]) -> ResultT:
    """The result of `work()`, which rank 0 alone does while the others wait; small, since all ranks get it.

    It may take longer than the ranks wait for a message. Errors: what a user can mend ends all ranks; only rank 0 prints
    its line.
    """
    check_no_own_work()
    # The result, whether it failed, whether it is there. Any: torch sends a list of objects of every kind.
    answer: list[Any] = [None, False, True]
    error: UserError | DataError | None = None
    if ranks.is_main:
        try:
            with signs_of_life(ranks), user_errors():
                answer[0] = work()
        except (UserError, DataError) as caught:
            error = caught
            answer[1] = True
    if ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0)
        while not answer[2]:
            dist.broadcast_object_list(answer, src=0)
    result, failed, _ = answer
    if failed:
        raise error or SaidByAnotherRank
    return result


@contextlib.contextmanager
def signs_of_life(ranks: "Ranks") -> Iterator[None]:
    """While this block of rank 0 runs, the ranks that wait for its answer in `on_main` hear that it still works.

    What takes long is then told apart from a rank that is gone, which says nothing.
    """
    if ranks.world_size == 1:
        yield
        return
    pause = pause_between_signs(ranks)
    is_done = threading.Event()

    def tell() -> None:
        # NCCL: a thread begins on the first GPU, which is that of rank 0. A rank that is gone is noticed with the answer.
        with contextlib.suppress(RuntimeError):
            while not is_done.wait(pause):
                dist.broadcast_object_list([None, False, False], src=0)

    teller = threading.Thread(target=tell, name="signs of life", daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_done.set()
        teller.join()


def pause_between_signs(ranks: "Ranks") -> float:
    """The seconds from one sign of life to the next."""
    if ranks.timeout is None:
        return SIGN_OF_LIFE_S
    return min(SIGN_OF_LIFE_S, ranks.timeout.total_seconds() / 4)


@contextlib.contextmanager
def until_all_are_ready(ranks: "Ranks") -> Iterator[None]:
    """A block of work that each rank does for itself, such as reading its data: it ends when all of them are done.

    A rank may take longer than the others wait for a message, since they meet again and again until all are done. One that is
    gone, or fails, no longer comes. All ranks must enter the block, which may have no collective within: its messages would
    come between those by which the ranks meet.
    """
    check_no_own_work()
    before = _IN_OWN_WORK.set(True)
    try:
        with meetings(ranks):
            yield
    finally:
        _IN_OWN_WORK.reset(before)


def first_rank_first(ranks: "Ranks", work: Callable[[], ResultT]) -> ResultT:
    """The result of `work()`, which each rank does for itself: the first rank of each machine before the others of it.

    These find what the first one has made, such as a token store. Without an order any of them would make it, and the one that
    shows its progress might wait. All ranks must come here, and the work may have no collective. Errors: those of the work.
    """
    is_first = ranks.local_rank == 0
    failure: UserError | DataError | None = None
    with until_all_are_ready(ranks):
        if is_first:
            try:
                result = work()
            except (UserError, DataError) as error:
                failure = error
    # Raised here, where no rank waits for this one: the others find the same for themselves, instead of a rank that is gone.
    if failure is not None:
        raise failure
    with until_all_are_ready(ranks):
        if not is_first:
            result = work()
    return result


def check_no_own_work() -> None:
    """To be called where ranks talk to each other. Noticed with one rank too, where nothing is sent."""
    assert not _IN_OWN_WORK.get(), "work that each rank does for itself has no collective"


@contextlib.contextmanager
def meetings(ranks: "Ranks") -> Iterator[None]:
    """While this block runs, and until it is over on all ranks, a thread of each meets those of the others."""
    if ranks.world_size == 1:
        yield
        return
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    pause = pause_between_signs(ranks)
    is_done = threading.Event()
    failures: list[BaseException] = []

    def meet() -> None:
        # Some builds of Python give a thread the context of the one that starts it.
        _IN_OWN_WORK.set(False)
        # A thread begins on the first GPU.
        if device.type == "cuda":
            torch.cuda.set_device(device)
        all_are_done = False
        while not all_are_done:
            own = is_done.wait(pause)
            if failures:
                return
            try:
                all_are_done = least_of_ranks(ranks, float(own), device) == 1
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


def least_of_ranks(ranks: "Ranks", number: float, device: torch.device) -> float:
    """The smallest of the ranks' numbers, on all of them. A collective. device: the rank's own."""
    check_no_own_work()
    if ranks.world_size == 1:
        return number
    # NCCL sends what lies on a GPU alone, Gloo what lies in main memory.
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    least = torch.tensor(number, dtype=torch.float64, device=place)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def first_said(ranks: "Ranks", text: str) -> str:
    """The first of the ranks' texts that is not empty, on all of them; "": all are empty. A collective."""
    check_no_own_work()
    if ranks.world_size == 1:
        return text
    texts = [""] * ranks.world_size
    dist.all_gather_object(texts, text)
    return next(filter(None, texts), "")


def end_all(ranks: "Ranks", said: str) -> None:
    """End all ranks with a line, unless it is "". said: the same on all of them. Errors: UserError on rank 0, which prints it."""
    if said:
        raise UserError(said) if ranks.is_main else SaidByAnotherRank


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
    # own. All of them where the command has divided itself (machine/processes.py), so that its flags mean what they mean in
    # one process.
    sharing: int = 1
    # Whether all ranks can see the same memory.
    on_one_machine: bool = False
    # How many ranks the launcher has started on this machine; 1 where it does not say, and for the copies of a command.
    local_world_size: int = 1
    # How long they wait for a message.
    timeout: timedelta | None = None

    @property
    def micro_batches_at_once(self) -> int:
        """How many micro-batches of --batch_size rows the ranks compute side by side."""
        return self.world_size // self.sharing

    def rows_of(self, batch_size: int) -> int:
        """The rows that one rank computes at once, where a micro-batch has batch_size rows."""
        assert batch_size % self.sharing == 0, "machine/processes.py divides what can be divided"
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

    A group that this process is in already stays, with the timeout that it was made with.
    device: the user's choice ("cuda:0", "mps", "cpu") or None for the best there is. Under torchrun a CUDA rank takes
    the GPU of its local rank. Errors: UserError for `ddp` without torchrun or a device that is not there.
    """
    launched = ranks_of_launcher()
    if launched is None:
        if ddp:
            raise UserError("--ddp needs a launcher: torchrun --nproc_per_node 2 trainer/train_pretrain.py")
        own_device = pick_device(device)
        if own_device.type == "cuda":
            # Events and streams are of the current one.
            torch.cuda.set_device(own_device)
        return Ranks(), own_device
    end_with_launcher()
    own_device = pick_device(device)
    if own_device.type == "cuda":
        if launched.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc_per_node asks for more processes than this machine has GPUs ({torch.cuda.device_count()})"
            )
        own_device = torch.device("cuda", launched.local_rank)
        torch.cuda.set_device(own_device)
    elif own_device.type == "mps":
        raise UserError("data parallel does not work on mps: launch with python instead of torchrun, or --device cpu")
    if dist.is_initialized():
        return launched, own_device
    backend = pick_backend(own_device, launched)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        store=rendezvous_store(timeout),
        rank=launched.rank,
        world_size=launched.world_size,
        timeout=timeout,
        device_id=own_device if backend == "nccl" else None,
    )
    return replace(launched, timeout=timeout), own_device


def join_copies(rank: int, n: int, meeting_place: socket.socket) -> Ranks:
    """Join the n processes into which a command has divided itself; returns this one's place.

    rank: its number. meeting_place: the socket on which rank 0 listens.
    """
    port = meeting_place.getsockname()[1]
    timeout = timedelta(seconds=COPIES_WAIT_S)
    store: dist.Store
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", port, n, True, timeout, master_listen_fd=meeting_place.detach())
    else:
        meeting_place.close()
        store = dist.TCPStore("127.0.0.1", port, n, False, timeout)
    ranks = Ranks(rank, rank, n, sharing=n, on_one_machine=True, timeout=timeout)
    with network_of(ranks):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=timeout)
    return ranks


def network_of(ranks: Ranks) -> contextlib.AbstractContextManager[object]:
    """The context in which process groups of these ranks are made."""
    if ranks.sharing == 1:
        return contextlib.nullcontext()
    # Nothing leaves this machine: Gloo would look up the address of its name, which not every machine knows.
    return environment("GLOO_SOCKET_IFNAME", "lo")


def ranks_of_launcher() -> Ranks | None:
    """What a process group that there is already says, or the environment variables of torchrun; None where there is neither.

    No RANK, or -1 as old launch lines set it: there are no such variables. Errors: UserError for variables that no launcher
    would leave so.
    """
    if dist.is_initialized():
        return ranks_of_group()
    if os.environ.get("RANK", "-1").strip() == "-1":
        return None
    found = []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        value = os.environ.get(name, "")
        if not value.isdecimal():
            raise UserError(
                f"RANK is set to {os.environ['RANK']!r} and {name} to {value!r}: launch with torchrun, which sets them all, or "
                "unset RANK to train in one process"
            )
        found.append(int(value))
    rank, local_rank, world_size = found
    ranks = Ranks(rank, local_rank, world_size)
    if ranks.rank >= ranks.world_size or ranks.local_rank > ranks.rank:
        raise UserError(
            f"RANK={ranks.rank} LOCAL_RANK={ranks.local_rank} WORLD_SIZE={ranks.world_size} do not fit each other"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"RANK is set and {name} is not: launch with torchrun, or unset RANK to train in one process"
            )
    return with_machine(ranks)


def ranks_of_group() -> Ranks:
    """This process's place in the process group that another program has made, such as Ray Train, before it called us."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    # Such a program may say nothing of machines. Then memory is not shared, and GPUs are taken in the order of the ranks.
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return with_machine(Ranks(rank, local_rank, world_size))


def with_machine(ranks: Ranks) -> Ranks:
    """The same with what the launcher says of this machine, if it does. Errors: UserError for a number that cannot be."""
    name = "LOCAL_WORLD_SIZE"
    if name not in os.environ:
        return ranks
    value = os.environ[name]
    if not value.isdecimal() or not 1 <= int(value) <= ranks.world_size:
        raise UserError(
            f"WORLD_SIZE is {ranks.world_size} and {name} is set to {value!r}: launch with torchrun, which sets both, or "
            f"unset {name}"
        )
    n_here = int(value)
    return replace(ranks, on_one_machine=n_here == ranks.world_size, local_world_size=n_here)


def pick_backend(device: torch.device, ranks: Ranks) -> str:
    """The library that carries tensors between ranks: NCCL between GPUs where this PyTorch has it, Gloo elsewhere."""
    if device.type != "cuda":
        return "gloo"
    if dist.is_nccl_available():
        return "nccl"
    if ranks.is_main:
        announce("this PyTorch has no NCCL (on Windows it never has): the ranks use Gloo, which is slower")
    return "gloo"


def end_with_launcher() -> None:
    """Under torchrun: end this rank soon after the launcher is gone, even if that was killed.

    Ranks that went on alone would write over what the next launch trains. Only torchrun's ranks: a process that somebody
    started in the background by hand is to go on when the shell is closed.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return

    def leave() -> None:
        announce("error: the launcher is gone, so this rank ends", to_stderr=True)
        os._exit(1)

    watch_parent(os.getppid(), leave)


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

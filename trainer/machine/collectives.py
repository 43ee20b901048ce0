"""What the ranks of a run do together: work that one of them does for all, waiting for each other, small messages.

How an error of one rank ends all of them. A rank that raised while the others wait for it in a collective would leave
them there until the time limit of the process group. There are three cases:

- Work of rank 0 alone, such as choosing a checkpoint or making a folder, goes through `on_main`: the message that all
  ranks wait for says whether it failed, so all of them end, and rank 0 prints the line.
- A signal or a loader that failed is told with the next update's reduction (trainer/loop.py): all stop at the same place.
- What goes wrong on one rank alone ends that rank at once (command_line.end_process), without a handshake. The launcher
  sees it gone and ends the others; where the launcher itself was killed, each rank sees that (`ranks.end_with_launcher`).
"""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import transformers

from common.errors import DataError, SaidByAnotherRank, UserError, user_errors
from trainer.machine.ranks import Ranks

ResultT = TypeVar("ResultT")

# How often ranks meet at least while one of them works and the others wait for it
MEET_EVERY_S = 30.0
# What each machine may have in its own way: devices, workers, and the places of its files. What is in the files of the data is
# compared by their digests, the shares of a --mixture and the shape of a --from_weight with the rest of the run's identity. The
# weights themselves are rank 0's.
OWN_OF_A_MACHINE = frozenset(
    {
        "cache_dir",
        "data_dir",
        "data_path",
        "dev_file",
        "device",
        "from_weight",
        "local_rank",
        "mixture",
        "model_path",
        "num_workers",
        "out_dir",
        "test_file",
        "tokenizer_path",
        "train_file",
        "val_path",
        "vocab_path",
    }
)

# True while this thread is in a block of `until_all_are_ready`
_IN_OWN_WORK: ContextVar[bool] = ContextVar("in own work", default=False)


# ---------------------------------------------------------------------------------------- one rank works for all


def on_main(ranks: Ranks, work: Callable[[], ResultT]) -> ResultT:
    """The result of `work()`, which rank 0 alone does while the others wait; small, since all ranks get it.

    It may take longer than the ranks wait for a message. Errors: what a user can mend ends all ranks; only rank 0 prints
    its line.
    """
    check_no_own_work()
    # The result, and whether it failed. Any: torch sends a list of objects of every kind.
    answer: list[Any] = [None, False]
    error: UserError | DataError | None = None
    with meetings(ranks):
        if ranks.is_main:
            try:
                with user_errors():
                    answer[0] = work()
            except (UserError, DataError) as caught:
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


def first_rank_first(ranks: Ranks, work: Callable[[], ResultT]) -> ResultT:
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
def meetings(ranks: Ranks) -> Iterator[None]:
    """While this block runs, and until it is over on all ranks, a thread of each meets those of the others.

    What takes long is so told apart from a rank that is gone, which no longer comes.
    """
    if ranks.world_size == 1:
        yield
        return
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    pause = MEET_EVERY_S if ranks.timeout is None else min(MEET_EVERY_S, ranks.timeout.total_seconds() / 4)
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


def least_of_ranks(ranks: Ranks, number: float, device: torch.device) -> float:
    """The smallest of the ranks' numbers, on all of them. A collective. device: the rank's own."""
    check_no_own_work()
    if ranks.world_size == 1:
        return number
    # NCCL sends what lies on a GPU alone, Gloo what lies in main memory.
    place = device if dist.get_backend() == "nccl" else torch.device("cpu")
    least = torch.tensor(number, dtype=torch.float64, device=place)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def first_said(ranks: Ranks, text: str) -> str:
    """The first of the ranks' texts that is not empty, on all of them; "": all are empty. A collective."""
    check_no_own_work()
    if ranks.world_size == 1:
        return text
    texts = [""] * ranks.world_size
    dist.all_gather_object(texts, text)
    return next(filter(None, texts), "")


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
    flags = {f"--{name}": value for name, value in vars(settings).items() if name not in OWN_OF_A_MACHINE}
    # those that compute, or draw the order of the rows
    packages = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
    }
    compare_with_main(ranks, {**flags, **packages})


def compare_precision(ranks: Ranks, dtype: torch.dtype) -> None:
    """All ranks must call it. dtype: that this rank computes in, which its hardware may have chosen instead of --dtype.

    With float16 losses are scaled, so gradients of another precision cannot be added to its own. Errors: UserError where it
    is not that of rank 0.
    """
    advice = "name one that all of them have: --dtype float16 on GPUs, --dtype float32 on CPUs"
    compare_with_main(ranks, {"precision": str(dtype).removeprefix("torch.")}, advice)


def compare_with_main(
    ranks: Ranks, facts: Mapping[str, object], advice: str = "all ranks need the same flags, packages and data"
) -> None:
    """All ranks must call it. facts: of this rank, {what it is: value}. Errors: UserError where they are not those of rank 0."""
    if ranks.world_size == 1:
        return
    # The entries of an architecture in its place: a line names those that differ, not all of them.
    own: dict[str, object] = {}
    for name, value in facts.items():
        own |= (
            {f"{name} {entry}": below for entry, below in value.items()} if isinstance(value, dict) else {name: value}
        )
    of_main = [own]
    dist.broadcast_object_list(of_main, src=0)
    main = of_main[0]
    differing = [name for name in sorted({*own, *main}) if own.get(name) != main.get(name)]
    said = ""
    if differing:
        told = ", ".join(f"{name} {own.get(name)} (rank 0: {main.get(name)})" for name in differing)
        said = f"rank {ranks.rank} on {socket.gethostname()!r} has {told}: {advice}"
    end_all(ranks, first_said(ranks, said))

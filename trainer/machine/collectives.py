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
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.errors import DataError, SaidByAnotherRank, UserError, user_errors
from trainer.machine.ranks import Ranks

ResultT = TypeVar("ResultT")

# How often rank 0 says that it still works while the others wait for it, at least
SIGN_OF_LIFE_S = 30.0

# Whether this thread is in a block of `until_all_are_ready`.
_IN_OWN_WORK: ContextVar[bool] = ContextVar("in own work", default=False)


# ---------------------------------------------------------------------------------------- one rank works for all


def on_main(ranks: Ranks, work: Callable[[], ResultT]) -> ResultT:
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
def signs_of_life(ranks: Ranks) -> Iterator[None]:
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


def pause_between_signs(ranks: Ranks) -> float:
    """The seconds from one sign of life to the next."""
    if ranks.timeout is None:
        return SIGN_OF_LIFE_S
    return min(SIGN_OF_LIFE_S, ranks.timeout.total_seconds() / 4)


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

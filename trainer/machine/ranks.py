"""The ranks of a run: this process among them, how they join, work that one does for all, barriers, small messages.

A *collective* is a call that waits for the same call of every other rank: all must make it, and in the same order.

How an error of one rank ends all, also those that wait for it in a collective:
- Work of rank 0 alone, such as choosing a checkpoint, goes through `on_main`: the message that all ranks wait for says whether it
  failed, so all of them exit, and rank 0 prints the line.
- A signal or a failed loader is shared in the next update's all-reduce, or before the first one of an epoch (trainer/loop.py).
- Any other error ends its rank at once (command_line.end_process), without a handshake. The others notice and end, or the launcher
  ends them; if the launcher itself was killed, the kernel ends each rank.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from common.errors import PrintedByAnotherRank, UserError, user_errors
from common.processes import die_with_parent
from common.settings import Settings
from common.wording import announce
from trainer.machine.devices import pick_device
from trainer.machine.measure import versions
from trainer.machine.rank import ONE_RANK, Ranks

# Seconds between two looks at which ranks have joined
POLL_S = 0.05
# Environment variable of the ranks of one command (cpu_ranks.py), see Ranks.share_batches
SHARE_BATCHES = "MINIMIND_SHARE_BATCHES"
# Their timeout, in effect none: the command notices the end of a rank, and may be suspended with Ctrl-Z.
FOREVER = timedelta(days=30)


def init_distributed_mode(device: str | None = None, timeout_s: float = 600) -> tuple[Ranks, torch.device]:
    """Join the process group that torchrun describes in the environment; returns (Ranks, torch.device).

    device: the user's choice ("cuda:0", "mps", "cpu") or None for the best one. Under torchrun a CUDA rank takes the GPU
    of its local rank. Errors: UserError for a device that is not available.
    """
    launched = ranks_of_launcher()
    own_device = pick_device(device)
    if launched is None:
        if own_device.type == "cuda":
            # Events and streams use the current one.
            torch.cuda.set_device(own_device)
        return ONE_RANK, own_device
    # A rank that outlived a killed launcher would hold the files of the next launch. Only torchrun's ranks: a process that was
    # started in the background by hand should outlive its shell.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())
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
    if dist.is_initialized():
        # by the calling program, such as a worker of Ray Train
        return launched, own_device
    timeout = FOREVER if launched.share_batches else timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        store=rendezvous_store(launched, timeout, backend),
        rank=launched.rank,
        world_size=launched.world_size,
        timeout=timeout,
        device_id=own_device if backend == "nccl" else None,
    )
    return launched, own_device


def ranks_of_launcher() -> Ranks | None:
    """The ranks as described by torchrun's environment variables; None: without a launcher.

    No RANK, or -1 as old launch lines set it: no launcher. Errors: UserError if some are missing or do not fit.
    """
    if os.environ.get("RANK", "-1").strip() == "-1":
        return None
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    variables = {"LOCAL_WORLD_SIZE": "1", **os.environ}
    numbers = [int(variables[name]) for name in names if variables.get(name, "").strip().isdecimal()]
    if len(numbers) < len(names) or numbers[0] >= numbers[2] or numbers[3] == 0 or not variables.get("MASTER_ADDR"):
        texts = ", ".join(f"{name}={variables.get(name) or '(not set)'}" for name in (*names, "MASTER_ADDR"))
        raise UserError(f"{texts} do not fit: launch with torchrun, or unset RANK to train in one process")
    rank, local_rank, world_size, n_here, _ = numbers
    return Ranks(rank, local_rank, world_size, n_here, share_batches=SHARE_BATCHES in os.environ)


def rendezvous_store(ranks: Ranks, timeout: timedelta, backend: str) -> dist.Store:
    """The key-value store in which the ranks find each other, once all are there.

    Errors: torch's DistStoreError; UserError if the ranks have several backends, which would wait for each other.

    torchrun keeps one store across restarts, so a restarted rank could read the address of a dead peer and wait for it.
    So each restart has its own prefix. (Not with several nodes: each counts its own restarts. There launch/c10d.sh
    has a new store for each.)
    """
    with user_errors():
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    attempt = "0"
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}", store)
    # PyTorch waits without running Python's signal handlers (rank 0 above, where the launcher has no store of its own), and the
    # launcher sends a stop signal if a rank is lost meanwhile.
    joined = [f"rank {rank} has joined" for rank in range(ranks.world_size)]
    store.set(joined[ranks.rank], backend)
    end = time.monotonic() + timeout.total_seconds()
    while not store.check(joined) and time.monotonic() < end:
        time.sleep(POLL_S)
    if absent := [str(rank) for rank, key in enumerate(joined) if not store.check([key])]:
        raise dist.DistStoreError(f"rank {', '.join(absent)} did not join")
    if others := {store.get(key).decode() for key in joined} - {backend}:
        raise UserError(
            f"rank {ranks.rank} uses {backend}, others {', '.join(others)}: all ranks need GPUs, or --device cpu"
        )
    return store


ResultT = TypeVar("ResultT")

# Interval at which waiting ranks synchronise while others work: well within any --dist_timeout
MEET_EVERY_S = 0.25
# Suffixes of flags that may differ between machines: devices, workers, and paths. Data files are compared by their digests, the shares
# of a --mixture and the shape of a --from_weight with the rest of the run's identity. The weights come from rank 0.
MACHINE_SPECIFIC = ("_dir", "_path", "_file", "device", "from_weight", "mixture", "num_workers")


# ---------------------------------------------------------------------------------------- one rank works for all


def on_main(ranks: Ranks, work: Callable[[], ResultT]) -> ResultT:
    """Run `work()` on rank 0 while the others wait. Returns its result on all ranks, so it should be small.

    It may take longer than the timeout of collectives. Errors: a mistake of the user ends all ranks; only rank 0 prints
    its line.
    """
    # [result, whether it failed]. Any: torch broadcasts a list of objects of any type.
    answer: list[Any] = [None, False]
    error: UserError | None = None
    with wait_for_all_ranks(ranks):
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
        raise error or PrintedByAnotherRank
    return result


# ---------------------------------------------------------------------------------- each rank works for itself


@contextlib.contextmanager
def wait_for_all_ranks(ranks: Ranks) -> Iterator[None]:
    """A block of work that each rank does for itself, such as reading its data: it ends when all ranks are done.

    A rank may take longer than the timeout of collectives: a thread of each rank joins an all-reduce again and again until all are
    done. A rank that is gone, or fails, stops joining. All ranks must enter the block, and it must not contain a collective, which
    would get mixed up with those of the threads.
    """
    if ranks.world_size == 1:
        yield
        return
    gpu = torch.cuda.current_device() if dist.get_backend() == "nccl" else None
    is_done = threading.Event()
    failures: list[BaseException] = []

    def meet() -> None:
        # A thread starts on the first GPU.
        if gpu is not None:
            torch.cuda.set_device(gpu)
        all_are_done = False
        while not all_are_done:
            own = is_done.wait(MEET_EVERY_S)
            if failures:
                return
            try:
                all_are_done = min_over_ranks(ranks, float(own)) == 1
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
    """Run `work()` on each rank, on the first rank of each machine before the others there. Returns its result.

    The others find what the first one has made, such as a token store. Without this order any rank might make it, and the one
    that shows progress might wait. All ranks must call it, and the work must not contain a collective. Errors: those of the work.
    """
    is_first = ranks.local_rank == 0
    failure: UserError | None = None
    with wait_for_all_ranks(ranks):
        if is_first:
            try:
                result = work()
            except UserError as error:
                failure = error
    # Raised here, where no rank waits for this one: the others meet the same error themselves, not the loss of a rank.
    if failure is not None:
        raise failure
    with wait_for_all_ranks(ranks):
        if not is_first:
            result = work()
    return result


# ---------------------------------------------------------------------------------------------- small messages


def min_over_ranks(ranks: Ranks, number: float) -> float:
    """The smallest of the ranks' numbers, on all of them. A collective."""
    if ranks.world_size == 1:
        return number
    # NCCL sends only from GPU memory, Gloo from main memory.
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    least = torch.tensor(number, dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return least.item()


def fail_all_ranks(ranks: Ranks, message: str) -> None:
    """End all ranks with a line, unless it is "". message: the same on all ranks. Errors: UserError on rank 0, which prints it."""
    if message:
        raise UserError(message) if ranks.is_main else PrintedByAnotherRank


# --------------------------------------------------------------------------------------- what ranks must agree in

# On several machines each rank has its own command line, packages and copy of the data. The ranks make their plans
# independently, so with different ones they would train the wrong rows, or wait for messages that nobody sends.


def compare_settings(ranks: Ranks, settings: Settings) -> None:
    """All ranks must call it. settings: of the command. Errors: UserError if a rank has other flags or packages."""
    flags = {f"--{name}": value for name, value in settings.values().items() if not name.endswith(MACHINE_SPECIFIC)}
    compare_with_main(ranks, {**flags, **versions()})


def compare_with_main(
    ranks: Ranks, facts: Mapping[str, object], needed: str = "the same flags, packages and data"
) -> None:
    """All ranks must call it. facts: {name: value} of this rank. Errors: UserError if a rank's differ from those of rank 0.

    needed: what all ranks need, for the error's line.
    """
    if ranks.world_size == 1:
        return
    gathered: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(gathered, (socket.gethostname(), flatten_facts(facts)))
    _, main = gathered[0]
    for rank, (host, own) in enumerate(gathered):
        differing = [name for name in sorted({*own, *main}) if own.get(name) != main.get(name)]
        if differing:
            differences = ", ".join(f"{name} {own.get(name)} (rank 0: {main.get(name)})" for name in differing)
            fail_all_ranks(ranks, f"rank {rank} on {host!r} has {differences}: all ranks need {needed}")


def flatten_facts(facts: Mapping[str, object]) -> dict[str, object]:
    """The facts with nested dicts flattened, so that an error names single fields of an architecture, not the whole."""
    flat: dict[str, object] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= {f"{name} {entry}": below for entry, below in value.items()}
        else:
            flat[name] = value
    return flat

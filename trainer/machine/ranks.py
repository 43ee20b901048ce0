"""The processes of a run: where this one stands among them, and how they join. What they do together is in collectives.py."""

import contextlib
import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from common.errors import UserError
from common.processes import environment, watch_parent
from common.wording import announce
from trainer.machine.devices import pick_device


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
    # How long they wait for a message.
    timeout: timedelta | None = None

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

    A group that this process is in already stays, with the timeout that it was made with.
    device: the user's choice ("cuda:0", "mps", "cpu") or None for the best there is. Under torchrun a CUDA rank takes
    the GPU of its local rank. Errors: UserError for `ddp` without torchrun or a device that is not there.
    """
    launched = ranks_of_launcher()
    if launched is None and ddp:
        raise UserError("--ddp needs a launcher: torchrun --nproc_per_node 2 trainer/train_pretrain.py")
    if launched is not None:
        end_with_launcher()
    own_device = device_of(launched, device)
    if own_device.type == "cuda":
        # Events and streams are of the current one.
        torch.cuda.set_device(own_device)
    if launched is None:
        return ONE_RANK, own_device
    # Another program, such as Ray Train, has made the group.
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


def device_of(launched: Ranks | None, asked: str | None) -> torch.device:
    """The device of this process. launched: its place among those of a launcher, None: there is none. asked: by the user.

    Errors: UserError where the ranks of a launcher cannot have devices of this kind.
    """
    device = pick_device(asked)
    if launched is None:
        return device
    if device.type == "mps":
        raise UserError("data parallel does not work on mps: launch with python instead of torchrun, or --device cpu")
    if device.type != "cuda":
        return device
    if launched.local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--nproc_per_node asks for more processes than this machine has GPUs ({torch.cuda.device_count()})"
        )
    return torch.device("cuda", launched.local_rank)


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
        # Another program has made it, such as Ray Train, and may say nothing of machines. Then memory is not shared, and GPUs are
        # taken in the order of the ranks.
        rank, world_size = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    elif os.environ.get("RANK", "-1").strip() == "-1":
        return None
    else:
        rank, local_rank, world_size = numbers_of_environment()
    n_here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    if not n_here.isdecimal() or not 1 <= int(n_here) <= world_size:
        raise UserError(
            f"WORLD_SIZE is {world_size} and LOCAL_WORLD_SIZE is set to {n_here!r}: launch with torchrun, which sets both, or "
            "unset LOCAL_WORLD_SIZE"
        )
    return Ranks(rank, local_rank, world_size, local_world_size=int(n_here))


def numbers_of_environment() -> tuple[int, int, int]:
    """RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them. Errors: UserError for such that no launcher would leave so."""
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
    if rank >= world_size or local_rank > rank:
        raise UserError(f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={world_size} do not fit each other")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(
                f"RANK is set and {name} is not: launch with torchrun, or unset RANK to train in one process"
            )
    return rank, local_rank, world_size


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

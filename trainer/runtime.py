"""The process and its surroundings: ranks, device, precision, seeds, and errors a user can mend."""

import contextlib
import ctypes
import importlib.util
import os
import platform
import random
import shlex
import shutil
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist

from dataset.faults import DataError
from dataset.loader_workers import LoaderError
from dataset.notices import announce
from dataset.parent import watch_parent
from dataset.wording import one_line
from trainer.errors import UserError
from trainer.limits import what_the_machine_lacks


@contextlib.contextmanager
def user_errors():
    """Turn the ValueErrors and OSErrors of setting up (a config field, a file) into UserErrors.

    Used around set-up code only: inside the training loop a ValueError is a defect of ours and keeps its traceback.
    """
    try:
        yield
    except (UserError, DataError):
        raise
    except OSError as error:  # str() would begin with [Errno 13]
        raise UserError(f"{error.filename}: {error.strerror}" if error.filename else str(error)) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def plain_warning(message, category, filename, lineno, line=None) -> str:
    """A warning as a line for users: Python's own form shows a place in our source, and its code."""
    return f"warning: {one_line(message)}\n"


def run_cli(main):
    """Run `main()`; print what the user can mend, or what the machine lacks, as one line on stderr and exit with 2.

    Exit code 1 where nothing is to be mended: a worker process died.
    """
    warnings.formatwarning = plain_warning
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a sample's characters must not end a run
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except (UserError, DataError) as error:
        end_with_line(str(error), 2)
    except LoaderError as error:
        end_with_line(str(error), 2 if error.is_fault_of_data else 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has left
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.exit(1)
    except (MemoryError, RuntimeError, OSError) as error:
        lack = what_the_machine_lacks(error)
        if lack is None:
            raise
        end_with_line(lack, 2)


def end_with_line(message: str, code: int) -> NoReturn:
    if message:  # otherwise another rank says it
        print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    # The other ranks may be waiting in a collective that this one will never join: leave without a handshake.
    if dist.is_initialized():
        os._exit(code)
    sys.exit(code)


def launch_line(script, arguments):
    """The command that started this process, as a user types it."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    launcher = ["python"] if processes == "1" else ["torchrun", "--nproc_per_node", processes]
    return shlex.join([*launcher, script, *map(str, arguments)])


# --------------------------------------------------------------------------------------------------- ranks


def on_main(ranks, work):
    """The result of `work()`, which rank 0 alone does while the others wait; small, since all ranks get it.

    Errors: what a user can mend ends all ranks; only rank 0 prints its line.
    """
    answer = [None, False]  # the result, whether it failed
    error = None
    if ranks.is_main:
        try:
            with user_errors():
                answer[0] = work()
        except (UserError, DataError) as caught:
            answer[1], error = True, caught
    if ranks.world_size > 1:
        dist.broadcast_object_list(answer, src=0)
    if answer[1]:
        raise error or UserError("")
    return answer[0]


@dataclass(frozen=True)
class Ranks:
    """Where this process stands among those of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self):
        return self.rank == 0


def init_distributed_mode(device=None, timeout_s=600, ddp=False):
    """Join the process group that torchrun describes in the environment; returns (Ranks, torch.device).

    device: the user's choice ("cuda:0", "mps", "cpu") or None for the best there is. Under torchrun a CUDA rank takes
    the GPU of its local rank. Errors: UserError for `ddp` without torchrun or a device that is not there.
    """
    if int(os.environ.get("RANK", -1)) == -1:
        if ddp:
            raise UserError("--ddp needs a launcher: torchrun --nproc_per_node 2 trainer/train_pretrain.py")
        device = pick_device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # events and streams are of the current one
        return Ranks(), device
    end_with_launcher()
    ranks = Ranks(*(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
    device = pick_device(device)
    if device.type == "cuda":
        if ranks.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"--nproc_per_node asks for more processes than this machine has GPUs ({torch.cuda.device_count()})"
            )
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
    elif device.type == "mps":
        raise UserError("data parallel does not work on mps: launch with python instead of torchrun, or --device cpu")
    backend = pick_backend(device, ranks)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend,
        store=rendezvous_store(timeout),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=device if backend == "nccl" else None,
    )
    return ranks, device


def pick_backend(device, ranks: Ranks) -> str:
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

    def leave():
        announce("error: the launcher is gone, so this rank ends", to_stderr=True)
        os._exit(1)

    watch_parent(os.getppid(), leave)


def rendezvous_store(timeout):
    """The key-value store in which the ranks find each other.

    torchrun keeps one store over its restarts, so a restarted rank could read the address of a peer that is dead, and
    wait for it. Each restart gets names of its own. (Of several nodes each counts its own restarts, so not there.)
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if os.environ.get("GROUP_WORLD_SIZE") == "1" else "0"
    return dist.PrefixStore(f"attempt_{attempt}", store)


def pick_device(name=None):
    """torch.device for the user's choice, or CUDA, MPS, CPU in this order. Errors: UserError if it is not there.

    A CUDA device has its number: torch.cuda.set_device wants one.
    """
    has_mps = torch.backends.mps.is_available()
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name}: unknown; use cuda, cuda:N, mps or cpu") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name}: this machine shows {torch.cuda.device_count()} CUDA devices; try --device cpu"
        )
    if device.type == "mps" and not has_mps:
        raise UserError("--device mps: not available on this machine; try --device cpu")
    if device.type not in ("cuda", "mps", "cpu"):
        raise UserError(f"--device {name}: unknown; use cuda, cuda:N, mps or cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    return device


# ----------------------------------------------------------------------------------- precision, randomness


def cpu_has_bfloat16():
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16, AMX or ARM's BF16); emulation is slower than fp32."""
    names = ("avx512_bf16", "amx_bf16", "bf16", "amx_tile", "arm_bf16", "sve_bf16")
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in names)


def pick_dtype(name, device):
    """(torch.dtype for autocast, notice or None). Falls back where the hardware has no bfloat16."""
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    if dtype is torch.bfloat16 and device.type == "cpu" and not cpu_has_bfloat16():
        return torch.float32, "this CPU has no native bfloat16: training in float32 instead"
    if (
        dtype is torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        return torch.float16, "this GPU has no native bfloat16: training in float16 with a gradient scaler instead"
    return dtype, None


def seed_everything(seed, rank=0):
    """Seed Python, NumPy and torch. The data order has a generator of its own, so ranks may differ here (dropout)."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def rng_state(device):
    """Every random state of this process, as tensors and plain containers (loadable with weights_only=True)."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "mps": torch.mps.get_rng_state() if device.type == "mps" else None,
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
    }


def set_rng_state(state, device):
    """Inverse of rng_state; a state saved on another kind of device sets what both have."""
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    if device.type == "mps" and state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"].cpu())
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


# A run pays for compiling where, at these rates of matrix products in FLOP/s, its work alone takes this long: on a CPU
# the plain code takes about 2.4 times the time of its products, the compiled one 1.4 times, so one such time is saved.
COMPILE_SECONDS = 40
PRODUCT_RATE = {"cpu": 5e11, "cuda": 1e14}  # of a thread with AVX512-BF16, of a GPU


def compile_blocks(model, choice, device, say, shape=None, flops=0.0):
    """Make training fast: compile it (names of parameters stay as they are) and, on the CPU, keep freed memory at hand.

    choice: "1", "0" or "auto": where a compiler is found and the run is long enough to win back the compile time.
    shape: (rows, positions) of a full micro-batch, None: of the first one that comes; other shapes stay eager.
    flops: of this rank in the whole run, also where a resume has only a part of it left: it decides as the first start did.
    """
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for the products that stay in fp32, all with --dtype float32
    rate = PRODUCT_RATE.get(device.type, float("inf")) * (torch.get_num_threads() if device.type == "cpu" else 1)
    if choice == "0" or (choice == "auto" and flops < COMPILE_SECONDS * rate):
        return
    missing = compiler_missing(device)
    if missing:
        say(f"{missing}: training without torch.compile, which takes longer")
        return
    model.compile_training(shape)


def keep_freed_memory():
    """Tell glibc to keep large freed blocks for the next step. By default each is returned to the system, and the page
    faults of asking again take a fifth of a training step."""
    if platform.libc_ver()[0] == "glibc":
        M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never
        libc.mallopt(M_TOP_PAD, 64 << 20)


def compiler_missing(device):
    """What torch.compile lacks on this machine, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and not any(
        shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")
    ):
        return "no C++ compiler (g++ or clang++) is found"
    return None

"""Making training fast on this machine: torch.compile where it pays, and memory that is kept at hand."""

import ctypes
import functools
import os
import platform
from collections.abc import Callable

import torch

from common.wording import reason_of

# What a step takes, in times of its matrix products alone: the plain code, and the compiled one. Measured on a CPU.
PLAIN_TIME = 2.4
COMPILED_TIME = 1.4
# A run pays for compiling where its products alone take this long, at the rates below: one such time is saved.
COMPILE_SECONDS = 40

# FLOP/s of matrix products: a thread with AVX512-BF16, a GPU
PRODUCT_RATE = {"cpu": 5e11, "cuda": 1e14}
# The products of narrower networks are too small for that rate on a CPU: at width 128 a thread reaches 0.2e12. This is a rule
# that measures nothing, so that a resume decides as the start did, and of the products alone. `share_of_product_rate` in
# trainer/budget/costs.py is what a whole micro-batch reaches of the rate that was measured on the machine.
WIDE_ON_CPU = 320
# Others never compile by themselves.
COMPILED_DEVICES = tuple(PRODUCT_RATE)


def compile_blocks(
    compile_training: Callable[[tuple[int, int], torch.dtype], str],
    choice: str,
    device: torch.device,
    shape: tuple[int, int],
    flops: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    width: int | None = None,
) -> str:
    """Make training fast: set the device up for it, and compile the model where that pays. Names of parameters stay as they are.

    Returns a line for the user, or "".
    compile_training: the model's, which returns a line to say, or "".
    choice: "1", "0" or "auto": where a compiler is found and the run is long enough to win back the compile time.
    shape: (rows, positions) of a full micro-batch; other shapes stay eager.
    flops: of this rank in the whole run, also where a resume has only a part of it left: it decides as the first start did.
    dtype: of the matrix products. width: of the network's layers, which "auto" must know.
    """
    set_up(device, dtype)
    if choice == "auto":
        assert width is not None
        # of the matrix products of all threads together; a device without a known rate never compiles by itself
        rate = PRODUCT_RATE.get(device.type, float("inf"))
        if device.type == "cpu":
            rate *= torch.get_num_threads() * min(1.0, width / WIDE_ON_CPU)
        # Compiling saves about as much time as the matrix products alone take (PLAIN_TIME - COMPILED_TIME), and takes
        # COMPILE_SECONDS itself. So a run gains where its products take at least that long.
        choice = "1" if flops >= COMPILE_SECONDS * rate else "0"
    if choice == "0":
        return ""
    if device.type == "cuda":
        choose_kernels_by_rule()
    failure = failure_to_compile(device.type)
    if failure:
        return f"{failure}: training without torch.compile, which takes longer"
    return compile_training(shape, dtype)


def set_up(device: torch.device, dtype: torch.dtype) -> None:
    """Set the device up for training. Runs that are not compiled gain by it too. dtype: of the matrix products."""
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        # TF32 where fp32 was asked for. In half precision only a router's products stay in fp32, and these should be exact:
        # close scores decide the routing.
        torch.set_float32_matmul_precision("high" if dtype is torch.float32 else "highest")


def choose_kernels_by_rule() -> None:
    """Let the compiler choose among kernels without timing them.

    They add up in different orders, and a start with an empty cache may time them differently from the start before it. A
    resume could then end with other bits. TORCHINDUCTOR_DETERMINISTIC=0 in the environment leaves the choice to timing.
    """
    # It loads the compiler, which not every run needs.
    from torch._inductor import config

    # Earlier versions of torch have no such choice.
    if hasattr(config, "deterministic") and "TORCHINDUCTOR_DETERMINISTIC" not in os.environ:
        config.deterministic = True


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks for the next step. By default each is returned to the system, and the page
    faults of asking again take a fifth of a training step."""
    if platform.libc_ver()[0] == "glibc":
        # These numbers are those of glibc's malloc.h.
        M_TRIM_THRESHOLD = -1
        M_TOP_PAD = -2
        M_MMAP_MAX = -4
        libc = ctypes.CDLL(None)
        # No block gets a mapping of its own, which would be returned as soon as it is freed.
        libc.mallopt(M_MMAP_MAX, 0)
        # The heap is never trimmed, and grows by 64 MiB at a time.
        libc.mallopt(M_TRIM_THRESHOLD, -1)
        libc.mallopt(M_TOP_PAD, 64 << 20)


@functools.cache
def failure_to_compile(device_type: str) -> str | None:
    """What goes wrong when a tiny function and its backward pass are compiled, or None; tried once, within seconds.

    There may be no compiler, or one that lacks something: Apple's clang has no OpenMP, Triton wants a C compiler. Found out
    now, the run goes on without. In the first micro-batch, half of an update would have been computed.
    """
    numbers = torch.ones(64, device=device_type, requires_grad=True)

    def sum_of_sines(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.sin().sum()

    try:
        torch.compile(sum_of_sines, dynamic=False)(numbers).backward()
    except Exception as error:
        return f"torch.compile does not work here ({reason_of(error)})"
    return None

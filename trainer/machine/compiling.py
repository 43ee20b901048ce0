"""Fast training on this machine: torch.compile if it pays off, and reuse of freed memory."""

import ctypes
import functools
import mmap
import os
import platform
from collections.abc import Callable
from pathlib import Path

import torch

from common.processes import text_of_file
from common.wording import compiler_error_line
from trainer.machine.measure import total_memory

# Time of a step as a multiple of the time of its matrix products, eager and compiled; measured on a CPU
EAGER_TIME = 2.4
COMPILED_TIME = 1.4
# Time of a run's matrix products, at the rates below, from which compiling pays off: it saves about that time
COMPILE_SECONDS = 40

# FLOP/s of matrix products: a thread with AVX512-BF16, a GPU. Other devices do not compile with "auto".
PRODUCT_RATE = {"cpu": 5e11, "cuda": 1e14}
# Width from which matrix products reach that rate on a CPU: at width 128 a thread reaches 0.2e12. A rule without measurements,
# so that a resume decides as the start did.
WIDE_ON_CPU = 320
# "2": addresses count as memory, used or not
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


def compile_blocks(
    compile_training: Callable[[tuple[int, int], torch.dtype], str],
    choice: str,
    device: torch.device,
    shape: tuple[int, int],
    flops: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    width: int | None = None,
) -> list[str]:
    """Set the device up for fast training, and compile the model if that pays off. Parameter names do not change.

    Returns lines for the user.
    compile_training: the model's method, which returns such a line or "".
    choice: "1", "0" or "auto": if a compiler is found and the run is long enough to win back the compile time.
    shape: (rows, positions) of a full micro-batch; other shapes stay eager.
    flops: of this rank in the whole run, even if a resume has only part of it left: it decides as the first start did.
    dtype: of the matrix products. width: of the network's layers, required by "auto".
    """
    set_up(device, dtype)
    if choice == "auto":
        assert width is not None
        # Rate of all threads together; a device without a known rate does not compile with "auto".
        rate = PRODUCT_RATE.get(device.type, float("inf"))
        if device.type == "cpu":
            rate *= torch.get_num_threads() * min(1.0, width / WIDE_ON_CPU)
        # Compiling saves about as much time as the matrix products alone take (EAGER_TIME - COMPILED_TIME), and takes
        # COMPILE_SECONDS itself. So a run gains if its products take at least that long.
        choice = "1" if flops >= COMPILE_SECONDS * rate else "0"
    if choice == "0":
        return []
    if device.type == "cuda":
        choose_kernels_by_rule()
    failure = failure_to_compile(device.type)
    if failure:
        return [f"{failure}: training without torch.compile, which is slower"]
    notice = compile_training(shape, dtype)
    return [notice] if notice else []


def set_up(device: torch.device, dtype: torch.dtype) -> None:
    """Set the device up for training, compiled or eager. dtype: of the matrix products."""
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        # TF32 if fp32 was requested. In half precision only a router's products stay in fp32, and these should be exact: close
        # scores decide the routing.
        torch.set_float32_matmul_precision("high" if dtype is torch.float32 else "highest")
        # cuDNN's attention makes a plan for each new shape, and its gradients may be NaN under a mask (pytorch/pytorch#196678).
        torch.backends.cuda.enable_cudnn_sdp(False)


def choose_kernels_by_rule() -> None:
    """Let the compiler choose among kernels without timing them.

    Kernels add in different orders, and timings may differ after a restart with an empty cache: a resume could then end with
    other bits. With --deterministic 0, TORCHINDUCTOR_DETERMINISTIC=0 in the environment leaves the choice to timing.
    """
    # Loads the compiler, which not every run needs.
    from torch._inductor import config

    if "TORCHINDUCTOR_DETERMINISTIC" not in os.environ:
        config.deterministic = True


def keep_freed_memory() -> None:
    """Make glibc keep what is freed from now on for the next step. By default large blocks go back to the system, and the page
    faults of allocating them again take a fifth of a training step.

    In the main thread memory comes in huge pages, where the system has them: products of large results are limited by looking up
    the addresses of small ones. What is free by now goes back: a process that is forked would share it, and a shared huge page
    breaks up when it is written.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    # from glibc's malloc.h, and from Linux's mman.h
    M_TRIM_THRESHOLD = -1
    M_TOP_PAD = -2
    M_MMAP_MAX = -4
    MADV_HUGEPAGE = 14
    libc = ctypes.CDLL(None)
    libc.malloc_trim(ctypes.c_size_t(0))
    # No separate mappings for large blocks: they would be returned as soon as freed.
    libc.mallopt(M_MMAP_MAX, 0)
    # The heap is never trimmed, and grows by 64 MiB at a time.
    libc.mallopt(M_TRIM_THRESHOLD, -1)
    libc.mallopt(M_TOP_PAD, 64 << 20)
    if not may_reserve_addresses():
        return
    # It grows by addresses for half of the memory, which take none of it until they are used.
    size = (total_memory(torch.device("cpu")) or 0) // 2
    libc.malloc.restype = ctypes.c_void_p
    block = libc.malloc(ctypes.c_size_t(size))
    if block is not None:
        start = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(block + size - start), MADV_HUGEPAGE)
        libc.free(ctypes.c_void_p(block))


def may_reserve_addresses() -> bool:
    """Whether unused addresses cost nothing: on Linux, without limits on them and unless glibc is to fill what it allocates."""
    try:
        import resource
    except ImportError:
        # Windows
        return False
    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    is_unlimited = all(limit == resource.RLIM_INFINITY for limit in limits)
    return is_unlimited and text_of_file(OVERCOMMIT).strip() != "2" and "MALLOC_PERTURB_" not in os.environ


@functools.cache
def failure_to_compile(device_type: str) -> str | None:
    """Why torch.compile fails on a tiny function, or None; tried once, within seconds.

    The compiler may be missing or incomplete: Apple's clang has no OpenMP, Triton needs a C compiler. Noticed now, the run
    falls back to eager code; in the first micro-batch, half of an update would have been computed.
    """
    from torch._inductor import config, cpu_vec_isa

    # By default torch compiles a test of each instruction set that the processor has. This function tests the one that is used.
    failure = None
    for is_ok in (True, None) if config.cpp.vec_isa_ok is None else (config.cpp.vec_isa_ok,):
        config.cpp.vec_isa_ok = is_ok
        try:
            torch.compile(torch.sin, dynamic=False)(torch.ones(64, device=device_type))
            return None
        except Exception as error:
            failure = f"torch.compile does not work here ({compiler_error_line(error)})"
            cpu_vec_isa.valid_vec_isa_list.cache_clear()
    return failure

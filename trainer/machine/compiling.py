"""Making training fast on this machine: torch.compile where it pays, and memory that is kept at hand."""

import ctypes
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from typing import Protocol

import torch

# A run pays for compiling where, at these rates of matrix products in FLOP/s, its work alone takes this long: on a CPU
# the plain code takes about 2.4 times the time of its products, the compiled one 1.4 times, so one such time is saved.
COMPILE_SECONDS = 40
# FLOP/s of a thread with AVX512-BF16, and of a GPU.
PRODUCT_RATE = {"cpu": 5e11, "cuda": 1e14}


class Compilable(Protocol):
    """A model that can compile what it computes in training."""

    def compile_training(self, shape: tuple[int, int] | None = None) -> None: ...


def compile_blocks(
    model: Compilable,
    choice: str,
    device: torch.device,
    say: Callable[[str], None],
    shape: tuple[int, int] | None = None,
    flops: float = 0.0,
) -> None:
    """Make training fast: compile it (names of parameters stay as they are) and, on the CPU, keep freed memory at hand.

    choice: "1", "0" or "auto": where a compiler is found and the run is long enough to win back the compile time.
    shape: (rows, positions) of a full micro-batch, None: of the first one that comes; other shapes stay eager.
    flops: of this rank in the whole run, also where a resume has only a part of it left: it decides as the first start did.
    """
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        # TF32 for the products that stay in fp32, all with --dtype float32.
        torch.set_float32_matmul_precision("high")
    # Elsewhere (MPS) nothing is known of its rate: only --use_compile 1 compiles.
    rate = PRODUCT_RATE.get(device.type, float("inf"))
    if device.type == "cpu":
        rate *= torch.get_num_threads()
    is_too_short = flops < COMPILE_SECONDS * rate
    if choice == "0" or (choice == "auto" and is_too_short):
        return
    missing = compiler_missing(device)
    if missing:
        say(f"{missing}: training without torch.compile, which takes longer")
        return
    model.compile_training(shape)


def keep_freed_memory() -> None:
    """Tell glibc to keep large freed blocks for the next step. By default each is returned to the system, and the page
    faults of asking again take a fifth of a training step."""
    if platform.libc_ver()[0] != "glibc":
        return
    # The numbers of these options stand in glibc's malloc.h.
    trim_threshold = -1
    top_pad = -2
    mmap_max = -4
    libc = ctypes.CDLL(None)
    # No block is mapped by itself: such a block is always given back when it is freed.
    libc.mallopt(mmap_max, 0)
    # Free memory at the end of the heap is never given back, whatever its size.
    libc.mallopt(trim_threshold, -1)
    libc.mallopt(top_pad, 64 << 20)


def compiler_missing(device: torch.device) -> str | None:
    """What torch.compile lacks on this machine, or None."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(name) for name in compilers):
        return "no C++ compiler (g++ or clang++) is found"
    return None

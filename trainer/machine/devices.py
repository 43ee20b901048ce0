"""Device and precision of a run, and its random number generators: seeding, saving and restoring their states."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from common.errors import UserError


def pick_device(name: str | None = None) -> torch.device:
    """torch.device of the user's choice, or the first of CUDA, MPS, CPU. Errors: UserError if it is not available.

    A CUDA device has an index, which torch.cuda.set_device needs.
    """
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    has_mps = torch.backends.mps.is_available()
    available = [*(f"cuda:{number}" for number in range(n_gpus)), *["mps"] * has_mps, "cpu"]
    for device in available:
        if name in (None, device, device.partition(":")[0]):
            return torch.device(device)
    raise UserError(f"--device {name}: not on this machine; use --device {' or '.join(available)}")


def cpu_has_bfloat16() -> bool:
    """True if this CPU multiplies bfloat16 natively (AVX512-BF16, AMX or ARM's BF16); emulation is slower than fp32."""
    names = ("avx512_bf16", "amx_bf16", "bf16", "amx_tile", "sve_bf16")
    if not hasattr(torch.cpu, "get_capabilities"):
        # PyTorch 2.10, which images for notebooks have
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in names)


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, list[str]]:
    """(torch.dtype for autocast, lines for the user). Falls back if the hardware has no bfloat16.

    Errors: UserError for a GPU that this PyTorch cannot use.
    """
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    if dtype is torch.bfloat16 and device.type == "cpu" and not cpu_has_bfloat16():
        return torch.float32, ["this CPU has no native bfloat16: training in float32 instead"]
    if device.type == "cuda":
        try:
            torch.ones(1, device=device)
        except RuntimeError as error:
            if "no kernel image" not in str(error):
                raise
            raise UserError(
                "this PyTorch has no kernels for this GPU: install another build of it (for CUDA 12.6 for cards before RTX 20 "
                "and T4; https://pytorch.org/get-started/locally/), or train with --device cpu"
            ) from error
        # By default torch also counts GPUs that emulate bfloat16 in float32, slower than float16.
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.float16, [
                "this GPU has no native bfloat16: training in float16 with a gradient scaler instead"
            ]
    return dtype, []


def autocast(
    device: torch.device, dtype: torch.dtype, cache_weights: bool = True
) -> contextlib.AbstractContextManager[object]:
    """Context for computing a model: matrix products in `dtype`.

    cache_weights: cache weights cast to `dtype`, for reuse within the context.
    """
    if dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=cache_weights)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch. The data order has its own generator, so ranks may differ here (dropout)."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Allow only operations that give the same bits in every run. On a CPU all of ours do so anyway.

    Errors: RuntimeError that names the operation, for those without a deterministic form. They are listed with PyTorch's other
    rules at https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    before = torch.are_deterministic_algorithms_enabled()
    # cuBLAS reads it on first use; without it the order of additions may differ between runs.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # A module created on access, which PyTorch's types do not know
    options: Any = torch.utils.deterministic
    # A slow debugging aid that finds reads of uninitialised memory
    options.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The random states of this process, as tensors and plain containers (loadable with weights_only=True).

    Without NumPy's: its draws come from separate generators, seeded by seed and epoch.
    """
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "mps": torch.mps.get_rng_state() if device.type == "mps" else None,
        "python": random.getstate(),
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Inverse of rng_state; a state from another kind of device sets what both have."""
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    if device.type == "mps" and state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"].cpu())
    random.setstate(state["python"])

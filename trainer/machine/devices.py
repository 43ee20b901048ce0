"""Device and precision of a run, and its random number generators: seeding, saving and restoring their states."""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from common.errors import UserError


def _matmul_precision() -> str:
    # The older function raises if the flags of a backend say something else.
    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return "highest"


def _default_device() -> Any:
    # That of set_default_device, not of a `with`.
    return getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None)


def _flag(module: Any, name: str, value: Any = None) -> tuple[Callable[[], Any], Callable[[Any], object], Any]:
    return partial(getattr, module, name), partial(setattr, module, name), value


def _set_mps_state(state: torch.Tensor | None) -> None:
    if state is not None:
        torch.mps.set_rng_state(state)


# What decides bits or ends a run in all code of a process or thread: how to read and set it, and its value as a run starts (None: kept)
SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], object], Any], ...] = (
    (random.getstate, random.setstate, None),
    (np.random.get_state, np.random.set_state, None),
    (torch.get_rng_state, torch.set_rng_state, None),
    (lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [], torch.cuda.set_rng_state_all, None),
    (lambda: torch.mps.get_rng_state() if torch.backends.mps.is_available() else None, _set_mps_state, None),
    (torch.get_num_threads, torch.set_num_threads, None),
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (_default_device, torch.set_default_device, None),
    (torch.is_grad_enabled, torch.set_grad_enabled, True),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled, False),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    # Subnormal numbers are 0. The sharp scores of `init_induction` give many probabilities that small, for which a CPU takes several
    # times as long. On Linux worker threads have what the thread that starts them has then, and keep it: in a command all of them, since
    # it comes before the first operation; in a call from a program that has computed before, the main thread alone.
    (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal, True),
    (_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    _flag(torch.backends.mkldnn.matmul, "fp32_precision"),  # type: ignore[attr-defined]
    _flag(torch.backends.cuda.matmul, "fp32_precision"),
    _flag(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", True),
    _flag(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", True),
    _flag(torch.backends.cuda.matmul, "allow_fp16_accumulation", False),
    _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    _flag(torch.backends.mkldnn, "enabled", True),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, True),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, True),
    *(
        (partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind), False)
        for kind in ("cpu", "cuda", "mps")
    ),
)


@contextlib.contextmanager
def switches_kept() -> Iterator[None]:
    """Puts SWITCHES back, whatever is done to them within the block."""
    before = [(put, get()) for get, put, _ in SWITCHES]
    try:
        yield
    finally:
        for put, value in before:
            put(value)


@contextlib.contextmanager
def own_switches() -> Iterator[None]:
    """SWITCHES as a run needs them; afterwards they are those of the program that calls."""
    # inference_mode comes first, since it sets one of them.
    with torch.inference_mode(False), switches_kept():
        torch.set_default_device(None)
        for _, put, value in SWITCHES:
            if value is not None:
                put(value)
        # set by a `with` around the call
        is_elsewhere = torch.get_default_device().type != "cpu"
        with torch.device("cpu") if is_elsewhere else contextlib.nullcontext():
            yield


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
    """True if this CPU multiplies bfloat16 faster than float32: by AMX, AMD's and Cooper Lake's AVX512-BF16, ARM's BF16."""
    if not hasattr(torch.cpu, "get_capabilities"):
        # PyTorch 2.10, which images for notebooks have
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    capabilities = torch.cpu.get_capabilities()
    amx, others = ("amx_bf16", "amx_tile"), ("avx512_bf16", "bf16", "sve_bf16")
    # Intel's cores with AVX512-FP16 have AMX too. Where a virtual machine hides it, AVX512-BF16 is left, which takes them 1.8 times as
    # long as float32.
    hides_amx = "Intel" in capabilities.get("cpu_name", "") and capabilities.get("avx512_fp16", False)
    return any(capabilities.get(name, False) for name in (amx if hides_amx else amx + others))


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, list[str]]:
    """(torch.dtype for autocast, lines for the user). Falls back if the hardware has no bfloat16.

    Errors: UserError for a GPU that this PyTorch cannot use.
    """
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    if dtype is torch.bfloat16 and device.type == "cpu" and not cpu_has_bfloat16():
        return torch.float32, ["this CPU has no fast bfloat16: training in float32 instead"]
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
    # Within an autocast of the program that calls, torch would keep copies of older weights.
    torch.clear_autocast_cache()
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

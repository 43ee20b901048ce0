"""Every generator of random numbers of this process: seeding, saving and restoring them."""

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from common.errors import UserError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch. The data order has a generator of its own, so ranks may differ here (dropout)."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Take only operations that give the same bits in every run, if that is wanted. On a CPU all of ours do so anyway.

    https://docs.pytorch.org/docs/stable/notes/randomness.html tells what PyTorch does then, and which operations have no
    such form. Errors: UserError that names the operation.
    """
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    # A module that is made when it is asked for, which the types of PyTorch do not know.
    options: Any = torch.utils.deterministic
    fills = options.fill_uninitialized_memory
    # cuBLAS reads it when it is first used; without it, it may take another order of additions in each run.
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # It is there to find what reads memory that nothing was written to, and takes time.
    options.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        raise UserError(
            f"--deterministic 1: {operation} has no form that gives the same bits: --deterministic 0 trains without"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
        options.fill_uninitialized_memory = fills


def rng_state(device: torch.device) -> dict[str, Any]:
    """Every random state of this process, as tensors and plain containers (loadable with weights_only=True)."""
    # Asked for in the old form, a tuple: the checkpoints hold it so.
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    # weights_only=True refuses NumPy's arrays, and torch does little with uint32.
    numbers = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "mps": torch.mps.get_rng_state() if device.type == "mps" else None,
        "python": random.getstate(),
        "numpy": [kind, numbers, position, has_gauss, gauss],
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Inverse of rng_state; a state saved on another kind of device sets what both have."""
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    if device.type == "mps" and state["mps"] is not None:
        torch.mps.set_rng_state(state["mps"].cpu())
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))

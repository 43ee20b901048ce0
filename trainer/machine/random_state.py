"""Every generator of random numbers of this process: seeding, saving and restoring them."""

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch. The data order has a generator of its own, so ranks may differ here (dropout)."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


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

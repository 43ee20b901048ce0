"""A copy of a run's state, which is written while training goes on."""

from typing import Any

import torch

from trainer.sharding import is_sharded


def snapshot(value: Any, keeps: bool = True) -> Any:
    """A copy on the CPU that later updates do not change; tied tensors stay tied, and sharded ones become whole.

    A collective if there are sharded ones. keeps: False on ranks that only take part in it, and get None in place of each
    leaf. The host waits for a GPU once, after starting all copies: one wait for each of hundreds of tensors takes longer
    than the copies.
    """
    # by tensor id: a tied one is in the state more than once
    copies: dict[int, torch.Tensor | None] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(copied(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value if keeps else None
        if id(value) not in copies:
            copies[id(value)] = copy_of(value, keeps)
        return copies[id(value)]

    result = copied(value)
    if torch.cuda.is_initialized():
        # Before this nothing may read a copy, and no update change its source.
        torch.cuda.synchronize()
    return result


def copy_of(tensor: torch.Tensor, keeps: bool) -> torch.Tensor | None:
    """See `snapshot`; a copy from a GPU may still be under way."""
    if is_sharded(tensor):
        # One at a time: all of them may not fit on a GPU.
        whole = tensor.full_tensor().detach()
        return whole.to("cpu", copy=True) if keeps else None
    if not keeps:
        return None
    if tensor.is_cuda:
        # Copies from MPS are synchronous, as those from the CPU.
        return pinned_like(tensor).copy_(tensor.detach(), non_blocking=True)
    return tensor.detach().to("cpu", copy=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """CPU memory for a copy of a GPU tensor, pinned if possible: only then is the copy asynchronous.

    Pinning takes longer than copying. torch caches unused pinned memory, so the next save reuses that of the last one.
    """
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:
        # No more can be pinned: a system limit, or memory is short. The host waits for such a copy.
        return torch.empty_like(tensor, device="cpu")

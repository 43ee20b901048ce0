"""A Mac with an Apple GPU, as far as another machine can play it; see simulated_cuda.py."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.trainer.machine.simulated_cuda import OnTheCpu


class OnTheCpuWithoutFloat64(OnTheCpu):
    """Refuses what the GPU of a Mac refuses: numbers in float64."""

    def __init__(self) -> None:
        super().__init__("mps")

    def __torch_function__(self, function, types, args=(), kwargs=None):
        asked = self.asked
        result = super().__torch_function__(function, types, args, kwargs)
        goes_there = self.asked > asked and function is not torch.autocast
        if goes_there and isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64: the MPS framework doesn't support it.")
        return result


@contextlib.contextmanager
def simulated_mps() -> Iterator[OnTheCpu]:
    """Gives the mode, whose `asked` counts what went to the GPU."""
    state = torch.zeros(16, dtype=torch.uint8)
    answers: dict[tuple[Any, str], Any] = {
        (torch.backends.mps, "is_available"): lambda: True,
        (torch.cuda, "is_available"): lambda: False,
        (torch.mps, "synchronize"): lambda: None,
        (torch.mps, "get_rng_state"): lambda: state,
        (torch.mps, "set_rng_state"): lambda state: None,
    }
    with contextlib.ExitStack() as patches:
        for (module, name), answer in answers.items():
            patches.enter_context(mock.patch.object(module, name, answer))
        yield patches.enter_context(OnTheCpuWithoutFloat64())

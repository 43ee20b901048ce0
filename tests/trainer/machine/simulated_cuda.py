"""A machine with NVIDIA GPUs, and a Mac with its own, as far as others can play them. `torch.cuda` answers as it does where GPUs are, and a mode
of torch keeps tensors on the CPU: it rewrites the device in every call. What would make the host wait on a GPU is listed, as far
as it can be seen: tensors that are read, and copies that are not under way on their own."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

# These read a tensor. Of one on a GPU the host would wait for the device.
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}


class Event:
    """A stream event; nothing is asynchronous here."""

    def __init__(self, *arguments: Any, **named: Any):
        self.recorded = False

    def record(self, *arguments: Any) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded, "waited for an event that nobody recorded"


class Generator(torch.Generator):
    """Random numbers for any device. No torch function makes one, so the mode below does not see it."""

    def __new__(cls, device: Any = "cpu"):
        return super().__new__(cls, "cpu")


class OnTheCpu(TorchFunctionMode):
    """Rewrites devices of a kind, such as "cuda", to the CPU in every torch call, and counts how often one was asked for. reads: names
    of calls that read a tensor, wherever it would be, out of pinned memory. copies: those to the GPU for which the host would wait."""

    def __init__(self, kind: str = "cuda"):
        super().__init__()
        self.kind = kind
        self.asked = 0
        self.reads = []
        self.copies = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.device:  # the trainer's own idea of where it runs stays
            return function(*args, **kwargs)
        if function is torch.Tensor.pin_memory:
            args[0].is_pinned_here = True
            return args[0]
        is_pinned = kwargs.pop("pin_memory", False)
        asked_before = self.asked
        moved_args = tuple(self._moved(value) for value in args)
        moved_kwargs = {name: self._moved(value) for name, value in kwargs.items()}
        self._note_waits(function, args, kwargs, goes_to_gpu=self.asked > asked_before)
        result = function(*moved_args, **moved_kwargs)
        if is_pinned:
            result.is_pinned_here = True
        return result

    def _note_waits(self, function, args, kwargs, goes_to_gpu: bool) -> None:
        name = getattr(function, "__name__", "")
        from_pinned = bool(args) and getattr(args[0], "is_pinned_here", False)
        if name in READS and not from_pinned:
            self.reads.append(name)
        if not goes_to_gpu:
            return
        is_copy = function in (torch.Tensor.to, torch.Tensor.cuda) and not (from_pinned and kwargs.get("non_blocking"))
        if is_copy or name in ("tensor", "as_tensor", "from_numpy"):
            self.copies.append(f"{name} {tuple(getattr(args[0], 'shape', ()))}")

    def _moved(self, value: Any) -> Any:
        is_device = isinstance(value, torch.device) and value.type == self.kind
        is_name = isinstance(value, str) and value.split(":")[0] == self.kind
        if is_device or is_name:
            self.asked += 1
            return torch.device("cpu")
        return value


def set_device(device: Any, chosen: list[int]) -> None:
    """As the real one, which raises ValueError for a device without a number, up to the call of the driver."""
    index = torch.cuda._utils._get_device_index(device)
    if index >= 0:
        chosen.append(index)


@contextlib.contextmanager
def simulated_cuda(gpus: int = 1, capability: tuple[int, int] = (8, 9)) -> Iterator[SimpleNamespace]:
    """Gives an object with `chosen`, the numbers that set_device was called with, and `mode`. capability: from 8.0 on a GPU has
    bfloat16; earlier ones compute it by way of float32."""
    chosen: list[int] = []
    major, minor = capability
    properties = SimpleNamespace(total_memory=24 << 30, name="Simulated GPU", major=major, minor=minor)
    properties.multi_processor_count = 80
    # Each its own: torch._dynamo, which may be imported within, wants no two names of one function.
    counted = ("reset_peak_memory_stats", "set_rng_state", "manual_seed_all", "synchronize")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: gpus,
        "current_device": lambda: chosen[-1] if chosen else 0,
        "set_device": lambda device: set_device(device, chosen),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or major >= 8,
        "max_memory_allocated": lambda device=None: 1 << 20,
        "memory_allocated": lambda device=None: 1 << 20,
        "memory_reserved": lambda device=None: 2 << 20,
        "mem_get_info": lambda device=None: (20 << 30, properties.total_memory),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        **{name: mock.Mock() for name in counted},
        "Event": Event,
    }
    precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, answer))
        # A build for CUDA would ask the driver whether an optimiser's step is being recorded.
        patches.enter_context(mock.patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None))
        patches.enter_context(mock.patch.object(torch, "Generator", Generator))
        mode = patches.enter_context(OnTheCpu())
        try:
            yield SimpleNamespace(chosen=chosen, mode=mode)
        finally:
            torch.set_float32_matmul_precision(precision)


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

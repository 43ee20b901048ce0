"""What the machine is and can do: its memory in use, its best matrix-product rate, its description for a report."""

import contextlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU, or resident. Not ru_maxrss where it can be helped: that begins with the parent's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        # Not on Windows.
        import resource
    except ImportError:
        return 0
    # In bytes on a Mac, in KiB elsewhere.
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def product_rate(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, sizes: Sequence[int] | None = None, times: int = 4
) -> float:
    """FLOP/s of the fastest of some large matrix products [n, n] x [n, n]."""
    # A generator of its own: a draw from the run's would change its results.
    generator = torch.Generator(device).manual_seed(0)
    best = 0.0
    if not sizes:
        sizes = (1024, 2048, 4096) if device.type == "cpu" else (4096, 8192)
    for n in sizes:
        a = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
        b = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
        c = torch.empty(n, n, device=device, dtype=dtype)
        multiply = partial(torch.mm, a, b, out=c)
        # The best of some: whatever else the machine does makes a product slower, and nothing makes it faster.
        for _ in range(times):
            best = max(best, 2 * n**3 / seconds(multiply, device))
    return best


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long `work()` takes, on the device too."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def versions() -> dict[str, str]:
    """Of what a result may depend on, for a checkpoint."""
    return {
        "python": platform.python_version(),
        # A class of its own, which weights_only refuses.
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def describe_machine(device: torch.device, world_size: int = 1) -> dict[str, str | int | None]:
    """{what: text or number} for a report."""
    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    found: dict[str, str | int | None] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor,
        "cores": os.cpu_count(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return {**found, "device": str(device), "threads": torch.get_num_threads(), "ranks": world_size}


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has in all; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # Windows has no sysconf.
        return None

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

from trainer.machine import cgroups


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU, or resident. Not ru_maxrss where it can be helped: that begins with the parent's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _kibibytes(Path("/proc/self/status"), "VmHWM:")
    if peak is not None:
        return peak
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
    """Bytes of memory that the device has in all, or that a container may use; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        # Windows has no sysconf.
        return None
    limit = cgroups.memory_limit()
    return there if limit is None else min(there, limit)


def available_memory(device: torch.device, root: Path = cgroups.SYSTEM_ROOT) -> int | None:
    """Bytes that this process can still get on the device; None where the system does not tell. root: of /proc and /sys.

    Linux: what can be had without swapping, within the limits of the process's cgroups and of the shell (ulimit -v).
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps freed blocks for itself.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    in_machine = _kibibytes(root / "proc/meminfo", "MemAvailable:")
    if device.type != "cpu" or in_machine is None:
        return None
    bounds = [in_machine]
    in_group = cgroups.memory_left(root)
    if in_group is not None:
        bounds.append(in_group)
    in_shell = _address_space_left(root)
    if in_shell is not None:
        bounds.append(in_shell)
    return min(bounds)


def _kibibytes(path: Path, name: str) -> int | None:
    """Bytes in the line `name number kB` of a file of /proc; None where it is not there."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1]) * 1024
    return None


def _address_space_left(root: Path) -> int | None:
    """Bytes of addresses that RLIMIT_AS leaves this process; None: no limit, or no Linux."""
    try:
        # Not on Windows.
        import resource
    except ImportError:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = _kibibytes(root / "proc/self/status", "VmSize:")
    if limit == resource.RLIM_INFINITY or used is None:
        return None
    return max(limit - used, 0)

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

SYSTEM_ROOT = Path("/")
KIB = 1024
# {version of cgroups: files of the limit on memory and of the memory in use, and what memory.stat calls memory that the system
# gives up when asked}
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU, or resident. Not ru_maxrss where it can be helped: that begins with the parent's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _entry(SYSTEM_ROOT / "proc/self/status", "VmHWM:")
    if peak is not None:
        return KIB * peak
    try:
        # Not on Windows.
        import resource
    except ImportError:
        return 0
    # In bytes on a Mac, in KiB elsewhere.
    unit = 1 if platform.system() == "Darwin" else KIB
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
    """What a result may depend on, for a checkpoint."""
    return {
        "python": platform.python_version(),
        # A class of its own, which weights_only refuses.
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def describe_machine(device: torch.device, world_size: int = 1) -> dict[str, str | int | None]:
    """{what: text or number} for a report."""
    names = [line for line in _text(SYSTEM_ROOT / "proc/cpuinfo").splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
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
    return min([there, *(limit for limit, _ in _memory_of_groups(SYSTEM_ROOT))])


def available_memory(device: torch.device, root: Path = SYSTEM_ROOT) -> int | None:
    """Bytes that this process can still get on the device; None where the system does not tell. root: of /proc and /sys.

    Linux: what can be had without swapping, within the limits of the process's cgroups and of the shell (ulimit -v).
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps freed blocks for itself.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    in_machine = _entry(root / "proc/meminfo", "MemAvailable:")
    if device.type != "cpu" or in_machine is None:
        return None
    bounds = [KIB * in_machine, *(left for _, left in _memory_of_groups(root))]
    # Windows has no such module.
    with contextlib.suppress(ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = _entry(root / "proc/self/status", "VmSize:")
        if limit != resource.RLIM_INFINITY and used is not None:
            bounds.append(max(limit - KIB * used, 0))
    return min(bounds)


# ------------------------------------------------- limits of containers, systemd units and jobs of a cluster: Linux's cgroups


def _memory_of_groups(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes left) of each group of this process that has a limit on memory."""
    found = []
    for folder, version in _groups(root, "memory"):
        limit_file, used_file, cache = MEMORY_FILES[version]
        limit = _text(folder / limit_file).strip()
        used = _text(folder / used_file).strip()
        # Version 2 says `max` where there is no limit.
        if limit.isdecimal():
            # Pages of files that nobody has in use count as used, and make room as soon as somebody asks for memory.
            freed = _entry(folder / "memory.stat", cache) or 0
            found.append((int(limit), max(int(limit) - int(used or 0) + freed, 0)))
    return found


def processor_limit(root: Path = SYSTEM_ROOT) -> float | None:
    """Processors that this process's groups may use at a time, as 1.5; None: no limit. root: of /proc and /sys."""
    limits = []
    for folder, version in _groups(root, "cpu"):
        # As `150000 100000`, microseconds of each period, or `max 100000`; version 1 says -1 where there is no limit.
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, period = (*" ".join(_text(folder / name) for name in files).split(), "", "")[:2]
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def _groups(root: Path, controller: str) -> list[tuple[Path, int]]:
    """(folder, version of cgroups) of the process's own group and of those around it, as far as the controller has such."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        # Number of the hierarchy, its controllers, path; version 2 has the number 0 and no controllers.
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(","):
            top, version = root / "sys/fs/cgroup" / controller, 1
        elif line.startswith("0::"):
            top, version = root / "sys/fs/cgroup", 2
        else:
            continue
        # Within a container the path may be the host's, which is not there; then the top is the container's own group.
        found.append((top, version))
        parts = Path(path.lstrip("/")).parts
        if ".." not in parts:
            found += [(top.joinpath(*parts[: depth + 1]), version) for depth in range(len(parts))]
    return found


def _text(path: Path) -> str:
    """The content of a file; "" where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _entry(path: Path, name: str) -> int | None:
    """The number in the line `name number` of a file; None where there is none."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None

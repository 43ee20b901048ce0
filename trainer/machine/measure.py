"""The machine: its memory, its best matrix-product rate, its description for a report; and one line with advice when memory, files or
threads are used up."""

import contextlib
import errno
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import tokenizers
import torch
import torch.distributed as dist

from common import processes
from common.errors import LoaderError, UserError
from common.processes import cgroups, text_of_file
from common.wording import one_line

KIB = 1024


def peak_memory(device: torch.device) -> int:
    """Peak bytes, of the GPU or resident. ru_maxrss is the last resort: it starts at the parent's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = _entry(processes.SYSTEM_ROOT / "proc/self/status", "VmHWM:")
    if peak is not None:
        return KIB * peak
    if platform.system() == "Windows":
        return psutil.Process().memory_info().peak_wset
    import resource

    # bytes on a Mac, KiB elsewhere
    unit = 1 if platform.system() == "Darwin" else KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def product_rate(device: torch.device, dtype: torch.dtype, sizes: Sequence[int] | None = None) -> float:
    """FLOP/s of the fastest of some large matrix products [n, n] x [n, n]."""
    # A separate generator: a draw from the run's would change its results.
    generator = torch.Generator(device).manual_seed(0)
    best = 0.0
    if not sizes:
        # Most CPUs emulate float16, thirty times slower than float32.
        n_on_cpu = 512 if dtype is torch.float16 else 2048
        sizes = (n_on_cpu,) if device.type == "cpu" else (4096, 8192)
    for n in sizes:
        a = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
        b = torch.randn(n, n, device=device, dtype=dtype, generator=generator)
        c = torch.empty(n, n, device=device, dtype=dtype)
        multiply = partial(torch.mm, a, b, out=c)
        # The best of four: other load can only make a product slower.
        for _ in range(4):
            best = max(best, 2 * n**3 / seconds(multiply, device))
    return best


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of `work()`, including the device's."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def slowness() -> float:
    """How many times as long a program takes as on an idle machine, by what this thread gets of a core for a tenth of a second."""
    began, of_thread = time.perf_counter(), time.thread_time()
    sum(range(5_000_000))
    return max((time.perf_counter() - began) / (time.thread_time() - of_thread), 1.0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def versions() -> dict[str, str]:
    """Versions of the packages that compute, or draw the order of rows."""
    return {
        # torch's own class compares as version numbers, not as text.
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
    }


def describe_machine(device: torch.device, world_size: int = 1) -> dict[str, str | int | None]:
    """{name: text or number} for a report."""
    _, _, names = text_of_file(processes.SYSTEM_ROOT / "proc/cpuinfo").partition("model name")
    processor = names.partition("\n")[0].strip("\t :") or platform.processor() or platform.machine()
    facts: dict[str, str | int | None] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    return {**facts, "device": str(device), "threads": torch.get_num_threads(), "ranks": world_size}


def total_memory(device: torch.device) -> int | None:
    """Total memory of the device in bytes, or what a container may use; None if the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return min([*_memory_of_machine("total"), *(limit for limit, _ in _memory_of_groups())], default=None)


def available_memory(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on the device; None if the system does not say.

    Without swapping, within the limits of the process's cgroups.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch caches freed blocks.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    return min([*_memory_of_machine("available"), *(left for _, left in _memory_of_groups())], default=None)


def _memory_of_machine(field: str) -> list[int]:
    """A field of `psutil.virtual_memory`; [] if the system does not say, such as in a chroot without /proc."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        return [getattr(psutil.virtual_memory(), field)]
    return []


def _memory_of_groups() -> list[tuple[int, int]]:
    """(limit, bytes left) of each cgroup of this process that has a memory limit."""
    limits = []
    for folder in cgroups("memory"):
        # the names of version 2, and of version 1
        limit = (text_of_file(folder / "memory.max") or text_of_file(folder / "memory.limit_in_bytes")).strip()
        used = (text_of_file(folder / "memory.current") or text_of_file(folder / "memory.usage_in_bytes")).strip()
        stat = folder / "memory.stat"
        # No limit: `max`, in version 1 a number of about 2**63
        if limit.isdecimal():
            # Inactive page cache counts as used, but is freed as soon as a process needs memory.
            freed = _entry(stat, "total_inactive_file") or _entry(stat, "inactive_file") or 0
            limits.append((int(limit), max(int(limit) - int(used or 0) + freed, 0)))
    return limits


def _entry(path: Path, name: str) -> int | None:
    """The number in the line `name number` of a file; None if there is none."""
    for line in text_of_file(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return None


# {errno of a used-up resource of the machine or a limit of the shell: advice}
EXHAUSTED = {
    errno.EFBIG: ": raise the limit (ulimit -f)",
    errno.EMFILE: ": raise the limit (ulimit -n)",
    **dict.fromkeys((errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT), ""),
}
# parts of allocators' messages, in lower case: torch's on the CPU and on GPUs, C++'s, cuBLAS's, the compiler's
NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if this error or one in its chain of causes is a failed allocation."""
    reasons: list[BaseException] = []
    reason: BaseException | None = error
    # torch.compile wraps errors. A chain of causes can be a circle.
    while reason is not None and reason not in reasons:
        reasons.append(reason)
        is_found = isinstance(reason, MemoryError | torch.OutOfMemoryError)
        is_found |= isinstance(reason, OSError) and reason.errno == errno.ENOMEM
        # torch's own allocators and C++ raise RuntimeErrors that only their text identifies.
        is_found |= isinstance(reason, RuntimeError) and any(text in str(reason).lower() for text in NO_MEMORY)
        if is_found:
            return True
        reason = reason.__cause__ or reason.__context__
    return False


def exhausted_line(error: Exception) -> str | None:
    """One line for an error that means that memory, files or threads are used up; None for all others."""
    message = one_line(error)
    smaller = "try a smaller --batch_size, --max_seq_len or model"
    if isinstance(error, OSError):
        if error.errno not in EXHAUSTED:
            return None
        path = f"{error.filename}: " if error.filename else ""
        return f"{path}{(error.strerror or '').lower()}{EXHAUSTED[error.errno]}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"no memory is left on the GPU ({message.split('. ')[0]}); {smaller}"
    if is_out_of_memory(error):
        reason = f" ({message[-160:]})" if message else ""
        return f"no memory is left{reason}; {smaller}, or raise the limit (ulimit -v)"
    # Python's words, and those of the libraries in Rust
    if "can't start new thread" in message or "ThreadPoolBuildError" in message:
        return "no more threads can be started: raise the limit (ulimit -u, ulimit -v)"
    return None


# CUDA's words for a GPU that has failed (Xid 48, 74, 79), is gone or is taken, and not for a mistake in a kernel
CARD_LOST = re.compile(
    "uncorrectable|hardware stack|launch timed out|GPU is lost|no CUDA-capable|busy or unavailable|CUDA error: unknown"
)


def lost_card_line(error: Exception) -> str | None:
    """One line for an error that means that the GPU has failed, is gone or is taken; None for all others."""
    sentences = re.split(r"[\n.']", str(error)) if isinstance(error, RuntimeError) else []
    reason = next(filter(CARD_LOST.search, sentences), None)
    return reason and (
        f"the GPU has failed, is gone, or is held by another program ({reason}): `nvidia-smi` and `dmesg | grep Xid` say more; on one "
        "that works, --from_resume 1 continues from the newest checkpoint"
    )


# Words of NCCL's errors that another rank causes
CAUSED_BY_OTHERS = re.compile(r"remote|connection|abort|time.?out|timed out", re.IGNORECASE)


def lost_rank_line(error: Exception) -> str | None:
    """A line for an error that means that another rank is lost; None for others."""
    message = one_line(error)
    is_loss = isinstance(error, dist.DistNetworkError | dist.DistStoreError)
    # Gloo raises plain RuntimeErrors.
    is_loss |= "gloo/transport" in message
    # NCCL raises the same type for everything, including wrong settings of this machine.
    is_loss |= isinstance(error, dist.DistBackendError) and CAUSED_BY_OTHERS.search(message) is not None
    if not is_loss:
        return None
    # Without the source location at its start and the advice at its end
    message = re.sub(r"^\[\S+\] ", "", message).partition(" This is typically")[0].rstrip(".")
    lost = "another rank is gone, or silent for longer than --dist_timeout"
    return f"{lost} ({message}): --from_resume 1 continues from the newest checkpoint"


@contextlib.contextmanager
def out_of_memory_as_user_error(device: torch.device, advise: Callable[[], str]) -> Iterator[None]:
    """Turn a failed allocation into a UserError whose line ends with `advise()`."""
    try:
        yield
    except Exception as error:
        # A loader's error has its own line, which may mention memory as a guess.
        if isinstance(error, UserError | LoaderError) or not is_out_of_memory(error):
            raise
        taken = re.findall(r"Process \d+ has [\d.]+ \w+ memory in use", str(error))
        raise UserError(f"no memory is left on {', '.join([str(device), *taken])}: {advise()}") from None

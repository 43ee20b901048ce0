"""What to say when memory, files or threads are used up: one line, and what helps."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from common.errors import UserError
from dataset.loader import LoaderError

# what ends for want of something that the machine or a limit of the shell does not give
EXHAUSTED = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOMEM: "no memory is left",
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the disk quota is used up",
}
# parts of what allocators say, in small letters: torch's on the CPU and on GPUs, C++'s, cuBLAS's, the compiler's.
NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "status_alloc_failed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, be it the reason for the error or the reason of its reason."""
    reasons: list[BaseException] = []
    reason: BaseException | None = error
    # torch.compile wraps what happens within it. A reason can be its own reason.
    while reason is not None and reason not in reasons:
        reasons.append(reason)
        is_said = isinstance(reason, MemoryError | torch.OutOfMemoryError)
        is_said |= isinstance(reason, OSError) and reason.errno == errno.ENOMEM
        # torch's own allocators and C++ raise RuntimeErrors, which only their text tells apart.
        is_said |= isinstance(reason, RuntimeError) and any(text in str(reason).lower() for text in NO_MEMORY)
        if is_said:
            return True
        reason = reason.__cause__ or reason.__context__
    return False


def what_the_machine_lacks(error: Exception) -> str | None:
    """One line for an error that says that memory, files or threads are used up; None for any other error."""
    said = " ".join(str(error).split())
    smaller = "try a smaller --batch_size, --max_seq_len or model"
    if isinstance(error, OSError):
        reason = EXHAUSTED.get(error.errno) if error.errno is not None else None
        if reason and error.filename:
            return f"{error.filename}: {reason}"
        return reason
    if isinstance(error, torch.OutOfMemoryError):
        return f"no memory is left on the GPU ({said.split('. ')[0]}); {smaller}"
    if is_out_of_memory(error):
        reason = f" ({said[-160:]})" if said else ""
        return f"no memory is left{reason}; {smaller}, or raise the limit (ulimit -v)"
    if "can't start new thread" in said:
        return "no more threads can be started: raise the limit (ulimit -u, ulimit -v)"
    return None


class BatchSettings(Protocol):
    """The flags that decide how many rows are computed at once."""

    batch_size: int
    accumulation_steps: int
    rows_per_update: int
    gradient_checkpointing: bool


class OutOfMemory(UserError):
    """An allocation failed, on the device or on the host."""


@contextlib.contextmanager
def told_in_a_line(device: torch.device, advise: Callable[[], str]) -> Iterator[None]:
    """Turn a failed allocation into OutOfMemory, whose line ends with what `advise()` gives."""
    try:
        yield
    except Exception as error:
        # A loader's error has its own line, which may speak of memory as a guess.
        if isinstance(error, UserError | LoaderError) or not is_out_of_memory(error):
            raise
        # Not `from error`: the frames of its traceback hold the tensors that filled the memory.
        raise OutOfMemory(f"no memory is left on {device}: {advise()}") from None


def gigabytes(n_bytes: float) -> str:
    """As people say it: 0.35 GB, 4.4 GB, 1,200 GB."""
    amount = n_bytes / 1e9
    if amount >= 100:
        return f"{amount:,.0f} GB"
    return f"{amount:.1f} GB" if amount >= 1 else f"{amount:.2f} GB"


def same_update(batch_size: int, accumulation_steps: int, most_rows: int) -> tuple[int, int] | None:
    """(batch_size, accumulation_steps) of the same product with as many rows as possible up to `most_rows`; None: none."""
    rows_of_update = batch_size * accumulation_steps
    for rows in range(min(most_rows, batch_size - 1), 0, -1):
        if rows_of_update % rows == 0:
            return rows, rows_of_update // rows
    return None


def batch_flags(settings: BatchSettings, rows: int, steps: int) -> str:
    """The flags for micro-batches of so many rows, and so many of them. With --rows_per_update their number follows."""
    return f"--batch_size {rows}" if settings.rows_per_update else f"--batch_size {rows} --accumulation_steps {steps}"


def plain_advice(settings: BatchSettings, shorter: str) -> str:
    """What helps where nothing can be worked out. shorter: flags that make rows or the model smaller."""
    ways = []
    smaller = same_update(settings.batch_size, settings.accumulation_steps, settings.batch_size // 2)
    if smaller is not None:
        ways.append(f"{batch_flags(settings, *smaller)}, which leaves the updates as they are")
    if not settings.gradient_checkpointing:
        ways.append("--gradient_checkpointing 1")
    ways.append(shorter)
    return f"try {', or '.join(ways)}"

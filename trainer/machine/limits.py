"""Errors that say that memory, files or threads are used up, in the words of a user."""

import errno

import torch

# What ends for want of something that the machine or a limit of the shell does not give
EXHAUSTED = {
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine",
    errno.ENOMEM: "no memory is left",
    errno.ENOSPC: "no space is left",
    errno.EDQUOT: "the disk quota is used up",
}


# Parts of what allocators say, in small letters: torch's on the CPU and on GPUs, C++'s, cuBLAS's, the compiler's.
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
        reason = reason.__cause__ or reason.__context__
    return any(map(_says_no_memory, reasons))


def _says_no_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's own allocators and C++ raise RuntimeErrors, which only their text tells apart.
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(text in said for text in NO_MEMORY)


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

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


def what_the_machine_lacks(error: Exception) -> str | None:
    """One line for an error that says that memory, files or threads are used up; None for any other error."""
    said = " ".join(str(error).split())
    smaller = "try a smaller --batch_size, --max_seq_len or model, or raise the limit (ulimit -v)"
    if isinstance(error, OSError):
        reason = EXHAUSTED.get(error.errno) if error.errno is not None else None
        if reason and error.filename:
            return f"{error.filename}: {reason}"
        return reason
    if isinstance(error, torch.OutOfMemoryError):
        return f"no memory is left on the GPU ({said.split('. ')[0]}); {smaller}"
    # torch's own allocators and C++ raise RuntimeErrors, which only their text tells apart.
    if isinstance(error, MemoryError) or "can't allocate memory" in said or "bad_alloc" in said:
        return f"no memory is left ({said[-160:]}); {smaller}" if said else f"no memory is left; {smaller}"
    if "can't start new thread" in said:
        return "no more threads can be started: raise the limit (ulimit -u, ulimit -v)"
    return None

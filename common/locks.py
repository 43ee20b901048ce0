"""Locks that the operating system takes back when their process ends, however that ends."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import FileLock


def file_lock(path: Path, of_thread: bool = True, file_stays: bool = False) -> "FileLock":
    """A lock that is not held yet. To take it raises OSError on a file system that has no locks (Lustre without `-o flock`).

    filelock would take the file's being there for a lock instead, and nobody would ever take back that of a killed process.
    of_thread: only the thread that took the lock may give it back. file_stays: also when the lock is given back.
    """
    # Loaded where it is needed: the flags of every trainer import who uses this, and its loading takes a tenth of a second.
    from filelock import FileLock

    return FileLock(path, thread_local=of_thread, fallback_to_soft=False, preserve_lock_file=file_stays)

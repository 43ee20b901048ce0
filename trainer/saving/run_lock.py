"""One run at a time writes a set of files: a lock that the operating system releases when its process ends, however.

Beside the files of `out/pretrain_512` lie `out/.pretrain_512.lock`, which stays, is empty and means nothing by itself,
and, while a run holds the lock, `out/.pretrain_512.running`, which says who it is.
"""

import contextlib
import json
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from common.errors import UserError
from common.files import atomic_file
from common.locks import file_lock
from common.notices import announce

# Ranks of a launcher that was just killed need a moment to notice it.
WAIT_S = 3.0
# A server of network files keeps the lock of a machine that is lost: NFS for a lease of 90 s by default.
WAIT_FOR_A_MACHINE_S = 150.0

# What this process holds: (the lock, the file that says who holds it).
_held: list[tuple[FileLock, Path]] = []


def hold(stem: Path) -> None:
    """Take the lock of the files `{stem}*` until `release_all` or the end of this process.

    Errors: UserError that names the process that has it. Where the file system has no locks, a line says so.
    """
    stem = stem.absolute()
    lock = file_lock(_beside(stem, "lock"), of_thread=False, file_stays=True)
    running = _beside(stem, "running")
    try:
        _acquire(lock, stem, running)
    except Timeout:
        raise UserError(
            f"{stem}: {_who(running)} is writing these files: wait for it, stop it, or name another --out_dir"
        ) from None
    except (OSError, NotImplementedError) as error:
        if isinstance(error, PermissionError):
            raise
        announce(f"note: {stem.parent} takes no lock ({error}): see to it that no second run writes there")
        return
    _held.append((lock, running))
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    # A full disk: the lock itself holds all the same.
    with contextlib.suppress(OSError), atomic_file(running) as file:
        file.write(json.dumps(owner).encode())


def _acquire(lock: FileLock, stem: Path, running: Path) -> None:
    """Errors: Timeout where another process has it and keeps it."""
    try:
        lock.acquire(timeout=WAIT_S)
    except Timeout:
        host = _owner(running).get("host")
        if host in (None, socket.gethostname()):
            raise
        announce(
            f"{stem}: {_who(running)} is writing these files, or its machine was lost and its lock is not free yet: waiting for "
            f"{WAIT_FOR_A_MACHINE_S:g} seconds at most"
        )
        lock.acquire(timeout=WAIT_FOR_A_MACHINE_S)


def release_all() -> None:
    """Give back what `hold` took."""
    while _held:
        lock, running = _held.pop()
        with contextlib.suppress(OSError):
            running.unlink(missing_ok=True)
        lock.release()


def _beside(stem: Path, kind: str) -> Path:
    return stem.with_name(f".{stem.name}.{kind}")


def _who(running: Path) -> str:
    """The process that holds the lock, as its file tells."""
    owner = _owner(running)
    return "process {pid} on {host!r} (since {started})".format(**owner) if owner else "another process"


def _owner(running: Path) -> dict[str, int | str]:
    """pid, host and started of the process that holds the lock; nothing where its file does not tell."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        owner = json.loads(running.read_text())
        return {"pid": int(owner["pid"]), "host": str(owner["host"]), "started": str(owner["started"])}
    return {}
